//! The answer of a request as a stream of events.
//!
//! Source: AWS, "Amazon event stream specification" (Smithy): each message has its length, that of
//! its headers, their CRC-32, the headers, the payload, and the CRC-32 of all before.

use axum::body::{Body, Bytes, to_bytes};
use axum::http::HeaderValue;
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::response::Response;
use serde_json::{Map, Value};

use super::invoke::{FUNCTION_ERROR, LOG_RESULT};

/// The type of a header's value: a string.
const STRING: u8 = 7;

/// Bytes of a message besides its headers and its payload.
const FRAME: usize = 16;

/// The answer of Invoke as that of InvokeWithResponseStream: what the function has returned is one
/// chunk.
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
        complete.insert("ErrorCode".to_owned(), kind.into());
        complete.insert("ErrorDetails".to_owned(), details.into());
    } else {
        message(&mut stream, "PayloadChunk", "application/octet-stream", &payload);
    }
    let complete = Value::Object(complete).to_string();
    message(&mut stream, "InvokeComplete", "application/json", complete.as_bytes());
    parts.headers.remove(CONTENT_LENGTH);
    let kind = HeaderValue::from_static("application/vnd.amazon.eventstream");
    parts.headers.insert(CONTENT_TYPE, kind);
    Response::from_parts(parts, Body::from(Bytes::from(stream)))
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
