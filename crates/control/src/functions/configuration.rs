//! Checks a function's configuration and applies it to a version.

use std::collections::BTreeMap;

use firn_memory::planners::{self, ParsePlannerError};
use firn_run::ImageName;

use super::images::IMAGE_VARIABLE;
use super::version::DEFAULT_STORAGE;
use super::{
    Code, ImageError, LATEST, LayerName, MAX_UNPACKED, Runtime, Version, VersionState,
    new_revision, timestamp,
};

/// The largest size of all environment variables of a function together, bytes.
pub const MAX_ENVIRONMENT: usize = 4096;

/// The largest number of layers of a function.
pub(crate) const MAX_LAYERS: usize = 5;

/// The environment variable of a function's configuration that names its planner.
pub(crate) const PLANNER_VARIABLE: &str = "FIRN_PLANNER";

/// The environment variable of a function's configuration that takes its network away: `none`.
pub(crate) const NETWORK_VARIABLE: &str = "FIRN_NETWORK";

/// The environment variable of a function's configuration that declares a restore hook.
pub(crate) const RESTORE_HOOK_VARIABLE: &str = "FIRN_RESTORE_HOOK";

/// Environment variables that a function's configuration cannot set: those that AWS Lambda
/// reserves, and those that the guest's agent sets.
const RESERVED: [&str; 24] = [
    "_HANDLER",
    "_X_AMZN_TRACE_ID",
    "AWS_DEFAULT_REGION",
    "AWS_REGION",
    "AWS_EXECUTION_ENV",
    "AWS_LAMBDA_FUNCTION_NAME",
    "AWS_LAMBDA_FUNCTION_MEMORY_SIZE",
    "AWS_LAMBDA_FUNCTION_VERSION",
    "AWS_LAMBDA_INITIALIZATION_TYPE",
    "AWS_LAMBDA_LOG_GROUP_NAME",
    "AWS_LAMBDA_LOG_STREAM_NAME",
    "AWS_LAMBDA_MAX_CONCURRENCY",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_ACCESS_KEY",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_LAMBDA_RUNTIME_API",
    "LAMBDA_TASK_ROOT",
    "LAMBDA_RUNTIME_DIR",
    "FIRN_INSTANCE_ID",
    "FIRN_GENERATION_FILE",
    "_LAMBDA_TELEMETRY_LOG_FD",
];

/// The parts of a configuration to set; `None` leaves a part as it is.
#[derive(Debug, Clone, Default)]
pub struct ConfigurationChange {
    /// What runs the function.
    pub runtime: Option<Runtime>,
    /// The entry point: 1 to 128 characters.
    pub handler: Option<String>,
    /// The ARN of a role: at most 256 bytes.
    pub role: Option<String>,
    /// Free text: at most 256 characters.
    pub description: Option<String>,
    /// Time limit of a request: 1 to 900 seconds.
    pub timeout: Option<u32>,
    /// Memory of the function: 128 to 10240 MiB.
    pub memory: Option<u32>,
    /// Size of `/tmp`: 512 to 10240 MiB.
    pub storage: Option<u32>,
    /// All environment variables of the function.
    pub environment: Option<BTreeMap<String, String>>,
    /// Whether the daemon freezes a snapshot of each published version.
    pub snap_start: Option<bool>,
    /// All layers of the function, in their order; the caller looks them up.
    pub layers: Option<Vec<LayerName>>,
}

/// A part of a configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Field {
    /// [`ConfigurationChange::runtime`]
    Runtime,
    /// [`ConfigurationChange::handler`]
    Handler,
    /// [`ConfigurationChange::role`]
    Role,
    /// [`ConfigurationChange::description`]
    Description,
    /// [`ConfigurationChange::timeout`]
    Timeout,
    /// [`ConfigurationChange::memory`]
    Memory,
    /// [`ConfigurationChange::storage`]
    Storage,
    /// The name or value of a variable in [`ConfigurationChange::environment`].
    Variable,
}

