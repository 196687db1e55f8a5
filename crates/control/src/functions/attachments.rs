//! What is attached to a function, or to one of its versions or aliases: tags, permissions,
//! settings of events, a URL, provisioned concurrency.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::Target;

/// What is attached to `$LATEST` (which stands for the function), a version or an alias, in the
/// form in which the database stores it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Attachments {
    /// Only of the function.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) tags: BTreeMap<String, String>,
    /// In the order in which they were added.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) permissions: Vec<Permission>,
    /// Changes with every change of the permissions.
    #[serde(skip_serializing_if = "Uuid::is_nil")]
    pub(crate) permissions_revision: Uuid,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) events: Option<EventSettings>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) url: Option<FunctionUrl>,
    /// Only of a published version, or of an alias.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) provisioned: Option<Provisioned>,
}

/// MicroVMs of a version that are kept initialised: AWS Lambda's provisioned concurrency.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Provisioned {
    pub(crate) count: u32,
    /// When it was set, in the form of [`Version::last_modified`](super::Version).
    pub(crate) modified: String,
}

/// A statement of a function's policy, which allows a principal to invoke it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Permission {
    /// Its name in the policy.
    pub id: String,
    /// The operation, such as `lambda:InvokeFunction`.
    pub action: String,
    /// A service, an account, the ARN of a user or role, or `*`.
    pub principal: String,
    /// Conditions: the kind (`StringEquals`, `ArnLike`, `Bool`), the key and the value.
    pub conditions: Vec<(String, String, String)>,
}

/// How the events of a function are retried, and where they go; `None` is the default.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventSettings {
    /// How often an event is retried after an error of the function.
    pub retries: Option<u32>,
    /// How old an event may become before it is dropped, seconds.
    pub max_age: Option<u32>,
    /// When the settings were made, seconds since 1970.
    pub modified: u64,
    /// What gets the records of events that were served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_success: Option<Destination>,
    /// What gets the records of events that were given up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_failure: Option<Destination>,
}

/// A function that gets the records of another one's events.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Destination {
    /// The function, version or alias.
    pub target: Target,
    /// Its ARN, as the settings name it.
    pub arn: String,
}

impl Permission {
    /// Whether everyone may use the URL of the function.
    pub(crate) fn is_public_url(&self) -> bool {
        let action = ["lambda:InvokeFunctionUrl", "lambda:*", "*"].contains(&self.action.as_str());
        // Any other condition holds for none of the requests to a URL that anyone may use.
        let holds = |(_, key, value): &(String, String, String)| match key.as_str() {
            "lambda:FunctionUrlAuthType" => value == "NONE",
            "lambda:InvokedViaFunctionUrl" => value == "true",
            _ => false,
        };
        action && self.principal == "*" && self.conditions.iter().all(holds)
    }

    /// About its length in a policy, bytes.
    pub(crate) fn length(&self) -> usize {
        let conditions = self.conditions.iter();
        let conditions = conditions.map(|(kind, key, value)| kind.len() + key.len() + value.len());
        self.id.len() + self.action.len() + self.principal.len() + conditions.sum::<usize>()
    }
}

/// A URL that invokes a function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionUrl {
    /// The first label of its host: random, so that it cannot be guessed.
    pub id: String,
    /// Whether requests have to be signed.
    pub signed: bool,
    /// Whether an answer is sent as the function streams it.
    #[serde(default)]
    pub stream: bool,
    /// Which pages of other origins may use it.
    pub cors: Option<Cors>,
    /// When it was created, in the form of [`Version::last_modified`](super::Version).
    pub created: String,
    /// When it was changed.
    pub modified: String,
}

/// Which pages of other origins may use a URL, and how. The serialized form has AWS Lambda's names.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default, deny_unknown_fields)]
pub struct Cors {
    /// Whether requests may have cookies and other credentials.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_credentials: Option<bool>,
    /// Headers that requests may have, or `*`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_headers: Option<Vec<String>>,
    /// Methods of requests, or `*`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_methods: Option<Vec<String>>,
    /// The origins, or `*`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_origins: Option<Vec<String>>,
    /// Headers of answers that pages may read, or `*`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expose_headers: Option<Vec<String>>,
    /// How long a browser may keep this, seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_age: Option<u32>,
}
