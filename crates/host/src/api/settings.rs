//! A function's configuration: checked, and put into a version.

use super::error::ApiError;
use super::types::{FunctionCode, Settings};
use crate::functions::{Code, CodeStore, LATEST, MAX_ZIP, Runtime, State, Version, now, revision};
use crate::instances::{IMAGE_VARIABLE, ImageError};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use firn_run::ImageName;

/// All environment variables together, in bytes.
const MAX_ENVIRONMENT: usize = 4096;

/// Names that a function cannot set: AWS Lambda's reserved variables, and those that firn sets.
const RESERVED: [&str; 21] = [
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
    "AWS_ACCESS_KEY",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_LAMBDA_RUNTIME_API",
    "LAMBDA_TASK_ROOT",
    "LAMBDA_RUNTIME_DIR",
    "FIRN_INSTANCE_ID",
    "_LAMBDA_TELEMETRY_LOG_FD",
];

/// A new function's `$LATEST`.
pub(crate) fn create(name: &str, settings: Settings, code: Code) -> Result<Version, ApiError> {
    let required = |value: &Option<String>, field| match value {
        Some(_) => Ok(()),
        None => Err(ApiError::validation(format!(
            "1 validation error detected: Value null at '{field}' failed to satisfy constraint: Member must not be null"
        ))),
    };
    required(&settings.runtime, "runtime")?;
    required(&settings.handler, "handler")?;
    required(&settings.role, "role")?;
    let mut version = Version {
        function: name.to_owned(),
        version: LATEST.to_owned(),
        revision: revision(),
        last_modified: now(),
        code,
        runtime: Runtime::Python311,
        handler: String::new(),
        role: String::new(),
        description: String::new(),
        timeout: 3,
        memory: 128,
        environment: Default::default(),
        snap_start: false,
        state: State::Active,
        snapshot: None,
    };
    apply(&mut version, settings)?;
    Ok(version)
}

/// Changes what `settings` names.
pub(crate) fn apply(version: &mut Version, settings: Settings) -> Result<(), ApiError> {
    if settings.package_type.is_some_and(|kind| kind != "Zip") {
        return Err(ApiError::invalid("PackageType: this daemon takes zip files alone"));
    }
    if settings.layers.is_some_and(|layers| !layers.is_empty()) {
        return Err(ApiError::invalid("Layers: this daemon has none; put the files into the zip"));
    }
    if settings.architectures.is_some_and(|architectures| architectures != ["x86_64"]) {
        return Err(ApiError::invalid("Architectures: this daemon runs on x86_64 alone"));
    }
    if let Some(runtime) = settings.runtime {
        version.runtime = Runtime::parse(&runtime).ok_or_else(|| {
            ApiError::invalid(format!(
                "Value {runtime} at 'runtime' failed to satisfy constraint: Member must satisfy enum value set: {} or be a valid ARN",
                Runtime::NAMES
            ))
        })?;
    }
    if let Some(handler) = settings.handler {
        let fits = handler.chars().all(|c| !c.is_whitespace() && !c.is_control());
        if handler.is_empty() || handler.len() > 128 || !fits {
            return Err(constraint("handler", &handler, "have 1 to 128 characters and no space"));
        }
        version.handler = handler;
    }
    if let Some(role) = settings.role {
        if role.is_empty() || role.len() > 256 {
            return Err(constraint("role", &role, "be an ARN"));
        }
        version.role = role;
    }
    if let Some(description) = settings.description {
        if description.chars().count() > 256 {
            return Err(constraint("description", "...", "have at most 256 characters"));
        }
        version.description = description;
    }
    if let Some(timeout) = settings.timeout {
        if !(1..=900).contains(&timeout) {
            return Err(constraint("timeout", &timeout, "be between 1 and 900"));
        }
        version.timeout = timeout;
    }
    if let Some(memory) = settings.memory_size {
        if !(128..=10_240).contains(&memory) {
            return Err(constraint("memorySize", &memory, "be between 128 and 10240"));
        }
        version.memory = memory;
    }
    if let Some(environment) = settings.environment {
        check_environment(&environment.variables)?;
        version.environment = environment.variables;
    }
    if let Some(snap_start) = settings.snap_start {
        version.snap_start = match snap_start.apply_on.as_deref() {
            Some("PublishedVersions") => true,
            Some("None") | None => false,
            Some(other) => {
                return Err(constraint("snapStart.applyOn", other, "be PublishedVersions or None"));
            }
        };
    }
    Ok(())
}

/// The zip file of a request.
pub(crate) fn unpack(code: &FunctionCode) -> Result<Vec<u8>, ApiError> {
    if code.s3_bucket.is_some() || code.image_uri.is_some() {
        return Err(ApiError::invalid("this daemon takes code as ZipFile alone"));
    }
    let Some(text) = &code.zip_file else {
        return Err(ApiError::invalid("Please provide a source for function code."));
    };
    let zip = STANDARD.decode(text).map_err(|error| {
        ApiError::request_content(format!("Could not parse request body: ZipFile: {error}"))
    })?;
    if zip.len() > MAX_ZIP {
        let message = format!("Zipped size must be smaller than {MAX_ZIP} bytes");
        return Err(ApiError::invalid(message));
    }
    Ok(zip)
}

/// Checks and keeps a zip file.
pub(crate) fn store(codes: &CodeStore, zip: &[u8]) -> Result<Code, ApiError> {
    Ok(codes.put(zip)?)
}

fn check_environment(
    variables: &std::collections::BTreeMap<String, String>,
) -> Result<(), ApiError> {
    for (name, value) in variables {
        let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
        let begins = name.bytes().next().is_some_and(|byte| byte.is_ascii_alphabetic());
        if RESERVED.contains(&name.as_str()) {
            return Err(ApiError::invalid(format!(
                "Lambda was unable to configure your environment variables because the environment variables you have \
                 provided contains reserved keys that are currently not supported for modification. Reserved keys used \
                 in this request: {name}"
            )));
        }
        if !begins || name.len() < 2 || !name.bytes().all(word) || value.contains('\0') {
            return Err(constraint("environment.variables", name, "be [a-zA-Z]([a-zA-Z0-9_])+"));
        }
    }
    let size: usize = variables.iter().map(|(name, value)| name.len() + value.len()).sum();
    if size > MAX_ENVIRONMENT {
        return Err(ApiError::invalid(format!(
            "Lambda was unable to configure your environment variables because the environment variables you have \
             provided exceeded the {MAX_ENVIRONMENT} bytes limit."
        )));
    }
    if let Some(image) = variables.get(IMAGE_VARIABLE) {
        ImageName::try_from(image.clone()).map_err(ImageError::Name)?;
    }
    if let Some(planner) = variables.get("FIRN_PLANNER") {
        firn_memory::planners::parse(planner)
            .map_err(|error| ApiError::invalid(format!("FIRN_PLANNER: {error}")))?;
    }
    Ok(())
}

fn constraint(field: &str, value: &(impl std::fmt::Display + ?Sized), rule: &str) -> ApiError {
    ApiError::validation(format!(
        "1 validation error detected: Value '{value}' at '{field}' failed to satisfy constraint: Member must {rule}"
    ))
}
