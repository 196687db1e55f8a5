//! What a start did, took and cost.

use std::path::PathBuf;

use firn_base::nanoseconds;
use firn_memory::compare::CompareReport;
use firn_memory::copy_ahead::WriteReport;
use firn_memory::loader::LoaderReport;
use firn_memory::pager::PagerReport;
use firn_memory::{ChunkCopies, ExecuteReport, MemoryUsage, ProcessCounters, Work};
use firn_net::{PublishedPort, RuleCount};
use firn_snapshot::{NoCopy, ReplicaReport};
use firn_vmm::{KvmStats, RestoreReport};
use serde::{Deserialize, Serialize};

use crate::jail::JailReport;
use crate::outcome::Outcome;

/// Version of [`StartReport`]'s JSON. A field may be added without a new version.
pub const REPORT_VERSION: u32 = 1;

/// One start of a microVM: how it was done, what it took, what it cost.
///
/// The command line prints it, the daemon and its telemetry read it, the benchmark and the tests
/// measure with it. Its JSON is that of `firn boot --json` and `firn thaw --json`. Counters are of
/// the whole process since it began. They are read when the guest is ready, when it has answered,
/// or, for a player, when its timed loop ends.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct StartReport {
    /// [`REPORT_VERSION`].
    #[serde(default)]
    pub version: u32,
    /// Name of the microVM; a player has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Process id of the monitor, as the process that started it sees it.
    #[serde(default)]
    pub pid: u32,
    /// How the monitor was jailed; `None` where it was not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub jail: Option<JailReport>,
    /// Name of the function that was loaded, of a boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub function: Option<String>,
    /// Ports of the guest that programs of the host reach.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub published: Vec<PublishedPort>,
    /// Guest memory, bytes.
    #[serde(default)]
    pub memory: u64,
    /// The guest's processor, of a boot: a named model, or host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<String>,
    /// The snapshot: its directory, or its name in the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<PathBuf>,
    /// The planner with its options; empty for a boot.
    #[serde(default)]
    pub planner: String,
    /// Whether the VM was made before the request; `None` where the process was started for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standby: Option<StandbyUse>,
    /// Whether the microVM was restored before the request; `None` where that was not tried.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready: Option<ReadyUse>,
    /// What was done before the request, where the microVM was ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub making: Option<Making>,
    /// Times.
    pub times: StartTimes,
    /// Verification of the bytes of a snapshot, where this start had to do it, ns; part of
    /// `load_ns`.
    #[serde(default)]
    pub check_ns: Option<u64>,
    /// What it took to have a replica, where the planner runs on one; part of `load_ns`.
    #[serde(default)]
    pub replica: Option<ReplicaCost>,
    /// What executing the plan did.
    #[serde(default)]
    pub execute: ExecuteReport,
    /// What the loader did, where the plan has one. A start does not wait for it, so it may be at
    /// work still.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loader: Option<LoaderReport>,
    /// What restoring the machine did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restore: Option<RestoreReport>,
    /// Counters.
    #[serde(flatten)]
    pub counters: Counters,
    /// How often each rule of `--egress` has decided so far, where the guest has a user-mode
    /// network. The process that starts the monitor has counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<Vec<RuleCount>>,
    /// What was expected to be written and what was, where the planner runs on copies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub writes: Option<WriteReport>,
    /// How guest memory differed from the image after the answer, where that was requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compared: Option<CompareReport>,
    /// The answer to the first request, where one was sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<Outcome>,
    /// What a player replayed.
    #[serde(flatten)]
    pub replay: Option<Replay>,
}

/// What a start found in the standby monitor that it was sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StandbyUse {
    /// The VM and its vCPUs, made in advance for a microVM of the same shape.
    Hit,
    /// A process with KVM open: it had made nothing for a microVM of this shape.
    Miss,
}

/// Whether a start found a ready clone of its snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReadyUse {
    /// The microVM was mapped and restored before the request.
    Hit,
    /// No clone was ready, or none that could be resumed: an ordinary start followed.
    Miss,
}

