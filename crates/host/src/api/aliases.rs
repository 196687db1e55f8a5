//! Aliases: other names for versions.

use axum::Json;
use axum::body::Body;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use serde_json::{Value, json};

use super::functions::{MAX_DOCUMENT, function, missing};
use super::named::Unqualified;
use super::types::AliasSettings;
use super::{ApiError, blocking, json as body_json, page};
use crate::daemon::Daemon;
use crate::functions::{Alias, Arn, LATEST, Target, is_alias, revision};
use crate::store::Change;

pub(super) async fn create(
    Unqualified { daemon, target, .. }: Unqualified,
    body: Body,
) -> Result<impl IntoResponse, ApiError> {
    let request: AliasSettings = body_json(body, MAX_DOCUMENT, "CreateAlias").await?;
    blocking(move || {
        let alias = request.name.clone().unwrap_or_default();
        if !is_alias(&alias) {
            return Err(ApiError::validation(format!(
                "Value '{alias}' at 'name' failed to satisfy constraint: letters, digits, hyphens and underscores that are not all digits"
            )));
        }
        let new = Alias { version: String::new(), description: String::new(), revision: revision() };
        let created = daemon.store.change(|change| {
            function(&daemon, change, &target)?;
            if change.alias(&target.name, &alias)?.is_some() {
                let arn = Arn(&daemon.place, &target.name, Some(&alias));
                return Err(ApiError::conflict(format!("Alias already exists: {arn}")));
            }
            if request.function_version.is_none() {
                return Err(ApiError::validation("FunctionVersion must not be null"));
            }
            put(&daemon, change, &target, &alias, new, request)
        })?;
        Ok((StatusCode::CREATED, Json(document(&daemon, &target, &alias, &created))))
    })
    .await
}

pub(super) async fn get(
    Unqualified { daemon, target, alias, .. }: Unqualified,
) -> Result<impl IntoResponse, ApiError> {
    blocking(move || {
        let found = daemon.store.alias(&target.name, &alias)?;
        let found = found.ok_or_else(|| no_alias(&daemon, &target, &alias))?;
        Ok(Json(document(&daemon, &target, &alias, &found)))
    })
    .await
}

pub(super) async fn list(
    Unqualified { daemon, target, query, .. }: Unqualified,
) -> Result<impl IntoResponse, ApiError> {
    blocking(move || {
        daemon.find(&target)?;
        let aliases = daemon.store.aliases(&target.name)?;
        let wanted = query.function_version.as_deref();
        let items = aliases
            .into_iter()
            .filter(|(_, alias)| wanted.is_none_or(|version| alias.version == version))
            .map(|(name, alias)| (name.clone(), document(&daemon, &target, &name, &alias)))
            .collect();
        let (aliases, next) = page(items, &query, 50);
        Ok(Json(json!({ "Aliases": aliases, "NextMarker": next })))
    })
    .await
}

pub(super) async fn update(
    Unqualified { daemon, target, alias, .. }: Unqualified,
    body: Body,
) -> Result<impl IntoResponse, ApiError> {
    let request: AliasSettings = body_json(body, MAX_DOCUMENT, "UpdateAlias").await?;
    blocking(move || {
        let updated = daemon.store.change(|change| {
            let found = change.alias(&target.name, &alias)?;
            let mut found = found.ok_or_else(|| no_alias(&daemon, &target, &alias))?;
            let expected = request.revision_id.as_deref();
            if expected.is_some_and(|expected| expected != found.revision.to_string()) {
                return Err(ApiError::precondition());
            }
            found.revision = revision();
            put(&daemon, change, &target, &alias, found, request)
        })?;
        Ok(Json(document(&daemon, &target, &alias, &updated)))
    })
    .await
}

pub(super) async fn delete(
    Unqualified { daemon, target, alias, .. }: Unqualified,
) -> Result<impl IntoResponse, ApiError> {
    blocking(move || {
        daemon.store.change(|change| change.remove_alias(&target.name, &alias))?;
        Ok(StatusCode::NO_CONTENT)
    })
    .await
}

fn put(
    daemon: &Daemon,
    change: &Change,
    target: &Target,
    name: &str,
    mut alias: Alias,
    request: AliasSettings,
) -> Result<Alias, ApiError> {
    let routes = request
        .routing_config
        .as_ref()
        .and_then(|routes| routes["AdditionalVersionWeights"].as_object());
    if routes.is_some_and(|routes| !routes.is_empty()) {
        return Err(ApiError::invalid("RoutingConfig: an alias of this daemon names one version"));
    }
    if let Some(version) = request.function_version {
        let there = match version.parse() {
            Ok(number) => change.version(&target.name, number)?.is_some(),
            Err(_) => version == LATEST,
        };
        if !there {
            let qualifier = Some(version);
            return Err(missing(daemon, &Target { qualifier, name: target.name.clone() }));
        }
        alias.version = version;
    }
    alias.description = request.description.unwrap_or(alias.description);
    change.put_alias(&target.name, name, &alias)?;
    Ok(alias)
}

fn no_alias(daemon: &Daemon, target: &Target, alias: &str) -> ApiError {
    ApiError::not_found("Cannot find alias arn", Arn(&daemon.place, &target.name, Some(alias)))
}

fn document(daemon: &Daemon, target: &Target, name: &str, alias: &Alias) -> Value {
    json!({
        "AliasArn": Arn(&daemon.place, &target.name, Some(name)).to_string(),
        "Name": name,
        "FunctionVersion": alias.version,
        "Description": alias.description,
        "RevisionId": alias.revision,
    })
}
