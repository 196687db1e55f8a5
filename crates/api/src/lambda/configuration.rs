//! Reads a function's configuration from a request.

use firn_control::{ConfigurationChange, Runtime};

use super::ApiError;
use super::documents::Settings;

/// The supported runtimes, for an error's text.
const RUNTIMES: &str = "[python3.11, provided.al2023, provided.al2]";

/// Reads the configuration in a request. Refuses what this daemon does not support.
pub(super) fn change(settings: Settings) -> Result<ConfigurationChange, ApiError> {
    if settings.package_type.is_some_and(|kind| kind != "Zip") {
        return Err(ApiError::invalid("PackageType: this daemon accepts only zip files"));
    }
    if settings.layers.is_some_and(|layers| !layers.is_empty()) {
        let message =
            "Layers: this daemon does not support layers; put the files into the zip file";
        return Err(ApiError::invalid(message));
    }
    if settings.architectures.is_some_and(|architectures| architectures != ["x86_64"]) {
        return Err(ApiError::invalid("Architectures: this daemon supports only x86_64"));
    }
    let snap_start = settings.snap_start.map(|snap_start| match snap_start.apply_on.as_deref() {
        Some("PublishedVersions") => Ok(true),
        Some("None") | None => Ok(false),
        Some(other) => {
            Err(ApiError::constraint("snapStart.applyOn", other, "be PublishedVersions or None"))
        }
    });
    Ok(ConfigurationChange {
        runtime: settings.runtime.map(|name| runtime(&name)).transpose()?,
        handler: settings.handler,
        role: settings.role,
        description: settings.description,
        timeout: settings.timeout,
        memory: settings.memory_size,
        environment: settings.environment.map(|environment| environment.variables),
        snap_start: snap_start.transpose()?,
    })
}

fn runtime(name: &str) -> Result<Runtime, ApiError> {
    serde_json::from_value(name.into()).map_err(|_| {
        ApiError::invalid(format!(
            "Value {name} at 'runtime' failed to satisfy constraint: Member must satisfy enum value set: {RUNTIMES} or be a valid ARN",
        ))
    })
}
