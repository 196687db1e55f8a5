//! Invoke: one request to a function.

use axum::Extension;
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use firn_agent::protocol::LOG_TAIL_BYTES;
use firn_control::{Answering, InvocationRequest, Invoked, Prepared, Target, TraceContext};

use super::authorize::{Received, Share};
use super::extract::Qualified;
use super::{ApiError, Lambda, REPORT, REQUEST_ID, event_stream};

/// The header with the kind of a function's error.
pub(super) const FUNCTION_ERROR: HeaderName = HeaderName::from_static("x-amz-function-error");

/// The kind of every error of a function.
pub(super) const UNHANDLED: &str = "Unhandled";

/// The header with the end of the log.
pub(super) const LOG_RESULT: HeaderName = HeaderName::from_static("x-amz-log-result");

/// Options in a request's headers.
struct Options {
    kind: Kind,
    tail: bool,
    client_context: Option<String>,
    trace_id: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    RequestResponse,
    Event,
    DryRun,
}

/// The names of a request and of the version that serves it, in headers.
type Ids = [(HeaderName, String); 2];

/// The answer as a stream of events, as InvokeWithResponseStream has it.
pub(super) async fn stream(
    Qualified { lambda, target, .. }: Qualified,
    Extension(received): Extension<Received>,
    headers: HeaderMap,
    Extension(share): Extension<Share>,
    body: Bytes,
) -> Result<Response, ApiError> {
    let options = Options::read(&headers)?;
    let (kind, tail) = (options.kind, options.tail);
    if kind == Kind::Event {
        return Err(ApiError::invalid("invocation type Event: expected RequestResponse or DryRun"));
    }
    let (prepared, ids) =
        prepare(&lambda, target, received, &headers, options, share, body).await?;
    if kind == Kind::DryRun {
        return Ok(with_headers(StatusCode::NO_CONTENT, ids, Body::empty()));
    }
    match lambda.control.stream(prepared).await {
        Answering::Whole(invoked) => Ok(event_stream::of(answer(*invoked, ids, tail)?).await),
        Answering::Stream(stream) => {
            let mut response = event_stream::streamed(stream, tail);
            add_ids(&mut response, ids);
            Ok(response)
        }
    }
}

pub(super) async fn invoke(
    Qualified { lambda, target, .. }: Qualified,
    Extension(received): Extension<Received>,
    headers: HeaderMap,
    Extension(share): Extension<Share>,
    body: Bytes,
) -> Result<Response, ApiError> {
    let options = Options::read(&headers)?;
    let (kind, tail) = (options.kind, options.tail);
    let (prepared, ids) =
        prepare(&lambda, target, received, &headers, options, share, body).await?;
    match kind {
        Kind::DryRun => Ok(with_headers(StatusCode::NO_CONTENT, ids, Body::empty())),
        Kind::Event => {
            lambda.control.accept_event(prepared).await?;
            Ok(with_headers(StatusCode::ACCEPTED, ids, Body::empty()))
        }
        Kind::RequestResponse => answer(lambda.control.invoke(prepared).await, ids, tail),
    }
}

async fn prepare(
    lambda: &Lambda,
    target: Target,
    Received(received): Received,
    headers: &HeaderMap,
    options: Options,
    Share(share): Share,
    body: Bytes,
) -> Result<(Prepared, Ids), ApiError> {
    let field =
        |name: &str| headers.get(name).and_then(|value| Some(value.to_str().ok()?.to_owned()));
    let request = InvocationRequest {
        function_arn: lambda.scope.arn_of(&target).to_string(),
        target,
        event: body.into(),
        client_context: options.client_context,
        trace_id: options.trace_id,
        trace: TraceContext::read(field),
        received,
        hold: Some(Box::new(share)),
    };
    let prepared = lambda.control.prepare(request).await.map_err(lambda.error())?;
    let ids = [
        (HeaderName::from_static(REQUEST_ID), prepared.request_id().to_owned()),
        (HeaderName::from_static("x-amz-executed-version"), prepared.version().to_owned()),
    ];
    Ok((prepared, ids))
}

impl Options {
    fn read(headers: &HeaderMap) -> Result<Self, ApiError> {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let kind = match text("x-amz-invocation-type") {
            None | Some("RequestResponse") => Kind::RequestResponse,
            Some("Event") => Kind::Event,
            Some("DryRun") => Kind::DryRun,
            Some(other) => {
                return Err(ApiError::invalid(format!(
                    "invocation type {other}: expected RequestResponse, Event or DryRun"
                )));
            }
        };
        for name in ["x-amz-tenant-id", "x-amz-durable-execution-name"] {
            if headers.contains_key(name) {
                return Err(ApiError::invalid(format!("{name}: this daemon does not support it")));
            }
        }
        let tail = match text("x-amz-log-type") {
            None | Some("None") => false,
            Some("Tail") => true,
            Some(other) => return Err(ApiError::constraint("logType", other, "be None or Tail")),
        };
        let client_context = text("x-amz-client-context").map(decode).transpose()?;
        Ok(Self {
            kind,
            tail,
            client_context,
            trace_id: text("x-amzn-trace-id").map(ToOwned::to_owned),
        })
    }
}

fn decode(base64: &str) -> Result<String, ApiError> {
    let refused =
        || ApiError::request_content("Client context must be a valid Base64-encoded JSON object.");
    let bytes = STANDARD.decode(base64).map_err(|_| refused())?;
    let value: serde_json::Value = serde_json::from_slice(&bytes).map_err(|_| refused())?;
    // The context becomes a header of another request, so it has to be one line.
    Ok(value.to_string())
}

/// The answer of a request that did not stream.
fn answer(invoked: Invoked, ids: Ids, tail: bool) -> Result<Response, ApiError> {
    let Invoked { outcome, report, log } = invoked;
    let outcome = outcome.map_err(|failure| ApiError::from(failure).with_report(report.json()))?;
    let (body, failed) = match outcome {
        Ok(answer) => (answer.payload, false),
        Err(failed) => (serde_json::to_vec(&failed.error).unwrap_or_default(), true),
    };
    let mut response = with_headers(StatusCode::OK, ids, Body::from(body));
    let headers = response.headers_mut();
    headers.insert("content-type", HeaderValue::from_static("application/json"));
    if failed {
        headers.insert(FUNCTION_ERROR, HeaderValue::from_static(UNHANDLED));
    }
    insert(headers, REPORT, &report.json());
    if tail {
        insert(headers, LOG_RESULT, &log_tail(&log));
    }
    Ok(response)
}

/// The end of a log, in base64.
pub(super) fn log_tail(log: &str) -> String {
    STANDARD.encode(&log.as_bytes()[log.len().saturating_sub(LOG_TAIL_BYTES)..])
}

fn with_headers(status: StatusCode, ids: Ids, body: Body) -> Response {
    let mut response = (status, body).into_response();
    add_ids(&mut response, ids);
    response
}

fn add_ids(response: &mut Response, ids: Ids) {
    for (name, value) in ids {
        insert(response.headers_mut(), name, &value);
    }
}

fn insert(headers: &mut HeaderMap, name: HeaderName, value: &str) {
    // Omits a value that is not valid in a header.
    if let Ok(value) = HeaderValue::from_str(value) {
        headers.insert(name, value);
    }
}
