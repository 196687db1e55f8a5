use std::future::poll_fn;

use axum::response::IntoResponse;
use tokio::sync::mpsc;

use super::*;

/// A body of parts that the test sends.
struct Parts(mpsc::Receiver<Bytes>);

impl HttpBody for Parts {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        self.0.poll_recv(context).map(|part| part.map(|part| Ok(Frame::data(part))))
    }
}

#[tokio::test]
async fn the_clients_time_counts_only_while_a_part_waits_for_it() {
    const LIMIT: Duration = Duration::from_secs(600);
    let peer = Arc::new(Peer::new(LIMIT));
    let (sender, parts) = mpsc::channel(1);
    let response = Body::new(Parts(parts)).into_response();
    let mut body = paced(response, &peer, LIMIT).into_body();
    let mut poll =
        async || poll_fn(|context| Poll::Ready(Pin::new(&mut body).poll_frame(context))).await;
    for _ in 0..2 {
        assert!(poll().await.is_pending());
        assert!(peer.waits_since().is_none());
        sender.send(Bytes::from("a")).await.unwrap();
        assert!(matches!(poll().await, Poll::Ready(Some(Ok(_)))));
        assert!(peer.waits_since().is_some());
    }
    assert!(poll().await.is_pending());
    assert!(peer.waits_since().is_none());
    drop(sender);
    assert!(matches!(poll().await, Poll::Ready(None)));
    assert!(peer.waits_since().is_some());
}
