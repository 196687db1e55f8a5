//! A queue in front of one value: whoever comes first is served first.

use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// A value that one caller at a time may use, in the order in which they asked. (A plain mutex
/// promises no order, so one caller could starve.)
#[derive(Debug)]
pub(crate) struct Line<T> {
    tickets: Mutex<Tickets>,
    moved: Condvar,
    value: Mutex<T>,
}

#[derive(Debug, Default)]
struct Tickets {
    next: u64,
    serving: u64,
}

/// One caller's time with the value; the next one's begins when it is dropped.
#[derive(Debug)]
pub(crate) struct Turn<'a, T> {
    line: &'a Line<T>,
    value: MutexGuard<'a, T>,
}

impl<T> Line<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { tickets: Mutex::default(), moved: Condvar::new(), value: Mutex::new(value) }
    }

    /// Waits until all who asked earlier are done.
    pub(crate) fn wait(&self) -> Turn<'_, T> {
        let mut tickets = self.tickets.lock().unwrap_or_else(PoisonError::into_inner);
        let mine = tickets.next;
        tickets.next += 1;
        while tickets.serving != mine {
            tickets = self.moved.wait(tickets).unwrap_or_else(PoisonError::into_inner);
        }
        drop(tickets);
        let value = self.value.lock().unwrap_or_else(PoisonError::into_inner);
        Turn { line: self, value }
    }
}

impl<T> Drop for Turn<'_, T> {
    fn drop(&mut self) {
        let mut tickets = self.line.tickets.lock().unwrap_or_else(PoisonError::into_inner);
        tickets.serving += 1;
        self.line.moved.notify_all();
    }
}

impl<T> Deref for Turn<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Turn<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

#[cfg(test)]
impl<T> Line<T> {
    /// How many callers wait for their turn.
    pub(crate) fn waiting(&self) -> u64 {
        let tickets = self.tickets.lock().unwrap();
        tickets.next.saturating_sub(tickets.serving + 1)
    }
}
