//! The results of a measurement, and their JSON.

use serde::{Deserialize, Serialize};

use super::open_loop::OpenLoop;
use super::stock::StockRow;
use crate::cache::Cache;
use crate::host::Host;
use crate::players::LeftOut;
use crate::stats::{Comparison, Summary};
use firn_run::{ReadyUse, StandbyUse, StartReport};

/// The version of the JSON of [`Results`]. Files without one are of version 0: they lack the single
/// measurements.
pub const RESULTS_VERSION: u32 = 1;

/// The results of `firn bench thaw`: `{"version":1,"host":{…},"results":[…]}`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// The version of this form: [`RESULTS_VERSION`].
    #[serde(default)]
    pub version: u32,
    /// The host, the medium and the build.
    pub host: Host,
    /// Leaves of the guests' own page tables, as `--leaves` names them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leaves: Option<String>,
    /// The factor for the recorded work between touches, as `--gaps` names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gaps: Option<String>,
    /// The repeated accesses, as `--again` names them, if there were any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub again: Option<String>,
    /// Whether the images stored zero pages too.
    #[serde(default)]
    pub dense: bool,
    /// Whether the pages that the guests held free had content.
    #[serde(default)]
    pub unsanitised: bool,
    /// Runs before the first measured one, of planners that map from a pool.
    #[serde(default)]
    pub warm_up: u32,
    /// The seed of the random order in which the planners had their turns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub order: Option<u64>,
    /// The seed by which each run replayed one of the player's inputs, the same for every planner;
    /// without it, each replayed its trace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mix: Option<u64>,
    /// One row for each planner and trace, in the order in which they were listed.
    pub results: Vec<Row>,
    /// The noise of the measurement: planners that were measured twice. A session of several
    /// planners has one at least.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub noise: Vec<Noise>,
    /// A program with Firecracker's API that was measured in the same rounds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stock: Vec<StockRow>,
    /// Planners that were not measured.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<LeftOut>,
}

/// The label of the first measurement of a planner that is measured several times.
const FIRST: &str = "a";

