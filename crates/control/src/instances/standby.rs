//! Monitors that are started and empty: a process with KVM open, which waits on its standard input for what to thaw.

use std::ffi::OsString;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use tokio::io::AsyncWriteExt;

use super::monitor::{StartError, Started};

/// What a monitor that stands by is told, in one line of JSON.
#[derive(Debug, Serialize, Deserialize)]
pub struct ThawOrder {
    /// When the start was asked for, ns of CLOCK_MONOTONIC.
    pub request_ns: u64,
    /// The arguments of `firn thaw`.
    pub arguments: Vec<OsString>,
}

/// The monitors that stand by.
#[derive(Debug)]
pub(crate) struct Standbys {
    /// How many there shall be.
    count: usize,
    ready: Mutex<Vec<Started>>,
}

impl Standbys {
    pub(crate) fn new(count: usize) -> Self {
        Self { count, ready: Mutex::default() }
    }

    /// Tells one what to thaw. None, where none stands by.
    pub(super) async fn order(&self, request_ns: u64, arguments: &[OsString]) -> Option<Started> {
        let order = ThawOrder { request_ns, arguments: arguments.to_vec() };
        let mut line = serde_json::to_vec(&order).ok()?;
        line.push(b'\n');
        loop {
            let mut started = self.lock().pop()?;
            // One that has ended, by whatever hand, takes no order.
            if let Some(input) = &mut started.input
                && matches!(started.child.try_wait(), Ok(None))
                && input.write_all(&line).await.is_ok()
            {
                return Some(started);
            }
        }
    }

    /// Drops those that have ended, and starts what is missing.
    pub(super) fn fill(&self, start: impl Fn() -> Result<Started, StartError>) {
        let mut ready = self.lock();
        ready.retain_mut(|started| matches!(started.child.try_wait(), Ok(None)));
        while ready.len() < self.count {
            match start() {
                Ok(started) => ready.push(started),
                Err(error) => {
                    // A thaw then starts its own.
                    tracing::warn!(
                        error = &error as &dyn std::error::Error,
                        "no monitor stands by"
                    );
                    return;
                }
            }
        }
    }

    /// Ends all of them.
    pub(crate) fn end(&self) {
        self.lock().clear();
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Started>> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
