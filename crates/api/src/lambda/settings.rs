//! Settings of AWS Lambda that this daemon does not support. A request that sets one is refused, so
//! that no setting is lost.

use std::collections::BTreeMap;

use serde_json::Value;

use super::ApiError;

/// The members of a document that no operation uses.
pub(super) type Others = BTreeMap<String, Value>;

const ONLY_ZIP: &str = "this daemon accepts code only as ZipFile";
const NO_NETWORK: &str = "functions have no network";

/// Members of AWS Lambda's documents: name, the value that is accepted besides empty ones, as JSON,
/// and why others are refused.
const SETTINGS: [(&str, &str, &str); 17] = [
    ("S3Bucket", "null", ONLY_ZIP),
    ("S3Key", "null", ONLY_ZIP),
    ("S3ObjectVersion", "null", ONLY_ZIP),
    ("S3ObjectStorageMode", "null", ONLY_ZIP),
    ("ImageUri", "null", ONLY_ZIP),
    ("ImageConfig", "null", ONLY_ZIP),
    ("SourceKMSKeyArn", "null", ONLY_ZIP),
    ("PackageType", r#""Zip""#, "this daemon accepts only zip files"),
    ("Architectures", r#"["x86_64"]"#, "this daemon supports only x86_64"),
    ("TracingConfig", r#"{"Mode":"PassThrough"}"#, "there is no X-Ray; firn serve --otlp traces"),
    (
        "LoggingConfig",
        r#"{"LogFormat":"Text"}"#,
        "logs are text, and their end is in the answer of Invoke with LogType=Tail",
    ),
    ("VpcConfig", "null", NO_NETWORK),
    ("FileSystemConfigs", "null", NO_NETWORK),
    ("DeadLetterConfig", "null", "there are no dead-letter queues; the log has abandoned events"),
    ("Tags", "null", "TagResource and UntagResource change tags"),
    ("KMSKeyArn", "null", "there is no key management; environment variables are not encrypted"),
    ("CodeSigningConfigArn", "null", "code is not signed"),
];

/// Refuses settings that would have an effect on AWS Lambda.
pub(super) fn check(others: &Others) -> Result<(), ApiError> {
    for (name, value) in others.iter().filter(|(_, value)| !is_empty(value)) {
        let known = SETTINGS.iter().find(|(known, ..)| *known == name.as_str());
        let (accepted, reason) = known.map_or(
            ("null", "this daemon does not support this setting"),
            |(_, accepted, reason)| (*accepted, *reason),
        );
        let text = value.to_string();
        if text != accepted {
            return Err(ApiError::invalid(format!("{name}: {reason}")));
        }
    }
    Ok(())
}

/// Whether a value means the same as no value.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.iter().all(is_empty),
        Value::Object(members) => members.values().all(is_empty),
        Value::Bool(true) | Value::Number(_) => false,
    }
}

#[cfg(test)]
#[path = "settings_tests.rs"]
mod tests;
