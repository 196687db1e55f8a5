//! `firn-firecracker` over its socket, with the player's ELF file as the kernel.
#![allow(clippy::panic, clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod diffs;
mod flags;
mod handler;
mod instance;
mod isolation;
mod load_times;
mod player;
mod pools;
mod process;
mod records;
mod refusals;
mod resources;
mod snapshots;
mod stock;
mod taps;
