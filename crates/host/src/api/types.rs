//! The documents of the API, as AWS Lambda's service model names their fields (`lambda`, 2015-03-31).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::functions::{Arn, Place, Runtime, State, Version};

/// The body of CreateFunction. Fields that are not here are not looked at.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct CreateFunction {
    pub(crate) function_name: String,
    pub(crate) code: FunctionCode,
    #[serde(default)]
    pub(crate) publish: bool,
    #[serde(flatten)]
    pub(crate) settings: Settings,
}

/// What a function's configuration can be set to.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct Settings {
    pub(crate) runtime: Option<String>,
    pub(crate) handler: Option<String>,
    pub(crate) role: Option<String>,
    pub(crate) description: Option<String>,
    pub(crate) timeout: Option<u32>,
    pub(crate) memory_size: Option<u32>,
    pub(crate) environment: Option<Environment>,
    pub(crate) snap_start: Option<SnapStart>,
    pub(crate) package_type: Option<String>,
    pub(crate) architectures: Option<Vec<String>>,
    pub(crate) layers: Option<Vec<String>>,
    pub(crate) revision_id: Option<String>,
}

/// Environment variables.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct Environment {
    #[serde(default)]
    pub(crate) variables: BTreeMap<String, String>,
}

/// Whether published versions are frozen.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct SnapStart {
    pub(crate) apply_on: Option<String>,
}

/// Where the code comes from.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct FunctionCode {
    /// Base64.
    pub(crate) zip_file: Option<String>,
    pub(crate) s3_bucket: Option<String>,
    pub(crate) image_uri: Option<String>,
}

/// The body of UpdateFunctionCode.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct UpdateCode {
    #[serde(flatten)]
    pub(crate) code: FunctionCode,
    #[serde(default)]
    pub(crate) publish: bool,
    #[serde(default)]
    pub(crate) dry_run: bool,
    pub(crate) revision_id: Option<String>,
}

/// The body of PublishVersion.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct PublishVersion {
    pub(crate) code_sha256: Option<String>,
    pub(crate) description: Option<String>,
    pub(crate) revision_id: Option<String>,
}

/// The body of CreateAlias and UpdateAlias.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct AliasSettings {
    pub(crate) name: Option<String>,
    pub(crate) function_version: Option<String>,
    pub(crate) description: Option<String>,
    pub(crate) revision_id: Option<String>,
    pub(crate) routing_config: Option<Value>,
}

/// The body of PutFunctionConcurrency, and its answer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct Concurrency {
    pub(crate) reserved_concurrent_executions: u32,
}

impl Runtime {
    /// Reads AWS Lambda's name of a runtime.
    pub(crate) fn parse(name: &str) -> Option<Self> {
        serde_json::from_value(json!(name)).ok()
    }

    /// All of them, for an error's text.
    pub(crate) const NAMES: &'static str = "[python3.11, provided.al2023, provided.al2]";
}

/// A version's configuration, named with its version where it was asked for with one.
pub(crate) fn configuration(place: &Place, version: &Version, qualified: bool) -> Value {
    let qualifier = qualified.then_some(version.version.as_str());
    let (state, reason) = match &version.state {
        State::Pending => ("Pending", Some(("Creating", "The function is being created."))),
        State::Active => ("Active", None),
        State::Failed { reason } => ("Failed", Some(("FunctionError", reason.as_str()))),
    };
    let published = version.version != crate::functions::LATEST;
    let optimized = version.snap_start && published && version.state == State::Active;
    let mut document = json!({
        "FunctionName": version.function,
        "FunctionArn": Arn(place, &version.function, qualifier).to_string(),
        "Runtime": version.runtime,
        "Role": version.role,
        "Handler": version.handler,
        "CodeSize": version.code.size,
        "Description": version.description,
        "Timeout": version.timeout,
        "MemorySize": version.memory,
        "LastModified": version.last_modified,
        "CodeSha256": base64_of_hex(&version.code.sha256),
        "Version": version.version,
        "RevisionId": version.revision,
        "State": state,
        "LastUpdateStatus": "Successful",
        "PackageType": "Zip",
        "Architectures": ["x86_64"],
        "EphemeralStorage": { "Size": 512 },
        "TracingConfig": { "Mode": "PassThrough" },
        "SnapStart": {
            "ApplyOn": if version.snap_start { "PublishedVersions" } else { "None" },
            "OptimizationStatus": if optimized { "On" } else { "Off" },
        },
    });
    if !version.environment.is_empty() {
        document["Environment"] = json!({ "Variables": version.environment });
    }
    if let Some((code, reason)) = reason {
        document["StateReasonCode"] = json!(code);
        document["StateReason"] = json!(reason);
    }
    document
}

/// A digest as AWS Lambda writes it.
pub(crate) fn base64_of_hex(hex: &str) -> String {
    use base64::Engine;
    let digits = hex.as_bytes().chunks_exact(2);
    let bytes: Vec<u8> = digits
        .filter_map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok())
        .collect();
    base64::engine::general_purpose::STANDARD.encode(bytes)
}
