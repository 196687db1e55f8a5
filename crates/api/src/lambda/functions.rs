//! Functions: create, read, change, delete.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use axum::{Extension, Json};
use firn_control::{CodeChange, NewFunction};
use serde_json::json;

use super::authorize::{Caller, Share};
use super::body::{WithCode, ZipPlace, parse as parse_body};
use super::configuration::change;
use super::documents::{Concurrency, CreateFunction, Settings, UpdateCode, configuration};
use super::extract::{Qualified, Unqualified, ValidQuery};
use super::names::parse;
use super::pages::page;
use super::{ApiError, Lambda, settings};

pub(super) async fn create(
    State(lambda): State<Arc<Lambda>>,
    Extension(share): Extension<Share>,
    Extension(Caller(tenant)): Extension<Caller>,
    body: Bytes,
) -> Result<impl IntoResponse, ApiError> {
    let decoded = lambda.with_code(body, share, ZipPlace::Code, "CreateFunction").await?;
    let WithCode { request, zip, hold } = decoded;
    let request: CreateFunction = request;
    let publish = request.publish;
    let new = NewFunction {
        tags: request.tags.unwrap_or_default(),
        target: parse(&request.function_name, None, &lambda.scope)?.of_tenant(tenant),
        zip: settings::check(&request.code.others).and(zip)?,
        configuration: change(request.settings, &lambda.scope)?,
        publish,
        hold,
    };
    let version = lambda.control.create_function(new).await.map_err(lambda.error())?;
    Ok((StatusCode::CREATED, Json(configuration(&lambda.scope, &version, publish))))
}

pub(super) async fn list(
    State(lambda): State<Arc<Lambda>>,
    ValidQuery(query): ValidQuery,
    Extension(Caller(tenant)): Extension<Caller>,
) -> Result<impl IntoResponse, ApiError> {
    let all = match query.function_version.as_deref() {
        None => false,
        Some("ALL") => true,
        Some(other) => return Err(ApiError::constraint("functionVersion", other, "be ALL")),
    };
    let versions = lambda.control.functions(tenant, all).await.map_err(lambda.error())?;
    let items = versions.iter().map(|version| {
        let key = format!("{}:{}", version.function, version.version);
        (key, configuration(&lambda.scope, version, all))
    });
    let (functions, next) = page(items.collect(), &query)?;
    Ok(Json(json!({ "Functions": functions, "NextMarker": next })))
}

pub(super) async fn get(
    Qualified { lambda, target, .. }: Qualified,
) -> Result<impl IntoResponse, ApiError> {
    let found = lambda.control.find(&target).await.map_err(lambda.error())?;
    let location = lambda.control.code_path(&found.version).display().to_string();
    let qualified = target.qualifier().is_some();
    let mut answer = json!({
        "Configuration": configuration(&lambda.scope, &found.version, qualified),
        "Code": { "RepositoryType": "firn", "Location": location },
    });
    // Tags are those of the function, whatever version the request names.
    let function = target.function();
    let tags = lambda.control.tags(&function).await.map_err(lambda.error())?;
    if !tags.is_empty() {
        answer["Tags"] = json!(tags);
    }
    if let Some(limit) = found.concurrency {
        answer["Concurrency"] = json!(Concurrency { reserved_concurrent_executions: limit });
    }
    Ok(Json(answer))
}

pub(super) async fn get_configuration(
    Qualified { lambda, target, .. }: Qualified,
) -> Result<impl IntoResponse, ApiError> {
    let found = lambda.control.find(&target).await.map_err(lambda.error())?;
    let qualified = target.qualifier().is_some();
    Ok(Json(configuration(&lambda.scope, &found.version, qualified)))
}

pub(super) async fn update_code(
    Unqualified { lambda, target, .. }: Unqualified,
    Extension(share): Extension<Share>,
    body: Bytes,
) -> Result<impl IntoResponse, ApiError> {
    let decoded = lambda.with_code(body, share, ZipPlace::Top, "UpdateFunctionCode").await?;
    let WithCode { request, zip, hold } = decoded;
    let request: UpdateCode = request;
    // A missing function is reported before an invalid zip file.
    lambda.control.find(&target).await.map_err(lambda.error())?;
    let publish = request.publish;
    let change = CodeChange {
        zip: settings::check(&request.code.others).and(zip)?,
        publish,
        dry_run: request.dry_run,
        revision: request.revision_id,
        hold,
    };
    let version = lambda.control.update_code(&target, change).await.map_err(lambda.error())?;
    Ok(Json(configuration(&lambda.scope, &version, publish)))
}

pub(super) async fn update_configuration(
    Unqualified { lambda, target, .. }: Unqualified,
    body: Bytes,
) -> Result<impl IntoResponse, ApiError> {
    let mut request: Settings = parse_body(&body)?;
    let revision = request.revision_id.take();
    let change = change(request, &lambda.scope)?;
    let updated = lambda.control.update_configuration(&target, change, revision).await;
    let version = updated.map_err(lambda.error())?;
    Ok(Json(configuration(&lambda.scope, &version, false)))
}

pub(super) async fn delete(
    Qualified { lambda, target, .. }: Qualified,
) -> Result<impl IntoResponse, ApiError> {
    lambda.control.delete(&target).await.map_err(lambda.error())?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn put_concurrency(
    Unqualified { lambda, target, .. }: Unqualified,
    body: Bytes,
) -> Result<impl IntoResponse, ApiError> {
    let request: Concurrency = parse_body(&body)?;
    let limit = Some(request.reserved_concurrent_executions);
    lambda.control.set_concurrency(&target, limit).await.map_err(lambda.error())?;
    Ok(Json(request))
}

pub(super) async fn delete_concurrency(
    Unqualified { lambda, target, .. }: Unqualified,
) -> Result<impl IntoResponse, ApiError> {
    lambda.control.set_concurrency(&target, None).await.map_err(lambda.error())?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn get_concurrency(
    Unqualified { lambda, target, .. }: Unqualified,
) -> Result<impl IntoResponse, ApiError> {
    let limit = lambda.control.find(&target).await.map_err(lambda.error())?.concurrency;
    let limited = limit.map(|limit| json!(Concurrency { reserved_concurrent_executions: limit }));
    Ok(Json(limited.unwrap_or_else(|| json!({}))))
}
