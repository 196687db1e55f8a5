//! AWS Lambda's Runtime API over HTTP, for one runtime at a time.
//!
//! Source: AWS Lambda Developer Guide, "Using the Lambda runtime API" and "Building a custom
//! runtime" (response streaming); `/restore/next` and `/restore/error` as used by AWS Lambda's
//! runtime interface clients for SnapStart.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};
use uuid::Uuid;

use super::credentials::{Credentials, PATH as CREDENTIALS};
use crate::protocol::MAX_ANSWER_BYTES;

const PREFIX: &str = "/2018-06-01/runtime/";

/// The header, or the trailer of a streamed answer, with the kind of an error.
const ERROR_TYPE: &str = "lambda-runtime-function-error-type";

/// The trailer of a streamed answer with an error: JSON in base64.
const ERROR_BODY: &str = "lambda-runtime-function-error-body";

/// The header that states whether an answer is streamed.
const RESPONSE_MODE: &str = "lambda-runtime-function-response-mode";

/// Maximum length of a body that is kept, in bytes. Longer bodies are truncated, which makes an
/// answer exceed its limit.
const MAX_BODY: usize = 1 + MAX_ANSWER_BYTES;

/// Pause after a connection could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

/// A call of the runtime that needs a response.
pub(super) struct Call {
    pub(super) kind: CallKind,
    reply: oneshot::Sender<Response<Full<Bytes>>>,
}

/// The kind of a call.
#[derive(Debug)]
pub(super) enum CallKind {
    /// Requests the next event.
    Next,
    /// Ready to be frozen. The response is sent after the restore.
    RestoreNext,
    /// The answer to an event.
    Response { request_id: String, body: Vec<u8> },
    /// The answer to an event, which arrives in parts.
    Stream { request_id: String, content_type: Option<String>, parts: Parts },
    /// The error of an event.
    InvocationError { request_id: String, posted: PostedError },
    /// Loading the function or its before-snapshot hooks failed.
    InitError(PostedError),
    /// The function's after-restore hooks failed.
    RestoreError(PostedError),
}

/// A posted error.
#[derive(Debug)]
pub(super) struct PostedError {
    pub(super) kind: Option<String>,
    pub(super) body: Vec<u8>,
}

/// The parts of an answer. One is kept until it is taken; meanwhile the function's next one waits
/// in the connection.
pub(super) type Parts = mpsc::Receiver<Part>;

/// A part of an answer. Without an end, the runtime has closed the connection.
#[derive(Debug)]
pub(super) enum Part {
    /// The next bytes.
    Bytes(Bytes),
    /// The answer is complete, or has failed.
    End(Option<PostedError>),
}

impl std::fmt::Debug for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Call").field("kind", &self.kind).finish_non_exhaustive()
    }
}