/// The measurements of one planner on one trace. Each microVM of each run is one measurement;
/// counts and bytes are medians over them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The planner, with all its options.
    pub planner: String,
    /// `a` or `b`, if the planner was measured twice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// The trace.
    pub trace: String,
    /// MicroVMs that started together.
    pub concurrency: u32,
    /// The number of snapshots of these microVMs: 1, or copies with other content that the microVMs
    /// take turns with.
    #[serde(default = "one")]
    pub snapshots: u32,
    /// MicroVMs that ran together where that is fewer: the pool had no room for more replicas, so
    /// each of the others waited until an earlier one had ended. Their times contain the wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_once: Option<u32>,
    /// The input that the planner's profile was recorded on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recorded_on: Option<String>,
    /// The page cache before each run.
    pub cache: Cache,
    /// Number of runs: batches of `concurrency` microVMs.
    pub runs: u32,
    /// Whether there were more microVMs than processors: wall times then include waiting for a
    /// processor.
    pub oversubscribed: bool,
    /// The measurements of the quantity that comparisons use ([`Row::compared`]), a list for each
    /// run in the order of the runs. None is left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub measurements: Vec<Vec<f64>>,
    /// Starts in standby monitors that had made the VM; `None` where no start was in one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standby_hits: Option<u64>,
    /// Memory of one standby monitor before the request, the kernel's own for it included, bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standby_bytes: Option<u64>,
    /// Starts from ready clones; `None` where none was ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_hits: Option<u64>,
    /// Memory of one ready clone before the request, bytes: its monitor, the kernel's own for the
    /// VM, and its copy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_bytes: Option<u64>,
    /// Making one, before the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub making_ms: Option<Summary>,
    /// Pages that a replay touches.
    pub pages: u64,
    /// Touches of a replay: pages, and first writes to pages that were read before.
    pub touches: u64,
    /// Request to a running vCPU: process start, load, plan, execute, resume. Preloading is not
    /// part of it.
    pub start_to_resume_ms: Summary,
    /// A running vCPU to its last touch.
    pub resume_to_last_page_ms: Summary,
    /// The sum of both.
    pub total_ms: Summary,
    /// Request to the first line of the monitor; a part of `start_to_resume_ms`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process_start_ms: Option<Summary>,
    /// Entering the jail, which a start from a standby monitor has behind it; else a part of
    /// `process_start_ms`. `None` without a jail.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub jail_ms: Option<Summary>,
    /// A running vCPU to the first touch that serves the request, where the player knows it; a part
    /// of `resume_to_last_page_ms`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connect_ms: Option<Summary>,
    /// A second invocation of the same microVM, where there was one: warm.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warm_ms: Option<Summary>,
    /// Loads of the first invocation from pages that it never writes, where the player counted
    /// them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_only_loads: Option<u64>,
    /// The first request of a run to the last page of its last microVM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub burst_ms: Option<Summary>,
    /// Starts at random intervals after the runs, if there were any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub open_loop: Option<OpenLoop>,
    /// Reading the image into the page cache before the measured time, if the planner does that.
    pub preload_ms: Option<Summary>,
    /// Building the host's index before the resume; a part of `start_to_resume_ms`.
    pub index_ms: Summary,
    /// Making replicas equal to their snapshot, if the start waited for that; a part of
    /// `start_to_resume_ms`.
    pub imaging_ms: Option<Summary>,
    /// The time that the pool's manager needed after a batch until it had prepared everything that
    /// it prepares in advance; a part of no other time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settle_ms: Option<Summary>,
    /// The part of `resume_to_last_page_ms` that the guest waited for page faults, if it measured
    /// that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault_ms: Option<Summary>,
    /// The mean number of touches of a microVM by their time, if it measured that: below 250 ns,
    /// then up to twice the end of the one before, and the last without an end.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub touch_times: Vec<f64>,
    /// Reading what earlier runs touched: the loader's time beside the guest, or the installation
    /// before the resume, which is a part of `start_to_resume_ms`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fetch_ms: Option<Summary>,
    /// Bytes that were read so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fetch_bytes: Option<u64>,
    /// Bytes that page faults brought into the page cache, read-ahead included. Present if the page
    /// cache was cold and one microVM ran. Median over the runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault_read_bytes: Option<u64>,
    /// The replay's time per page.
    pub ns_per_page: Summary,
    /// The process's processor time per page.
    pub cpu_ns_per_page: Summary,
    /// The process's processor time.
    pub cpu_ms: Summary,
    /// Guest page faults that KVM resolved.
    pub kvm_page_faults: u64,
    /// Exits from guest mode.
    pub kvm_exits: u64,
    /// Leaves of 4 KiB in KVM's tables at the end.
    pub kvm_pages_4k: u64,
    /// Leaves of 2 MiB in KVM's tables at the end.
    pub kvm_pages_2m: u64,
    /// Page faults of the process that did not read from storage.
    pub minor_faults: u64,
    /// Page faults of the process that read from storage.
    pub major_faults: u64,
    /// Bytes that the process read from storage.
    pub read_bytes: u64,
    /// Guest memory in DRAM that belongs to one microVM alone.
    pub private_bytes: u64,
    /// Guest memory in DRAM that one microVM maps from the page cache.
    pub shared_bytes: u64,
    /// Guest memory that one microVM maps from a pool, including a replica of its own. It is memory
    /// of the pool, not DRAM of the microVM.
    pub pool_bytes: u64,
    /// Copies of chunks of the pool's extent that were made in advance for one microVM: DRAM that
    /// belongs to it alone.
    #[serde(default)]
    pub copy_bytes: u64,
    /// Page tables of one process.
    pub page_table_bytes: u64,
    /// Anonymous memory of one process that is not guest memory.
    #[serde(default)]
    pub monitor_bytes: u64,
    /// Growth of KVM's own page tables for all microVMs of a batch (`SecPageTables` of
    /// /proc/meminfo). Median over the runs.
    #[serde(default)]
    pub batch_kvm_table_bytes: u64,
    /// DRAM of a batch: private memory, copies, page tables and monitors of all its microVMs, KVM's
    /// tables, and once the snapshot's pages in the page cache (mincore). It is read when all
    /// microVMs have touched their last page and none checks its memory yet. Median over the runs.
    pub batch_dram_bytes: u64,
    /// The page cache's part of it.
    pub batch_page_cache_bytes: u64,
    /// Bytes that a batch read, up to the last touch, from image and packed files for pages that
    /// the guest's allocator held free at the freeze. Present if the page cache was cold and the
    /// trace lists the free pages. Median over the runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch_free_read_bytes: Option<u64>,
}

