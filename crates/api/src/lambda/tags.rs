//! Tags of functions.

use std::collections::BTreeMap;

use axum::Json;
use axum::body::Bytes;
use axum::extract::Query;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use serde::Deserialize;
use serde_json::json;

use super::ApiError;
use super::body::parse;
use super::extract::Qualified;
use super::settings::{self, Others};

/// The body of TagResource.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Tags {
    tags: BTreeMap<String, String>,
    #[serde(flatten)]
    others: Others,
}

pub(super) async fn list(
    Qualified { lambda, target, .. }: Qualified,
) -> Result<impl IntoResponse, ApiError> {
    let tags = lambda.control.tags(&target).await.map_err(lambda.error())?;
    Ok(Json(json!({ "Tags": tags })))
}

pub(super) async fn add(
    Qualified { lambda, target, .. }: Qualified,
    body: Bytes,
) -> Result<impl IntoResponse, ApiError> {
    let Tags { tags, others } = parse(&body)?;
    settings::check(&others)?;
    lambda.control.tag(&target, tags).await.map_err(lambda.error())?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn remove(
    Qualified { lambda, target, .. }: Qualified,
    Query(query): Query<Vec<(String, String)>>,
) -> Result<impl IntoResponse, ApiError> {
    let keys: Vec<String> =
        query.into_iter().filter(|(name, _)| name == "tagKeys").map(|(_, key)| key).collect();
    if keys.is_empty() {
        return Err(ApiError::constraint("tagKeys", "null", "not be null"));
    }
    lambda.control.untag(&target, keys).await.map_err(lambda.error())?;
    Ok(StatusCode::NO_CONTENT)
}
