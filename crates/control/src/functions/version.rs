//! A function's versions and aliases, in the form in which the database stores them.

use std::collections::BTreeMap;
use std::path::PathBuf;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use firn_memory::planners;
use firn_run::RuntimeKind;
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use time::macros::format_description;
use uuid::Uuid;

use super::{PLANNER_VARIABLE, Target, UsedLayer};

/// The name of the unpublished version, the only one that can be changed.
pub const LATEST: &str = "$LATEST";

/// Size of `/tmp` unless a function sets another, MiB (AWS Lambda's default).
pub(super) const DEFAULT_STORAGE: u32 = 512;
/// What a guest's system keeps on its disk, at most, bytes.
const OWN_STORAGE: u64 = 16 << 20;

fn default_storage() -> u32 {
    DEFAULT_STORAGE
}

/// A function: what all its versions have in common.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct FunctionRecord {
    /// Distinguishes the function from earlier ones of the same name.
    #[serde(default)]
    pub(crate) id: Uuid,
    /// The number of the next published version.
    pub(crate) next_version: u64,
    /// The limit of requests in flight, if the function has one.
    pub(crate) concurrency: Option<u32>,
    /// The tenant that has created it, if there was one.
    #[serde(default)]
    pub(crate) owner: Option<String>,
    /// The unpublished version.
    pub(crate) latest: Version,
}

/// One version of a function, with everything that its microVMs need.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Version {
    /// The function's name.
    pub function: String,
    /// `$LATEST`, or a number.
    pub version: String,
    /// Changes with every change of the version. A microVM belongs to one revision.
    pub revision: Uuid,
    /// UTC, as `2026-11-21T17:00:00.000+0000`.
    pub last_modified: String,
    /// The zip file with the function's files.
    pub code: Code,
    /// Its layers, in their order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<UsedLayer>,
    /// What runs the function.
    pub runtime: Runtime,
    /// The entry point, in the form that the runtime expects.
    pub handler: String,
    /// An ARN that the API stores and returns; the daemon does not use it.
    pub role: String,
    /// Free text.
    pub description: String,
    /// Time limit of a request, seconds.
    pub timeout: u32,
    /// Memory of the function, MiB.
    pub memory: u32,
    /// Size of `/tmp`, MiB.
    #[serde(default = "default_storage")]
    pub storage: u32,
    /// Environment variables of the function.
    pub environment: BTreeMap<String, String>,
    /// Whether the daemon freezes a snapshot of each published version.
    pub snap_start: bool,
    /// Whether the version can be invoked.
    pub state: VersionState,
    /// Why the version, which is pending, is not active yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<String>,
    /// The tenant that owns its function, of a published version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) owner: Option<String>,
    /// The snapshot that microVMs of this version are thawed from.
    pub(crate) snapshot: Option<VersionSnapshot>,
}

impl Version {
    /// The planner that the function's configuration names, if it does.
    pub(crate) fn named_planner(&self) -> Option<&str> {
        self.environment.get(PLANNER_VARIABLE).map(String::as_str)
    }

    /// Size of the disk of its guests, bytes: `/tmp`, the files of the function and its layers, and
    /// the file system's own blocks.
    pub(crate) fn disk(&self) -> u64 {
        let tmp = u64::from(self.storage) << 20;
        // An ext4 has an inode of 256 bytes for each 16 KiB, which is less than a thirty-second.
        let own = tmp / 32 + OWN_STORAGE;
        let files = self.codes().map(|code| code.unpacked).sum();
        tmp.saturating_add(own).saturating_add(files).next_multiple_of(1 << 20)
    }

    /// Its zip files: the function's, then those of its layers.
    pub(crate) fn codes(&self) -> impl Iterator<Item = &Code> {
        std::iter::once(&self.code).chain(self.layers.iter().map(|layer| &layer.code))
    }

    /// Whether its planner needs a recording of its snapshot.
    pub(crate) fn needs_recording(&self) -> bool {
        let planner = self.named_planner().map(planners::parse);
        matches!(planner, Some(Ok(planner)) if planner.uses_profile())
    }
}

/// A version's code.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Code {
    /// SHA-256 of the zip file, in hexadecimal.
    pub sha256: String,
    /// Size of the zip file, bytes.
    pub size: u64,
    /// Space that its files take in a guest, bytes.
    #[serde(default)]
    pub unpacked: u64,
    /// Size of its files together, bytes.
    #[serde(default)]
    pub content: u64,
}

impl Code {
    /// SHA-256 of the zip file, in base64.
    #[must_use]
    pub fn sha256_base64(&self) -> String {
        let digits = self.sha256.as_bytes().chunks_exact(2);
        let bytes: Vec<u8> = digits
            .filter_map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok())
            .collect();
        STANDARD.encode(bytes)
    }
}

