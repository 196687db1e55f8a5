//! AWS Lambda's Runtime API over HTTP, for one runtime at a time.
//!
//! Source: AWS Lambda Developer Guide, "Using the Lambda runtime API"; `/restore/next` and
//! `/restore/error` as used by AWS Lambda's runtime interface clients for SnapStart.

use std::io::{self, Read};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use tiny_http::{Method, Request, Response, Server};
use uuid::Uuid;

use super::credentials::{Credentials, PATH as CREDENTIALS};
use crate::protocol::MAX_ANSWER_BYTES;

const PREFIX: &str = "/2018-06-01/runtime/";

/// The header with the kind of an error.
const ERROR_TYPE: &str = "Lambda-Runtime-Function-Error-Type";

/// Maximum length of a body that is read, in bytes. Longer bodies are truncated, which makes an
/// answer exceed its limit.
const MAX_BODY: u64 = 1 + MAX_ANSWER_BYTES as u64;

/// A call of the runtime that needs a response.
pub(super) struct Call {
    pub(super) kind: CallKind,
    request: Request,
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

impl std::fmt::Debug for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Call").field("kind", &self.kind).finish_non_exhaustive()
    }
}

impl Call {
    /// Responds with a document and headers of the API.
    pub(super) fn answer(self, headers: &[(&str, &str)], body: &str) {
        let mut response = Response::from_string(body);
        for (name, value) in [("Content-Type", "application/json")].iter().chain(headers) {
            // Values that are not valid in a header are omitted.
            if let Ok(header) = tiny_http::Header::from_bytes(*name, *value) {
                response.add_header(header);
            }
        }
        // If the runtime has exited, waiting for it detects that.
        let _ = self.request.respond(response);
    }

    /// Acknowledges a posted document.
    pub(super) fn accept(self) {
        respond(self.request, 202, r#"{"status":"OK"}"#);
    }

    /// Refuses the call with an HTTP status code.
    pub(super) fn refuse(self, status: u16, kind: &str, message: &str) {
        refuse(self.request, status, kind, message);
    }
}

/// The server, which runs in its own thread as long as the agent.
#[derive(Debug)]
pub(crate) struct RuntimeApi {
    address: SocketAddr,
    /// Keeps other programs than the function from the keys of its role. Clones share it.
    token: Arc<str>,
    runtime: Arc<Mutex<Option<Connection>>>,
}

/// The channel to the current runtime.
#[derive(Debug)]
struct Connection {
    calls: Sender<Call>,
    event: OwnedFd,
}

impl Connection {
    /// Fails if the runtime was ended. In that case no process waits for the response.
    fn send(&self, call: Call) {
        if self.calls.send(call).is_ok() {
            let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
        }
    }
}

/// The calls of one runtime.
#[derive(Debug)]
pub(super) struct Calls {
    calls: Receiver<Call>,
    event: OwnedFd,
}

impl RuntimeApi {
    /// Listens on `address` and serves.
    pub(super) fn serve(address: SocketAddr, credentials: Credentials) -> io::Result<Self> {
        let server = Server::http(address).map_err(io::Error::other)?;
        let address = server.server_addr().to_ip().ok_or(io::ErrorKind::AddrNotAvailable)?;
        let runtime = Arc::<Mutex<Option<Connection>>>::default();
        let current = Arc::clone(&runtime);
        let token: Arc<str> = Uuid::new_v4().simple().to_string().into();
        let expected = Arc::clone(&token);
        std::thread::Builder::new().name("runtime-api".into()).spawn(move || {
            for request in server.incoming_requests() {
                if request.url() == CREDENTIALS {
                    respond_with_credentials(request, &credentials, &expected);
                } else {
                    forward(request, &current);
                }
            }
        })?;
        Ok(Self { address, token, runtime })
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
            ("AWS_CONTAINER_AUTHORIZATION_TOKEN".to_owned(), self.token.to_string()),
        ]
    }

    /// The calls of the next runtime. From now on the calls of earlier runtimes are dropped.
    pub(super) fn connect(&self) -> io::Result<Calls> {
        let event = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        let (sender, calls) = channel();
        let connection = Connection { calls: sender, event: event.try_clone()? };
        *self.runtime.lock() = Some(connection);
        Ok(Calls { calls, event })
    }
}

impl Calls {
    /// The next call, if any.
    pub(super) fn take(&self) -> Option<Call> {
        // Read before the queue is: a call that arrives between the two is taken now, or the
        // descriptor is readable. Fails if no call arrived since.
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
        self.calls.try_recv().ok()
    }

    /// A descriptor that is readable if a call arrived since [`Calls::take`] returned none.
    pub(super) fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

fn respond_with_credentials(request: Request, credentials: &Credentials, token: &str) {
    let header = request.headers().iter().find(|header| header.field.equiv("Authorization"));
    if header.is_none_or(|header| header.value.as_str() != token) {
        return refuse(request, 403, "Forbidden", "the authorization token is not valid");
    }
    match credentials.document() {
        Some(document) => respond(request, 200, &document),
        None => refuse(request, 404, "NotFound", "the function's role has no keys"),
    }
}

fn forward(mut request: Request, runtime: &Mutex<Option<Connection>>) {
    let kind = match read(&mut request) {
        Ok(Some(kind)) => kind,
        Ok(None) => return refuse(request, 404, "Runtime.NotFound", "the API has no such call"),
        Err(error) => {
            return refuse(request, 400, "Runtime.BadRequest", &error.to_string());
        }
    };
    let runtime = runtime.lock();
    let Some(connection) = &*runtime else { return };
    connection.send(Call { kind, request });
}

/// Decodes a request; `None` if the API has no such call.
fn read(request: &mut Request) -> io::Result<Option<CallKind>> {
    let Some(path) = request.url().strip_prefix(PREFIX) else { return Ok(None) };
    let parts: Vec<String> = path.split('/').map(ToOwned::to_owned).collect();
    let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
    let method = request.method().clone();
    Ok(match (method, parts.as_slice()) {
        (Method::Get, ["invocation", "next"]) => Some(CallKind::Next),
        (Method::Get, ["restore", "next"]) => Some(CallKind::RestoreNext),
        (Method::Post, ["invocation", id, "response"]) => {
            Some(CallKind::Response { request_id: (*id).to_owned(), body: body(request)? })
        }
        (Method::Post, ["invocation", id, "error"]) => Some(CallKind::InvocationError {
            request_id: (*id).to_owned(),
            posted: posted(request)?,
        }),
        (Method::Post, ["init", "error"]) => Some(CallKind::InitError(posted(request)?)),
        (Method::Post, ["restore", "error"]) => Some(CallKind::RestoreError(posted(request)?)),
        _ => None,
    })
}

fn posted(request: &mut Request) -> io::Result<PostedError> {
    let header = request.headers().iter().find(|header| header.field.equiv(ERROR_TYPE));
    let kind = header.map(|header| header.value.as_str().to_owned());
    Ok(PostedError { kind, body: body(request)? })
}

fn body(request: &mut Request) -> io::Result<Vec<u8>> {
    let mut body = Vec::new();
    request.as_reader().take(MAX_BODY).read_to_end(&mut body)?;
    Ok(body)
}

fn refuse(request: Request, status: u16, kind: &str, message: &str) {
    let body = serde_json::json!({ "errorType": kind, "errorMessage": message });
    respond(request, status, &body.to_string());
}

fn respond(request: Request, status: u16, body: &str) {
    // If the runtime has exited, waiting for it detects that.
    let _ = request.respond(Response::from_string(body).with_status_code(status));
}

#[cfg(test)]
#[path = "api_tests.rs"]
mod tests;
