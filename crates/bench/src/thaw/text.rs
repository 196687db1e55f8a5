//! Results of a session as text for a terminal.

use firn_base::format_bytes;

use super::invocation::Invocation;
use super::results::{Results, Row};
use super::stock::StockRow;
use crate::stats::Summary;
use crate::text::{interval, number, table};

/// What the columns mean.
const LEGEND: &str = "times: median, p95, and spread (interquartile range / median); interval: the 95 % \
bootstrap interval of the median with 11 runs or more, otherwise minimum to maximum; counts and bytes: medians for one microVM; DRAM of \
a run: private memory, copies, page tables, monitors and KVM's tables of all its microVMs, and the page cache once; pool: bytes of the \
pool, which are not the microVM's DRAM; index and imaging (making a replica equal to its snapshot) are part of start to resume; read of \
free pages: bytes that a run read for pages that the guest held free at the freeze (cold page cache); settle: time that the pool's \
manager needs after a run to prepare the next; starts at random intervals: 5 to 500 ms apart, none waits for an earlier one or for the \
manager (--open-loop); warm: a second invocation of the same microVM, whose counts and bytes are in no row (--warm); fallbacks: those that did not find what is made ahead for them; standby: memory of one standby monitor before the request, the kernel's own \
for it included (--standby); ready: memory of one ready clone before the request, its copy included, and making: how long that took (--ready); jail: \
entering it, a part of the process's start (--unjailed measures without it, too); \
burst: first request of a run to the last page of its last microVM; planners that map from a pool use no page cache";

impl Results {
    /// All tables, with the host and the meaning of the columns.
    #[must_use]
    pub fn text(&self) -> String {
        let invocations = self.results.iter().flat_map(Row::invocations);
        let mut lines =
            vec![self.host.line(), table(TIMES, &invocations.map(times).collect::<Vec<_>>())];
        for (head, row) in [(COUNTS, counts as fn(&Row) -> Vec<String>), (DRAM, dram)] {
            let rows: Vec<Vec<String>> = self.results.iter().map(row).collect();
            lines.push(table(head, &rows));
        }
        let open: Vec<Vec<String>> = self.results.iter().filter_map(open_loop).collect();
        if !open.is_empty() {
            lines.push(table(OPEN_LOOP, &open));
        }
        if !self.stock.is_empty() {
            lines.push(table(STOCK, &self.stock.iter().map(stock).collect::<Vec<_>>()));
        }
        lines.push(LEGEND.to_owned());
        if self.results.iter().any(|row| row.oversubscribed) {
            lines.push(format!(
                "* oversubscribed: a run starts more microVMs than this host's {} processors, so wall times include waiting; compare CPU \
                 ns per page and DRAM",
                self.host.cpus
            ));
        }
        if let Some(seed) = self.mix {
            lines.push(format!(
                "each run replayed the trace or the function's other input, by seed {seed}, the same for every planner"
            ));
        }
        for noise in &self.noise {
            lines.push(format!(
                "noise: {} on {}, page cache {}, {} as b / as a: {}; a smaller ratio than {:.3} between planners is noise",
                noise.planner,
                noise.trace,
                noise.cache,
                noise.of,
                noise.ratio,
                noise.floor()
            ));
        }
        for left_out in &self.left_out {
            lines.push(format!("left out: {}: {}", left_out.planner, left_out.reason));
        }
        lines.join("\n")
    }
}

fn origin(invocation: Invocation<'_>) -> Vec<String> {
    let row = invocation.row;
    let snapshots =
        if row.snapshots > 1 { format!(" of {}", row.snapshots) } else { String::new() };
    let runs = format!("{} x {}{snapshots}", row.runs, row.concurrency);
    let trace = match &row.recorded_on {
        Some(input) => format!("{}, profile of {input}", row.trace),
        None => row.trace.clone(),
    };
    vec![invocation.name(), trace, row.cache.to_string(), runs]
}

const TIMES: &[&str] = &[
    "planner",
    "trace",
    "cache",
    "runs",
    "start to resume, ms",
    "p95",
    "resume to last page, ms",
    "p95",
    "total, ms",
    "interval",
    "p95",
    "spread",
    "burst, ms",
    "ns per page",
    "CPU ns per page",
    "preload, ms",
    "index, ms",
    "imaging, ms",
    "settle, ms",
    "making, ms",
    "jail, ms",
];

