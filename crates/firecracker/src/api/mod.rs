//! The API: HTTP on a unix socket.
//!
//! One thread serves it, one request at a time, as Firecracker does. A request is parsed
//! ([`request`]), carried out by the [`Controller`] and answered: 204 without a body, 200 with
//! JSON, or an error with `{"fault_message": …}`.

mod request;

use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::fs;
use std::io;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::rc::Rc;

use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue, SERVER};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request as HttpRequest, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::json;
use thiserror::Error;

pub(crate) use request::{Action, Request, VmState};

use crate::controller::{Answer, Controller};
use crate::fault::Fault;
use crate::log;
use crate::logger::Level;
use crate::metrics::Metrics;

/// The most connections at once; further ones are closed.
const MAX_CONNECTIONS: usize = 64;

/// Why there is no API.
#[derive(Debug, Error)]
pub(crate) enum ApiError {
    /// The socket cannot be bound.
    #[error(
        "Failed to open the API socket at: {path}. Check that it is not already used, or remove it"
    )]
    Bind {
        /// Its path.
        path: String,
        /// The system's error.
        source: io::Error,
    },
    /// The API's thread or its event loop cannot be started.
    #[error("cannot serve the API")]
    Serve(#[source] io::Error),
}

/// Binds the socket of the API.
pub(crate) fn bind(path: &Path) -> Result<UnixListener, ApiError> {
    let failed = |source| ApiError::Bind { path: path.display().to_string(), source };
    let listener = UnixListener::bind(path).map_err(failed)?;
    listener.set_nonblocking(true).map_err(|error| {
        let _ = fs::remove_file(path);
        failed(error)
    })?;
    Ok(listener)
}

/// Serves the API in this thread, if there is a listener, and flushes the metrics, until the
/// process ends. A body has at most `limit` bytes.
pub(crate) fn serve(
    listener: Option<UnixListener>,
    limit: usize,
    controller: Controller,
    metrics: Metrics,
) -> Result<Infallible, ApiError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(ApiError::Serve)?;
    let flushed = metrics.clone();
    let shared = Rc::new(Shared { controller: RefCell::new(controller), limit, metrics });
    let connections = Rc::new(Cell::new(0));
    let local = tokio::task::LocalSet::new();
    local.block_on(&runtime, async {
        let Some(listener) = listener else { return Ok(flushed.keep_flushing().await) };
        tokio::task::spawn_local(flushed.keep_flushing());
        let listener = tokio::net::UnixListener::from_std(listener).map_err(ApiError::Serve)?;
        loop {
            // What fails is the connection of a client that has gone, or descriptors are short;
            // then closing one helps.
            let Ok((stream, _)) = listener.accept().await else {
                tokio::task::yield_now().await;
                continue;
            };
            if connections.get() >= MAX_CONNECTIONS {
                log!(Level::Warn, "a connection to the API was closed: {MAX_CONNECTIONS} are open");
                continue;
            }
            let open = Open::new(connections.clone());
            let shared = shared.clone();
            tokio::task::spawn_local(async move {
                let service = service_fn(|request| {
                    let shared = shared.clone();
                    async move {
                        let answer = shared.answer(request).await;
                        shared.confine_after();
                        Ok::<_, Infallible>(answer)
                    }
                });
                let connection =
                    http1::Builder::new().serve_connection(TokioIo::new(stream), service);
                // A client that breaks off gets no answer.
                let _ = connection.await;
                drop(open);
            });
        }
    })
}

/// A connection that counts.
struct Open(Rc<Cell<usize>>);

impl Open {
    fn new(count: Rc<Cell<usize>>) -> Self {
        count.set(count.get() + 1);
        Self(count)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.set(self.0.get().saturating_sub(1));
    }
}

struct Shared {
    controller: RefCell<Controller>,
    limit: usize,
    metrics: Metrics,
}

impl Shared {
    /// Confines this thread, if that is to be done, when an answer is on its way.
    fn confine_after(self: Rc<Self>) {
        if self.controller.borrow().is_to_be_confined() {
            tokio::task::spawn_local(async move {
                // A start has the error.
                let _ = self.controller.borrow_mut().confine();
            });
        }
    }

    async fn answer(&self, request: HttpRequest<Incoming>) -> Response<Full<Bytes>> {
        let (parts, body) = request.into_parts();
        let path = parts.uri.path();
        log!(Level::Info, "The API server received a {} request on {path:?}.", parts.method);
        let result = match Limited::new(body, self.limit).collect().await {
            Ok(body) => {
                let body = body.to_bytes();
                let request = request::parse(&parts.method, path, &body);
                request.and_then(|request| {
                    if request.is_deprecated() {
                        self.metrics.count_deprecated();
                    }
                    self.controller.borrow_mut().handle(request)
                })
            }
            Err(error) if error.is::<LengthLimitError>() => Err(Fault {
                status: StatusCode::PAYLOAD_TOO_LARGE,
                message: format!(
                    "the body has more than {} bytes: raise --http-api-max-payload-size",
                    self.limit
                ),
            }),
            Err(error) => Err(Fault::new(format!("cannot read the body: {error}"))),
        };
        if let Some(counter) = request::counter(&parts.method, path) {
            self.metrics.count(counter, result.is_err());
        }
        match &result {
            Ok(_) => log!(Level::Info, "The request was executed successfully."),
            Err(Fault { status, message }) => {
                log!(Level::Error, "Received Error. Status code: {status}. Message: {message}");
            }
        }
        respond(result)
    }
}

fn respond(result: Result<Answer, Fault>) -> Response<Full<Bytes>> {
    let (status, body) = match result {
        Ok(Answer::Done) => (StatusCode::NO_CONTENT, None),
        Ok(Answer::Json(value)) => (StatusCode::OK, Some(value.to_string())),
        Err(Fault { status, message }) => {
            (status, Some(json!({ "fault_message": message }).to_string()))
        }
    };
    let has_body = body.is_some();
    let mut response = Response::new(Full::from(body.unwrap_or_default()));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(SERVER, HeaderValue::from_static("Firecracker API"));
    if has_body {
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    }
    response
}
