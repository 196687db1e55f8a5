//! The time limits of a client that reads an answer while a function writes it.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::response::Response;
use hyper::body::Frame;

use super::peers::Peer;

/// A body that a function still writes. The client's time limit counts only while bytes wait for
/// the client, and again for each part.
struct Paced {
    body: Body,
    peer: Arc<Peer>,
    limit: Duration,
}

/// Has the client's time limit follow the body of a response.
pub(crate) fn paced(response: Response, peer: &Arc<Peer>, limit: Duration) -> Response {
    let peer = Arc::clone(peer);
    response.map(|body| Body::new(Paced { body, peer, limit }))
}

impl HttpBody for Paced {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        match polled {
            Poll::Pending => self.peer.serves(),
            Poll::Ready(_) => self.peer.waits(self.limit),
        }
        polled
    }
}

#[cfg(test)]
#[path = "paced_tests.rs"]
mod tests;
