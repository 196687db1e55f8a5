//! The player: a guest without an operating system, in ring 3 from its first instruction, that repeats the page
//! accesses of a recorded function and checks what it reads.
//!
//! This crate is two things. [`format`](mod@format) is what the builder of its memory (`firn_bench::player`) and the guest agree on.
//! [`run`] is the guest; `main.rs` wraps it into a freestanding program, which `crates/bench/build.rs` builds.
#![no_std]

mod check;
mod console;
pub mod format;
mod guest;
mod replay;

pub use guest::{end, run};
