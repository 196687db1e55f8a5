//! The answer of a request as a stream of events.
//!
//! Source: AWS, "Amazon event stream specification" (Smithy): each message has its length, that of
//! its headers, their CRC-32, the headers, the payload, and the CRC-32 of all before.

use axum::body::{Body, Bytes, to_bytes};
use axum::http::HeaderValue;
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::response::Response;
use firn_control::{AnswerEvent, AnswerStream, Invoked};
use serde_json::{Map, Value};

use super::invoke::{FUNCTION_ERROR, LOG_RESULT, UNHANDLED, log_tail};
use crate::streamed::{CutOff, respond};

const CONTENT: HeaderValue = HeaderValue::from_static("application/vnd.amazon.eventstream");

/// The type of a header's value: a string.
const STRING: u8 = 7;

/// Bytes of a message besides its headers and its payload.
const FRAME: usize = 16;

/// The answer of Invoke as that of InvokeWithResponseStream, if the function does not stream: what
/// it has returned is one chunk.
pub(super) async fn of(response: Response) -> Response {
    let (mut parts, body) = response.into_parts();
    // It is in memory, so this does not fail.
    let payload = to_bytes(body, usize::MAX).await.unwrap_or_default();
    let mut text = |name| {
        let value = parts.headers.remove(name)?;
        Some(value.to_str().ok()?.to_owned())
    };
    let mut complete = Map::new();
    if let Some(log) = text(LOG_RESULT) {
        complete.insert("LogResult".to_owned(), log.into());
    }
    let mut stream = Vec::new();
    if let Some(kind) = text(FUNCTION_ERROR) {
        let details = String::from_utf8_lossy(&payload).into_owned();
        fail(&mut complete, &kind, details);
    } else {
        message(&mut stream, "PayloadChunk", "application/octet-stream", &payload);
    }
    end(&mut stream, complete);
    parts.headers.remove(CONTENT_LENGTH);
    parts.headers.insert(CONTENT_TYPE, CONTENT);
    Response::from_parts(parts, Body::from(Bytes::from(stream)))
}

/// The answer that a function streams, one chunk for each part. `tail` adds the end of the log.
pub(super) fn streamed(stream: AnswerStream, tail: bool) -> Response {
    let mut response = respond(Bytes::new(), stream, move |event| {
        let mut bytes = Vec::new();
        match event {
            AnswerEvent::Part(part) => {
                message(&mut bytes, "PayloadChunk", "application/octet-stream", &part);
            }
            AnswerEvent::End(invoked) => end(&mut bytes, complete(&invoked, tail)),
            AnswerEvent::Lost => return Err(CutOff),
        }
        Ok(bytes.into())
    });
    response.headers_mut().insert(CONTENT_TYPE, CONTENT);
    response
}

/// How the request of a streamed answer has ended.
fn complete(invoked: &Invoked, tail: bool) -> Map<String, Value> {
    let mut complete = Map::new();
    if tail {
        complete.insert("LogResult".to_owned(), log_tail(&invoked.log).into());
    }
    match &invoked.outcome {
        Ok(Ok(_)) => {}
        Ok(Err(failed)) => {
            let details = serde_json::to_string(&failed.error).unwrap_or_default();
            fail(&mut complete, UNHANDLED, details);
        }
        Err(failure) => fail(&mut complete, "ServiceException", failure.to_string()),
    }
    complete
}

fn fail(complete: &mut Map<String, Value>, code: &str, details: String) {
    complete.insert("ErrorCode".to_owned(), code.into());
    complete.insert("ErrorDetails".to_owned(), details.into());
}

/// Appends the last event.
fn end(stream: &mut Vec<u8>, complete: Map<String, Value>) {
    let complete = Value::Object(complete).to_string();
    message(stream, "InvokeComplete", "application/json", complete.as_bytes());
}

/// Appends an event. Names and values of headers are shorter than 256 bytes, payloads than 16 MiB.
fn message(stream: &mut Vec<u8>, event: &str, content_type: &str, payload: &[u8]) {
    let mut headers = Vec::new();
    for (name, value) in
        [(":message-type", "event"), (":event-type", event), (":content-type", content_type)]
    {
        headers.push(u8::try_from(name.len()).unwrap_or(u8::MAX));
        headers.extend(name.as_bytes());
        headers.push(STRING);
        headers.extend(u16::try_from(value.len()).unwrap_or(u16::MAX).to_be_bytes());
        headers.extend(value.as_bytes());
    }
    let length = |bytes: usize| u32::try_from(bytes).unwrap_or(u32::MAX).to_be_bytes();
    let begin = stream.len();
    stream.extend(length(FRAME + headers.len() + payload.len()));
    stream.extend(length(headers.len()));
    let digest = |bytes: &[u8]| crc32fast::hash(bytes).to_be_bytes();
    let prelude = digest(&stream[begin..]);
    stream.extend(prelude);
    stream.extend(headers);
    stream.extend(payload);
    let whole = digest(&stream[begin..]);
    stream.extend(whole);
}

#[cfg(test)]
#[path = "event_stream_tests.rs"]
mod tests;
