//! Reads a function's configuration from a request.

use firn_control::{ConfigurationChange, Runtime};

use super::documents::Settings;
use super::names::Scope;
use super::{ApiError, layers, settings};

/// The supported runtimes, for an error's text.
const RUNTIMES: &str =
    "[python3.11, python3.13, nodejs20.x, java21, provided.al2023, provided.al2]";

/// Reads the configuration in a request. Refuses what this daemon does not support.
pub(super) fn change(request: Settings, scope: &Scope) -> Result<ConfigurationChange, ApiError> {
    settings::check(&request.others)?;
    let snap_start = request.snap_start.map(|snap_start| match snap_start.apply_on.as_deref() {
        Some("PublishedVersions") => Ok(true),
        Some("None") | None => Ok(false),
        Some(other) => {
            Err(ApiError::constraint("snapStart.applyOn", other, "be PublishedVersions or None"))
        }
    });
    Ok(ConfigurationChange {
        runtime: request.runtime.map(|name| runtime(&name)).transpose()?,
        handler: request.handler,
        role: request.role,
        description: request.description,
        timeout: request.timeout,
        memory: request.memory_size,
        storage: request.ephemeral_storage.map(|storage| storage.size),
        environment: request.environment.map(|environment| environment.variables),
        snap_start: snap_start.transpose()?,
        layers: request.layers.map(|arns| layers::names(&arns, scope)).transpose()?,
    })
}

fn runtime(name: &str) -> Result<Runtime, ApiError> {
    serde_json::from_value(name.into()).map_err(|_| {
        ApiError::invalid(format!(
            "Value {name} at 'runtime' failed to satisfy constraint: Member must satisfy enum value set: {RUNTIMES}. \
             Container images are not supported either: put another language into a bootstrap (provided.al2023), on an \
             image of your own if it needs packages (FIRN_IMAGE, firn image build)",
        ))
    })
}
