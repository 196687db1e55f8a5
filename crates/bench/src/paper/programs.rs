//! The cost of SnapBPF's programs (SnapBPF 4, "Overheads").

use firn_memory::page_cache::evict;
use firn_memory::{BpfCost, BpfCosts, BpfError};
use firn_snapshot::{OpenError, Snapshot};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::players::FrozenPlayer;
use crate::stats::Summary;

/// What BPF programs cost the start of one function.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Programs {
    /// The trace.
    pub trace: String,
    /// Ranges of pages that earlier runs brought into the page cache.
    pub ranges: u64,
    /// Making a BPF map and writing the ranges into it, in one call.
    pub map_ms: Summary,
    /// The same with a call for each range.
    pub map_each_ms: Summary,
    /// Loading and attaching the program that captures offsets, with its map.
    pub attach_ms: Summary,
}

/// Why there is no cost of programs.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ProgramsError {
    /// The snapshot cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The image cannot be evicted from the page cache.
    #[error("cannot evict the image of the player of {trace}")]
    Evict {
        /// The trace.
        trace: String,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// The profile or the image is missing.
    #[error(
        "the player of {0} has no image or no profile of the page cache; run as root, on a kernel with BPF"
    )]
    NoProfile(String),
    /// The kernel refuses the program.
    #[error(transparent)]
    Bpf(#[from] BpfError),
}

impl Programs {
    /// Measures `times` times.
    pub(super) fn measure(player: &FrozenPlayer, times: u32) -> Result<Self, ProgramsError> {
        let trace = player.trace.clone();
        let snapshot = Snapshot::open(&player.snapshot)?;
        let cached = snapshot.profile()?.and_then(|profile| profile.cached);
        let (Some(runs), Some(image)) = (cached, snapshot.image_file()) else {
            return Err(ProgramsError::NoProfile(trace));
        };
        evict(image).map_err(|source| ProgramsError::Evict { trace: trace.clone(), source })?;
        let costs = BpfCosts::new(image, snapshot.manifest().layout.pages())?;
        let measured = (0..times).map(|_| costs.measure(&runs)).collect::<Result<Vec<_>, _>>()?;
        let summary = |of: fn(&BpfCost) -> u64| {
            let all: Vec<_> = measured.iter().map(|cost| vec![of(cost) as f64 / 1e6]).collect();
            Summary::of_runs(&all)
        };
        let (map, each, attach) = (
            summary(|cost| cost.map_ns),
            summary(|cost| cost.map_each_ns),
            summary(|cost| cost.attach_ns),
        );
        let (Some(map_ms), Some(map_each_ms), Some(attach_ms)) = (map, each, attach) else {
            return Err(ProgramsError::NoProfile(trace));
        };
        Ok(Self { trace, ranges: runs.len() as u64, map_ms, map_each_ms, attach_ms })
    }
}
