//! The documents of the API. Their fields have the names of AWS Lambda's service model (`lambda`,
//! 2015-03-31).

use std::collections::BTreeMap;

use firn_control::{LATEST, Version, VersionState};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::names::Scope;
use super::settings::Others;

/// The body of CreateFunction.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct CreateFunction {
    pub(super) function_name: String,
    pub(super) code: FunctionCode,
    #[serde(default)]
    pub(super) publish: bool,
    pub(super) tags: Option<BTreeMap<String, String>>,
    #[serde(flatten)]
    pub(super) settings: Settings,
}

/// A function's configuration.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct Settings {
    pub(super) runtime: Option<String>,
    pub(super) handler: Option<String>,
    pub(super) role: Option<String>,
    pub(super) description: Option<String>,
    pub(super) timeout: Option<u32>,
    pub(super) memory_size: Option<u32>,
    pub(super) ephemeral_storage: Option<EphemeralStorage>,
    pub(super) environment: Option<Environment>,
    pub(super) snap_start: Option<SnapStart>,
    pub(super) layers: Option<Vec<String>>,
    pub(super) revision_id: Option<String>,
    #[serde(flatten)]
    pub(super) others: Others,
}

/// The size of `/tmp`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct EphemeralStorage {
    /// MiB.
    pub(super) size: u32,
}

/// Environment variables.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct Environment {
    #[serde(default)]
    pub(super) variables: BTreeMap<String, String>,
}

/// Whether the daemon freezes published versions.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct SnapStart {
    pub(super) apply_on: Option<String>,
}

/// The source of the code. `body` finds the zip file.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct FunctionCode {
    #[serde(default, rename = "ZipFile")]
    _zip_file: IgnoredAny,
    #[serde(flatten)]
    pub(super) others: Others,
}

/// The body of UpdateFunctionCode.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct UpdateCode {
    #[serde(default)]
    pub(super) publish: bool,
    #[serde(default)]
    pub(super) dry_run: bool,
    pub(super) revision_id: Option<String>,
    #[serde(flatten)]
    pub(super) code: FunctionCode,
}

/// The body of PublishVersion.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct PublishVersion {
    pub(super) code_sha256: Option<String>,
    pub(super) description: Option<String>,
    pub(super) revision_id: Option<String>,
    #[serde(flatten)]
    pub(super) others: Others,
}

/// The body of CreateAlias and UpdateAlias.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct AliasSettings {
    pub(super) name: Option<String>,
    pub(super) function_version: Option<String>,
    pub(super) description: Option<String>,
    pub(super) revision_id: Option<String>,
    pub(super) routing_config: Option<RoutingConfig>,
    #[serde(flatten)]
    pub(super) others: Others,
}

/// Versions that get a part of an alias's requests.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct RoutingConfig {
    #[serde(default)]
    pub(super) additional_version_weights: BTreeMap<String, f64>,
}

/// The body of PutFunctionConcurrency, and its answer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct Concurrency {
    pub(super) reserved_concurrent_executions: u32,
}

/// A version's configuration. With `qualified`, its ARN contains the version.
pub(super) fn configuration(scope: &Scope, version: &Version, qualified: bool) -> Value {
    let qualifier = qualified.then_some(version.version.as_str());
    let (state, reason) = match &version.state {
        VersionState::Pending => {
            let waiting = version.waiting.as_deref();
            ("Pending", Some(("Creating", waiting.unwrap_or("The function is being created."))))
        }
        VersionState::Active => ("Active", None),
        VersionState::Failed { reason } => ("Failed", Some(("FunctionError", reason.as_str()))),
    };
    let published = version.version != LATEST;
    let optimized = version.snap_start && published && version.state == VersionState::Active;
    let mut document = json!({
        "FunctionName": version.function,
        "FunctionArn": scope.arn(&version.function, qualifier).to_string(),
        "Runtime": version.runtime,
        "Role": version.role,
        "Handler": version.handler,
        "CodeSize": version.code.size,
        "Description": version.description,
        "Timeout": version.timeout,
        "MemorySize": version.memory,
        "LastModified": version.last_modified,
        "CodeSha256": version.code.sha256_base64(),
        "Version": version.version,
        "RevisionId": version.revision,
        "State": state,
        "LastUpdateStatus": "Successful",
        "PackageType": "Zip",
        "Architectures": ["x86_64"],
        "EphemeralStorage": { "Size": version.storage },
        "TracingConfig": { "Mode": "PassThrough" },
        "LoggingConfig": {
            "LogFormat": "Text",
            "LogGroup": format!("/aws/lambda/{}", version.function),
        },
        "SnapStart": {
            "ApplyOn": if version.snap_start { "PublishedVersions" } else { "None" },
            "OptimizationStatus": if optimized { "On" } else { "Off" },
        },
    });
    if !version.environment.is_empty() {
        document["Environment"] = json!({ "Variables": version.environment });
    }
    if !version.layers.is_empty() {
        let layers = version.layers.iter().map(|layer| {
            let arn = scope.layer_version(&layer.layer, layer.version);
            json!({ "Arn": arn, "CodeSize": layer.code.size })
        });
        document["Layers"] = layers.collect();
    }
    if let Some((code, reason)) = reason {
        document["StateReasonCode"] = json!(code);
        document["StateReason"] = json!(reason);
    }
    document
}
