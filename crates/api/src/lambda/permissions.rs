//! Permissions of functions: their resource-based policies.
//!
//! Source: AWS, "IAM JSON policy elements reference", and "Using resource-based policies for
//! Lambda".

use axum::Json;
use axum::body::Bytes;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use firn_control::{AttachmentError, Permission};
use serde::Deserialize;
use serde_json::{Value, json};

use super::ApiError;
use super::body::parse;
use super::extract::Qualified;
use super::settings::{self, Others};

/// The body of AddPermission.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Request {
    statement_id: String,
    action: String,
    principal: String,
    source_arn: Option<String>,
    source_account: Option<String>,
    event_source_token: Option<String>,
    revision_id: Option<String>,
    #[serde(rename = "PrincipalOrgID")]
    principal_org_id: Option<String>,
    function_url_auth_type: Option<String>,
    invoked_via_function_url: Option<bool>,
    #[serde(flatten)]
    others: Others,
}

pub(super) async fn add(
    Qualified { lambda, target, .. }: Qualified,
    body: Bytes,
) -> Result<impl IntoResponse, ApiError> {
    let mut request: Request = parse(&body)?;
    settings::check(&request.others)?;
    let revision = request.revision_id.take();
    let new = permission(request)?;
    let statement = statement(&lambda.scope.arn_of(&target).to_string(), &new);
    lambda.control.add_permission(&target, new, revision).await.map_err(lambda.error())?;
    Ok((StatusCode::CREATED, Json(json!({ "Statement": statement.to_string() }))))
}

pub(super) async fn get(
    Qualified { lambda, target, .. }: Qualified,
) -> Result<impl IntoResponse, ApiError> {
    let found = lambda.control.permissions(&target).await;
    let (permissions, revision) = found.map_err(|error| match error {
        AttachmentError::None(_) => {
            ApiError::missing("The resource you requested does not exist.".to_owned())
        }
        error => lambda.error()(error),
    })?;
    Ok(Json(policy(&lambda.scope.arn_of(&target).to_string(), &permissions, &revision)))
}

pub(super) async fn remove(
    Qualified { lambda, target, query, part }: Qualified,
) -> Result<impl IntoResponse, ApiError> {
    let removed = lambda.control.remove_permission(&target, part, query.revision_id).await;
    removed.map_err(lambda.error())?;
    Ok(StatusCode::NO_CONTENT)
}

fn permission(request: Request) -> Result<Permission, ApiError> {
    let id = statement_id(request.statement_id)?;
    let operation = request.action.strip_prefix("lambda:");
    let letters = |name: &str| name == "*" || name.bytes().all(|byte| byte.is_ascii_alphabetic());
    if request.action != "*" && !operation.is_some_and(|name| !name.is_empty() && letters(name)) {
        let rule = "be *, lambda:* or lambda: and an operation";
        return Err(ApiError::constraint("action", &request.action, rule));
    }
    let principal = principal_of(request.principal)?;
    if let Some(auth) = &request.function_url_auth_type {
        if !["NONE", "AWS_IAM"].contains(&auth.as_str()) {
            return Err(ApiError::constraint("functionUrlAuthType", auth, "be NONE or AWS_IAM"));
        }
        if request.action != "lambda:InvokeFunctionUrl" {
            return Err(ApiError::invalid(
                "FunctionUrlAuthType is only supported for lambda:InvokeFunctionUrl action",
            ));
        }
    }
    let via_url = request.invoked_via_function_url.map(|via| via.to_string());
    let conditions = [
        ("StringEquals", "AWS:SourceAccount", request.source_account),
        ("StringEquals", "lambda:EventSourceToken", request.event_source_token),
        ("StringEquals", "aws:PrincipalOrgID", request.principal_org_id),
        ("StringEquals", "lambda:FunctionUrlAuthType", request.function_url_auth_type),
        ("Bool", "lambda:InvokedViaFunctionUrl", via_url),
        ("ArnLike", "AWS:SourceArn", request.source_arn),
    ];
    let conditions = conditions
        .into_iter()
        .filter_map(|(kind, key, value)| condition(kind, key, value))
        .collect();
    Ok(Permission { id, action: request.action, principal, conditions })
}

/// Checks the name of a statement.
pub(super) fn statement_id(id: String) -> Result<String, ApiError> {
    let word = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
    if !(1..=100).contains(&id.len()) || !id.bytes().all(word) {
        return Err(ApiError::constraint("statementId", &id, "be [a-zA-Z0-9-_]{1,100}"));
    }
    Ok(id)
}

/// Checks a statement's principal.
pub(super) fn principal_of(principal: String) -> Result<String, ApiError> {
    if principal.is_empty() || principal.contains(char::is_whitespace) {
        return Err(ApiError::invalid("The provided principal was invalid."));
    }
    Ok(principal)
}

/// A condition of a statement, if it has a value.
pub(super) fn condition(
    kind: &str,
    key: &str,
    value: Option<String>,
) -> Option<(String, String, String)> {
    Some((kind.to_owned(), key.to_owned(), value?))
}

/// The answer with the policy of the resource `arn`.
pub(super) fn policy(arn: &str, permissions: &[Permission], revision: &str) -> Value {
    let statements: Vec<Value> =
        permissions.iter().map(|permission| statement(arn, permission)).collect();
    let policy = json!({ "Version": "2012-10-17", "Id": "default", "Statement": statements });
    json!({ "Policy": policy.to_string(), "RevisionId": revision })
}

/// A statement of the policy of the resource `arn`.
pub(super) fn statement(arn: &str, permission: &Permission) -> Value {
    let Permission { id, action, principal, conditions } = permission;
    let is_account = principal.len() == 12 && principal.bytes().all(|byte| byte.is_ascii_digit());
    let principal = match principal.as_str() {
        "*" => json!("*"),
        account if is_account => json!({ "AWS": format!("arn:aws:iam::{account}:root") }),
        arn if arn.starts_with("arn:") => json!({ "AWS": arn }),
        service => json!({ "Service": service }),
    };
    let mut statement = json!({
        "Sid": id,
        "Effect": "Allow",
        "Principal": principal,
        "Action": action,
        "Resource": arn,
    });
    for (kind, key, value) in conditions {
        statement["Condition"][kind][key] = json!(value);
    }
    statement
}
