//! Shared parts of the end-to-end tests: a [`World`] to run the real `firn` in, functions with
//! known answers, and one frozen snapshot of each function.
//!
//! A world is a directory with a run directory, temporary files and a place for a test's own files.
//! When a world is dropped, no file and no process of firn may remain: every test checks
//! that.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that cannot go on fails"
)]

mod allocator;
mod at_once;
mod blocked_loader;
mod collector;
mod compared;
mod daemon;
mod frozen;
mod function;
mod monitor;
mod outcome;
mod resources;
mod world;

pub use allocator::{FreeLists, free_lists};
pub use at_once::at_once;
pub use blocked_loader::BlockedLoader;
pub use collector::Collector;
pub use compared::check_memory;
pub use daemon::{
    Daemon, Reply, clients, python, reply, shell, try_reply, try_send, zip_of, zip_of_files,
};
pub use frozen::{client, frozen, profiled, workshop};
pub use function::{
    Function, HELLO, JSON, LIGHT, MMAP, READ_LIST, folder, together, workshop_folder,
};
pub use monitor::Monitor;
pub use outcome::Outcome;
pub use resources::Resources;
pub use world::{Firn, World, cache};
