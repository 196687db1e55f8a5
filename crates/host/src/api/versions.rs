//! Versions: publish, list.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::{Path, Query as UrlQuery, State};
use axum::http::StatusCode;
use axum::response::IntoResponse;

use super::functions::{Daemonic, MAX_DOCUMENT, unqualified, versions_page};
use super::types::{PublishVersion, configuration};
use super::{ApiError, Query, blocking, read};

pub(super) async fn publish(
    State(daemon): Daemonic,
    Path(name): Path<String>,
    body: Body,
) -> Result<impl IntoResponse, ApiError> {
    let target = unqualified(&name)?;
    let body = read(body, MAX_DOCUMENT, "PublishVersion").await?;
    let request: PublishVersion = if body.is_empty() {
        PublishVersion::default()
    } else {
        serde_json::from_slice(&body).map_err(|error| {
            ApiError::request_content(format!("Could not parse request body into json: {error}"))
        })?
    };
    let version = daemon.publish(&target.name, Some(request)).await?;
    Ok((StatusCode::CREATED, Json(configuration(&daemon.place, &version, true))))
}

pub(super) async fn list(
    State(daemon): Daemonic,
    Path(name): Path<String>,
    UrlQuery(query): UrlQuery<Query>,
) -> Result<impl IntoResponse, ApiError> {
    let target = unqualified(&name)?;
    let daemon = Arc::clone(&daemon);
    blocking(move || versions_page(&daemon, &target.name, &query).map(Json)).await
}
