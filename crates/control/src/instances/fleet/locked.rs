//! The locked state, and the tasks that begin once it is unlocked.
//!
//! A task that begins may drop what it holds at once, on the thread that spawns it: the runtime
//! does that when it shuts down. A reservation that is dropped locks the state.

use std::cell::Cell;
use std::future::Future;
use std::ops::{Deref, DerefMut};
use std::pin::Pin;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use tokio::runtime::Handle;

use super::{Fleet, State, Vm};

thread_local! {
    /// Whether this thread has locked the state of a fleet.
    static LOCKED: Cell<bool> = const { Cell::new(false) };
}

/// The state of a fleet, and the lock of it.
#[derive(Debug)]
pub(super) struct StateLock(Mutex<State>);

/// The state, locked by this thread.
#[derive(Debug)]
pub(super) struct StateGuard<'a>(MutexGuard<'a, State>);

/// Starts the tasks of a fleet, from threads that have not locked its state.
#[derive(Debug)]
pub(super) struct Runtime(Handle);

/// The state of a fleet, and the tasks that begin once it is unlocked.
#[derive(Debug)]
pub(super) struct Locked<'a> {
    // Unlocked before the tasks begin: fields are dropped in this order.
    state: StateGuard<'a>,
    later: Later<'a>,
}

/// Tasks that begin when this is dropped.
pub(super) struct Later<'a> {
    fleet: &'a Arc<Fleet>,
    tasks: Vec<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl StateLock {
    pub(super) fn new(state: State) -> Self {
        Self(Mutex::new(state))
    }

    pub(super) fn lock(&self) -> StateGuard<'_> {
        let guard = self.0.lock();
        LOCKED.set(true);
        StateGuard(guard)
    }
}

impl Deref for StateGuard<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.0
    }
}

impl DerefMut for StateGuard<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.0
    }
}

impl Drop for StateGuard<'_> {
    fn drop(&mut self) {
        LOCKED.set(false);
    }
}

impl Runtime {
    /// The runtime of the calling task.
    pub(super) fn current() -> Self {
        Self(Handle::current())
    }

    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        Self::assert_unlocked();
        self.0.spawn(task);
    }

    pub(super) fn spawn_blocking(&self, work: impl FnOnce() + Send + 'static) {
        Self::assert_unlocked();
        self.0.spawn_blocking(work);
    }

    fn assert_unlocked() {
        debug_assert!(!LOCKED.get(), "a task begins while its thread has locked the state");
    }
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
