//! All operations of AWS Lambda's API, for the error of those that this daemon does not support.
//!
//! Source: AWS, the service model `lambda`, 2015-03-31.

use axum::extract::Request;
use axum::http::{Method, Uri};

use super::ApiError;

/// The name, the method, and the path of each operation. A word in braces in a path stands for any
/// word. A query is a part of the request.
const OPERATIONS: [(&str, &str, &str); 91] = [
    (
        "AddLayerVersionPermission",
        "POST",
        "/2018-10-31/layers/{LayerName}/versions/{VersionNumber}/policy",
    ),
    ("AddPermission", "POST", "/2015-03-31/functions/{FunctionName}/policy"),
    (
        "CheckpointDurableExecution",
        "POST",
        "/2025-12-01/durable-executions/{DurableExecutionArn}/checkpoint",
    ),
    ("CreateAlias", "POST", "/2015-03-31/functions/{FunctionName}/aliases"),
    ("CreateCapacityProvider", "POST", "/2025-11-30/capacity-providers"),
    ("CreateCodeSigningConfig", "POST", "/2020-04-22/code-signing-configs"),
    ("CreateEventSourceMapping", "POST", "/2015-03-31/event-source-mappings"),
    ("CreateFunction", "POST", "/2015-03-31/functions"),
    ("CreateFunctionUrlConfig", "POST", "/2021-10-31/functions/{FunctionName}/url"),
    ("DeleteAlias", "DELETE", "/2015-03-31/functions/{FunctionName}/aliases/{Name}"),
    ("DeleteCapacityProvider", "DELETE", "/2025-11-30/capacity-providers/{CapacityProviderName}"),
    (
        "DeleteCodeSigningConfig",
        "DELETE",
        "/2020-04-22/code-signing-configs/{CodeSigningConfigArn}",
    ),
    ("DeleteDurableExecution", "DELETE", "/2025-12-01/durable-executions/{DurableExecutionArn}"),
    ("DeleteEventSourceMapping", "DELETE", "/2015-03-31/event-source-mappings/{UUID}"),
    ("DeleteFunction", "DELETE", "/2015-03-31/functions/{FunctionName}"),
    (
        "DeleteFunctionCodeSigningConfig",
        "DELETE",
        "/2020-06-30/functions/{FunctionName}/code-signing-config",
    ),
    ("DeleteFunctionConcurrency", "DELETE", "/2017-10-31/functions/{FunctionName}/concurrency"),
    (
        "DeleteFunctionEventInvokeConfig",
        "DELETE",
        "/2019-09-25/functions/{FunctionName}/event-invoke-config",
    ),
    ("DeleteFunctionUrlConfig", "DELETE", "/2021-10-31/functions/{FunctionName}/url"),
    ("DeleteLayerVersion", "DELETE", "/2018-10-31/layers/{LayerName}/versions/{VersionNumber}"),
    (
        "DeleteProvisionedConcurrencyConfig",
        "DELETE",
        "/2019-09-30/functions/{FunctionName}/provisioned-concurrency",
    ),
    ("DeleteResourcePolicy", "DELETE", "/2026-07-09/resource-policy/{ResourceArn}"),
    ("GetAccountSettings", "GET", "/2016-08-19/account-settings"),
    ("GetAlias", "GET", "/2015-03-31/functions/{FunctionName}/aliases/{Name}"),
    ("GetCapacityProvider", "GET", "/2025-11-30/capacity-providers/{CapacityProviderName}"),
    ("GetCodeSigningConfig", "GET", "/2020-04-22/code-signing-configs/{CodeSigningConfigArn}"),
    ("GetDurableExecution", "GET", "/2025-12-01/durable-executions/{DurableExecutionArn}"),
    (
        "GetDurableExecutionHistory",
        "GET",
        "/2025-12-01/durable-executions/{DurableExecutionArn}/history",
    ),
    (
        "GetDurableExecutionState",
        "GET",
        "/2025-12-01/durable-executions/{DurableExecutionArn}/state",
    ),
    ("GetEventSourceMapping", "GET", "/2015-03-31/event-source-mappings/{UUID}"),
    ("GetFunction", "GET", "/2015-03-31/functions/{FunctionName}"),
    (
        "GetFunctionCodeSigningConfig",
        "GET",
        "/2020-06-30/functions/{FunctionName}/code-signing-config",
    ),
    ("GetFunctionConcurrency", "GET", "/2019-09-30/functions/{FunctionName}/concurrency"),
    ("GetFunctionConfiguration", "GET", "/2015-03-31/functions/{FunctionName}/configuration"),
    (
        "GetFunctionEventInvokeConfig",
        "GET",
        "/2019-09-25/functions/{FunctionName}/event-invoke-config",
    ),
    ("GetFunctionRecursionConfig", "GET", "/2024-08-31/functions/{FunctionName}/recursion-config"),
    (
        "GetFunctionScalingConfig",
        "GET",
        "/2025-11-30/functions/{FunctionName}/function-scaling-config",
    ),
    ("GetFunctionUrlConfig", "GET", "/2021-10-31/functions/{FunctionName}/url"),
    ("GetLayerVersion", "GET", "/2018-10-31/layers/{LayerName}/versions/{VersionNumber}"),
    ("GetLayerVersionByArn", "GET", "/2018-10-31/layers?find=LayerVersion"),
    (
        "GetLayerVersionPolicy",
        "GET",
        "/2018-10-31/layers/{LayerName}/versions/{VersionNumber}/policy",
    ),
    ("GetPolicy", "GET", "/2015-03-31/functions/{FunctionName}/policy"),
    (
        "GetProvisionedConcurrencyConfig",
        "GET",
        "/2019-09-30/functions/{FunctionName}/provisioned-concurrency",
    ),
    ("GetResourcePolicy", "GET", "/2026-07-09/resource-policy/{ResourceArn}"),
    (
        "GetRuntimeManagementConfig",
        "GET",
        "/2021-07-20/functions/{FunctionName}/runtime-management-config",
    ),
    ("Invoke", "POST", "/2015-03-31/functions/{FunctionName}/invocations"),
    ("InvokeAsync", "POST", "/2014-11-13/functions/{FunctionName}/invoke-async"),
    (
        "InvokeWithResponseStream",
        "POST",
        "/2021-11-15/functions/{FunctionName}/response-streaming-invocations",
    ),
    ("ListAliases", "GET", "/2015-03-31/functions/{FunctionName}/aliases"),
    ("ListCapacityProviders", "GET", "/2025-11-30/capacity-providers"),
    ("ListCodeSigningConfigs", "GET", "/2020-04-22/code-signing-configs"),
    (
        "ListDurableExecutionsByFunction",
        "GET",
        "/2025-12-01/functions/{FunctionName}/durable-executions",
    ),
    ("ListEventSourceMappings", "GET", "/2015-03-31/event-source-mappings"),
    (
        "ListFunctionEventInvokeConfigs",
        "GET",
        "/2019-09-25/functions/{FunctionName}/event-invoke-config/list",
    ),
    ("ListFunctionUrlConfigs", "GET", "/2021-10-31/functions/{FunctionName}/urls"),
    (
        "ListFunctionVersionsByCapacityProvider",
        "GET",
        "/2025-11-30/capacity-providers/{CapacityProviderName}/function-versions",
    ),
    ("ListFunctions", "GET", "/2015-03-31/functions"),
    (
        "ListFunctionsByCodeSigningConfig",
        "GET",
        "/2020-04-22/code-signing-configs/{CodeSigningConfigArn}/functions",
    ),
    ("ListLayerVersions", "GET", "/2018-10-31/layers/{LayerName}/versions"),
    ("ListLayers", "GET", "/2018-10-31/layers"),
    (
        "ListProvisionedConcurrencyConfigs",
        "GET",
        "/2019-09-30/functions/{FunctionName}/provisioned-concurrency?List=ALL",
    ),
    ("ListTags", "GET", "/2017-03-31/tags/{Resource}"),
    ("ListVersionsByFunction", "GET", "/2015-03-31/functions/{FunctionName}/versions"),
    ("PauseDurableExecution", "POST", "/2025-12-01/durable-executions/{DurableExecutionArn}/pause"),
    ("PublishLayerVersion", "POST", "/2018-10-31/layers/{LayerName}/versions"),
    ("PublishVersion", "POST", "/2015-03-31/functions/{FunctionName}/versions"),
    (
        "PutFunctionCodeSigningConfig",
        "PUT",
        "/2020-06-30/functions/{FunctionName}/code-signing-config",
    ),
    ("PutFunctionConcurrency", "PUT", "/2017-10-31/functions/{FunctionName}/concurrency"),
    (
        "PutFunctionEventInvokeConfig",
        "PUT",
        "/2019-09-25/functions/{FunctionName}/event-invoke-config",
    ),
    ("PutFunctionRecursionConfig", "PUT", "/2024-08-31/functions/{FunctionName}/recursion-config"),
    (
        "PutFunctionScalingConfig",
        "PUT",
        "/2025-11-30/functions/{FunctionName}/function-scaling-config",
    ),
    (
        "PutProvisionedConcurrencyConfig",
        "PUT",
        "/2019-09-30/functions/{FunctionName}/provisioned-concurrency",
    ),
    ("PutResourcePolicy", "PUT", "/2026-07-09/resource-policy/{ResourceArn}"),
    (
        "PutRuntimeManagementConfig",
        "PUT",
        "/2021-07-20/functions/{FunctionName}/runtime-management-config",
    ),
    (
        "RemoveLayerVersionPermission",
        "DELETE",
        "/2018-10-31/layers/{LayerName}/versions/{VersionNumber}/policy/{StatementId}",
    ),
    ("RemovePermission", "DELETE", "/2015-03-31/functions/{FunctionName}/policy/{StatementId}"),
    (
        "ResumeDurableExecution",
        "POST",
        "/2025-12-01/durable-executions/{DurableExecutionArn}/resume",
    ),
    (
        "SendDurableExecutionCallbackFailure",
        "POST",
        "/2025-12-01/durable-execution-callbacks/{CallbackId}/fail",
    ),
    (
        "SendDurableExecutionCallbackHeartbeat",
        "POST",
        "/2025-12-01/durable-execution-callbacks/{CallbackId}/heartbeat",
    ),
    (
        "SendDurableExecutionCallbackSuccess",
        "POST",
        "/2025-12-01/durable-execution-callbacks/{CallbackId}/succeed",
    ),
    ("StopDurableExecution", "POST", "/2025-12-01/durable-executions/{DurableExecutionArn}/stop"),
    ("TagResource", "POST", "/2017-03-31/tags/{Resource}"),
    ("UntagResource", "DELETE", "/2017-03-31/tags/{Resource}"),
    ("UpdateAlias", "PUT", "/2015-03-31/functions/{FunctionName}/aliases/{Name}"),
    ("UpdateCapacityProvider", "PUT", "/2025-11-30/capacity-providers/{CapacityProviderName}"),
    ("UpdateCodeSigningConfig", "PUT", "/2020-04-22/code-signing-configs/{CodeSigningConfigArn}"),
    ("UpdateEventSourceMapping", "PUT", "/2015-03-31/event-source-mappings/{UUID}"),
    ("UpdateFunctionCode", "PUT", "/2015-03-31/functions/{FunctionName}/code"),
    ("UpdateFunctionConfiguration", "PUT", "/2015-03-31/functions/{FunctionName}/configuration"),
    (
        "UpdateFunctionEventInvokeConfig",
        "POST",
        "/2019-09-25/functions/{FunctionName}/event-invoke-config",
    ),
    ("UpdateFunctionUrlConfig", "PUT", "/2021-10-31/functions/{FunctionName}/url"),
];

