//! Invoke: one request to a function.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{Path, Query as UrlQuery};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use firn_agent::protocol::{LOG_TAIL_BYTES, MAX_EVENT_BYTES};

use super::functions::Daemonic;
use super::{ApiError, Query, REQUEST_ID, blocking, read};
use crate::agent::{EventError, Invocation};
use crate::daemon::{Daemon, Found};
use crate::functions::{Arn, State, Target};
use crate::instances::{self, Invoked, Wanted};
use crate::metrics::Ending;

/// The header with what a request cost, in JSON.
const REPORT: HeaderName = HeaderName::from_static("x-firn-report");

/// What a request asks for besides the answer.
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

pub(super) async fn invoke(
    axum::extract::State(daemon): Daemonic,
    Path(name): Path<String>,
    UrlQuery(query): UrlQuery<Query>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let received = Instant::now();
    let options = Options::read(&headers)?;
    let target = Target::parse(&name, query.qualifier.as_deref())?;
    let body = read(body, MAX_EVENT_BYTES, "InvokeFunction").await?;
    let (daemon, found, target) = blocking(move || {
        let found = daemon.find(&target)?;
        Ok((daemon, found, target))
    })
    .await?;
    let arn = Arn(&daemon.place, &target.name, target.qualifier.as_deref()).to_string();
    check_state(&found, &arn)?;
    let event = if body.is_empty() { "{}" } else { text(&body)? };
    let limit = Duration::from_secs(found.version.timeout.into());
    let invocation = Invocation::new(event, limit)
        .map_err(|error| match error {
            EventError::TooLong { .. } => ApiError::too_large(MAX_EVENT_BYTES, "InvokeFunction"),
            EventError::NotJson(error) => not_json(&error),
        })?
        .with_function_arn(Some(arn))
        .with_client_context(options.client_context)
        .with_trace_id(options.trace_id);
    let executed = found.version.version.clone();
    let request_id = invocation.request_id().to_owned();
    let named = [
        (HeaderName::from_static(REQUEST_ID), request_id.clone()),
        (HeaderName::from_static("x-amz-executed-version"), executed.clone()),
    ];
    if options.kind == Kind::DryRun {
        return Ok(with_headers(StatusCode::NO_CONTENT, named, Body::empty()));
    }
    let request = instances::Request {
        wanted: Wanted { version: Arc::new(found.version), concurrency: Some(found.concurrency) },
        invocation,
        received,
    };
    // A task of its own: it goes on when the client does not wait for it.
    let task = tokio::spawn(run(Arc::clone(&daemon), request));
    if options.kind == Kind::Event {
        return Ok(with_headers(StatusCode::ACCEPTED, named, Body::empty()));
    }
    let invoked = match task.await {
        Ok(done) => done?,
        Err(error) => return Err(ApiError::service(&error, "the request's task was lost")),
    };
    Ok(answer(invoked, named, &request_id, &executed, options.tail))
}

/// Runs a request, counts it and writes it to the log.
async fn run(daemon: Arc<Daemon>, request: instances::Request) -> Result<Invoked, ApiError> {
    let version = Arc::clone(&request.wanted.version);
    let request_id = request.invocation.request_id().to_owned();
    let (fleet, code) = (Arc::clone(&daemon.fleet), daemon.code.clone());
    let invoked = instances::invoke(fleet, code, request).await;
    let ended = |ending| daemon.fleet.metrics.ended(&version.function, ending);
    let (function, number) = (&version.function, &version.version);
    match invoked {
        Ok(invoked) => {
            let failed = invoked.outcome.is_err();
            ended(if failed { Ending::function_error } else { Ending::answered });
            let report = serde_json::to_string(&invoked.report).unwrap_or_default();
            tracing::info!(function, version = number, request_id, failed, report, "invoked");
            Ok(invoked)
        }
        Err(failure) => {
            let text = failure.to_string();
            let error = ApiError::from(failure);
            ended(if error.is_throttling() { Ending::throttled } else { Ending::failed });
            tracing::warn!(function, version = number, request_id, reason = text, "not invoked");
            Err(error)
        }
    }
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
                    "invocation type {other}: RequestResponse, Event or DryRun"
                )));
            }
        };
        let client_context = text("x-amz-client-context").map(decode).transpose()?;
        Ok(Self {
            kind,
            tail: text("x-amz-log-type") == Some("Tail"),
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
    // Written anew, in one line: it becomes a header.
    Ok(value.to_string())
}

fn check_state(found: &Found, arn: &str) -> Result<(), ApiError> {
    match &found.version.state {
        State::Active => Ok(()),
        State::Pending => Err(ApiError::not_ready(arn)),
        State::Failed { reason } => Err(ApiError::snap_start(format!(
            "the version could not be frozen: {reason}; publish another"
        ))),
    }
}

fn text(body: &[u8]) -> Result<&str, ApiError> {
    std::str::from_utf8(body).map_err(|error| not_json(&error))
}

fn not_json(error: &dyn std::fmt::Display) -> ApiError {
    ApiError::request_content(format!("Could not parse request body into json: {error}"))
}

fn answer(
    invoked: Invoked,
    named: [(HeaderName, String); 2],
    request_id: &str,
    version: &str,
    tail: bool,
) -> Response {
    let (body, logs, duration, failed) = match invoked.outcome {
        Ok(answer) => (answer.json, answer.logs, answer.duration, false),
        Err(failed) => {
            let body = serde_json::to_string(&failed.error).unwrap_or_default();
            (body, failed.logs, Duration::from_nanos(invoked.report.invoke_ns), true)
        }
    };
    let mut response = with_headers(StatusCode::OK, named, Body::from(body));
    let headers = response.headers_mut();
    headers.insert("content-type", HeaderValue::from_static("application/json"));
    if failed {
        headers.insert("x-amz-function-error", HeaderValue::from_static("Unhandled"));
    }
    let report = serde_json::to_string(&invoked.report).unwrap_or_default();
    insert(headers, REPORT, &report);
    if tail {
        let milliseconds = duration.as_secs_f64() * 1000.0;
        let log = format!(
            "START RequestId: {request_id} Version: {version}\n{logs}{}END RequestId: {request_id}\n\
             REPORT RequestId: {request_id}\tDuration: {milliseconds:.2} ms\n",
            if logs.is_empty() || logs.ends_with('\n') { "" } else { "\n" },
        );
        let kept = &log.as_bytes()[log.len().saturating_sub(LOG_TAIL_BYTES)..];
        insert(headers, HeaderName::from_static("x-amz-log-result"), &STANDARD.encode(kept));
    }
    response
}

fn with_headers(status: StatusCode, named: [(HeaderName, String); 2], body: Body) -> Response {
    let mut response = (status, body).into_response();
    for (name, value) in named {
        insert(response.headers_mut(), name, &value);
    }
    response
}

fn insert(headers: &mut HeaderMap, name: HeaderName, value: &str) {
    // A value that no header can hold is left out.
    if let Ok(value) = HeaderValue::from_str(value) {
        headers.insert(name, value);
    }
}
