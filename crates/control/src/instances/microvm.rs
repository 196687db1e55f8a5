//! The process of one microVM.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use firn_run::OwnedInstance;
use firn_run::monitor::Monitor;
use tokio::task::spawn_blocking;

use super::processes::Registered;

/// How long a microVM takes to end before it is killed.
pub(super) const END_LIMIT: Duration = Duration::from_secs(5);

/// A microVM's process and its name. Dropping it kills the process and removes its sockets.
#[derive(Debug)]
pub(crate) struct Microvm {
    // Dropped first, so that the name is free only after the process has ended.
    pub(super) monitor: Monitor,
    pub(super) instance: OwnedInstance,
    pub(super) process: Registered,
    /// If it is a client of the pool: a time before it became one.
    pub(super) client_since: Option<Instant>,
    /// Whether the guest waits for [`Microvm::unpause`].
    pub(super) paused: bool,
}

impl Microvm {
    /// Its process, if it runs.
    pub(crate) fn process(&mut self) -> Option<u32> {
        self.is_alive().then(|| self.monitor.pid())
    }

    /// Records that it has started: from now on a daemon that stops waits for its request.
    pub(crate) fn serves(&self) {
        self.process.serves();
    }

    /// Whether it became a client of the pool before `time`.
    pub(super) fn is_client_since_before(&self, time: Instant) -> bool {
        self.client_since.is_some_and(|since| since < time)
    }

    /// The socket for connections to the guest.
    pub(crate) fn vsock_socket(&self) -> PathBuf {
        self.instance.vsock_socket()
    }

    /// Whether its process runs.
    pub(crate) fn is_alive(&mut self) -> bool {
        self.monitor.is_alive()
    }

    /// Keeps the guest from running until [`Microvm::unpause`].
    pub(crate) fn pause(&mut self) {
        // Fails if the process has ended, as the next request finds.
        self.paused |= self.monitor.pause().is_ok();
    }

    /// Lets a paused guest run for a request, which may be sent at once.
    pub(crate) fn unpause(&mut self) {
        if std::mem::take(&mut self.paused) {
            let _ = self.monitor.unpause();
        }
    }

    /// Ends the microVM and waits for that.
    pub(crate) async fn end(self) {
        let end = move || {
            let Self { monitor, instance, process, .. } = self;
            monitor.end(END_LIMIT);
            drop((instance, process));
        };
        // Ending does not panic, and the runtime does not cancel blocking tasks.
        let _ = spawn_blocking(end).await;
    }
}
