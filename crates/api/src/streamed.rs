//! The body of an answer that a function streams.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::body::{Body, Bytes, HttpBody};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use firn_control::{AnswerEvent, AnswerStream};
use hyper::body::Frame;

/// What the daemon holds of an answer at most, bytes: some parts on their way, of 64 KiB each.
pub(crate) const STREAM_BUFFER: usize = 320 << 10;

/// Marks a response whose body a function still writes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Streaming;

/// The answer ends before its end.
#[derive(Debug, thiserror::Error)]
#[error("the function's answer was cut off")]
pub(crate) struct CutOff;

/// The bytes that a client gets for an event.
type Encode = Box<dyn FnMut(AnswerEvent) -> Result<Bytes, CutOff> + Send>;

/// A body with the events of a stream, each encoded.
struct Streamed {
    stream: AnswerStream,
    encode: Encode,
    first: Bytes,
    ended: bool,
}

/// A response with `first` and the rest of `stream`. `encode` fails to cut the answer off.
pub(crate) fn respond(
    first: Bytes,
    stream: AnswerStream,
    encode: impl FnMut(AnswerEvent) -> Result<Bytes, CutOff> + Send + 'static,
) -> Response {
    let body = Streamed { stream, encode: Box::new(encode), first, ended: false };
    let mut response = (StatusCode::OK, Body::new(body)).into_response();
    response.extensions_mut().insert(Streaming);
    response
}

impl HttpBody for Streamed {
    type Data = Bytes;
    type Error = CutOff;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, CutOff>>> {
        let mut bytes = std::mem::take(&mut self.first);
        while bytes.is_empty() && !self.ended {
            let event = ready!(self.stream.poll_next(context));
            self.ended = !matches!(event, AnswerEvent::Part(_));
            bytes = match (self.encode)(event) {
                Ok(bytes) => bytes,
                Err(error) => {
                    self.ended = true;
                    return Poll::Ready(Some(Err(error)));
                }
            };
        }
        let more = !bytes.is_empty();
        Poll::Ready(more.then(|| Ok(Frame::data(bytes))))
    }
}

/// The next event of a stream.
pub(crate) async fn next(stream: &mut AnswerStream) -> AnswerEvent {
    std::future::poll_fn(|context| stream.poll_next(context)).await
}

#[cfg(test)]
#[path = "streamed_tests.rs"]
pub(crate) mod tests;
