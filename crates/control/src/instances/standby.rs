//! Standby monitors: processes that have KVM open and wait for a start request.

use firn_run::StartError;
use firn_run::monitor::Monitor;
use parking_lot::Mutex;

/// The standby monitors.
#[derive(Debug)]
pub(crate) struct Standbys {
    /// The number to keep.
    count: usize,
    ready: Mutex<Vec<Monitor>>,
}

impl Standbys {
    /// No monitors yet; [`Standbys::fill`] starts `count`.
    pub(crate) fn new(count: usize) -> Self {
        Self { count, ready: Mutex::default() }
    }

    /// Takes a monitor that runs.
    pub(super) fn take(&self) -> Option<Monitor> {
        loop {
            let mut monitor = self.ready.lock().pop()?;
            if monitor.is_alive() {
                return Some(monitor);
            }
        }
    }

    /// Drops monitors that have ended, and starts monitors until there are enough.
    pub(super) fn fill(&self, start: impl Fn() -> Result<Monitor, StartError>) {
        let mut ready = self.ready.lock();
        ready.retain_mut(Monitor::is_alive);
        while ready.len() < self.count {
            match start() {
                Ok(monitor) => ready.push(monitor),
                Err(error) => {
                    // The next thaw starts its own monitor.
                    let error: &dyn std::error::Error = &error;
                    tracing::warn!(error, "cannot start a standby monitor");
                    return;
                }
            }
        }
    }

    /// Ends all monitors.
    pub(crate) fn end(&self) {
        self.ready.lock().clear();
    }

    /// The number of monitors.
    pub(crate) fn len(&self) -> usize {
        self.ready.lock().len()
    }
}
