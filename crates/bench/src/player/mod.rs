//! The player: a guest that replays a recorded trace and reports what it measured.
//!
//! [`freeze()`] builds the guest's memory from a trace, or from several traces of one function, and
//! freezes it before its first instruction into an ordinary snapshot. [`elf`](elf()) builds the
//! same guest for other monitors. [`firn_run::player`] thaws and records players. The guest is the
//! crate `firn_player`; this crate embeds it as a program.

mod calibrate;
mod elf;
mod freeze;
mod inputs;
mod invocations;
mod memory;
mod options;
mod page_tables;

pub use elf::{PlayerElf, PlayerElfError, elf};
pub(crate) use freeze::prepare;
pub use freeze::{FreezePlayerError, freeze, freeze_signed};
pub use inputs::{PlayerInputs, PlayerInputsError};
pub use memory::PlayerMemoryError;
pub use options::{GapFactor, Leaves, MediumModel, ParseOptionError, PlayerOptions, Repeats};

#[cfg(test)]
mod pool_tests;
#[cfg(test)]
mod profiled_tests;
#[cfg(test)]
mod record_tests;
#[cfg(test)]
mod tests;
