//! Provisioned concurrency: PutProvisionedConcurrencyConfig and what goes with it.

use axum::Json;
use axum::body::Bytes;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use firn_control::{LATEST, ProvisionedStatus, Target};
use serde::Deserialize;
use serde_json::{Value, json};

use super::ApiError;
use super::body::parse;
use super::extract::Qualified;
use super::pages::page;
use super::settings::{self, Others};

/// The body of PutProvisionedConcurrencyConfig.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Request {
    provisioned_concurrent_executions: Option<u32>,
    #[serde(flatten)]
    others: Others,
}

pub(super) async fn put(
    Qualified { lambda, target, .. }: Qualified,
    body: Bytes,
) -> Result<impl IntoResponse, ApiError> {
    let request: Request = parse(&body)?;
    settings::check(&request.others)?;
    let field = "provisionedConcurrentExecutions";
    let count = match request.provisioned_concurrent_executions {
        None => return Err(ApiError::constraint(field, "null", "not be null")),
        Some(0) => {
            let rule = "have value greater than or equal to 1";
            return Err(ApiError::constraint(field, "0", rule));
        }
        Some(count) => count,
    };
    check_qualifier(
        &target,
        "Provisioned Concurrency Configs cannot be applied to unpublished function versions.",
    )?;
    let set = lambda.control.set_provisioned(&target, count).await.map_err(lambda.error())?;
    Ok((StatusCode::ACCEPTED, Json(document(&set))))
}

/// Gets the configuration of a version or alias, or, with `List=ALL`, lists those of a function.
pub(super) async fn get(
    Qualified { lambda, target, query, .. }: Qualified,
) -> Result<impl IntoResponse, ApiError> {
    if query.list.is_some() {
        let all = lambda.control.all_provisioned(&target).await.map_err(lambda.error())?;
        let items = all.into_iter().map(|(qualifier, status)| {
            let mut document = document(&status);
            let arn = lambda.scope.arn(target.name(), Some(&qualifier));
            document["FunctionArn"] = json!(arn.to_string());
            (qualifier, document)
        });
        let (configs, next) = page(items.collect(), &query)?;
        return Ok(Json(json!({ "ProvisionedConcurrencyConfigs": configs, "NextMarker": next })));
    }
    check_qualifier(&target, NO_VERSION)?;
    let found = lambda.control.provisioned(&target).await.map_err(lambda.error())?;
    Ok(Json(document(&found.ok_or_else(ApiError::not_provisioned)?)))
}

pub(super) async fn delete(
    Qualified { lambda, target, .. }: Qualified,
) -> Result<impl IntoResponse, ApiError> {
    check_qualifier(&target, NO_VERSION)?;
    lambda.control.delete_provisioned(&target).await.map_err(lambda.error())?;
    Ok(StatusCode::NO_CONTENT)
}

const NO_VERSION: &str = "The function resource provided must be an alias or a published version.";

fn check_qualifier(target: &Target, message: &str) -> Result<(), ApiError> {
    match target.qualifier() {
        None => Err(ApiError::constraint("qualifier", "null", "not be null")),
        Some(LATEST) => Err(ApiError::invalid(message)),
        Some(_) => Ok(()),
    }
}

fn document(status: &ProvisionedStatus) -> Value {
    let ProvisionedStatus { requested, allocated, modified, failure } = status;
    let (state, reason) = match failure {
        _ if allocated >= requested => ("READY", None),
        Some(reason) => ("FAILED", Some(reason)),
        None => ("IN_PROGRESS", None),
    };
    let mut document = json!({
        "RequestedProvisionedConcurrentExecutions": requested,
        "AvailableProvisionedConcurrentExecutions": allocated,
        "AllocatedProvisionedConcurrentExecutions": allocated,
        "Status": state,
        "LastModified": modified,
    });
    if let Some(reason) = reason {
        document["StatusReason"] = json!(reason);
    }
    document
}