/// A planner compared with itself: the difference is the noise of the measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Noise {
    /// The planner.
    pub planner: String,
    /// The trace.
    pub trace: String,
    /// The page cache before each run.
    pub cache: Cache,
    /// The compared quantity: `total_ms`, or `cpu_ns_per_page` if there were more microVMs than
    /// processors.
    pub of: String,
    /// b divided by a, run by run; 1 without noise.
    pub ratio: Comparison,
}

/// One run: a batch of microVMs.
#[derive(Debug)]
pub(crate) struct Run {
    /// Reports of its microVMs; at least one.
    pub(crate) reports: Vec<StartReport>,
    /// The first request to the last page of the last microVM, ns.
    pub(crate) burst_ns: u64,
    /// Time of the preload before the measured time.
    pub(crate) preload_ns: Option<u64>,
    /// Time that the pool's manager needed afterwards to prepare the next run.
    pub(crate) settle_ns: Option<u64>,
    /// Bytes of the snapshot in the page cache when all had touched their last page.
    pub(crate) cached_bytes: u64,
    /// Bytes that were read for free pages, if that is known.
    pub(crate) free_bytes: Option<u64>,
    /// Growth of KVM's tables when all had touched their last page.
    pub(crate) kvm_table_bytes: u64,
}

/// The conditions that all runs of a row share.
#[derive(Clone, Debug)]
pub(crate) struct RowHead {
    pub(crate) planner: String,
    pub(crate) label: Option<String>,
    pub(crate) trace: String,
    pub(crate) concurrency: u32,
    pub(crate) cache: Cache,
    pub(crate) oversubscribed: bool,
    pub(crate) snapshots: u32,
    pub(crate) at_once: Option<u32>,
    pub(crate) recorded_on: Option<String>,
    pub(crate) standby_bytes: Option<u64>,
    pub(crate) ready_bytes: Option<u64>,
}

impl Results {
    /// No results yet.
    pub(crate) fn at(host: Host) -> Self {
        Self {
            version: RESULTS_VERSION,
            host,
            leaves: None,
            gaps: None,
            again: None,
            dense: false,
            unsanitised: false,
            warm_up: 0,
            order: None,
            mix: None,
            results: Vec::new(),
            noise: Vec::new(),
            stock: Vec::new(),
            left_out: Vec::new(),
        }
    }
}

fn one() -> u32 {
    1
}

