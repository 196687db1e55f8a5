//! The player, thawed: the guest that repeats the page accesses of a recorded function, and checks
//! what it reads.
//!
//! The guest is the crate `firn_player`. Its snapshot is an ordinary one. A register selects which
//! of its traces it replays; it reports through a window of registers and ends by a triple fault.

#[cfg(feature = "player-agent")]
pub(crate) mod agent;
mod registers;
mod replay;

use firn_snapshot::Manifest;
use firn_vmm::{HostConfig, MmioWindow};

pub(crate) use replay::Player;
pub use replay::replay;

/// The handler in the manifest of a player's snapshot. No function has it: a function's is
/// `module.attribute`.
pub const HANDLER: &str = "player";

/// What separates the names of traces in the manifest of a player's snapshot.
pub const SEPARATOR: char = ',';

/// The names of the traces that a snapshot's player can repeat; `None` where the snapshot is not of
/// a player.
#[must_use]
pub fn traces_of(manifest: &Manifest) -> Option<Vec<&str>> {
    let function = manifest.description.function.as_ref()?;
    (function.handler == HANDLER && manifest.description.disks.is_empty())
        .then(|| function.name.split(SEPARATOR).collect())
}

/// What a player's microVM uses of its host: windows for its reports. It has no devices.
#[must_use]
pub fn host(windows: Vec<MmioWindow>) -> HostConfig {
    HostConfig { windows, ..HostConfig::default() }
}
