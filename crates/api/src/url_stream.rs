//! The responses of URLs that stream.
//!
//! Source: AWS, "Response streaming for Lambda functions" and "Building a custom runtime": an
//! answer of the type [`WITH_PRELUDE`] begins with a JSON document and eight zero bytes.

use axum::body::Bytes;
use axum::http::HeaderValue;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use firn_control::{AnswerEvent, AnswerStream, Answering};

use crate::function_url::{Head, bad_gateway};
use crate::lambda::ApiError;
use crate::streamed::{self, CutOff};

/// The content type of an answer that begins with the response's head.
const WITH_PRELUDE: &str = "application/vnd.awslambda.http-integration-response";

/// What separates the head from the body.
const SEPARATOR: &[u8] = &[0; 8];

/// The longest head, bytes.
const MAX_PRELUDE: usize = 64 << 10;

/// The response of a URL that streams.
pub(crate) async fn respond(answering: Answering) -> Result<Response, ApiError> {
    match answering {
        Answering::Stream(stream) => Ok(stream_of(stream).await.unwrap_or_else(bad_gateway)),
        Answering::Whole(invoked) => Ok(match invoked.outcome? {
            Ok(answer) => ([(CONTENT_TYPE, "application/json")], answer.payload).into_response(),
            Err(_) => bad_gateway(),
        }),
    }
}

/// The response with an answer that a function streams. `None` if its head is not valid.
async fn stream_of(mut stream: AnswerStream) -> Option<Response> {
    let kind = stream.content_type().map(ToOwned::to_owned);
    let with_prelude = kind.as_deref() == Some(WITH_PRELUDE);
    let (head, first) = match with_prelude {
        true => read_prelude(&mut stream).await.map(|(head, first)| (Some(head), first))?,
        false => (None, Bytes::new()),
    };
    let mut response = streamed::respond(first, stream, |event| match event {
        AnswerEvent::Part(part) => Ok(part.into()),
        AnswerEvent::End(invoked) if matches!(invoked.outcome, Ok(Ok(_))) => Ok(Bytes::new()),
        // The status is sent already.
        AnswerEvent::End(_) | AnswerEvent::Lost => Err(CutOff),
    });
    let kind = kind.filter(|_| !with_prelude).and_then(|kind| HeaderValue::try_from(kind).ok());
    let binary = HeaderValue::from_static("application/octet-stream");
    response.headers_mut().insert(CONTENT_TYPE, kind.unwrap_or(binary));
    head.map_or(Some(()), |head: Head| head.apply(&mut response))?;
    Some(response)
}

/// Reads the head of an answer, and the first bytes of its body. `None` if it is not valid.
async fn read_prelude(stream: &mut AnswerStream) -> Option<(Head, Bytes)> {
    let mut read = Vec::new();
    loop {
        let AnswerEvent::Part(part) = streamed::next(stream).await else { return None };
        let searched = read.len().saturating_sub(SEPARATOR.len() - 1);
        read.extend(part);
        let mut windows = read[searched..].windows(SEPARATOR.len());
        if let Some(at) = windows.position(|window| window == SEPARATOR) {
            let head = serde_json::from_slice(&read[..searched + at]).ok()?;
            return Some((head, Bytes::from(read).slice(searched + at + SEPARATOR.len()..)));
        }
        if read.len() > MAX_PRELUDE {
            return None;
        }
    }
}

#[cfg(test)]
#[path = "url_stream_tests.rs"]
mod tests;
