//! An answer that a function streams, on its way from the microVM to the client.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use firn_run::AnswerSink;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::timeout_at;

use super::requests::Invoked;

/// A function's answer.
#[derive(Debug)]
pub enum Answering {
    /// The function has answered, or failed, without a stream.
    Whole(Box<Invoked>),
    /// The function streams its answer.
    Stream(AnswerStream),
}

/// An answer that a function streams. At most one part is in memory. If this is dropped, the
/// function runs to its end, and the rest of its answer is discarded.
#[derive(Debug)]
pub struct AnswerStream {
    content_type: Option<String>,
    parts: mpsc::Receiver<Vec<u8>>,
    task: JoinHandle<Served>,
}

/// What an [`AnswerStream`] yields.
#[derive(Debug)]
pub enum AnswerEvent {
    /// The next bytes.
    Part(Vec<u8>),
    /// The function has ended. It can fail during its answer.
    End(Box<Invoked>),
    /// The answer has a gap: the client did not read it within the function's time limit.
    Lost,
}

/// A request that was served.
#[derive(Debug)]
pub struct Served {
    /// Its result.
    pub invoked: Invoked,
    /// Whether all parts of a streamed answer were taken.
    pub complete: bool,
}

/// The end of an [`AnswerStream`] that the microVM's client writes to.
#[derive(Debug)]
pub(crate) struct AnswerSender {
    begun: Option<oneshot::Sender<Option<String>>>,
    parts: Option<mpsc::Sender<Vec<u8>>>,
    runtime: Handle,
}

impl AnswerSender {
    /// A sender, and what [`answering`] needs. Must be called inside a Tokio runtime.
    pub(crate) fn new() -> (Self, oneshot::Receiver<Option<String>>, mpsc::Receiver<Vec<u8>>) {
        let ((begun, beginning), (sender, parts)) = (oneshot::channel(), mpsc::channel(1));
        let runtime = Handle::current();
        (Self { begun: Some(begun), parts: Some(sender), runtime }, beginning, parts)
    }

    /// Whether all parts were taken.
    pub(crate) fn is_complete(&self) -> bool {
        self.parts.is_some()
    }
}

impl AnswerSink for AnswerSender {
    fn begin(&mut self, content_type: Option<String>) {
        // Fails if the client has left.
        let _ = self.begun.take().map(|begun| begun.send(content_type));
    }

    fn part(&mut self, bytes: Vec<u8>, deadline: Instant) {
        let Some(parts) = &self.parts else { return };
        let sent = async { timeout_at(deadline.into(), parts.send(bytes)).await };
        if !matches!(self.runtime.block_on(sent), Ok(Ok(()))) {
            self.parts = None;
        }
    }
}

/// Waits until the function begins to stream its answer, or has answered. `task` serves the
/// request, and owns the sender.
pub(crate) async fn answering(
    beginning: oneshot::Receiver<Option<String>>,
    parts: mpsc::Receiver<Vec<u8>>,
    task: JoinHandle<Served>,
) -> Answering {
    match beginning.await {
        Ok(content_type) => Answering::Stream(AnswerStream::new(content_type, parts, task)),
        Err(_) => Answering::Whole(Box::new(match task.await {
            Ok(served) => served.invoked,
            Err(error) => Invoked::failed(error),
        })),
    }
}

impl AnswerStream {
    /// The answer whose `parts` a function streams while `task` serves the request.
    #[must_use]
    pub fn new(
        content_type: Option<String>,
        parts: mpsc::Receiver<Vec<u8>>,
        task: JoinHandle<Served>,
    ) -> Self {
        Self { content_type, parts, task }
    }

    /// The content type that the function has named.
    #[must_use]
    pub fn content_type(&self) -> Option<&str> {
        self.content_type.as_deref()
    }

    /// The next event. Must not be called after [`AnswerEvent::End`] or [`AnswerEvent::Lost`].
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<AnswerEvent> {
        if let Some(part) = ready!(self.parts.poll_recv(context)) {
            return Poll::Ready(AnswerEvent::Part(part));
        }
        Poll::Ready(match ready!(Pin::new(&mut self.task).poll(context)) {
            Ok(Served { invoked, complete: true }) => AnswerEvent::End(Box::new(invoked)),
            Ok(Served { complete: false, .. }) => AnswerEvent::Lost,
            Err(error) => AnswerEvent::End(Box::new(Invoked::failed(error))),
        })
    }
}

#[cfg(test)]
#[path = "stream_tests.rs"]
mod tests;
