//! Destinations: how an event ended becomes an event for another function.
//!
//! Source: AWS, "Capturing records of Lambda asynchronous invocations".

use std::sync::Arc;
use std::time::Duration;

use firn_run::{EventError, Invocation};
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::Control;
use super::errors::{EventRefused, FindError};
use super::events::{Event, LoadError};
use crate::functions::{Destination, LATEST, Target, timestamp};
use crate::telemetry::TraceContext;

/// How many events may follow one another, as by AWS Lambda's detection of recursive loops: a
/// destination can be the function whose events come from it.
const MAX_HOPS: u32 = 16;

/// How an event ended.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) condition: Condition,
    /// How often the function was invoked.
    pub(super) attempts: u32,
    /// What the function answered at last.
    pub(super) response: Option<Response>,
}

/// Why an event ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) enum Condition {
    Success,
    RetriesExhausted,
    EventAgeExceeded,
}

/// An answer, or an error, of the function.
#[derive(Debug)]
pub(super) struct Response {
    /// The version that has answered.
    pub(super) version: String,
    /// Whether it is an error.
    pub(super) failed: bool,
    /// JSON.
    pub(super) payload: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Record<'a> {
    version: &'static str,
    timestamp: String,
    request_context: RequestContext<'a>,
    request_payload: &'a RawValue,
    #[serde(skip_serializing_if = "Option::is_none")]
    response_context: Option<ResponseContext<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    response_payload: Option<&'a RawValue>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct RequestContext<'a> {
    request_id: &'a str,
    function_arn: String,
    condition: Condition,
    approximate_invoke_count: u32,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ResponseContext<'a> {
    status_code: u16,
    executed_version: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    function_error: Option<&'static str>,
}

/// A destination did not get the record of an event.
#[derive(Debug, thiserror::Error)]
enum DeliverError {
    #[error("{MAX_HOPS} events have followed one another: the functions call each other in a loop")]
    Loop,
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error("the record is not JSON")]
    Json(#[from] serde_json::Error),
    #[error("the record cannot be an event")]
    Event(#[from] EventError),
    #[error(transparent)]
    Find(#[from] FindError),
    #[error(transparent)]
    Refused(#[from] EventRefused),
}

impl Control {
    /// Sends the record of an event that has ended to its destination, as an event that is accepted
    /// before the first one is removed.
    pub(super) async fn deliver(
        self: &Arc<Self>,
        event: &Event,
        destination: Option<&Destination>,
        ended: &Ended,
    ) {
        let Some(destination) = destination else { return };
        if let Err(error) = self.try_deliver(event, destination, ended).await {
            let error: &(dyn std::error::Error + 'static) = &error;
            tracing::warn!(
                error,
                function = event.target().name(),
                request_id = event.request_id(),
                destination = destination.arn,
                "the destination of an event did not get its record"
            );
        }
    }

    async fn try_deliver(
        self: &Arc<Self>,
        event: &Event,
        destination: &Destination,
        ended: &Ended,
    ) -> Result<(), DeliverError> {
        if event.hops() >= MAX_HOPS {
            return Err(DeliverError::Loop);
        }
        let limit = self.find(&destination.target).await?.version.timeout;
        let invocation = {
            let loaded = event.load().await?;
            let record = record(event.target(), &loaded.invocation(), ended)?;
            let invocation = Invocation::new(&record, Duration::from_secs(limit.into()))?;
            invocation.with_function_arn(Some(destination.arn.clone()))
        };
        let target = destination.target.clone();
        let next = self.events.accept_after(event.hops() + 1, target, invocation).await?;
        self.spawn_event(next, TraceContext::default());
        Ok(())
    }
}

/// An answer as JSON: what a function has streamed may be other text.
pub(super) fn json_of(payload: Vec<u8>) -> String {
    let text = String::from_utf8(payload)
        .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned());
    match serde_json::from_str::<&RawValue>(&text) {
        Ok(_) => text,
        Err(_) => Value::String(text).to_string(),
    }
}

/// The record of an event that has ended.
fn record(
    target: &Target,
    invocation: &Invocation,
    ended: &Ended,
) -> Result<String, serde_json::Error> {
    let mut function_arn = invocation.function_arn().unwrap_or_default().to_owned();
    if target.qualifier().is_none() {
        function_arn = format!("{function_arn}:{LATEST}");
    }
    let payload = ended.response.as_ref().map(|response| response.payload.as_str());
    let record = Record {
        version: "1.0",
        timestamp: timestamp().replace("+0000", "Z"),
        request_context: RequestContext {
            request_id: invocation.request_id(),
            function_arn,
            condition: ended.condition,
            approximate_invoke_count: ended.attempts,
        },
        request_payload: serde_json::from_str(invocation.event())?,
        response_context: ended.response.as_ref().map(|response| ResponseContext {
            status_code: 200,
            executed_version: &response.version,
            function_error: response.failed.then_some("Unhandled"),
        }),
        response_payload: payload.map(serde_json::from_str).transpose()?,
    };
    serde_json::to_string(&record)
}

#[cfg(test)]
#[path = "destinations_tests.rs"]
mod tests;