/// A ready clone: what was done for it before its request, and what it takes meanwhile.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Making {
    /// From the order to a restored microVM, ns.
    pub ns: u64,
    /// DRAM of the monitor, its guest's copy included, bytes; without the kernel's own memory for
    /// the VM.
    pub dram_bytes: u64,
    /// The copy's part of it.
    pub copy_bytes: u64,
    /// Memory of the pool that it maps, bytes.
    pub pool_bytes: u64,
    /// Why it has no copy, where its planner runs on one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_copy: Option<NoCopy>,
    /// The planner with its options.
    pub planner: String,
}

impl Making {
    /// Makings of a clone before it is kept without a copy: the first one tells the pool's manager
    /// which copies to make.
    pub const LIMIT: u32 = 3;
}

/// What a player replayed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Replay {
    /// Name of the trace.
    pub trace: String,
    /// Touches that were replayed.
    pub touches: u64,
    /// Pages that were touched.
    pub pages: u64,
    /// Repeated accesses beside the touches.
    #[serde(default)]
    pub repeated: u64,
    /// Loads from pages that the trace never writes; counted with repeated accesses or a modelled
    /// medium.
    #[serde(default)]
    pub read_only_loads: u64,
    /// The number of touches by their time, where the guest measured it: below 250 ns, then up to
    /// twice the end of the one before, and the last without an end.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub touch_times: Vec<u64>,
}

/// Times of a start, ns, in the order in which they pass.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct StartTimes {
    /// Request to the monitor's receipt of it; where the time of the request is known.
    pub process_start_ns: Option<u64>,
    /// A thaw: reading the snapshot's header, machine state and zero map, and checking that this
    /// host can run it.
    #[serde(default)]
    pub load_ns: u64,
    /// Making the plan.
    #[serde(default)]
    pub plan_ns: u64,
    /// Executing it: mapping guest memory, `preload_ns`, `index_ns` and `install_ns` included.
    #[serde(default)]
    pub execute_ns: u64,
    /// The part of `execute_ns` that read the image into the page cache.
    #[serde(default)]
    pub preload_ns: u64,
    /// The part of `execute_ns` that built the host's index, or populated pages.
    #[serde(default)]
    pub index_ns: u64,
    /// The part of `execute_ns` that installed pages of a packed file.
    #[serde(default)]
    pub install_ns: u64,
    /// Making the VM and restoring its state, or loading its kernel, until the first vCPU runs, as
    /// its thread measures: the monitor's may continue later.
    pub resume_ns: u64,
    /// A boot: running vCPUs to an agent that answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot_ns: Option<u64>,
    /// Running vCPUs, or an agent that answers, to a guest with an identity of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identify_ns: Option<u64>,
    /// A boot with a function: function sent to function imported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub function_ns: Option<u64>,
    /// Event sent to answer received.
    #[serde(default)]
    pub invoke_ns: Option<u64>,
    /// A player: running vCPUs to the store that ends the timed loop.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replay_ns: Option<u64>,
    /// The part of `replay_ns` that the touches took beyond the time of the fastest, where the
    /// guest measured it: the time in page faults.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault_ns: Option<u64>,
    /// The part of `replay_ns` before the first touch that serves the request, where the trace's
    /// player knows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connect_ns: Option<u64>,
    /// A player: its second invocation in the same microVM; part of no other time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warm_ns: Option<u64>,
    /// Request (or program start) to the last of the above, the second invocation excluded.
    pub total_ns: u64,
    /// A player: its second pass over all memory; part of no other time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verify_ns: Option<u64>,
}

impl StartTimes {
    /// The request (or the program's start) to running vCPUs, ns.
    #[must_use]
    pub fn start_to_resume_ns(&self) -> u64 {
        let before = self.process_start_ns.unwrap_or_default() + self.load_ns + self.plan_ns;
        before + self.execute_ns + self.resume_ns
    }

    /// The parts of `execute_ns` by the kind of step.
    pub(crate) fn set_steps(&mut self, report: &ExecuteReport) {
        let sum = |is: fn(&Work) -> bool| {
            report.steps.iter().filter(|step| is(&step.step.work)).map(|step| step.ns).sum()
        };
        self.preload_ns = sum(|work| matches!(work, Work::Preload { .. }));
        let indexes = |work: &Work| {
            matches!(work, Work::Index { .. } | Work::IndexCopy { .. } | Work::Populate { .. })
        };
        self.index_ns = sum(indexes);
        self.install_ns = sum(|work| matches!(work, Work::Install { .. }));
    }

