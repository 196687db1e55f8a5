//! Requests from other threads to a running microVM.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use thiserror::Error;
use vmm_sys_util::eventfd::EventFd;

use super::{Microvm, event};

type Request = Box<dyn FnOnce(&mut Microvm) + Send>;

/// The microVM ended before it answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the microVM has ended")]
pub struct GoneError;

/// Sends requests to a microVM while [`Microvm::run`] serves it. Clones refer to the same microVM,
/// and any thread may use them.
#[derive(Clone)]
pub struct Handle {
    requests: Sender<Request>,
    doorbell: Arc<EventFd>,
}

impl Handle {
    /// Runs `request` on the microVM's own thread, between two events, and returns its result.
    ///
    /// # Errors
    /// [`GoneError`] if the microVM ended first.
    pub fn call<T: Send + 'static>(
        &self,
        request: impl FnOnce(&mut Microvm) -> T + Send + 'static,
    ) -> Result<T, GoneError> {
        let (answer, receiver) = channel();
        self.post(move |microvm| {
            // Fails if the caller has stopped waiting.
            let _ = answer.send(request(microvm));
        })?;
        receiver.recv().map_err(|_| GoneError)
    }

    /// The same without waiting. Requests of one thread run in their order.
    ///
    /// # Errors
    /// [`GoneError`] if the microVM has ended.
    pub fn post(
        &self,
        request: impl FnOnce(&mut Microvm) + Send + 'static,
    ) -> Result<(), GoneError> {
        self.requests.send(Box::new(request)).map_err(|_| GoneError)?;
        // The write fails only when the counter is full; the microVM is awake then.
        let _ = self.doorbell.write(1);
        Ok(())
    }
}

/// The microVM's receiver of the requests of its handles.
pub(super) struct Inbox {
    requests: Receiver<Request>,
    sender: Sender<Request>,
    pub(super) doorbell: Arc<EventFd>,
}

impl Inbox {
    pub(super) fn new() -> std::io::Result<Self> {
        let (sender, requests) = channel();
        let doorbell = Arc::new(event()?);
        Ok(Self { requests, sender, doorbell })
    }

    pub(super) fn handle(&self) -> Handle {
        Handle { requests: self.sender.clone(), doorbell: self.doorbell.clone() }
    }

    /// The next pending request.
    pub(super) fn next(&self) -> Option<Request> {
        self.requests.try_recv().ok()
    }
}
