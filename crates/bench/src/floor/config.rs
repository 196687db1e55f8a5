//! The comparison of the player with the loop, as `firn bench floor` runs it.

use std::path::{Path, PathBuf};

use firn_base::GuestRange;
use tempfile::TempDir;
use thiserror::Error;

use firn_memory::Leaf;
use firn_snapshot::Destination;
use firn_vmm::KVM_DEVICE;

use super::FloorAccess;
use super::compare::{CompareError, FloorComparison, FloorResults};
use crate::harness::Harness;
use crate::host::{Host, HostError};
use crate::medium::{self, MediumError, PrivateMount};
use crate::player::{
    FreezePlayerError, GapFactor, Leaves, PlayerInputs, PlayerInputsError, PlayerOptions, freeze,
};
use crate::progress::Steps;
use crate::stats::Summary;
use crate::text::{number, table};
use crate::traces::{LoadTraceError, load};

/// Leaves of the guests' page tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FloorLeaves {
    /// 4 KiB.
    #[default]
    Small,
    /// 2 MiB; the image then lies on a tmpfs of huge pages.
    Large,
}

/// A comparison of the player with the loop.
#[derive(Clone, Debug)]
pub struct FloorConfig {
    /// The number of pairs: one run of the loop and one of the player.
    pub pairs: u32,
    /// Bytes of memory to touch. By default it is 64 MiB with leaves of 4 KiB and 1 GiB with leaves
    /// of 2 MiB, which take milliseconds.
    pub memory: Option<u64>,
    /// Leaves of both guests' page tables.
    pub leaves: FloorLeaves,
    /// How both touch a page.
    pub access: FloorAccess,
    /// The directory in which the player's snapshot is made, with leaves of 4 KiB. By default it is
    /// the directory for temporary files.
    pub directory: Option<PathBuf>,
}

impl Default for FloorConfig {
    fn default() -> Self {
        Self {
            pairs: 30,
            memory: None,
            leaves: FloorLeaves::Small,
            access: FloorAccess::Read,
            directory: None,
        }
    }
}

/// Why the player was not compared with the loop.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RunFloorError {
    /// There is no directory for the snapshot.
    #[error(transparent)]
    Medium(#[from] MediumError),
    /// The trace cannot be loaded.
    #[error(transparent)]
    Trace(#[from] LoadTraceError),
    /// A player cannot replay the trace.
    #[error(transparent)]
    Inputs(#[from] PlayerInputsError),
    /// The player cannot be frozen.
    #[error(transparent)]
    Freeze(#[from] FreezePlayerError),
    /// The host cannot be described.
    #[error(transparent)]
    Host(#[from] HostError),
    /// A run failed.
    #[error(transparent)]
    Compare(#[from] CompareError),
}

/// The directory of the snapshot, which is removed on drop.
enum Place {
    Directory(TempDir),
    Huge(PrivateMount),
}

impl Place {
    fn path(&self) -> &Path {
        match self {
            Self::Directory(directory) => directory.path(),
            Self::Huge(tmpfs) => tmpfs.path(),
        }
    }
}

impl FloorConfig {
    /// Freezes a player of sequential accesses, and compares it with the loop.
    ///
    /// # Errors
    ///
    /// [`RunFloorError`].
    pub fn run(&self, harness: &Harness<'_>) -> Result<FloorResults, RunFloorError> {
        let trace = match self.access {
            FloorAccess::Read => "sequential-read",
            FloorAccess::Write => "sequential-write",
        };
        let memory = self.memory.unwrap_or(match self.leaves {
            FloorLeaves::Small => 64 << 20,
            FloorLeaves::Large => 1 << 30,
        });
        let inputs = PlayerInputs::new(vec![load(&format!("{trace}:{memory}"))?])?;
        let (place, leaves, leaf) = match self.leaves {
            FloorLeaves::Small => {
                let directory = medium::directory(self.directory.as_deref())?;
                (Place::Directory(directory), Leaves::All4K, Leaf::Size4K)
            }
            FloorLeaves::Large => {
                (Place::Huge(PrivateMount::huge_tmpfs()?), Leaves::All2M, Leaf::Size2M)
            }
        };
        let host = Host::of(place.path())?;
        let snapshot = place.path().join("player");
        let options = PlayerOptions { leaves, gaps: GapFactor::NONE, ..PlayerOptions::default() };
        let destination = Destination::Directory(snapshot.clone());
        freeze(&inputs, &options, KVM_DEVICE.as_ref(), destination, true)?;
        let comparison = FloorComparison {
            program: harness.program.clone(),
            snapshot,
            range: GuestRange { start: 0, len: memory },
            access: self.access,
            leaf,
            planner: "firecracker".to_owned(),
            pairs: self.pairs,
        };
        let mut steps = Steps::begin(harness.progress, u64::from(self.pairs));
        Ok(comparison.run(host, harness.interrupt, || steps.advance("pairs"))?)
    }

    /// The results as text for a terminal.
    #[must_use]
    pub fn text(&self, results: &FloorResults) -> String {
        const HEAD: [&str; 8] =
            ["ns per page", "median", "p95", "min", "max", "spread", "KVM faults", "2 MiB leaves"];
        let row = |name: &str, summary: Summary, which: usize| {
            vec![
                name.to_owned(),
                number(summary.median),
                number(summary.p95),
                number(summary.min),
                number(summary.max),
                format!("{:.1} %", summary.spread * 100.0),
                results.kvm_page_faults[which].to_string(),
                results.kvm_pages_2m[which].to_string(),
            ]
        };
        let rows = [
            row("loop", results.floor_ns_per_page, 0),
            row("player", results.player_ns_per_page, 1),
        ];
        let leaves = match self.leaves {
            FloorLeaves::Small => "4 KiB",
            FloorLeaves::Large => "2 MiB",
        };
        format!(
            "{}\n{} pages, {:?}, leaves of {leaves}, {}, {} pairs\n{}\nplayer / loop: {}\nplayer - loop: {} ns per page",
            results.host.line(),
            results.pages,
            self.access,
            results.planner,
            results.ratio.pairs,
            table(&HEAD, &rows),
            results.ratio,
            results.difference_ns_per_page
        )
    }
}
