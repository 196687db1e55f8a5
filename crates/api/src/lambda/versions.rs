//! Versions: publish and list.

use axum::Json;
use axum::body::Bytes;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use firn_control::PublishRequest;
use serde_json::json;

use super::body::parse;
use super::documents::{PublishVersion, configuration};
use super::extract::Unqualified;
use super::pages::page;
use super::{ApiError, settings};

pub(super) async fn publish(
    Unqualified { lambda, target, .. }: Unqualified,
    body: Bytes,
) -> Result<impl IntoResponse, ApiError> {
    let request: PublishVersion =
        if body.is_empty() { PublishVersion::default() } else { parse(&body)? };
    settings::check(&request.others)?;
    let request = PublishRequest {
        code_sha256: request.code_sha256,
        description: request.description,
        revision: request.revision_id,
    };
    let version = lambda.control.publish(&target, request).await.map_err(lambda.error())?;
    Ok((StatusCode::CREATED, Json(configuration(&lambda.scope, &version, true))))
}

pub(super) async fn list(
    Unqualified { lambda, target, query, .. }: Unqualified,
) -> Result<impl IntoResponse, ApiError> {
    let versions = lambda.control.versions(&target).await.map_err(lambda.error())?;
    let items = versions
        .iter()
        .map(|version| (version.version.clone(), configuration(&lambda.scope, version, true)))
        .collect();
    let (versions, next) = page(items, &query)?;
    Ok(Json(json!({ "Versions": versions, "NextMarker": next })))
}
