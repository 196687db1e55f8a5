//! The tiers of the study on this host: real, emulated or modelled.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::thread::available_parallelism;

use procfs::{Current, Meminfo};
use serde::{Deserialize, Serialize};

use super::experiments::TierName;
use crate::cache::Cache;
use crate::medium::PrivateMount;
use crate::player::MediumModel;
use crate::text::number;
use crate::tier::{
    DiskParameters, EmulateError, EmulatedDisk, ProbeError, ReadTimes, Tier, TierError, read_times,
};

const PAGE: f64 = 4096.0;
/// The paper's table 1.
const DRAM: MemoryParameters =
    MemoryParameters { latency_ns: 80.0, read_bandwidth: 23_000_000_000, in_table_1: true };
const DCPM: MemoryParameters =
    MemoryParameters { latency_ns: 300.0, read_bandwidth: 6_800_000_000, in_table_1: true };
/// CXL memory is not in the paper. The latency is the middle of 170 to 250 ns (Maruf et al., TPP,
/// ASPLOS '23, figure 2). A copy is as fast as from DRAM: the link is faster than the module behind
/// it, which is one of table 1.
const CXL: MemoryParameters = MemoryParameters { latency_ns: 210.0, in_table_1: false, ..DRAM };
const NVME: DiskParameters = DiskParameters {
    latency_ns: 10e3,
    read_bandwidth: 2_200_000_000,
    write_bandwidth: 2_000_000_000,
    saturating_readers: None,
};
const SSD: DiskParameters = DiskParameters {
    latency_ns: 180e3,
    read_bandwidth: 500_000_000,
    write_bandwidth: 500_000_000,
    saturating_readers: Some(4),
};

/// Published figures of a medium.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Parameters {
    /// A disk of the paper's table 1.
    Disk(DiskParameters),
    /// A byte-addressable memory.
    Memory(MemoryParameters),
}

/// Published figures of a memory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemoryParameters {
    /// Time of a load, ns.
    pub latency_ns: f64,
    /// Bytes read in a second.
    pub read_bandwidth: u64,
    /// Whether they are of the paper's table 1.
    pub in_table_1: bool,
}

impl MemoryParameters {
    /// What a load and the copy of a page take longer than on DRAM.
    fn model(self) -> MediumModel {
        let copy = |memory: Self| PAGE * 1e9 / memory.read_bandwidth as f64;
        let load_ns = self.latency_ns - DRAM.latency_ns;
        MediumModel { load_ns, copy_ns: load_ns + copy(self) - copy(DRAM) }
    }
}

impl std::fmt::Display for Parameters {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let gigabytes = |bytes: u64| number(bytes as f64 / 1e9);
        match self {
            Self::Disk(disk) => {
                let (us, rate) = (number(disk.latency_ns / 1e3), gigabytes(disk.read_bandwidth));
                write!(f, "table 1: {us} µs, {rate} GB/s")
            }
            Self::Memory(memory) => {
                let source = if memory.in_table_1 { "table 1" } else { "not from table 1" };
                let rate = gigabytes(memory.read_bandwidth);
                write!(f, "{source}: {} ns, {rate} GB/s", number(memory.latency_ns))
            }
        }
    }
}

/// A tier of the study, and what it was on this host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TierUse {
    /// Its name.
    pub name: String,
    /// Whether it is the medium that it is named after.
    pub how: Realisation,
    /// What it was.
    pub description: String,
    /// Published figures of the medium that it is named after; none for a tier of the user's list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parameters: Option<Parameters>,
    /// The measured latency of a disk without delays: 4 KiB, one reader, ns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own_latency_ns: Option<f64>,
    /// What 4 KiB more of the same read take there, ns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own_page_ns: Option<f64>,
    /// Guests' cold faults on it without delays and with them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest_fault: Option<GuestFault>,
    /// The model of a byte-addressable medium.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<MediumModel>,
}

/// Cold faults of guests that read at once from an emulated disk.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct GuestFault {
    /// Guests at once.
    pub readers: u32,
    /// Time of a fault without delays, the median over the guests of all runs, ns.
    pub without_ns: f64,
    /// The same with delays.
    pub with_ns: f64,
}

impl TierUse {
    /// A tier without delays and without a model.
    pub(super) fn new(name: &str, how: Realisation, description: &str) -> Self {
        Self {
            name: name.to_owned(),
            how,
            description: description.to_owned(),
            parameters: None,
            own_latency_ns: None,
            own_page_ns: None,
            guest_fault: None,
            model: None,
        }
    }

    /// Whether measurements on both are comparable.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        let own = |tier: &Self| (tier.how, tier.parameters, tier.model);
        self.name == other.name && own(self) == own(other)
    }

    /// Name, kind and all parameters in one line.
    pub(super) fn summary(&self) -> String {
        let parts =
            [self.parameters.map(|known| known.to_string()), self.measured(), self.changed()];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        format!("{}: {} ({})", self.name, self.how, parts.join("; "))
    }

    /// By how much reads are delayed while so many microVMs read at once; `None` where they are
    /// not.
    pub(super) fn delay_for(&self, microvms: u32) -> Option<ReadTimes> {
        let Some(Parameters::Disk(disk)) = self.parameters else { return None };
        let own = ReadTimes {
            first_page_ns: self.own_latency_ns.unwrap_or_default(),
            further_page_ns: self.own_page_ns.unwrap_or_default(),
        };
        Some(disk.busy(microvms, processors()).beyond(own))
    }

    /// The measured latency.
    pub(super) fn measured(&self) -> Option<String> {
        self.own_latency_ns.map(|ns| format!("measured {} µs without delays", number(ns / 1e3)))
    }

    /// What makes it slower than the medium that it is on: delays, or a model.
    pub(super) fn changed(&self) -> Option<String> {
        let delays = self.delay_for(1).map(|_| "each read delayed to this".to_owned());
        let model = self.model.map(|model| {
            let (load, copy) = (number(model.load_ns), number(model.copy_ns));
            format!("{load} ns more a load, {copy} ns more a copied page, no limit of bandwidth")
        });
        delays.or(model)
    }
}