impl Row {
    /// A row from all runs of one planner on one trace; `None` without runs.
    pub(crate) fn of(head: RowHead, runs: &[Run]) -> Option<Self> {
        let reports: Vec<&StartReport> = runs.iter().flat_map(|run| &run.reports).collect();
        let first = reports.first()?;
        let each = |value: &dyn Fn(&StartReport) -> f64| -> Vec<Vec<f64>> {
            runs.iter().map(|run| run.reports.iter().map(value).collect()).collect()
        };
        let summary = |value: &dyn Fn(&StartReport) -> f64| Summary::of_runs(&each(value));
        let count = |value: &dyn Fn(&StartReport) -> u64| {
            median_of(reports.iter().map(|report| value(report)).collect())
        };
        let optional = |value: &dyn Fn(&StartReport) -> Option<u64>| {
            let of_run =
                |run: &Run| run.reports.iter().filter_map(value).map(milliseconds).collect();
            Summary::of_runs(&runs.iter().map(of_run).collect::<Vec<_>>())
        };
        let once = |value: &dyn Fn(&Run) -> Option<u64>| {
            let of_run = |run| value(run).map(|ns| vec![milliseconds(ns)]);
            Summary::of_runs(&runs.iter().filter_map(of_run).collect::<Vec<_>>())
        };
        let making_ns = |report: &StartReport| {
            let hit = report.ready == Some(ReadyUse::Hit);
            report.making.as_ref().filter(|_| hit).map(|making| making.ns)
        };
        let ready_hits = reports.iter().filter(|r| making_ns(r).is_some()).count() as u64;
        let standbys: Vec<StandbyUse> = reports.iter().filter_map(|r| r.standby).collect();
        let hits = standbys.iter().filter(|found| **found == StandbyUse::Hit).count();
        let standby_hits = (!standbys.is_empty()).then_some(hits as u64);
        let RowHead {
            planner,
            label,
            trace,
            concurrency,
            cache,
            oversubscribed,
            snapshots,
            at_once,
            recorded_on,
            standby_bytes,
            ready_bytes,
        } = head;
        Some(Self {
            planner,
            label,
            trace,
            concurrency,
            snapshots,
            at_once,
            recorded_on,
            cache,
            standby_hits,
            standby_bytes,
            ready_hits: (ready_hits > 0).then_some(ready_hits),
            ready_bytes,
            making_ms: optional(&making_ns),
            runs: u32::try_from(runs.len()).unwrap_or(u32::MAX),
            oversubscribed,
            measurements: each(&|report| compared(report, oversubscribed)),
            pages: pages(first),
            touches: first.replay.as_ref().map_or(0, |replay| replay.touches),
            start_to_resume_ms: summary(&|r| milliseconds(r.times.start_to_resume_ns()))?,
            resume_to_last_page_ms: summary(&|r| milliseconds(replay_ns(r)))?,
            total_ms: summary(&total_ms)?,
            process_start_ms: optional(&|r| r.times.process_start_ns),
            jail_ms: optional(&|r| r.jail.as_ref().map(|jail| jail.ns)),
            connect_ms: optional(&|r| r.times.connect_ns),
            warm_ms: optional(&|r| r.times.warm_ns),
            read_only_loads: Some(count(&|r| {
                r.replay.as_ref().map_or(0, |replay| replay.read_only_loads)
            }))
            .filter(|loads| *loads > 0),
            burst_ms: once(&|run| Some(run.burst_ns)),
            open_loop: None,
            preload_ms: once(&|run| run.preload_ns),
            index_ms: summary(&|r| milliseconds(r.times.index_ns))?,
            imaging_ms: optional(&|r| r.replica.map(|replica| replica.imaging_ns)),
            settle_ms: once(&|run| run.settle_ns),
            fault_ms: optional(&|r| r.times.fault_ns),
            touch_times: mean_touch_times(&reports),
            fetch_ms: optional(&|r| fetched(r).map(|fetched| fetched.ns)),
            fetch_bytes: (reports.iter().all(|r| fetched(r).is_some()))
                .then(|| count(&|r| fetched(r).map_or(0, |fetched| fetched.bytes))),
            fault_read_bytes: (cache == Cache::Cold && concurrency == 1)
                .then(|| median_of(runs.iter().map(Run::fault_read_bytes).collect())),
            ns_per_page: summary(&|r| per_page(replay_ns(r), pages(r)))?,
            cpu_ns_per_page: summary(&|r| per_page(r.counters.cpu_ns, pages(r)))?,
            cpu_ms: summary(&|r| milliseconds(r.counters.cpu_ns))?,
            kvm_page_faults: count(&|r| r.counters.kvm.page_faults),
            kvm_exits: count(&|r| r.counters.kvm.exits),
            kvm_pages_4k: count(&|r| r.counters.kvm.pages_4k),
            kvm_pages_2m: count(&|r| r.counters.kvm.pages_2m),
            minor_faults: count(&|r| r.counters.minor_faults),
            major_faults: count(&|r| r.counters.major_faults),
            read_bytes: count(&|r| r.counters.read_bytes),
            private_bytes: count(&|r| r.counters.private_bytes),
            shared_bytes: count(&|r| r.counters.shared_bytes),
            pool_bytes: count(&|r| r.counters.pool_bytes),
            copy_bytes: count(&|r| r.counters.copy_bytes),
            page_table_bytes: count(&|r| r.counters.page_table_bytes),
            monitor_bytes: count(&|r| r.counters.monitor_bytes),
            batch_kvm_table_bytes: median_of(runs.iter().map(|run| run.kvm_table_bytes).collect()),
            batch_dram_bytes: median_of(runs.iter().map(Run::dram_bytes).collect()),
            batch_page_cache_bytes: median_of(runs.iter().map(|run| run.cached_bytes).collect()),
            batch_free_read_bytes: runs
                .iter()
                .map(|run| run.free_bytes)
                .collect::<Option<_>>()
                .map(median_of),
        })
    }

    /// Whether it is a second measurement of the planner, which only shows the noise.
    #[must_use]
    pub fn is_repeated(&self) -> bool {
        self.label.as_deref().is_some_and(|label| label != FIRST)
    }

    /// The quantity that comparisons use: `total_ms`, or `cpu_ns_per_page` if there were more
    /// microVMs than processors.
    #[must_use]
    pub fn compared(&self) -> (&'static str, Summary) {
        let summary = if self.oversubscribed { self.cpu_ns_per_page } else { self.total_ms };
        (compared_name(self.oversubscribed), summary)
    }
}

