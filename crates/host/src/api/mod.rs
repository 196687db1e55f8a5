//! AWS Lambda's REST API, over HTTP/1.1.

mod aliases;
mod error;
mod functions;
mod invoke;
mod named;
mod settings;
mod sigv4;
#[cfg(test)]
mod tests;
mod types;
mod versions;

use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use uuid::Uuid;

pub(crate) use error::ApiError;
pub use sigv4::{Credentials, CredentialsError};
pub(crate) use types::{PublishVersion, base64_of_hex};

use crate::daemon::Daemon;
use crate::functions::MAX_ZIP;
use crate::instances::DaemonStatus;

/// The longest body of any request, in bytes: a zip file of the largest size in base64, and what is around it.
const MAX_BODY: usize = MAX_ZIP.div_ceil(3) * 4 + (64 << 10);

/// What of a request's query the API looks at.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub(crate) struct Query {
    pub(crate) qualifier: Option<String>,
    pub(crate) function_version: Option<String>,
    pub(crate) marker: Option<String>,
    pub(crate) max_items: Option<usize>,
}

/// The API of `daemon`.
pub(crate) fn router(daemon: Arc<Daemon>) -> Router {
    let one = "/2015-03-31/functions/{name}";
    let path = |rest: &str| format!("{one}{rest}");
    Router::new()
        .route("/2015-03-31/functions", get(functions::list).post(functions::create))
        .route("/2015-03-31/functions/", get(functions::list).post(functions::create))
        .route(one, get(functions::get).delete(functions::delete))
        .route(&path("/code"), put(functions::update_code))
        .route(
            &path("/configuration"),
            get(functions::get_configuration).put(functions::update_configuration),
        )
        .route(&path("/versions"), get(versions::list).post(versions::publish))
        .route(&path("/aliases"), get(aliases::list).post(aliases::create))
        .route(
            &path("/aliases/{alias}"),
            get(aliases::get).put(aliases::update).delete(aliases::delete),
        )
        .route(&path("/invocations"), post(invoke::invoke))
        .route(
            "/2017-10-31/functions/{name}/concurrency",
            put(functions::put_concurrency).delete(functions::delete_concurrency),
        )
        .route("/2019-09-30/functions/{name}/concurrency", get(functions::get_concurrency))
        .route("/metrics", get(metrics))
        .route(STATUS_PATH, get(status))
        .fallback(async || ApiError::no_such_operation())
        .method_not_allowed_fallback(async || ApiError::no_such_operation())
        .layer(middleware::from_fn_with_state(Arc::clone(&daemon), authorize))
        .with_state(daemon)
}

/// Notes when a request came in, checks its signature, where the daemon has credentials, and gives every answer its request's id.
async fn authorize(
    State(daemon): State<Arc<Daemon>>,
    mut request: Request,
    next: Next,
) -> Response {
    request.extensions_mut().insert(Received(Instant::now()));
    let mut response = match &daemon.credentials {
        None => next.run(request).await,
        Some(credentials) => {
            let (parts, body) = request.into_parts();
            match read(body, MAX_BODY, "this").await {
                Ok(body) => match credentials.check(&parts, &body, std::time::SystemTime::now()) {
                    Ok(()) => next.run(Request::from_parts(parts, Body::from(body))).await,
                    Err(error) => error.into_response(),
                },
                Err(error) => error.into_response(),
            }
        }
    };
    let headers = response.headers_mut();
    if !headers.contains_key(REQUEST_ID)
        && let Ok(value) = HeaderValue::from_str(&Uuid::new_v4().to_string())
    {
        headers.insert(REQUEST_ID, value);
    }
    response
}

/// Where the daemon says what it is doing.
pub(crate) const STATUS_PATH: &str = "/status";

/// The header with a request's id.
pub(crate) const REQUEST_ID: &str = "x-amzn-requestid";

/// The header with what a request cost, in JSON.
const REPORT: HeaderName = HeaderName::from_static("x-firn-report");

/// When a request's head had come in.
#[derive(Debug, Clone, Copy)]
struct Received(Instant);

async fn metrics(State(daemon): State<Arc<Daemon>>) -> impl IntoResponse {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([("content-type", kind)], daemon.fleet.metrics.text())
}

async fn status(State(daemon): State<Arc<Daemon>>) -> axum::Json<DaemonStatus> {
    axum::Json(daemon.fleet.status())
}

/// Reads a request's body of at most `limit` bytes.
pub(crate) async fn read(body: Body, limit: usize, operation: &str) -> Result<Bytes, ApiError> {
    // A body over the limit and one that was cut off give one kind of error; the client of the latter is gone.
    to_bytes(body, limit).await.map_err(|_| ApiError::too_large(limit, operation))
}

/// Reads a request's JSON.
pub(crate) async fn json<T: DeserializeOwned>(
    body: Body,
    limit: usize,
    operation: &str,
) -> Result<T, ApiError> {
    let body = read(body, limit, operation).await?;
    serde_json::from_slice(&body).map_err(|error| {
        ApiError::request_content(format!("Could not parse request body into json: {error}"))
    })
}

/// Does work that waits for the disk where waiting is allowed.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => Err(ApiError::service(&error, "the request's task was lost")),
    }
}

/// One page of a list: what comes after `marker`, and the marker of the next page.
pub(crate) fn page<T>(
    items: Vec<(String, T)>,
    query: &Query,
    most: usize,
) -> (Vec<T>, Option<String>) {
    let after = query.marker.as_deref().unwrap_or_default();
    let at = items.iter().position(|(key, _)| after.is_empty() || key.as_str() == after);
    let skip = if after.is_empty() { 0 } else { at.map_or(items.len(), |at| at + 1) };
    let count = query.max_items.unwrap_or(most).clamp(1, most);
    let more = items.len() > skip.saturating_add(count);
    let page: Vec<(String, T)> = items.into_iter().skip(skip).take(count).collect();
    let next = page.last().map(|(key, _)| key.clone()).filter(|_| more);
    (page.into_iter().map(|(_, item)| item).collect(), next)
}
