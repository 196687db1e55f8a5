//! Aliases: second names for versions.

use axum::Json;
use axum::body::Bytes;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use firn_control::{Alias, AliasChange, Target};
use serde_json::{Value, json};

use super::body::parse;
use super::documents::AliasSettings;
use super::extract::Unqualified;
use super::names::Scope;
use super::pages::page;
use super::{ApiError, settings};

pub(super) async fn create(
    Unqualified { lambda, target, .. }: Unqualified,
    body: Bytes,
) -> Result<impl IntoResponse, ApiError> {
    let mut request: AliasSettings = parse(&body)?;
    let name = request.name.take().unwrap_or_default();
    let new = change(request)?;
    let created = lambda.control.create_alias(&target, name.clone(), new).await;
    let created = created.map_err(lambda.error())?;
    Ok((StatusCode::CREATED, Json(document(&lambda.scope, &target, &name, &created))))
}

pub(super) async fn get(
    Unqualified { lambda, target, part: alias, .. }: Unqualified,
) -> Result<impl IntoResponse, ApiError> {
    let found = lambda.control.alias(&target, &alias).await.map_err(lambda.error())?;
    Ok(Json(document(&lambda.scope, &target, &alias, &found)))
}

pub(super) async fn list(
    Unqualified { lambda, target, query, .. }: Unqualified,
) -> Result<impl IntoResponse, ApiError> {
    let aliases = lambda.control.aliases(&target).await.map_err(lambda.error())?;
    let version = query.function_version.as_deref();
    let items = aliases
        .into_iter()
        .filter(|(_, alias)| version.is_none_or(|version| alias.names(version)))
        .map(|(name, alias)| (name.clone(), document(&lambda.scope, &target, &name, &alias)))
        .collect();
    let (aliases, next) = page(items, &query)?;
    Ok(Json(json!({ "Aliases": aliases, "NextMarker": next })))
}

pub(super) async fn update(
    Unqualified { lambda, target, part: alias, .. }: Unqualified,
    body: Bytes,
) -> Result<impl IntoResponse, ApiError> {
    let mut request: AliasSettings = parse(&body)?;
    let revision = request.revision_id.take();
    let updated = lambda.control.update_alias(&target, &alias, change(request)?, revision).await;
    let updated = updated.map_err(lambda.error())?;
    Ok(Json(document(&lambda.scope, &target, &alias, &updated)))
}

pub(super) async fn delete(
    Unqualified { lambda, target, part: alias, .. }: Unqualified,
) -> Result<impl IntoResponse, ApiError> {
    lambda.control.delete_alias(&target, &alias).await.map_err(lambda.error())?;
    Ok(StatusCode::NO_CONTENT)
}

fn change(request: AliasSettings) -> Result<AliasChange, ApiError> {
    settings::check(&request.others)?;
    Ok(AliasChange {
        version: request.function_version,
        weights: request.routing_config.map(|routing| routing.additional_version_weights),
        description: request.description,
    })
}

fn document(scope: &Scope, target: &Target, name: &str, alias: &Alias) -> Value {
    let mut document = json!({
        "AliasArn": scope.arn(target.name(), Some(name)).to_string(),
        "Name": name,
        "FunctionVersion": alias.version,
        "Description": alias.description,
        "RevisionId": alias.revision,
    });
    if let Some((version, part)) = &alias.additional {
        document["RoutingConfig"] = json!({ "AdditionalVersionWeights": { version: part } });
    }
    document
}
