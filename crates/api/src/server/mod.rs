//! The server: accepts connections, bounds what they take, and passes their requests on.

mod buffer;
mod limits;
mod listener;
mod paced;
mod peers;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tower::ServiceExt;

pub(crate) use buffer::{Buffer, Held};
pub(crate) use limits::DECODERS;
pub use limits::Limits;
pub use listener::Listen;
pub(crate) use listener::{Listener, Source};
pub(crate) use paced::paced;
pub(crate) use peers::Peer;

use listener::Stream;
use peers::{Peers, Place};

/// Serves until `stop` changes or its sender is dropped; then returns once the answers of the
/// requests in flight are sent.
pub(crate) async fn run(
    listener: Listener,
    routes: Router,
    limits: &Limits,
    mut stop: watch::Receiver<bool>,
) {
    let peers = Peers::new(limits::reserve_files(limits.connections), limits.clone());
    let reserve = limits::Reserve::default();
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            _ = stop.changed() => break,
            Some(_) = connections.join_next() => continue,
            accepted = listener.accept(&reserve, || peers.close_oldest()) => accepted,
        };
        tokio::select! {
            _ = stop.changed() => break,
            place = peers.enter() => if let Some(place) = place {
                connections.spawn(serve(accepted, place, routes.clone(), stop.clone()));
            },
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// Serves one connection.
async fn serve(
    (stream, source): (Box<dyn Stream>, Source),
    place: Place,
    routes: Router,
    mut stop: watch::Receiver<bool>,
) {
    let peer = Arc::clone(&place.peer);
    let service = routes.map_request(move |mut request: Request<hyper::body::Incoming>| {
        request.extensions_mut().insert(Arc::clone(&peer));
        request.extensions_mut().insert(source);
        request.map(axum::body::Body::new)
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        // The peer's stage has the time limits.
        .header_read_timeout(None)
        .max_buf_size(limits::MAX_HEAD)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(service));
    tokio::pin!(connection);
    let mut stopping = false;
    loop {
        tokio::select! {
            // What has arrived counts, even if this task runs only after the limit.
            biased;
            // The client's errors: nothing to do.
            _ = &mut connection => return,
            () = place.peer.expired() => return,
            _ = stop.changed(), if !stopping => {
                stopping = true;
                connection.as_mut().graceful_shutdown();
            }
        }
    }
}