/// The answer to a request for which there is no route.
pub(crate) async fn unknown(request: Request) -> ApiError {
    let (method, uri) = (request.method(), request.uri());
    ApiError::no_such_operation(match name(method, uri) {
        Some(operation) => format!("this daemon does not support the operation {operation}"),
        None => format!("{method} {} is no operation of AWS Lambda's API", uri.path()),
    })
}

/// The operation that a request is for.
fn name(method: &Method, uri: &Uri) -> Option<&'static str> {
    let query = uri.query().unwrap_or_default();
    let fitting = OPERATIONS.iter().filter(|(_, its_method, pattern)| {
        let (path, needed) = pattern.split_once('?').unwrap_or((pattern, ""));
        method == its_method
            && fits(uri.path(), path)
            && (needed.is_empty() || query.split('&').any(|pair| pair == needed))
    });
    // The one with a query, if there is one.
    Some(fitting.max_by_key(|(_, _, pattern)| pattern.contains('?'))?.0)
}

fn fits(path: &str, pattern: &str) -> bool {
    let (mut words, mut wanted) = (path.trim_end_matches('/').split('/'), pattern.split('/'));
    loop {
        match (words.next(), wanted.next()) {
            (None, None) => return true,
            (Some(word), Some(wanted)) if wanted.starts_with('{') && !word.is_empty() => {}
            (Some(word), Some(wanted)) if word == wanted => {}
            _ => return false,
        }
    }
}

#[cfg(test)]
#[path = "operations_tests.rs"]
mod tests;