/// Whether a tier is the medium that it is named after.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Realisation {
    /// It is.
    Real,
    /// It is another medium with delays.
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

/// Where the snapshots of a tier are. Tiers share media.
#[derive(Clone)]
enum Place {
    Disk(Rc<EmulatedDisk>),
    Memory(Rc<PrivateMount>),
    Directory(PathBuf),
}

/// The media of this host that stand for those of the paper, made when they are first needed. All
/// memories are one tmpfs, and all disks one device, whose delays change from run to run.
#[derive(Default)]
pub(super) struct Media {
    memory: Option<Rc<PrivateMount>>,
    /// The device, and what reads take without delays.
    disk: Option<(Rc<EmulatedDisk>, ReadTimes)>,
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
    #[error(transparent)]
    Tier(#[from] TierError),
}

impl Media {
    fn memory(&mut self) -> Result<Place, ActivateError> {
        let memory = match &self.memory {
            Some(memory) => memory,
            None => {
                let mount = PrivateMount::tmpfs(c"huge=never,size=90%");
                self.memory.insert(Rc::new(mount.map_err(ActivateError::Tmpfs)?))
            }
        };
        Ok(Place::Memory(memory.clone()))
    }

    fn disk(&mut self) -> Result<(Rc<EmulatedDisk>, ReadTimes), ActivateError> {
        if let Some(disk) = &self.disk {
            return Ok(disk.clone());
        }
        let disk = EmulatedDisk::make(available() / 2)?;
        let own = read_times(disk.path())?;
        Ok(self.disk.insert((Rc::new(disk), own)).clone())
    }

    /// Sets a tier of the paper up.
    pub(super) fn of_paper(&mut self, name: TierName) -> Result<ActiveTier, ActivateError> {
        let parameters = match name {
            TierName::Dram => return self.memory_tier(name, DRAM),
            TierName::Dcpm => return self.memory_tier(name, DCPM),
            TierName::Cxl => return self.memory_tier(name, CXL),
            TierName::Nvme => NVME,
            TierName::Ssd => SSD,
        };
        let (disk, own) = self.disk()?;
        let used = TierUse {
            parameters: Some(Parameters::Disk(parameters)),
            own_latency_ns: Some(own.first_page_ns),
            own_page_ns: Some(own.further_page_ns),
            ..TierUse::new(
                name.name(),
                Realisation::Emulated,
                "ext4 on a compressed disk in memory (zram)",
            )
        };
        Ok(ActiveTier { used, place: Place::Disk(disk) })
    }

    fn memory_tier(
        &mut self,
        name: TierName,
        parameters: MemoryParameters,
    ) -> Result<ActiveTier, ActivateError> {
        let (how, model, description) = if name == TierName::Dram {
            (Realisation::Real, None, "tmpfs in pages of 4 KiB")
        } else {
            let description = "tmpfs in pages of 4 KiB; the player spins for each load from a page that is never \
                               written, and for each copied page";
            (Realisation::Modelled, Some(parameters.model()), description)
        };
        let used = TierUse {
            parameters: Some(Parameters::Memory(parameters)),
            model,
            ..TierUse::new(name.name(), how, description)
        };
        Ok(ActiveTier { used, place: self.memory()? })
    }
}

impl ActiveTier {
    /// Whether the same snapshots serve both.
    pub(super) fn shares(&self, other: &Self) -> bool {
        (self.path(), self.used.model) == (other.path(), other.used.model)
    }

    /// A tier of the user's list.
    pub(super) fn real(tier: &Tier) -> Result<Self, ActivateError> {
        let directory = tier.directory();
        let directory =
            directory.ok_or_else(|| ActivateError::NoDirectory(tier.medium.to_string()))?;
        tier.check()?;
        let own = read_times(&directory)?;
        let used = TierUse {
            own_latency_ns: Some(own.first_page_ns),
            own_page_ns: Some(own.further_page_ns),
            ..TierUse::new(&tier.name, Realisation::Real, &tier.medium.to_string())
        };
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

    /// Delays reads for a number of microVMs at once, or ends that.
    pub(super) fn delay(&self, microvms: Option<u32>) -> Result<(), EmulateError> {
        let Place::Disk(disk) = &self.place else { return Ok(()) };
        let by = microvms.and_then(|microvms| self.used.delay_for(microvms));
        disk.delay_reads(by.unwrap_or_default())
    }
}

/// Processors that this process may use.
pub(super) fn processors() -> u32 {
    available_parallelism().map_or(1, |number| u32::try_from(number.get()).unwrap_or(u32::MAX))
}

/// Bytes of DRAM that can be used now.
pub(in crate::paper) fn available() -> u64 {
    let memory = Meminfo::current().ok().and_then(|memory| memory.mem_available);
    memory.unwrap_or(4 << 30)
}

#[cfg(test)]
#[path = "tiers_tests.rs"]
mod tests;
