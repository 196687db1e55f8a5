//! Layers: zip files that functions share.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{Code, Permission};

/// A layer, in the form in which the database stores it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Layer {
    /// The tenant that has created it, if there was one.
    pub(crate) owner: Option<String>,
    /// The number of the next version. Numbers of deleted versions are not used again.
    pub(crate) next_version: u64,
    /// Its versions, oldest first.
    pub(crate) versions: Vec<LayerVersion>,
}

/// A version of a layer, which does not change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerVersion {
    /// Its number.
    pub version: u64,
    /// The zip file with its files.
    pub code: Code,
    /// Its publisher's description of it.
    pub about: LayerAbout,
    /// When it was published, in the form of [`Version::last_modified`](super::Version).
    pub created: String,
    /// The permissions to use it, in the order in which they were added.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) permissions: Vec<Permission>,
    /// Changes with every change of the permissions.
    #[serde(default, skip_serializing_if = "Uuid::is_nil")]
    pub(crate) permissions_revision: Uuid,
}

impl LayerVersion {
    /// The permissions to use it, and their revision.
    #[must_use]
    pub fn policy(&self) -> (&[Permission], String) {
        (&self.permissions, self.permissions_revision.to_string())
    }
}

/// A publisher's description of a layer's version. It has no effect.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerAbout {
    /// Free text.
    pub description: String,
    /// Its license, if it was named.
    pub license: Option<String>,
    /// The runtimes that it is for.
    pub runtimes: Vec<String>,
    /// The architectures that it is for.
    pub architectures: Vec<String>,
}

/// The version of a layer that a function's configuration names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerName {
    /// The layer's name.
    pub layer: String,
    /// The version's number.
    pub version: u64,
    /// As the request names it.
    pub arn: String,
}

/// A layer of a version of a function. It stays there when the layer is deleted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsedLayer {
    /// The layer's name.
    pub layer: String,
    /// The number of the layer's version.
    pub version: u64,
    /// The zip file with its files.
    pub code: Code,
}
