//! The tiers of the study on this host: real, emulated or modelled.

use std::path::{Path, PathBuf};

use procfs::{Current, Meminfo};
use serde::{Deserialize, Serialize};

use super::experiments::TierName;
use crate::cache::Cache;
use crate::medium::PrivateMount;
use crate::player::MediumModel;
use crate::tier::{
    DiskParameters, EmulateError, EmulatedDisk, ProbeError, Throttle, Tier, disk_latency,
};

/// Latency of DRAM in the paper's table 1, ns.
const DRAM_LATENCY_NS: f64 = 80.0;
/// Latency of persistent memory, ns.
const DCPM_LATENCY_NS: f64 = 300.0;
/// Bandwidths of DRAM and of persistent memory, bytes in a ns.
const DRAM_BANDWIDTH: f64 = 23.0;
const DCPM_BANDWIDTH: f64 = 6.8;
const PAGE: f64 = 4096.0;
const NVME: DiskParameters = DiskParameters {
    latency_ns: 10e3,
    read_bandwidth: 2_200_000_000,
    write_bandwidth: 2_000_000_000,
};
const SSD: DiskParameters =
    DiskParameters { latency_ns: 180e3, read_bandwidth: 500_000_000, write_bandwidth: 500_000_000 };
/// Readers at which the paper finds the SSD's rate of random reads saturated (4.2.1).
const SSD_DEPTH: u32 = 4;

/// A tier of the study, and what it was on this host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TierUse {
    /// Its name.
    pub name: String,
    /// Whether it is the medium that it is named after.
    pub how: Realisation,
    /// What it was.
    pub description: String,
    /// What a disk is emulated with, from the paper's table 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parameters: Option<DiskParameters>,
    /// The latency of the emulated disk without limits, ns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own_latency_ns: Option<f64>,
    /// Its limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub throttle: Option<Throttle>,
    /// A guest's cold fault on it without limits and with them: the median over the runs, ns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest_fault_ns: Option<(f64, f64)>,
    /// The model of a byte-addressable medium.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<MediumModel>,
}

impl TierUse {
    /// A tier without limits and without a model.
    fn new(name: &str, how: Realisation, description: &str) -> Self {
        Self {
            name: name.to_owned(),
            how,
            description: description.to_owned(),
            parameters: None,
            own_latency_ns: None,
            throttle: None,
            guest_fault_ns: None,
            model: None,
        }
    }
}

/// Whether a tier is the medium that it is named after.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Realisation {
    /// It is.
    Real,
    /// It is another medium with limits.
    Emulated,
    /// It is DRAM, and the player spins for what the medium takes longer.
    Modelled,
}

impl std::fmt::Display for Realisation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Real => "real",
            Self::Emulated => "emulated",
            Self::Modelled => "modelled",
        })
    }
}

/// A tier while it is measured.
pub(super) struct ActiveTier {
    pub(super) used: TierUse,
    place: Place,
}

enum Place {
    Disk(EmulatedDisk),
    Memory(PrivateMount),
    Directory(PathBuf),
}

/// Why a tier is left out.
#[derive(Debug, thiserror::Error)]
pub(super) enum ActivateError {
    #[error(transparent)]
    Emulate(#[from] EmulateError),
    #[error(transparent)]
    Probe(#[from] ProbeError),
    #[error("cannot mount a tmpfs: run as root (CAP_SYS_ADMIN)")]
    Tmpfs(#[source] std::io::Error),
    #[error("{0} is no file system: snapshots are measured in directories")]
    NoDirectory(String),
}

impl ActiveTier {
    /// Sets a tier of the paper up. `scales` is whether several microVMs start at once on it.
    pub(super) fn of_paper(name: TierName, scales: bool) -> Result<Self, ActivateError> {
        let named = |how, description: &str| TierUse::new(name.name(), how, description);
        let memory = || {
            let mount = PrivateMount::tmpfs(c"huge=never,size=90%").map_err(ActivateError::Tmpfs);
            mount.map(Place::Memory)
        };
        let (parameters, depth) = match name {
            TierName::Dram => {
                let used = named(Realisation::Real, "tmpfs in pages of 4 KiB");
                return Ok(Self { used, place: memory()? });
            }
            TierName::Dcpm => {
                let load_ns = DCPM_LATENCY_NS - DRAM_LATENCY_NS;
                let copy_ns = load_ns + PAGE / DCPM_BANDWIDTH - PAGE / DRAM_BANDWIDTH;
                let used = TierUse {
                    model: Some(MediumModel { load_ns, copy_ns }),
                    ..named(
                        Realisation::Modelled,
                        "tmpfs in pages of 4 KiB; the player spins for each load from a page that is never written, \
                         and for each copied page; bandwidth has no limit",
                    )
                };
                return Ok(Self { used, place: memory()? });
            }
            TierName::Nvme => (NVME, 1),
            TierName::Ssd => (SSD, if scales { SSD_DEPTH } else { 1 }),
        };
        let disk = EmulatedDisk::make(available() / 2)?;
        let own_latency_ns = disk_latency(disk.path())?.median;
        let throttle = parameters.throttle(own_latency_ns, depth);
        let used = TierUse {
            parameters: Some(parameters),
            own_latency_ns: Some(own_latency_ns),
            throttle: Some(throttle),
            ..named(
                Realisation::Emulated,
                "ext4 on a loop device over memory, limited in the root blkio group",
            )
        };
        Ok(Self { used, place: Place::Disk(disk) })
    }

    /// A tier of the user's list.
    pub(super) fn real(tier: &Tier) -> Result<Self, ActivateError> {
        let directory = tier.directory();
        let directory =
            directory.ok_or_else(|| ActivateError::NoDirectory(tier.medium.to_string()))?;
        tier.check().map_err(ProbeError::from)?;
        let used = TierUse::new(&tier.name, Realisation::Real, &tier.medium.to_string());
        Ok(Self { used, place: Place::Directory(directory) })
    }

    /// The directory for snapshots.
    pub(super) fn path(&self) -> &Path {
        match &self.place {
            Place::Disk(disk) => disk.path(),
            Place::Memory(mount) => mount.path(),
            Place::Directory(path) => path,
        }
    }

    /// The page cache before a run. tmpfs is its own.
    pub(super) fn cache(&self) -> Cache {
        match &self.place {
            Place::Memory(_) => Cache::Cached,
            Place::Disk(_) | Place::Directory(_) => Cache::Cold,
        }
    }

    /// Sets or lifts the limits.
    pub(super) fn limit(&self, on: bool) -> Result<(), EmulateError> {
        match (&self.place, self.used.throttle) {
            (Place::Disk(disk), Some(throttle)) => {
                disk.throttle(if on { throttle } else { Throttle::NONE })
            }
            _ => Ok(()),
        }
    }
}

/// Bytes of DRAM that can be used now.
pub(super) fn available() -> u64 {
    let memory = Meminfo::current().ok().and_then(|memory| memory.mem_available);
    memory.unwrap_or(4 << 30)
}
