//! A function's versions and aliases, as they are stored.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use time::macros::format_description;
use uuid::Uuid;

/// The name of the version that can be changed.
pub(crate) const LATEST: &str = "$LATEST";

/// A function: what is common to its versions.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Function {
    /// The number of the next version that is published.
    pub(crate) next_version: u64,
    /// How many requests may be in flight at once, where that is limited.
    pub(crate) concurrency: Option<u32>,
    /// The version that can be changed.
    pub(crate) latest: Version,
}

/// One version of a function, with everything that its instances need.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Version {
    pub(crate) function: String,
    /// `$LATEST`, or a number.
    pub(crate) version: String,
    /// Changes with every change: microVMs are of one revision.
    pub(crate) revision: Uuid,
    /// In AWS Lambda's form.
    pub(crate) last_modified: String,
    pub(crate) code: Code,
    pub(crate) runtime: Runtime,
    pub(crate) handler: String,
    pub(crate) role: String,
    pub(crate) description: String,
    /// Seconds.
    pub(crate) timeout: u32,
    /// MiB.
    pub(crate) memory: u32,
    pub(crate) environment: BTreeMap<String, String>,
    /// Whether published versions are frozen.
    pub(crate) snap_start: bool,
    pub(crate) state: State,
    /// What the microVMs of this version are thawed from.
    pub(crate) snapshot: Option<Snapshot>,
}

/// A version's code.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Code {
    /// SHA-256 of the zip file, in hexadecimal.
    pub(crate) sha256: String,
    /// Of the zip file, in bytes.
    pub(crate) size: u64,
}

/// What runs a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Runtime {
    /// Debian 12's Python with `awslambdaric`.
    #[serde(rename = "python3.11")]
    Python311,
    /// The function's own `bootstrap`.
    #[serde(rename = "provided.al2023")]
    Provided2023,
    /// The same.
    #[serde(rename = "provided.al2")]
    Provided2,
}

/// Whether a version can be invoked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum State {
    /// It is being frozen.
    Pending,
    Active,
    /// It could not be frozen.
    Failed {
        reason: String,
    },
}

/// A version's snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Snapshot {
    pub(crate) place: SnapshotPlace,
    /// What its image takes, in bytes.
    pub(crate) bytes: u64,
    /// The planner that it is thawed by, where the function names none.
    pub(crate) planner: String,
}

/// Where a version's snapshot is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum SnapshotPlace {
    /// A directory of this name among the daemon's snapshots.
    Directory(String),
    /// A snapshot of this name in the daemon's pool.
    Pool(String),
}

/// Another name for a version.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Alias {
    pub(crate) version: String,
    pub(crate) description: String,
    pub(crate) revision: Uuid,
}

/// The time, in the form of `LastModified`.
pub(crate) fn now() -> String {
    let form = format_description!(
        "[year]-[month]-[day]T[hour]:[minute]:[second].[subsecond digits:3]+0000"
    );
    // The form takes every time that a clock can tell.
    OffsetDateTime::now_utc().format(form).unwrap_or_default()
}

/// A revision that none had before.
pub(crate) fn revision() -> Uuid {
    Uuid::new_v4()
}