impl Call {
    /// Responds with a document and headers of the API.
    pub(super) fn answer(self, headers: &[(&'static str, &str)], body: &str) {
        let mut response = document(StatusCode::OK, body.to_owned());
        for (name, value) in headers {
            // Values that are not valid in a header are omitted.
            if let Ok(value) = HeaderValue::from_str(value) {
                response.headers_mut().insert(HeaderName::from_static(name), value);
            }
        }
        self.respond(response);
    }

    /// Acknowledges a posted document.
    pub(super) fn accept(self) {
        self.respond(document(StatusCode::ACCEPTED, r#"{"status":"OK"}"#.to_owned()));
    }

    /// Refuses the call with an HTTP status code.
    pub(super) fn refuse(self, status: StatusCode, kind: &str, message: &str) {
        self.respond(refusal(status, kind, message));
    }

    fn respond(self, response: Response<Full<Bytes>>) {
        // If the runtime has exited, waiting for it detects that.
        let _ = self.reply.send(response);
    }
}

/// The server, which runs in its own thread as long as the agent.
#[derive(Debug)]
pub(crate) struct RuntimeApi {
    address: SocketAddr,
    served: Arc<Served>,
}

/// What the server serves.
#[derive(Debug)]
struct Served {
    credentials: Credentials,
    /// Keeps other programs than the function from the keys of its role. Clones share it.
    token: String,
    runtime: Mutex<Option<Connection>>,
}

/// The channel to the current runtime.
#[derive(Debug, Clone)]
struct Connection {
    calls: Sender<Call>,
    event: Arc<OwnedFd>,
}

impl Connection {
    /// Fails if the runtime was ended. In that case no process waits for the response.
    fn send(&self, call: Call) {
        if self.calls.send(call).is_ok() {
            self.wake();
        }
    }

    fn wake(&self) {
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }
}

/// The end of [`Parts`] that takes them from the connection.
struct Feed {
    parts: Option<mpsc::Sender<Part>>,
    connection: Connection,
}

impl Feed {
    /// Waits until the agent has taken the part before. Parts of an answer that it does not want
    /// any more are discarded.
    async fn send(&mut self, part: Part) {
        if let Some(parts) = &self.parts
            && parts.send(part).await.is_err()
        {
            self.parts = None;
        }
        self.connection.wake();
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        self.parts = None;
        self.connection.wake();
    }
}

/// The calls of one runtime.
#[derive(Debug)]
pub(super) struct Calls {
    calls: Receiver<Call>,
    event: Arc<OwnedFd>,
}

impl RuntimeApi {
    /// Listens on `address` and serves.
    pub(super) fn serve(address: SocketAddr, credentials: Credentials) -> io::Result<Self> {
        let listener = std::net::TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let executor = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let listener = {
            let _entered = executor.enter();
            TcpListener::from_std(listener)?
        };
        let token = Uuid::new_v4().simple().to_string();
        let served = Arc::new(Served { credentials, token, runtime: Mutex::default() });
        let api = Arc::clone(&served);
        std::thread::Builder::new()
            .name("runtime-api".into())
            .spawn(move || executor.block_on(accept(listener, api)))?;
        Ok(Self { address, served })
    }

    /// The address of the server.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// The environment variables by which AWS's SDKs find the keys of the function's role.
    pub(super) fn credentials_environment(&self) -> [(String, String); 2] {
        let uri = format!("http://{}{CREDENTIALS}", self.address);
        [
            ("AWS_CONTAINER_CREDENTIALS_FULL_URI".to_owned(), uri),
            ("AWS_CONTAINER_AUTHORIZATION_TOKEN".to_owned(), self.served.token.clone()),
        ]
    }

    /// The calls of the next runtime. From now on the calls of earlier runtimes are dropped.
    pub(super) fn connect(&self) -> io::Result<Calls> {
        let event = Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?);
        let (sender, calls) = channel();
        let connection = Connection { calls: sender, event: Arc::clone(&event) };
        *self.served.runtime.lock() = Some(connection);
        Ok(Calls { calls, event })
    }
}

impl Calls {
    /// The next call, if any.
    pub(super) fn take(&self) -> Option<Call> {
        self.clear();
        self.calls.try_recv().ok()
    }

    /// The next part of an answer, if any.
    pub(super) fn part(&self, parts: &mut Parts) -> Result<Part, mpsc::error::TryRecvError> {
        self.clear();
        parts.try_recv()
    }

    /// Clears the event before a queue is read: what arrives between the two is taken now, or the
    /// descriptor is readable.
    fn clear(&self) {
        // Fails if nothing arrived since.
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
    }

    /// A descriptor that is readable if a call or a part arrived, or an answer ended, since none
    /// was found.
    pub(super) fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// Serves connections, each in a task.
async fn accept(listener: TcpListener, api: Arc<Served>) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => drop(tokio::spawn(serve(stream, Arc::clone(&api)))),
            // Temporarily no descriptors.
            Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
        }
    }
}

async fn serve(stream: TcpStream, api: Arc<Served>) {
    let service = service_fn(|request| async { Ok::<_, Infallible>(respond(request, &api).await) });
    // Errors of a connection are the runtime's. Waiting for it detects its end.
    let _ = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(None)
        // A runtime may close the connection after the last byte of its answer.
        .half_close(true)
        // As AWS Lambda sends them; shell scripts search for them.
        .title_case_headers(true)
        .serve_connection(TokioIo::new(stream), service)
        .await;
}

async fn respond(request: Request<Incoming>, api: &Served) -> Response<Full<Bytes>> {
    if request.uri().path() == CREDENTIALS {
        return respond_with_credentials(&request, api);
    }
    let connection = api.runtime.lock().clone();
    match forward(request, connection).await {
        Ok(Some(response)) => response,
        Ok(None) => refusal(StatusCode::NOT_FOUND, "Runtime.NotFound", "the API has no such call"),
        Err(error) => refusal(StatusCode::BAD_REQUEST, "Runtime.BadRequest", &error.to_string()),
    }
}

fn respond_with_credentials(request: &Request<Incoming>, api: &Served) -> Response<Full<Bytes>> {
    let token = request.headers().get(hyper::header::AUTHORIZATION);
    if token.is_none_or(|token| token.as_bytes() != api.token.as_bytes()) {
        let text = "the authorization token is not valid";
        return refusal(StatusCode::FORBIDDEN, "Forbidden", text);
    }
    match api.credentials.document() {
        Some(keys) => document(StatusCode::OK, keys),
        None => refusal(StatusCode::NOT_FOUND, "NotFound", "the function's role has no keys"),
    }
}

/// Passes a call to the agent and waits for its response. `None` if the API has no such call. The
/// body is always read to its end: otherwise the connection could not be used again.
async fn forward(
    request: Request<Incoming>,
    connection: Option<Connection>,
) -> Result<Option<Response<Full<Bytes>>>, hyper::Error> {
    let (head, mut body) = request.into_parts();
    let path = head.uri.path().strip_prefix(PREFIX).unwrap_or_default();
    let parts: Vec<&str> = path.split('/').collect();
    let mut feed = None;
    let kind = match (&head.method, parts.as_slice()) {
        (&Method::GET, ["invocation", "next"]) => CallKind::Next,
        (&Method::GET, ["restore", "next"]) => CallKind::RestoreNext,
        (&Method::POST, ["invocation", id, "response"]) => {
            let request_id = (*id).to_owned();
            match text(&head.headers, RESPONSE_MODE).as_deref() {
                None | Some("buffered") => {
                    CallKind::Response { request_id, body: collect(&mut body).await? }
                }
                Some("streaming") => {
                    let (sender, parts) = mpsc::channel(1);
                    feed = Some(sender);
                    let content_type = text(&head.headers, CONTENT_TYPE.as_str());
                    CallKind::Stream { request_id, content_type, parts }
                }
                Some(_) => {
                    collect(&mut body).await?;
                    let message = "the response mode must be buffered or streaming";
                    let kind = "Runtime.InvalidResponseModeHeader";
                    return Ok(Some(refusal(StatusCode::BAD_REQUEST, kind, message)));
                }
            }
        }
        (&Method::POST, ["invocation", id, "error"]) => CallKind::InvocationError {
            request_id: (*id).to_owned(),
            posted: posted(&head.headers, &mut body).await?,
        },
        (&Method::POST, ["init", "error"]) => {
            CallKind::InitError(posted(&head.headers, &mut body).await?)
        }
        (&Method::POST, ["restore", "error"]) => {
            CallKind::RestoreError(posted(&head.headers, &mut body).await?)
        }
        _ => {
            collect(&mut body).await?;
            return Ok(None);
        }
    };
    let (reply, response) = oneshot::channel();
    if let Some(connection) = connection {
        connection.send(Call { kind, reply });
        if feed.is_some() {
            stream(&mut body, Feed { parts: feed, connection }).await?;
        }
    }
    // The agent drops the calls of a runtime that it ends.
    let response = response.await;
    Ok(Some(
        response.unwrap_or_else(|_| document(StatusCode::INTERNAL_SERVER_ERROR, String::new())),
    ))
}

/// Passes the parts of an answer on as they arrive, and its end, with the error in its trailers.
async fn stream(body: &mut Incoming, mut feed: Feed) -> Result<(), hyper::Error> {
    let mut error = None;
    while let Some(frame) = body.frame().await.transpose()? {
        match frame.into_data() {
            Ok(bytes) => feed.send(Part::Bytes(bytes)).await,
            Err(frame) => error = frame.into_trailers().ok().and_then(|found| failure(&found)),
        }
    }
    feed.send(Part::End(error)).await;
    Ok(())
}

/// The error in the trailers of an answer.
fn failure(trailers: &HeaderMap) -> Option<PostedError> {
    let (kind, body) = (text(trailers, ERROR_TYPE), trailers.get(ERROR_BODY));
    if kind.is_none() && body.is_none() {
        return None;
    }
    let body = body.and_then(|body| STANDARD.decode(body).ok()).unwrap_or_default();
    Some(PostedError { kind, body })
}

async fn posted(headers: &HeaderMap, body: &mut Incoming) -> Result<PostedError, hyper::Error> {
    Ok(PostedError { kind: text(headers, ERROR_TYPE), body: collect(body).await? })
}

/// Reads a body to its end, and keeps at most [`MAX_BODY`] of it.
async fn collect(body: &mut Incoming) -> Result<Vec<u8>, hyper::Error> {
    let mut kept = Vec::new();
    while let Some(frame) = body.frame().await.transpose()? {
        if let Ok(bytes) = frame.into_data() {
            let room = MAX_BODY - kept.len();
            kept.extend_from_slice(&bytes[..bytes.len().min(room)]);
        }
    }
    Ok(kept)
}

fn text(headers: &HeaderMap, name: &str) -> Option<String> {
    Some(headers.get(name)?.to_str().ok()?.to_owned())
}

fn refusal(status: StatusCode, kind: &str, message: &str) -> Response<Full<Bytes>> {
    let body = serde_json::json!({ "errorType": kind, "errorMessage": message });
    document(status, body.to_string())
}

fn document(status: StatusCode, json: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::from(json));
    *response.status_mut() = status;
    let kind = HeaderValue::from_static("application/json");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}

#[cfg(test)]
#[path = "api_tests.rs"]
mod tests;
