//! AWS Lambda's Runtime API over HTTP, for one runtime at a time.
//!
//! Source: AWS Lambda Developer Guide, "Using the Lambda runtime API"; `/restore/next` and `/restore/error` as AWS Lambda's
//! runtime interface clients call them for SnapStart.

use std::io::{self, Read};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::{EventfdFlags, eventfd};
use tiny_http::{Method, Request, Response, Server};

use crate::protocol::MAX_ANSWER_BYTES;

const PREFIX: &str = "/2018-06-01/runtime/";

/// The header that names the kind of an error.
const ERROR_TYPE: &str = "Lambda-Runtime-Function-Error-Type";

/// The longest body that is read, in bytes. Longer ones end here: what is over the limit of an answer is an error.
const MAX_BODY: u64 = 1 + MAX_ANSWER_BYTES as u64;

/// A call of the runtime that needs an answer from whoever runs it.
pub(super) struct Call {
    pub(super) kind: CallKind,
    request: Request,
}

/// What a runtime calls for.
#[derive(Debug)]
pub(super) enum CallKind {
    /// The next request, please.
    Next,
    /// Ready to be frozen; answered after the restore.
    RestoreNext,
    /// The answer to a request.
    Response { request_id: String, body: Vec<u8> },
    /// A request's error.
    InvocationError { request_id: String, posted: PostedError },
    /// The function does not load, or its before-snapshot hooks failed.
    InitError(PostedError),
    /// The function's after-restore hooks failed.
    RestoreError(PostedError),
}

/// An error as it was posted.
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
    /// Answers with a document and headers of the API.
    pub(super) fn answer(self, headers: &[(&str, &str)], body: &str) {
        let mut response = Response::from_string(body);
        for (name, value) in [("Content-Type", "application/json")].iter().chain(headers) {
            // A value that no header can hold is left out.
            if let Ok(header) = tiny_http::Header::from_bytes(*name, *value) {
                response.add_header(header);
            }
        }
        // A runtime that is gone is found out by its end.
        let _ = self.request.respond(response);
    }

    /// Takes note of what was posted.
    pub(super) fn accept(self) {
        respond(self.request, 202, r#"{"status":"OK"}"#);
    }

    /// Refuses the call, with a status code of HTTP.
    pub(super) fn refuse(self, status: u16, kind: &str, message: &str) {
        refuse(self.request, status, kind, message);
    }
}

/// The server, on a thread of its own for as long as the agent runs.
#[derive(Debug)]
pub(crate) struct RuntimeApi {
    address: SocketAddr,
    runtime: Arc<Mutex<Option<Line>>>,
}

/// The way to the runtime that is running now.
#[derive(Debug)]
struct Line {
    calls: Sender<Call>,
    bell: OwnedFd,
}

/// The calls of one runtime.
#[derive(Debug)]
pub(super) struct Calls {
    calls: Receiver<Call>,
    bell: OwnedFd,
}

impl RuntimeApi {
    /// Listens on `address` and serves.
    pub(super) fn serve(address: SocketAddr) -> io::Result<Self> {
        let server = Server::http(address).map_err(io::Error::other)?;
        let address = server.server_addr().to_ip().ok_or(io::ErrorKind::AddrNotAvailable)?;
        let runtime = Arc::<Mutex<Option<Line>>>::default();
        let current = Arc::clone(&runtime);
        std::thread::Builder::new().name("runtime-api".into()).spawn(move || {
            for request in server.incoming_requests() {
                pass_on(request, &current);
            }
        })?;
        Ok(Self { address, runtime })
    }

    /// Where it listens.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// The calls of the runtime that is started next. Those of an earlier one are refused from now on.
    pub(super) fn connect(&self) -> io::Result<Calls> {
        let bell = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        let (sender, calls) = channel();
        let line = Line { calls: sender, bell: bell.try_clone()? };
        *self.runtime.lock().unwrap_or_else(PoisonError::into_inner) = Some(line);
        Ok(Calls { calls, bell })
    }
}

impl Calls {
    /// The next call, if there is one.
    pub(super) fn take(&self) -> Option<Call> {
        let call = self.calls.try_recv().ok();
        if call.is_none() {
            // Fails where the bell has not rung since.
            let _ = rustix::io::read(&self.bell, &mut [0; 8]);
        }
        call
    }

    /// Can be read when a call has come since [`Calls::take`] had none.
    pub(super) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

fn pass_on(mut request: Request, runtime: &Mutex<Option<Line>>) {
    let kind = match read(&mut request) {
        Ok(Some(kind)) => kind,
        Ok(None) => return refuse(request, 404, "Runtime.NotFound", "no such call of the API"),
        Err(error) => {
            return refuse(request, 400, "Runtime.BadRequest", &error.to_string());
        }
    };
    let runtime = runtime.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(line) = &*runtime else { return };
    // Fails where the runtime was ended: then nobody waits for an answer.
    if line.calls.send(Call { kind, request }).is_ok() {
        let _ = rustix::io::write(&line.bell, &1_u64.to_ne_bytes());
    }
}

/// What a request asks for; nothing where the API has no such call.
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
    // A runtime that is gone is found out by its end.
    let _ = request.respond(Response::from_string(body).with_status_code(status));
}
