//! What every request passes: its arrival time, the check of its signature, and its id.

use std::time::{Instant, SystemTime};

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::HeaderValue;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use uuid::Uuid;

use super::body::{MAX_BODY, read};
use super::{ApiError, REQUEST_ID};
use crate::sigv4::Credentials;

/// When a request's head arrived.
#[derive(Debug, Clone, Copy)]
pub(super) struct Received(pub(super) Instant);

/// Adds the check of signatures, if there are credentials, and the errors for unknown paths.
pub(crate) fn with_authorization(routes: Router, credentials: Option<Credentials>) -> Router {
    routes
        .fallback(async || ApiError::no_such_operation())
        .method_not_allowed_fallback(async || ApiError::no_such_operation())
        .layer(middleware::from_fn_with_state(credentials, authorize))
}

async fn authorize(
    State(credentials): State<Option<Credentials>>,
    mut request: Request,
    next: Next,
) -> Response {
    request.extensions_mut().insert(Received(Instant::now()));
    let mut response = match credentials {
        None => next.run(request).await,
        Some(credentials) => match verify(&credentials, request).await {
            Ok(request) => next.run(request).await,
            Err(error) => error.into_response(),
        },
    };
    let headers = response.headers_mut();
    if !headers.contains_key(REQUEST_ID)
        && let Ok(value) = HeaderValue::from_str(&Uuid::new_v4().to_string())
    {
        headers.insert(REQUEST_ID, value);
    }
    response
}

async fn verify(credentials: &Credentials, request: Request) -> Result<Request, ApiError> {
    let (parts, body) = request.into_parts();
    let body = read(body, MAX_BODY, "this").await?;
    credentials.check(&parts, &body, SystemTime::now())?;
    Ok(Request::from_parts(parts, Body::from(body)))
}
