//! Functions: create, look at, change, delete.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use serde_json::json;

use super::named::{Qualified, Unqualified, ValidQuery};
use super::types::{Concurrency, CreateFunction, Settings, UpdateCode, configuration};
use super::{ApiError, MAX_BODY, blocking, json as body_json, page, settings};
use crate::daemon::Daemon;
use crate::functions::{Arn, Function, LATEST, Target, Version, now, revision};
use crate::store::Change;

/// The longest body of a request without code, in bytes.
pub(super) const MAX_DOCUMENT: usize = 64 << 10;

/// The most functions and versions in one page.
pub(super) const MAX_PAGE: usize = 50;

pub(super) async fn create(
    State(daemon): State<Arc<Daemon>>,
    body: Body,
) -> Result<impl IntoResponse, ApiError> {
    let request: CreateFunction = body_json(body, MAX_BODY, "CreateFunction").await?;
    let target = Target::parse(&request.function_name, None)?;
    let (name, publish) = (target.name, request.publish);
    let created = blocking({
        let daemon = Arc::clone(&daemon);
        move || {
            let zip = settings::unpack(&request.code)?;
            // What can be refused without unpacking the zip is.
            let checked = settings::create(
                &name,
                request.settings,
                crate::functions::CodeStore::code_of(&zip),
            )?;
            daemon.fleet.launcher.images.of(&checked)?;
            let taken = || ApiError::conflict(format!("Function already exist: {name}"));
            if daemon.store.function(&name)?.is_some() {
                return Err(taken());
            }
            let _hold = daemon.hold_code();
            settings::store(&daemon.code, &zip)?;
            let function = Function { next_version: 1, concurrency: None, latest: checked };
            daemon.store.change(|change| {
                if change.function(&name)?.is_some() {
                    return Err(taken());
                }
                change.put_function(&name, &function)?;
                Ok(())
            })?;
            Ok(function.latest)
        }
    })
    .await?;
    tracing::info!(function = created.function, "created");
    let version = if publish { daemon.publish(&created.function, None).await? } else { created };
    Ok((StatusCode::CREATED, Json(configuration(&daemon.place, &version, publish))))
}

pub(super) async fn list(
    State(daemon): State<Arc<Daemon>>,
    ValidQuery(query): ValidQuery,
) -> Result<impl IntoResponse, ApiError> {
    blocking(move || {
        let mut items = Vec::new();
        for function in daemon.store.functions()? {
            let name = function.latest.function.clone();
            let all = query.function_version.as_deref() == Some("ALL");
            items.push((
                format!("{name}:{LATEST}"),
                configuration(&daemon.place, &function.latest, all),
            ));
            if all {
                for version in daemon.store.versions(&name)? {
                    let key = format!("{name}:{}", version.version);
                    items.push((key, configuration(&daemon.place, &version, true)));
                }
            }
        }
        let (functions, next) = page(items, &query, MAX_PAGE);
        Ok(Json(json!({ "Functions": functions, "NextMarker": next })))
    })
    .await
}

pub(super) async fn get(
    Qualified { daemon, target }: Qualified,
) -> Result<impl IntoResponse, ApiError> {
    blocking(move || {
        let found = daemon.find(&target)?;
        let location = daemon.code.path(&found.version.code).display().to_string();
        let mut answer = json!({
            "Configuration": configuration(&daemon.place, &found.version, target.qualifier.is_some()),
            "Code": { "RepositoryType": "firn", "Location": location },
        });
        if let Some(limit) = found.concurrency {
            answer["Concurrency"] =
                json!(Concurrency { reserved_concurrent_executions: limit });
        }
        Ok(Json(answer))
    })
    .await
}

pub(super) async fn get_configuration(
    Qualified { daemon, target }: Qualified,
) -> Result<impl IntoResponse, ApiError> {
    blocking(move || {
        let found = daemon.find(&target)?;
        let qualified = target.qualifier.is_some();
        Ok(Json(configuration(&daemon.place, &found.version, qualified)))
    })
    .await
}

pub(super) async fn update_code(
    Unqualified { daemon, target, .. }: Unqualified,
    body: Body,
) -> Result<impl IntoResponse, ApiError> {
    let request: UpdateCode = body_json(body, MAX_BODY, "UpdateFunctionCode").await?;
    let (publish, dry_run) = (request.publish, request.dry_run);
    let updated = blocking({
        let daemon = Arc::clone(&daemon);
        move || {
            daemon.find(&target)?;
            let zip = settings::unpack(&request.code)?;
            let _hold = daemon.hold_code();
            let code = settings::store(&daemon.code, &zip)?;
            if dry_run {
                let mut version = daemon.find(&target)?.version;
                version.code = code;
                return Ok(version);
            }
            change_latest(&daemon, &target, request.revision_id.as_deref(), |version| {
                version.code = code;
                Ok(())
            })
        }
    })
    .await?;
    daemon.sweep_code().await;
    let version =
        if publish && !dry_run { daemon.publish(&updated.function, None).await? } else { updated };
    Ok(Json(configuration(&daemon.place, &version, publish)))
}