/// A configuration is not valid.
#[derive(Debug, thiserror::Error)]
pub enum ConfigurationError {
    /// A new function needs this part.
    #[error("{0:?} is missing")]
    Missing(Field),
    /// A value is out of range.
    #[error("{field:?}: {value:?} must {rule}")]
    Value {
        /// The part of the configuration.
        field: Field,
        /// The refused value, or the name of the refused variable.
        value: String,
        /// What a valid value has to do, as an infinitive.
        rule: &'static str,
    },
    /// The configuration sets a variable that is reserved.
    #[error("the environment variable {0} is reserved")]
    ReservedVariable(String),
    /// The environment variables are larger than [`MAX_ENVIRONMENT`].
    #[error("the environment variables are larger than {MAX_ENVIRONMENT} bytes")]
    EnvironmentTooLarge,
    /// The image that the function names cannot be used.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The function does not say whether its clones replace their random state.
    #[error(
        "{RESTORE_HOOK_VARIABLE} {0:?} is none of: true, if the function replaces its random state after a restore; \
         unset, if it does not"
    )]
    RestoreHook(String),
    /// The function asks for a network that there is not.
    #[error("{NETWORK_VARIABLE} {0:?} is neither none nor unset, for the daemon's network")]
    Network(String),
    /// Functions of the runtime have no hooks that replace their random state in each clone. The
    /// text is AWS Lambda's.
    #[error("{0} is not supported for SnapStart enabled functions.")]
    SnapStart(&'static str),
    /// The function's owner may not choose the planner that the function names.
    #[error("{PLANNER_VARIABLE}: the planner {planner} is not allowed; allowed: {allowed}")]
    PlannerRefused {
        /// The planner.
        planner: String,
        /// The planners that are allowed.
        allowed: String,
    },
    /// It names too many layers.
    #[error("a function has at most {MAX_LAYERS} layers")]
    TooManyLayers,
    /// It names two versions of one layer.
    #[error("{0} and {1} are versions of the same layer")]
    LayerTwice(String, String),
    /// It names a layer that does not exist.
    #[error("the layer version {0} does not exist")]
    NoLayer(String),
    /// The function and its layers are too large together.
    #[error("the function and its layers have {0} bytes unpacked; the limit is {MAX_UNPACKED}")]
    TooLarge(u64),
    /// The planner that the function names does not exist.
    #[error("{PLANNER_VARIABLE}: {0}")]
    Planner(ParsePlannerError),
}

/// A new function's `$LATEST`: AWS Lambda's defaults, changed by `change`.
pub(crate) fn new_latest(
    name: &str,
    change: ConfigurationChange,
    code: Code,
) -> Result<Version, ConfigurationError> {
    let Some(runtime) = change.runtime else {
        return Err(ConfigurationError::Missing(Field::Runtime));
    };
    for (value, field) in [(&change.handler, Field::Handler), (&change.role, Field::Role)] {
        if value.is_none() {
            return Err(ConfigurationError::Missing(field));
        }
    }
    let mut version = Version {
        function: name.to_owned(),
        version: LATEST.to_owned(),
        revision: new_revision(),
        last_modified: timestamp(),
        code,
        layers: Vec::new(),
        runtime,
        handler: String::new(),
        role: String::new(),
        description: String::new(),
        timeout: 3,
        memory: 128,
        storage: DEFAULT_STORAGE,
        environment: BTreeMap::new(),
        snap_start: false,
        state: VersionState::Active,
        waiting: None,
        owner: None,
        snapshot: None,
    };
    change.apply(&mut version)?;
    Ok(version)
}

