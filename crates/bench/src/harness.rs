//! What every measurement needs of its caller.

use std::path::PathBuf;

use crate::batch::Interrupt;
use crate::progress::Progress;

/// What every measurement needs of its caller.
#[derive(Clone)]
pub struct Harness<'a> {
    /// The `firn-monitor` program: each microVM is a process of it.
    pub program: PathBuf,
    /// Stops the measurement on a signal.
    pub interrupt: &'a Interrupt,
    /// Receives the progress.
    pub progress: &'a dyn Progress,
}