impl Run {
    fn dram_bytes(&self) -> u64 {
        let own = |r: &StartReport| {
            r.counters.private_bytes
                + r.counters.copy_bytes
                + r.counters.page_table_bytes
                + r.counters.monitor_bytes
        };
        self.reports.iter().map(own).sum::<u64>() + self.kvm_table_bytes + self.cached_bytes
    }

    /// What page faults brought into the page cache: all of it but what a loader read.
    fn fault_read_bytes(&self) -> u64 {
        let loaded = self.reports.iter().filter_map(|report| report.loader);
        self.cached_bytes.saturating_sub(loaded.map(|loader| loader.bytes).sum())
    }

    /// The quantity that is compared between a and b: the median over the batch.
    fn compared(&self, oversubscribed: bool) -> Option<f64> {
        let values = self.reports.iter().map(|report| compared(report, oversubscribed));
        Some(Summary::of(&values.collect::<Vec<_>>())?.median)
    }
}

impl Noise {
    /// The smallest ratio between two planners that is no noise: as far from 1 as the farther end
    /// of the interval. At least 1.
    #[must_use]
    pub fn floor(&self) -> f64 {
        self.ratio.high.max(self.ratio.low.recip()).max(1.0)
    }

    /// The noise from the runs of a planner as a and as b, the same number of each.
    pub(crate) fn of(head: &RowHead, a: &[Run], b: &[Run]) -> Option<Self> {
        let median = |run: &Run| run.compared(head.oversubscribed);
        let ratios = a.iter().zip(b).map(|(a, b)| Some(median(b)? / median(a)?));
        let ratios: Vec<f64> = ratios.collect::<Option<_>>()?;
        Some(Self {
            planner: head.planner.clone(),
            trace: head.trace.clone(),
            cache: head.cache,
            of: compared_name(head.oversubscribed).to_owned(),
            ratio: Comparison::of(&ratios)?,
        })
    }
}

/// What was read ahead of the guest.
struct Fetched {
    ns: u64,
    bytes: u64,
}

fn fetched(report: &StartReport) -> Option<Fetched> {
    if let Some(loader) = report.loader.filter(|loader| loader.done && loader.loaded) {
        return Some(Fetched { ns: loader.ns, bytes: loader.bytes });
    }
    let installed = report.counters.pager.map_or(0, |pager| pager.packed_bytes);
    (installed > 0).then_some(Fetched { ns: report.times.install_ns, bytes: installed })
}

fn mean_touch_times(reports: &[&StartReport]) -> Vec<f64> {
    let timed: Vec<&[u64]> =
        reports.iter().filter_map(|report| Some(&*report.replay.as_ref()?.touch_times)).collect();
    let classes = timed.iter().map(|times| times.len()).max().unwrap_or_default();
    let mean = |class: usize| {
        let all: u64 = timed.iter().filter_map(|times| times.get(class)).sum();
        all as f64 / timed.len() as f64
    };
    (0..classes).map(mean).collect()
}

/// The name of the quantity that comparisons use.
fn compared_name(oversubscribed: bool) -> &'static str {
    if oversubscribed { "cpu_ns_per_page" } else { "total_ms" }
}

/// The quantity of that name.
fn compared(report: &StartReport, oversubscribed: bool) -> f64 {
    if oversubscribed { per_page(report.counters.cpu_ns, pages(report)) } else { total_ms(report) }
}

/// Pages that a player touched.
fn pages(report: &StartReport) -> u64 {
    report.replay.as_ref().map_or(0, |replay| replay.pages)
}

fn replay_ns(report: &StartReport) -> u64 {
    report.times.replay_ns.unwrap_or_default()
}

pub(super) fn total_ms(report: &StartReport) -> f64 {
    milliseconds(report.times.start_to_resume_ns() + replay_ns(report))
}

pub(super) fn milliseconds(ns: u64) -> f64 {
    ns as f64 / 1e6
}

fn per_page(ns: u64, pages: u64) -> f64 {
    ns as f64 / pages.max(1) as f64
}

/// The lower median of counts, so that it is one of them.
fn median_of(mut counts: Vec<u64>) -> u64 {
    counts.sort_unstable();
    counts.get(counts.len().saturating_sub(1) / 2).copied().unwrap_or_default()
}

#[cfg(test)]
#[path = "results_tests.rs"]
mod tests;
