//! The player: a guest without an operating system, in ring 3 from its first instruction, that
//! replays the page accesses of a recorded function and checks the data that it reads.
//!
//! This crate has two parts. [`format`](mod@format) is the interface between the builder of the
//! player's memory (`firn_bench::player`) and the guest. [`run`] is the guest; `main.rs` wraps it
//! into a freestanding program, which `crates/bench/build.rs` builds.
#![no_std]

mod check;
mod console;
pub mod format;
mod guest;
mod replay;
mod time;

pub use guest::{end, run};
