//! The model of a function: name, configuration, code, image and versions.

mod attachments;
mod code;
mod configuration;
mod images;
mod layers;
mod name;
mod roles;
#[cfg(test)]
pub(crate) mod testing;
mod version;

pub(crate) use attachments::{Attachments, Provisioned};
pub use attachments::{Cors, Destination, EventSettings, FunctionUrl, Permission};
pub use code::{CodeError, MAX_UNPACKED, MAX_ZIP};
pub(crate) use code::{CodeStore, is_code_file};
pub use configuration::{ConfigurationChange, ConfigurationError, Field, MAX_ENVIRONMENT};
pub(crate) use configuration::{
    MAX_LAYERS, NETWORK_VARIABLE, PLANNER_VARIABLE, RESTORE_HOOK_VARIABLE, new_latest,
};
pub(crate) use images::Images;
pub use images::{ImageError, ImageFiles};
pub(crate) use layers::Layer;
pub use layers::{LayerAbout, LayerName, LayerVersion, UsedLayer};
pub(crate) use name::is_alias;
pub use name::{NameError, Target};
pub(crate) use roles::Roles;
pub use roles::RolesError;
pub use version::{Alias, Code, LATEST, Runtime, Version, VersionState};
pub(crate) use version::{
    FunctionRecord, SnapshotPlace, VersionSnapshot, is_snapshot_name, new_revision, snapshot_name,
    timestamp,
};