pub(super) async fn update_configuration(
    Unqualified { daemon, target, .. }: Unqualified,
    body: Body,
) -> Result<impl IntoResponse, ApiError> {
    let request: Settings = body_json(body, MAX_DOCUMENT, "UpdateFunctionConfiguration").await?;
    blocking(move || {
        let expected = request.revision_id.clone();
        let environment = request.environment.is_some();
        let version = change_latest(&daemon, &target, expected.as_deref(), |version| {
            settings::apply(version, request)?;
            // All else can be changed, too, where the image was removed.
            if environment {
                daemon.fleet.launcher.images.of(version)?;
            }
            Ok(())
        })?;
        Ok(Json(configuration(&daemon.place, &version, false)))
    })
    .await
}

pub(super) async fn delete(
    Qualified { daemon, target }: Qualified,
) -> Result<impl IntoResponse, ApiError> {
    let removed = blocking({
        let daemon = Arc::clone(&daemon);
        move || match target.qualifier.as_deref() {
            None => delete_function(&daemon, &target),
            Some(LATEST) => Err(ApiError::invalid(
                "$LATEST version cannot be deleted without deleting the function.",
            )),
            Some(version) => delete_version(&daemon, &target, version),
        }
    })
    .await?;
    for version in removed {
        tracing::info!(function = version.function, version = version.version, "deleted");
        daemon.forget(version).await;
    }
    daemon.sweep_code().await;
    Ok(StatusCode::NO_CONTENT)
}

fn delete_function(daemon: &Daemon, target: &Target) -> Result<Vec<Version>, ApiError> {
    daemon.store.change(|change| {
        let function = function(daemon, change, target)?;
        let mut removed = change.versions(&target.name)?;
        removed.iter().try_for_each(|version| daemon.doom(change, version))?;
        removed.push(function.latest);
        change.remove_function(&target.name)?;
        Ok(removed)
    })
}

fn delete_version(
    daemon: &Daemon,
    target: &Target,
    version: &str,
) -> Result<Vec<Version>, ApiError> {
    let Ok(number) = version.parse() else {
        return Err(ApiError::invalid("an alias is deleted by DeleteAlias"));
    };
    daemon.store.change(|change| {
        let Some(found) = change.version(&target.name, number)? else {
            return Err(missing(daemon, target));
        };
        let aliases = change.aliases(&target.name)?;
        if let Some((alias, _)) = aliases.iter().find(|(_, alias)| alias.version == version) {
            return Err(ApiError::conflict(format!(
                "Version {version} is used by the alias {alias}"
            )));
        }
        change.remove_version(&target.name, number)?;
        daemon.doom(change, &found)?;
        Ok(vec![found])
    })
}

pub(super) async fn put_concurrency(
    Unqualified { daemon, target, .. }: Unqualified,
    body: Body,
) -> Result<impl IntoResponse, ApiError> {
    let request: Concurrency = body_json(body, MAX_DOCUMENT, "PutFunctionConcurrency").await?;
    let limit = request.reserved_concurrent_executions;
    blocking(move || set_concurrency(&daemon, &target, Some(limit))).await?;
    Ok(Json(request))
}

pub(super) async fn delete_concurrency(
    Unqualified { daemon, target, .. }: Unqualified,
) -> Result<impl IntoResponse, ApiError> {
    blocking(move || set_concurrency(&daemon, &target, None)).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn get_concurrency(
    Unqualified { daemon, target, .. }: Unqualified,
) -> Result<impl IntoResponse, ApiError> {
    blocking(move || {
        let limit = daemon.find(&target)?.concurrency;
        let limited =
            limit.map(|limit| json!(Concurrency { reserved_concurrent_executions: limit }));
        Ok(Json(limited.unwrap_or_else(|| json!({}))))
    })
    .await
}

fn set_concurrency(daemon: &Daemon, target: &Target, limit: Option<u32>) -> Result<(), ApiError> {
    daemon.store.change(|change| {
        let mut function = function(daemon, change, target)?;
        function.concurrency = limit;
        Ok(change.put_function(&target.name, &function)?)
    })
}

/// Changes `$LATEST`. Its microVMs end.
fn change_latest(
    daemon: &Daemon,
    target: &Target,
    expected: Option<&str>,
    work: impl FnOnce(&mut Version) -> Result<(), ApiError>,
) -> Result<Version, ApiError> {
    let (before, after) = daemon.store.change(|change| {
        let mut function = function(daemon, change, target)?;
        let before = function.latest.revision;
        if expected.is_some_and(|expected| expected != before.to_string()) {
            return Err(ApiError::precondition());
        }
        work(&mut function.latest)?;
        function.latest.revision = revision();
        function.latest.last_modified = now();
        change.put_function(&target.name, &function)?;
        Ok((before, function.latest))
    })?;
    daemon.fleet.retire(before);
    Ok(after)
}

/// The function that a change is about.
pub(super) fn function(
    daemon: &Daemon,
    change: &Change,
    target: &Target,
) -> Result<Function, ApiError> {
    change.function(&target.name)?.ok_or_else(|| missing(daemon, target))
}

/// The error for a function or version that is not there.
pub(super) fn missing(daemon: &Daemon, target: &Target) -> ApiError {
    let arn = Arn(&daemon.place, &target.name, target.qualifier.as_deref());
    ApiError::not_found("Function", arn)
}
