//! Invoke: one request to a function.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Extension;
use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use firn_agent::protocol::{LOG_TAIL_BYTES, MAX_EVENT_BYTES};
use opentelemetry::Context;

use super::named::Qualified;
use super::{ApiError, REPORT, REQUEST_ID, Received, blocking, read};
use crate::daemon::{Daemon, Found};
use crate::functions::{Arn, State, Target};
use crate::instances::{self, Invoked, Report};
use crate::metrics::Ending;
use crate::telemetry::{self, Ended};
use firn_run::{Answer, EventError, Failed, Invocation};

/// How often an event is tried again when its function fails: AWS Lambda's default.
const RETRIES: u32 = 2;

/// How long an event waits at first where there was no room for it, and how long at most: AWS Lambda's.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(300);

/// How old an event may get: AWS Lambda's default.
const MAX_AGE: Duration = Duration::from_secs(6 * 3600);

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
    Qualified { daemon, target }: Qualified,
    Extension(Received(received)): Extension<Received>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let options = Options::read(&headers)?;
    let body = read(body, MAX_EVENT_BYTES, "InvokeFunction").await;
    let body = body.map_err(|_| ApiError::event_too_large())?;
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
            EventError::TooLong { .. } => ApiError::event_too_large(),
            EventError::NotJson(error) => not_json(&error),
        })?
        .with_function_arn(Some(arn))
        .with_client_context(options.client_context)
        .with_trace_id(options.trace_id);
    let invocation = Arc::new(invocation);
    let executed = found.version.version.clone();
    let request_id = invocation.request_id().to_owned();
    let named = [
        (HeaderName::from_static(REQUEST_ID), request_id.clone()),
        (HeaderName::from_static("x-amz-executed-version"), executed.clone()),
    ];
    if options.kind == Kind::DryRun {
        return Ok(with_headers(StatusCode::NO_CONTENT, named, Body::empty()));
    }
    let parent = telemetry::parent(&headers);
    if options.kind == Kind::Event {
        let permit = Arc::clone(&daemon.events).try_acquire_owned();
        let permit = permit.map_err(|_| ApiError::too_many_events())?;
        tokio::spawn(async move {
            run_event(&daemon, &target, invocation, &parent).await;
            drop(permit);
        });
        return Ok(with_headers(StatusCode::ACCEPTED, named, Body::empty()));
    }
    // A task of its own: it goes on when the client does not wait for it.
    let task =
        tokio::spawn(async move { run(&daemon, found, invocation, received, &parent).await });
    let (outcome, report) = match task.await {
        Ok(done) => done?,
        Err(error) => return Err(ApiError::service(&error, "the request's task was lost")),
    };
    Ok(answer(outcome, &report, named, &request_id, &executed, options.tail))
}

/// Runs a request that nobody waits for, as AWS Lambda does: again when the function fails, twice at most; and again and again,
/// less and less often, where there was no room for it or firn failed.
async fn run_event(
    daemon: &Arc<Daemon>,
    target: &Target,
    invocation: Arc<Invocation>,
    parent: &Context,
) {
    let accepted = Instant::now();
    let mut failures = 0;
    let mut pause = FIRST_PAUSE;
    loop {
        // The function may have changed meanwhile, or be gone.
        let (finder, wanted) = (Arc::clone(daemon), target.clone());
        let Ok(found) = blocking(move || finder.find(&wanted)).await else { return };
        let wait = match run(daemon, found, Arc::clone(&invocation), Instant::now(), parent).await {
            Ok((Ok(_), _)) => return,
            Err(error) if error.is_passing() => {
                let wait = pause;
                pause = (pause * 2).min(LONGEST_PAUSE);
                wait
            }
            _ => {
                failures += 1;
                daemon.event_pause * failures
            }
        };
        if failures > RETRIES || accepted.elapsed() + wait > MAX_AGE {
            tracing::warn!(
                function = target.name,
                request_id = invocation.request_id(),
                "an event was given up"
            );
            return;
        }
        tokio::time::sleep(wait).await;
    }
}

/// Runs a request that is ready to be, counts it, traces it and writes it to the log.
async fn run(
    daemon: &Arc<Daemon>,
    found: Found,
    invocation: Arc<Invocation>,
    received: Instant,
    parent: &Context,
) -> Result<(Result<Answer, Failed>, Report), ApiError> {
    let version = Arc::new(found.version);
    let request_id = invocation.request_id().to_owned();
    let request = instances::Request {
        version: Arc::clone(&version),
        concurrency: found.concurrency,
        invocation,
        received,
        accepted: Instant::now(),
    };
    let (fleet, code) = (Arc::clone(&daemon.fleet), daemon.code.clone());
    let Invoked { outcome, report } = instances::invoke(fleet, code, request).await;
    let (function, number) = (&version.function, &version.version);
    let failure = match &outcome {
        Ok(Ok(_)) => None,
        Ok(Err(failed)) => Some(failed.error.to_string()),
        Err(_) => report.reason.clone(),
    };
    let failed = failure.is_some();
    if let Some(telemetry) = &daemon.telemetry {
        let (version, request_id, report) = (&*version, request_id.as_str(), &report);
        telemetry.invocation(&Ended { version, request_id, parent, report, failure });
    }
    let json = report.json();
    match outcome {
        Ok(answered) => {
            let ending = if failed { Ending::function_error } else { Ending::answered };
            let taken = report.start.map(|start| (start, report.total_ns));
            daemon.fleet.tally(&version, ending, taken);
            tracing::info!(
                function,
                version = number,
                request_id,
                failed,
                report = json,
                "invoked"
            );
            Ok((answered, report))
        }
        Err(failure) => {
            let error = ApiError::from(failure);
            let ending = if error.is_throttling() { Ending::throttled } else { Ending::failed };
            daemon.fleet.tally(&version, ending, None);
            tracing::warn!(function, version = number, request_id, report = json, "not invoked");
            Err(error.with_report(json))
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
    outcome: Result<Answer, Failed>,
    report: &Report,
    named: [(HeaderName, String); 2],
    request_id: &str,
    version: &str,
    tail: bool,
) -> Response {
    let (body, logs, duration, failed) = match outcome {
        Ok(answer) => (answer.json, answer.logs, answer.duration, false),
        Err(failed) => {
            let body = serde_json::to_string(&failed.error).unwrap_or_default();
            (body, failed.logs, Duration::from_nanos(report.invoke_ns), true)
        }
    };
    let mut response = with_headers(StatusCode::OK, named, Body::from(body));
    let headers = response.headers_mut();
    headers.insert("content-type", HeaderValue::from_static("application/json"));
    if failed {
        headers.insert("x-amz-function-error", HeaderValue::from_static("Unhandled"));
    }
    insert(headers, REPORT, &report.json());
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
