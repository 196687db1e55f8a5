//! The locked state, and the tasks that begin once it is unlocked.
//!
//! A task that begins may drop what it holds at once, on the thread that spawns it: the runtime
//! does that when it shuts down. A reservation that is dropped locks the state.

use std::future::Future;
use std::ops::{Deref, DerefMut};
use std::pin::Pin;
use std::sync::Arc;

use parking_lot::MutexGuard;

use super::{Fleet, State, Vm};

/// The state of a fleet.
#[derive(Debug)]
pub(super) struct Locked<'a> {
    // Unlocked before the tasks begin: fields are dropped in this order.
    state: MutexGuard<'a, State>,
    later: Later<'a>,
}

/// Tasks that begin when this is dropped.
pub(super) struct Later<'a> {
    fleet: &'a Arc<Fleet>,
    tasks: Vec<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl Fleet {
    pub(super) fn lock(self: &Arc<Self>) -> Locked<'_> {
        let later = Later { fleet: self, tasks: Vec::new() };
        Locked { state: self.state.lock(), later }
    }
}

impl<'a> Locked<'a> {
    pub(super) fn parts(&mut self) -> (&mut State, &mut Later<'a>) {
        (&mut self.state, &mut self.later)
    }
}

impl Deref for Locked<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl Later<'_> {
    /// Runs a task in the background.
    pub(super) fn run(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.push(Box::pin(task));
    }

    /// Ends a microVM in the background.
    pub(super) fn end(&mut self, vm: Vm) {
        self.run(Arc::clone(self.fleet).end_and_wait(vm));
    }
}

impl Drop for Later<'_> {
    fn drop(&mut self) {
        for task in self.tasks.drain(..) {
            self.fleet.runtime.spawn(task);
        }
    }
}

impl std::fmt::Debug for Later<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Later").field("tasks", &self.tasks.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
#[path = "locked_tests.rs"]
mod tests;