    /// The measured parts with their names, for people, in the order in which they pass.
    #[must_use]
    pub fn parts(&self) -> Vec<(&'static str, u64)> {
        let thaw = |ns: u64| (ns > 0).then_some(ns);
        [
            ("process start", self.process_start_ns),
            ("load", thaw(self.load_ns)),
            ("plan", thaw(self.plan_ns)),
            ("execute", thaw(self.execute_ns)),
            ("resume", Some(self.resume_ns)),
            ("boot", self.boot_ns),
            ("identify", self.identify_ns),
            ("load function", self.function_ns),
            ("invoke", self.invoke_ns),
            ("replay", self.replay_ns),
        ]
        .into_iter()
        .filter_map(|(name, ns)| Some((name, ns?)))
        .collect()
    }
}

/// What a microVM and its monitor cost.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Counters {
    /// What the pager did, where one serves guest memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pager: Option<PagerReport>,
    /// What KVM counted.
    pub kvm: KvmStats,
    /// What writing to sealed memory took, on media without private mappings.
    #[serde(default)]
    pub chunk_copies: ChunkCopies,
    /// Guest pages that KVM maps: touched, or mapped with a touched one in a larger leaf.
    #[serde(default)]
    pub guest_pages: u64,
    /// Page faults of the process that needed no storage.
    #[serde(default)]
    pub minor_faults: u64,
    /// Page faults of the process that waited for storage.
    #[serde(default)]
    pub major_faults: u64,
    /// Bytes that the process caused to be read from storage.
    pub read_bytes: u64,
    /// Guest memory in DRAM that belongs to this microVM alone, bytes.
    pub private_bytes: u64,
    /// Guest memory in DRAM that other processes can share (page cache), bytes.
    pub shared_bytes: u64,
    /// Guest memory that is the pool's, a replica included, bytes: none of the microVM's DRAM.
    pub pool_bytes: u64,
    /// Copies of chunks of the pool's extent that were made ahead for this microVM, bytes: DRAM
    /// that belongs to it alone.
    #[serde(default)]
    pub copy_bytes: u64,
    /// Page tables of the process, bytes.
    #[serde(default)]
    pub page_table_bytes: u64,
    /// Anonymous memory of the process that is not guest memory, bytes.
    #[serde(default)]
    pub monitor_bytes: u64,
    /// Processor time of the process in user and kernel mode, its guest included, ns.
    #[serde(default)]
    pub cpu_ns: u64,
}

impl Counters {
    pub(crate) fn new(
        cpu_ns: u64,
        process: &ProcessCounters,
        kvm: KvmStats,
        chunk_copies: ChunkCopies,
        memory: &MemoryUsage,
        pager: Option<PagerReport>,
    ) -> Self {
        Self {
            pager,
            kvm,
            chunk_copies,
            guest_pages: kvm.mapped_pages(),
            minor_faults: process.minor_faults,
            major_faults: process.major_faults,
            read_bytes: process.read_bytes,
            private_bytes: memory.private,
            shared_bytes: memory.shared,
            pool_bytes: memory.pool,
            copy_bytes: memory.copies,
            page_table_bytes: memory.page_tables,
            monitor_bytes: memory.monitor,
            cpu_ns,
        }
    }
}

/// What it took to have a replica.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct ReplicaCost {
    /// Whether it was ready before the request; otherwise the start waited for it.
    pub ready: bool,
    /// Bytes that were compared while the start waited.
    pub compared_bytes: u64,
    /// Bytes that were copied while the start waited.
    pub copied_bytes: u64,
    /// How long that took, ns.
    pub imaging_ns: u64,
    /// Bytes that were compared in the background before, after the last run on the replica.
    pub prepared_compared_bytes: u64,
    /// Bytes that were copied then.
    pub prepared_copied_bytes: u64,
    /// How long that took, beside other work, ns.
    pub prepared_ns: u64,
}

impl From<ReplicaReport> for ReplicaCost {
    fn from(report: ReplicaReport) -> Self {
        let prepared = report.prepared.unwrap_or_default();
        Self {
            ready: report.prepared.is_some(),
            compared_bytes: report.imaging.compared,
            copied_bytes: report.imaging.copied,
            imaging_ns: nanoseconds(report.imaging.duration),
            prepared_compared_bytes: prepared.compared,
            prepared_copied_bytes: prepared.copied,
            prepared_ns: nanoseconds(prepared.duration),
        }
    }
}
