//! The player: the guest that repeats a trace, from trace to report.
//!
//! [`freeze`] makes the guest's memory from a trace, or from several of one function, and freezes
//! it before its first instruction: an ordinary snapshot. [`replay`] thaws one by any planner, runs
//! it to its end and reports. [`elf`](elf()) makes the same guest for other monitors. The guest is
//! the crate `firn_player`, which this crate carries as a program.

mod elf;
mod freeze;
mod inputs;
mod memory;
mod options;
mod page_tables;
mod record;
mod registers;
mod replay;
mod report;

pub use elf::{PlayerElf, PlayerElfError, elf};
pub use freeze::{FreezePlayerError, freeze};
pub use inputs::{PlayerInputs, PlayerInputsError};
pub use memory::PlayerMemoryError;
pub use options::{GapFactor, Leaves, ParseOptionError, PlayerOptions};
pub use record::{RecordReplayError, record};
pub use replay::{Clock, ReplayError, replay};
pub use report::{PlayerReport, PlayerTimes, ReplicaCost};

use firn_snapshot::Manifest;

/// The handler in the manifest of a player's snapshot. No function has it: a function's is
/// `module.attribute`.
const HANDLER: &str = "player";

/// The names of the traces that a snapshot's player can repeat; `None` where the snapshot is not of
/// a player.
#[must_use]
pub fn traces_of(manifest: &Manifest) -> Option<Vec<&str>> {
    let function = manifest.description.function.as_ref()?;
    (function.handler == HANDLER && manifest.description.disks.is_empty())
        .then(|| function.name.split(inputs::SEPARATOR).collect())
}

#[cfg(test)]
mod pool_tests;
#[cfg(test)]
mod profiled_tests;
#[cfg(test)]
mod record_tests;
#[cfg(test)]
mod tests;
