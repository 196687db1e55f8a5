//! Planners: each makes a plan of a snapshot, by one system's rules.

mod dram_cached;
mod firecracker;
mod written;

pub use dram_cached::DramCached;
pub use firecracker::Firecracker;
pub use written::{ParsePlannerError, Selection, parse, select};

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;

use firn_snapshot::{MemoryLayout, PageSet};
use serde::Serialize;
use thiserror::Error;

use crate::host_facts::HostFacts;
use crate::plan::Plan;

/// What is known of an image without reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ImageFacts {
    /// Length in bytes.
    pub len: u64,
    /// Bytes that it takes on its medium: less than its length where it has holes.
    pub stored: u64,
}

impl ImageFacts {
    /// Asks the file system.
    ///
    /// # Errors
    ///
    /// What the kernel said to `fstat`.
    pub fn of(image: &File) -> io::Result<Self> {
        let metadata = image.metadata()?;
        // stat(2) counts blocks of 512 bytes, whatever the file system's own are.
        Ok(Self { len: metadata.len(), stored: metadata.blocks() * 512 })
    }
}

/// What a planner makes a plan of.
#[derive(Clone, Copy, Debug)]
pub struct PlanInput<'a> {
    /// The guest memory to restore.
    pub layout: &'a MemoryLayout,
    /// The image.
    pub image: ImageFacts,
    /// The pages of the image that are all zero.
    pub zero_map: &'a PageSet,
    /// This host.
    pub host: &'a HostFacts,
}

/// Why a planner makes no plan.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PlannerError {
    /// The host has too little memory.
    #[error(
        "{planner} keeps the whole image in DRAM: {needed} bytes, but this host has {total}; \
         use a planner that pages on demand"
    )]
    TooLittleMemory {
        /// The planner, as written.
        planner: String,
        /// Bytes that the image takes.
        needed: u64,
        /// Bytes of DRAM.
        total: u64,
    },
}

/// Makes plans by one system's rules.
pub trait Planner: Send + Sync {
    /// As it is written on the command line, with its options: `firecracker:readahead=off`.
    fn name(&self) -> String;

    /// The plan for a snapshot on this host. It validates.
    ///
    /// # Errors
    ///
    /// [`PlannerError`] when this planner cannot restore this snapshot on this host.
    fn plan(&self, input: &PlanInput<'_>) -> Result<Plan, PlannerError>;
}

#[cfg(test)]
mod tests;
