//! What holds for all functions: limits, and that code is not signed.

use std::sync::Arc;

use axum::extract::State;
use axum::response::IntoResponse;
use axum::{Extension, Json};
use firn_control::{Account, MAX_UNPACKED, MAX_ZIP};
use serde_json::json;

use super::authorize::Caller;
use super::extract::Unqualified;
use super::{ApiError, Lambda};

pub(super) async fn settings(
    State(lambda): State<Arc<Lambda>>,
    Extension(Caller(tenant)): Extension<Caller>,
) -> Result<impl IntoResponse, ApiError> {
    let account = lambda.control.account(tenant).await.map_err(lambda.error())?;
    let Account { functions, code, code_limit, concurrency } = account;
    Ok(Json(json!({
        "AccountLimit": {
            "TotalCodeSize": code_limit,
            "CodeSizeUnzipped": MAX_UNPACKED,
            "CodeSizeZipped": MAX_ZIP,
            "ConcurrentExecutions": concurrency,
            // Reserved concurrency limits a function, and takes nothing from the others.
            "UnreservedConcurrentExecutions": concurrency,
        },
        "AccountUsage": { "TotalCodeSize": code, "FunctionCount": functions },
    })))
}

/// GetFunctionCodeSigningConfig: the code of no function is signed.
pub(super) async fn code_signing(
    Unqualified { lambda, target, .. }: Unqualified,
) -> Result<impl IntoResponse, ApiError> {
    lambda.control.find(&target).await.map_err(lambda.error())?;
    Ok(Json(json!({ "FunctionName": target.name() })))
}