impl ConfigurationChange {
    /// Checks the values and sets them in `version`.
    pub(crate) fn apply(self, version: &mut Version) -> Result<(), ConfigurationError> {
        version.runtime = self.runtime.unwrap_or(version.runtime);
        if let Some(handler) = self.handler {
            let fits = handler.chars().all(|c| !c.is_whitespace() && !c.is_control());
            if handler.is_empty() || handler.len() > 128 || !fits {
                let rule = "have 1 to 128 characters and no space";
                return Err(refused(Field::Handler, &handler, rule));
            }
            version.handler = handler;
        }
        if let Some(role) = self.role {
            if role.len() > 256 || !is_role(&role) {
                let rule = "satisfy regular expression pattern: \
                            arn:(aws[a-zA-Z-]*)?:iam::\\d{12}:role/?[a-zA-Z_0-9+=,.@\\-_/]+";
                return Err(refused(Field::Role, &role, rule));
            }
            version.role = role;
        }
        if let Some(description) = self.description {
            if description.chars().count() > 256 {
                let rule = "have at most 256 characters";
                return Err(refused(Field::Description, "...", rule));
            }
            version.description = description;
        }
        if let Some(timeout) = self.timeout {
            if !(1..=900).contains(&timeout) {
                return Err(refused(Field::Timeout, &timeout, "be between 1 and 900"));
            }
            version.timeout = timeout;
        }
        if let Some(memory) = self.memory {
            if !(128..=10_240).contains(&memory) {
                return Err(refused(Field::Memory, &memory, "be between 128 and 10240"));
            }
            version.memory = memory;
        }
        if let Some(storage) = self.storage {
            if !(DEFAULT_STORAGE..=10_240).contains(&storage) {
                return Err(refused(Field::Storage, &storage, "be between 512 and 10240"));
            }
            version.storage = storage;
        }
        if let Some(environment) = self.environment {
            check_environment(&environment)?;
            version.environment = environment;
        }
        version.snap_start = self.snap_start.unwrap_or(version.snap_start);
        if version.snap_start && version.runtime == Runtime::Nodejs20 {
            return Err(ConfigurationError::SnapStart("nodejs20.x"));
        }
        Ok(())
    }
}

/// Whether `text` has the form of a role's ARN, `arn:aws:iam::ACCOUNT:role/NAME`.
fn is_role(text: &str) -> bool {
    let parts: Vec<&str> = text.split(':').collect();
    let ["arn", partition, "iam", "", account, role] = parts[..] else { return false };
    let suffix = partition.strip_prefix("aws");
    let in_partition = |c: char| c.is_ascii_alphabetic() || c == '-';
    let in_name = |c: char| c.is_ascii_alphanumeric() || "+=,.@-_/".contains(c);
    (partition.is_empty() || suffix.is_some_and(|suffix| suffix.chars().all(in_partition)))
        && account.len() == 12
        && account.bytes().all(|byte| byte.is_ascii_digit())
        && role
            .strip_prefix("role")
            .map(|name| name.strip_prefix('/').unwrap_or(name))
            .is_some_and(|name| !name.is_empty() && name.chars().all(in_name))
}

fn check_environment(variables: &BTreeMap<String, String>) -> Result<(), ConfigurationError> {
    for (name, value) in variables {
        let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
        let begins = name.bytes().next().is_some_and(|byte| byte.is_ascii_alphabetic());
        if RESERVED.contains(&name.as_str()) {
            return Err(ConfigurationError::ReservedVariable(name.clone()));
        }
        if !begins || name.len() < 2 || !name.bytes().all(word) || value.contains('\0') {
            return Err(refused(Field::Variable, name, "be [a-zA-Z]([a-zA-Z0-9_])+"));
        }
    }
    let size: usize = variables.iter().map(|(name, value)| name.len() + value.len()).sum();
    if size > MAX_ENVIRONMENT {
        return Err(ConfigurationError::EnvironmentTooLarge);
    }
    if let Some(image) = variables.get(IMAGE_VARIABLE) {
        ImageName::try_from(image.clone()).map_err(ImageError::Name)?;
    }
    if let Some(hook) = variables.get(RESTORE_HOOK_VARIABLE).filter(|hook| *hook != "true") {
        return Err(ConfigurationError::RestoreHook(hook.clone()));
    }
    if let Some(network) = variables.get(NETWORK_VARIABLE).filter(|network| *network != "none") {
        return Err(ConfigurationError::Network(network.clone()));
    }
    if let Some(planner) = variables.get(PLANNER_VARIABLE) {
        planners::parse(planner).map_err(ConfigurationError::Planner)?;
    }
    Ok(())
}

fn refused(
    field: Field,
    value: &(impl std::fmt::Display + ?Sized),
    rule: &'static str,
) -> ConfigurationError {
    ConfigurationError::Value { field, value: value.to_string(), rule }
}
