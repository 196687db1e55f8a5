//! What a replay is reported as.

use firn_memory::ChunkCopies;
use firn_memory::copy_ahead::WriteReport;
use firn_memory::loader::LoaderReport;
use firn_memory::pager::PagerReport;
use firn_snapshot::{ImagedBy, PageSet, ReplicaReport};
use firn_vmm::{KvmIndex, KvmStats};
use serde::{Deserialize, Serialize};

/// A replay: what was done, what it took, what it cost. Its JSON is that of `firn thaw --json`.
///
/// The counters are read when the timed loop ends, before the second pass. They are of the whole process since it
/// began.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PlayerReport {
    /// Name of the trace that was replayed.
    pub trace: String,
    /// The planner, with its options.
    pub planner: String,
    /// Touches that were replayed.
    pub touches: u64,
    /// Pages that were touched.
    pub pages: u64,
    /// Times.
    pub times: PlayerTimes,
    /// Number of regions of guest memory that are mapped from a file packed by the profile.
    #[serde(default)]
    pub packed_regions: u64,
    /// Bytes of these: 0 for a planner without such a file.
    #[serde(default)]
    pub packed_bytes: u64,
    /// Bytes of guest memory that are anonymous: no fault on them reads a file.
    #[serde(default)]
    pub zero_bytes: u64,
    /// What the loader did, where the plan has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loader: Option<LoaderReport>,
    /// What having a replica took, where the planner runs on one; a part of `load_ns`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replica: Option<ReplicaCost>,
    /// What was expected to be written and what was, where the planner runs on copies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub writes: Option<WriteReport>,
    /// The image pages of a replica that were written, where that was logged: for its pool, no part of the report.
    #[serde(skip)]
    pub written: Option<PageSet>,
    /// Checking the bytes of a snapshot in a pool, where this start had to, ns; a part of `load_ns`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub check_ns: Option<u64>,
    /// KVM's own index, which a part of `resume_ns` built where the plan has an index and the kernel can.
    pub kvm_index: KvmIndex,
    /// What the pager did, where one serves guest memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pager: Option<PagerReport>,
    /// What KVM counted.
    pub kvm: KvmStats,
    /// What writing to sealed memory took, on media without private mappings.
    #[serde(default)]
    pub chunk_copies: ChunkCopies,
    /// Page faults of the process that needed no storage.
    pub minor_faults: u64,
    /// Page faults of the process that waited for storage.
    pub major_faults: u64,
    /// Bytes that the process caused to be read from storage.
    pub read_bytes: u64,
    /// Guest memory in DRAM that belongs to this microVM alone, bytes.
    pub private_bytes: u64,
    /// Guest memory in DRAM that others can share, bytes.
    pub shared_bytes: u64,
    /// Guest memory that is the pool's, a replica included, bytes: no DRAM of the microVM's.
    pub pool_bytes: u64,
    /// Copies of chunks of the pool's extent that were made ahead for this microVM, bytes: DRAM that belongs to it alone.
    #[serde(default)]
    pub copy_bytes: u64,
    /// Page tables of the process, bytes.
    pub page_table_bytes: u64,
    /// Anonymous memory of the process that is no guest memory, bytes.
    #[serde(default)]
    pub monitor_bytes: u64,
    /// Time of processors that the process used, in user and kernel mode, its guest included, in ns.
    pub cpu_ns: u64,
}

/// What having a replica took.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct ReplicaCost {
    /// Whether it was ready before it was asked for; otherwise the start waited for it.
    pub ready: bool,
    /// Bytes that were compared while the start waited.
    pub compared_bytes: u64,
    /// Bytes that were copied while the start waited.
    pub copied_bytes: u64,
    /// How long that took, ns.
    pub imaging_ns: u64,
    /// Bytes that were compared in the background before, after the last run in it.
    pub prepared_compared_bytes: u64,
    /// Bytes that were copied then.
    pub prepared_copied_bytes: u64,
    /// How long that took, beside whatever else ran, ns.
    pub prepared_ns: u64,
    /// How it was known then what to compare.
    #[serde(default)]
    pub prepared_by: ImagedBy,
}

impl ReplicaCost {
    /// What a pool's manager said of a replica.
    #[must_use]
    pub fn of(report: ReplicaReport) -> Self {
        let prepared = report.prepared.unwrap_or_default();
        Self {
            ready: report.prepared.is_some(),
            compared_bytes: report.imaging.compared,
            copied_bytes: report.imaging.copied,
            imaging_ns: firn_base::nanoseconds(report.imaging.duration),
            prepared_compared_bytes: prepared.compared,
            prepared_copied_bytes: prepared.copied,
            prepared_ns: firn_base::nanoseconds(prepared.duration),
            prepared_by: prepared.by,
        }
    }
}

/// Times of a replay in ns, in the order in which they pass.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PlayerTimes {
    /// Request to the first line of this program, where the caller said when the request came in
    /// (`FIRN_REQUEST_NS`).
    pub process_start_ns: Option<u64>,
    /// Reading the snapshot's header, machine state and zero map, and checking that this host is fit.
    pub load_ns: u64,
    /// Making the plan.
    pub plan_ns: u64,
    /// Carrying it out: mapping guest memory, `preload_ns` and `index_ns` included.
    pub execute_ns: u64,
    /// The part of `execute_ns` that read the image into the page cache.
    pub preload_ns: u64,
    /// The part of `execute_ns` that built the host's index.
    pub index_ns: u64,
    /// The part of `execute_ns` that installed pages of a packed file.
    #[serde(default)]
    pub install_ns: u64,
    /// Making the VM and restoring its state, to running vCPUs.
    pub resume_ns: u64,
    /// Running vCPUs to the store that ends the timed loop.
    pub replay_ns: u64,
    /// The part of `replay_ns` that the touches took, beyond what the fastest of them takes, where the guest measured it: the
    /// time that it waited for page faults.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault_ns: Option<u64>,
    /// Request (or program start) to that store.
    pub total_ns: u64,
    /// The second pass, from that store on; no part of any other time.
    pub verify_ns: u64,
}