fn times(invocation: Invocation<'_>) -> Vec<String> {
    let Invocation { row, ms, warm } = invocation;
    let mark = if row.oversubscribed { "*" } else { "" };
    let wall = |summary: Summary| {
        [format!("{}{mark}", number(summary.median)), format!("{}{mark}", number(summary.p95))]
    };
    let mut cells = origin(invocation);
    if warm {
        cells.resize(cells.len() + 4, "-".to_owned());
    } else {
        cells.extend(wall(row.start_to_resume_ms));
        cells.extend(wall(row.resume_to_last_page_ms));
    }
    let [median, p95] = wall(ms);
    cells.extend([median, format!("{}{mark}", interval(&ms)), p95]);
    cells.push(format!("{:.1} %", ms.spread * 100.0));
    if warm {
        cells.resize(TIMES.len(), "-".to_owned());
        return cells;
    }
    let or_none = |summary: Option<Summary>| summary.map_or("-".to_owned(), |s| number(s.median));
    cells.push(or_none(row.burst_ms));
    cells.push(format!("{}{mark}", number(row.ns_per_page.median)));
    cells.push(number(row.cpu_ns_per_page.median));
    cells.push(or_none(row.preload_ms));
    cells.push(number(row.index_ms.median));
    cells.push(or_none(row.imaging_ms));
    cells.push(or_none(row.settle_ms));
    cells.push(or_none(row.making_ms));
    cells.push(or_none(row.jail_ms));
    cells
}

const STOCK: &[&str] = &[
    "program",
    "trace",
    "cache",
    "runs",
    "process start, ms",
    "load and resume, ms",
    "replay, ms",
    "total, ms",
    "interval",
    "to its line, ms",
];

fn stock(row: &StockRow) -> Vec<String> {
    let StockRow { version, trace, cache, runs, .. } = row;
    let mut cells = vec![version.clone(), trace.clone(), cache.to_string(), runs.to_string()];
    let times = [row.start_ms, row.load_ms, row.replay_ms, row.total_ms];
    cells.extend(times.map(|time| number(time.median)));
    cells.extend([interval(&row.total_ms), number(row.line_ms.median)]);
    cells
}

const OPEN_LOOP: &[&str] = &[
    "planner",
    "trace",
    "starts at random intervals",
    "start to resume, ms",
    "p95",
    "total, ms",
    "p95",
    "largest",
    "p95 / median of the runs",
    "fallbacks",
];

fn open_loop(row: &Row) -> Option<Vec<String>> {
    let open = row.open_loop.as_ref()?;
    let mut cells = vec![row.name(), row.trace.clone(), open.starts.to_string()];
    let (resume, total) = (open.start_to_resume_ms, open.total_ms);
    cells.extend([resume.median, resume.p95, total.median, total.p95, total.max].map(number));
    cells.push(format!("{:.2}", open.p95_to_idle_median));
    cells.push(open.fallbacks.to_string());
    Some(cells)
}

const COUNTS: &[&str] = &[
    "planner",
    "trace",
    "cache",
    "pages",
    "KVM faults",
    "exits",
    "leaves 4 KiB",
    "2 MiB",
    "minor faults",
    "major faults",
    "read",
    "CPU, ms",
];

fn counts(row: &Row) -> Vec<String> {
    let mut cells = vec![row.name(), row.trace.clone(), row.cache.to_string()];
    cells.extend(
        [
            row.pages,
            row.kvm_page_faults,
            row.kvm_exits,
            row.kvm_pages_4k,
            row.kvm_pages_2m,
            row.minor_faults,
            row.major_faults,
        ]
        .map(|count| count.to_string()),
    );
    cells.push(format_bytes(row.read_bytes));
    cells.push(number(row.cpu_ms.median));
    cells
}

const DRAM: &[&str] = &[
    "planner",
    "trace",
    "cache",
    "private",
    "shared",
    "pool",
    "copies",
    "page tables",
    "monitor",
    "KVM tables of a run",
    "DRAM of a run",
    "of it page cache",
    "read of free pages",
    "standby",
    "ready",
];

fn dram(row: &Row) -> Vec<String> {
    let mut cells = vec![row.name(), row.trace.clone(), row.cache.to_string()];
    cells.extend(
        [
            row.private_bytes,
            row.shared_bytes,
            row.pool_bytes,
            row.copy_bytes,
            row.page_table_bytes,
            row.monitor_bytes,
            row.batch_kvm_table_bytes,
            row.batch_dram_bytes,
            row.batch_page_cache_bytes,
        ]
        .map(format_bytes),
    );
    cells.push(row.batch_free_read_bytes.map_or("-".to_owned(), format_bytes));
    cells.push(row.standby_bytes.map_or("-".to_owned(), format_bytes));
    cells.push(row.ready_bytes.map_or("-".to_owned(), format_bytes));
    cells
}
