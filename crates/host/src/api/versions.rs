//! Versions: publish, list.

use axum::Json;
use axum::body::Body;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use serde_json::json;

use super::functions::{MAX_DOCUMENT, MAX_PAGE};
use super::named::Unqualified;
use super::types::{PublishVersion, configuration};
use super::{ApiError, blocking, page, read};

pub(super) async fn publish(
    Unqualified { daemon, target, .. }: Unqualified,
    body: Body,
) -> Result<impl IntoResponse, ApiError> {
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
    Unqualified { daemon, target, query, .. }: Unqualified,
) -> Result<impl IntoResponse, ApiError> {
    blocking(move || {
        let latest = daemon.find(&target)?.version;
        let versions = std::iter::once(latest).chain(daemon.store.versions(&target.name)?);
        let items = versions
            .map(|version| (version.version.clone(), configuration(&daemon.place, &version, true)))
            .collect();
        let (versions, next) = page(items, &query, MAX_PAGE);
        Ok(Json(json!({ "Versions": versions, "NextMarker": next })))
    })
    .await
}
