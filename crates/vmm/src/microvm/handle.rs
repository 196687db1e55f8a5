//! Asking a running microVM for something from another thread.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use thiserror::Error;
use vmm_sys_util::eventfd::EventFd;

use super::Microvm;

type Request = Box<dyn FnOnce(&mut Microvm) + Send>;

/// The microVM ended before it could answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the microVM has ended")]
pub struct GoneError;

/// A way to reach a microVM while [`Microvm::run`] has it. Clones reach the same one; any thread
/// may use it.
#[derive(Clone)]
pub struct Handle {
    requests: Sender<Request>,
    doorbell: Arc<EventFd>,
}

impl Handle {
    /// Runs `request` on the microVM's own thread, between two events, and returns its answer.
    ///
    /// # Errors
    /// [`GoneError`] when the microVM ended first.
    pub fn call<T: Send + 'static>(
        &self,
        request: impl FnOnce(&mut Microvm) -> T + Send + 'static,
    ) -> Result<T, GoneError> {
        let (answer, receiver) = channel();
        let request: Request = Box::new(move |microvm| {
            // Nobody waits any more when this fails.
            let _ = answer.send(request(microvm));
        });
        self.requests.send(request).map_err(|_| GoneError)?;
        // Fails only when the counter is full: the microVM is awake then.
        let _ = self.doorbell.write(1);
        receiver.recv().map_err(|_| GoneError)
    }
}

/// The microVM's end of its handles.
pub(super) struct Inbox {
    requests: Receiver<Request>,
    sender: Sender<Request>,
    pub(super) doorbell: Arc<EventFd>,
}

impl Inbox {
    pub(super) fn new() -> std::io::Result<Self> {
        let (sender, requests) = channel();
        let doorbell = Arc::new(EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?);
        Ok(Self { requests, sender, doorbell })
    }

    pub(super) fn handle(&self) -> Handle {
        Handle { requests: self.sender.clone(), doorbell: self.doorbell.clone() }
    }

    /// The next request that waits.
    pub(super) fn next(&self) -> Option<Request> {
        self.requests.try_recv().ok()
    }
}