/// What runs a function. The serialized form is AWS Lambda's name of the runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Runtime {
    /// Debian 12's Python with `awslambdaric`.
    #[serde(rename = "python3.11")]
    Python311,
    /// Debian 13's Python with `awslambdaric`.
    #[serde(rename = "python3.13")]
    Python313,
    /// Debian 13's Node.js.
    #[serde(rename = "nodejs20.x")]
    Nodejs20,
    /// Debian 13's OpenJDK 21 with AWS Lambda's runtime interface client.
    #[serde(rename = "java21")]
    Java21,
    /// The function's own `bootstrap` program.
    #[serde(rename = "provided.al2023")]
    Provided2023,
    /// The same as [`Runtime::Provided2023`], under an older name.
    #[serde(rename = "provided.al2")]
    Provided2,
}

impl Runtime {
    /// Its name in AWS Lambda, if it is a runtime of a language.
    pub(crate) fn language(self) -> Option<&'static str> {
        match self {
            Self::Python311 => Some("python3.11"),
            Self::Python313 => Some("python3.13"),
            Self::Nodejs20 => Some("nodejs20.x"),
            Self::Java21 => Some("java21"),
            Self::Provided2023 | Self::Provided2 => None,
        }
    }

    /// The image that it runs on, if that is another one than the daemon's.
    pub(crate) fn image(self) -> Option<&'static str> {
        self.language().filter(|_| self != Self::Python311)
    }

    /// How the agent runs it.
    pub(crate) fn kind(self) -> RuntimeKind {
        match self {
            Self::Python311 | Self::Python313 => RuntimeKind::Python,
            Self::Nodejs20 | Self::Java21 => RuntimeKind::Image,
            Self::Provided2023 | Self::Provided2 => RuntimeKind::Provided,
        }
    }
}

/// Whether a version can be invoked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum VersionState {
    /// The daemon is freezing its snapshot.
    Pending,
    /// It can be invoked.
    Active,
    /// The daemon could not freeze its snapshot.
    Failed {
        /// The error and its causes.
        reason: String,
    },
}

/// A version's snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct VersionSnapshot {
    /// Where it is stored.
    pub(crate) place: SnapshotPlace,
    /// Size of its stored image, bytes.
    pub(crate) bytes: u64,
    /// The planner that thaws it.
    pub(crate) planner: String,
    /// The root image that it was frozen on. `None` in a record of an earlier daemon: the image
    /// that the version runs on now.
    #[serde(default)]
    pub(crate) root: Option<PathBuf>,
    /// Whether the guest has a network device. It had none under earlier daemons.
    #[serde(default)]
    pub(crate) network: bool,
}

/// The name of a version's snapshot.
pub(crate) fn snapshot_name(version: &Version) -> String {
    format!("{}-{}-{}", version.function, version.version, version.revision.simple())
}

/// Whether a name has the form of [`snapshot_name`].
pub(crate) fn is_snapshot_name(name: &str) -> bool {
    let mut parts = name.rsplitn(3, '-');
    let revision = parts.next().is_some_and(|id| id.len() == 32 && Uuid::try_parse(id).is_ok());
    let number = parts.next().is_some_and(|number| number.parse::<u64>().is_ok());
    revision && number && parts.next().is_some_and(|name| Target::new(name, None).is_ok())
}

/// Where a version's snapshot is stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum SnapshotPlace {
    /// In the directory of this name among the daemon's snapshots.
    Directory(String),
    /// In the daemon's pool, under this name.
    Pool(String),
}

/// A second name for a version.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Alias {
    /// The version that it names.
    pub version: String,
    /// Another version that gets a part of the requests, and that part, 0 to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub additional: Option<(String, f64)>,
    /// Free text.
    pub description: String,
    /// Changes with every change of the alias.
    pub revision: Uuid,
}

impl Alias {
    /// The version that serves a request. `draw` is a random number of the request, from 0 to less
    /// than 1.
    pub(crate) fn into_version(self, draw: f64) -> String {
        match self.additional {
            Some((version, part)) if draw < part => version,
            _ => self.version,
        }
    }

    /// Whether requests to the alias can be served by `version`.
    #[must_use]
    pub fn names(&self, version: &str) -> bool {
        let additional = self.additional.as_ref();
        self.version == version || additional.is_some_and(|(other, _)| other == version)
    }
}

/// The current time, in the form of [`Version::last_modified`].
pub(crate) fn timestamp() -> String {
    let form = format_description!(
        "[year]-[month]-[day]T[hour]:[minute]:[second].[subsecond digits:3]+0000"
    );
    // Formatting fails only for years outside 0 to 9999.
    OffsetDateTime::now_utc().format(form).unwrap_or_default()
}

/// A new, unique revision.
pub(crate) fn new_revision() -> Uuid {
    Uuid::new_v4()
}

#[cfg(test)]
#[path = "version_tests.rs"]
mod tests;
