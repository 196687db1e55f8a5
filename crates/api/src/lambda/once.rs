//! Signed requests that change something take effect once: the same request, sent again by its
//! client or by an attacker that has recorded it, gets the first answer.

use std::sync::Arc;

use axum::body::{Body, to_bytes};
use axum::extract::Request;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderName, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use firn_control::{Claim, Control};
use serde::{Deserialize, Serialize};

use super::ApiError;
use super::error::ERROR_TYPE;

/// The longest answer that is stored, bytes. Those of requests that change something are shorter.
const MAX_ANSWER: usize = 64 << 10;

/// The headers of an answer that are stored.
const HEADERS: [HeaderName; 2] = [CONTENT_TYPE, ERROR_TYPE];

/// A stored answer.
#[derive(Serialize, Deserialize)]
struct Answer {
    status: u16,
    /// The values of [`HEADERS`].
    headers: [Option<String>; 2],
    body: String,
}

/// Serves a request that has this signature, or answers it again.
pub(super) async fn serve(
    control: &Arc<Control>,
    signature: String,
    request: Request,
    next: Next,
) -> Response {
    match control.claim(signature.clone()).await {
        Ok(Claim::First) => {}
        Ok(Claim::Answered(answer)) => return again(&answer),
        Ok(Claim::Unanswered) => return ApiError::unanswered().into_response(),
        Ok(Claim::Full) => return ApiError::too_many_changes().into_response(),
        Err(error) => {
            return ApiError::service(&error, "the request was not recorded").into_response();
        }
    }
    let control = Arc::clone(control);
    // Continues if the client disconnects.
    let served = tokio::spawn(async move {
        let (parts, body) = next.run(request).await.into_parts();
        let body = to_bytes(body, MAX_ANSWER).await;
        let body = body.map_err(|error| ApiError::service(&error, "the answer is too long"))?;
        let header = |name| Some(parts.headers.get(name)?.to_str().ok()?.to_owned());
        let answer = Answer {
            status: parts.status.as_u16(),
            headers: HEADERS.map(header),
            body: String::from_utf8_lossy(&body).into_owned(),
        };
        let stored = match serde_json::to_vec(&answer) {
            Ok(answer) => control.answered(signature, answer).await,
            Err(error) => return Err(ApiError::service(&error, "the answer is not JSON")),
        };
        if let Err(error) = stored {
            // The same request would be answered that its result is not known.
            let error: &(dyn std::error::Error + 'static) = &error;
            tracing::warn!(error, "cannot store the answer of a request");
        }
        Ok(Response::from_parts(parts, Body::from(body)))
    });
    match served.await {
        Ok(Ok(response)) => response,
        Ok(Err(error)) => error.into_response(),
        Err(error) => ApiError::service(&error, "a task of the daemon failed").into_response(),
    }
}

fn again(stored: &[u8]) -> Response {
    let answer: Answer = match serde_json::from_slice(stored) {
        Ok(answer) => answer,
        Err(error) => {
            return ApiError::service(&error, "the stored answer is damaged").into_response();
        }
    };
    let mut response = Response::new(Body::from(answer.body));
    *response.status_mut() =
        StatusCode::from_u16(answer.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    for (name, value) in HEADERS.into_iter().zip(answer.headers) {
        if let Some(value) = value.and_then(|value| value.parse().ok()) {
            response.headers_mut().insert(name, value);
        }
    }
    response
}
