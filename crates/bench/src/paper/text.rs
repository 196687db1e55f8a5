//! The tables of the experiments, in Markdown.

use std::fmt;

use firn_base::format_bytes;
use firn_player::format::{FIRST_TIME_NS, time_class};

use super::kernel_faults;
use super::outcome::{Outcome, Place};
use super::picture::classes;
use super::replays::Quantity;
use crate::players::replicates;
use crate::stats::Summary;
use crate::text::{markdown, number, with_interval, with_range};
use crate::thaw::{Noise, Row};

/// A column of a table of rows: its head, and its cell for a row at a place.
pub(super) type Column = (&'static str, fn(&Place, &Row) -> Cell);

/// A cell of a table of rows.
pub(super) enum Cell {
    Text(String),
    /// A time, ms, and whether it includes waiting for a processor.
    Time(Summary, bool),
    Bytes(u64),
    Count(f64),
    /// With the interval of a ratio, if it is known.
    Ratio(f64, Option<[f64; 2]>),
    /// The row has no such quantity.
    Empty,
}

impl Cell {
    fn time(summary: Option<Summary>) -> Self {
        summary.map_or(Self::Empty, |summary| Self::Time(summary, false))
    }

    pub(super) fn bytes(bytes: Option<u64>) -> Self {
        bytes.map_or(Self::Empty, Self::Bytes)
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => f.write_str(text),
            Self::Time(summary, waits) => {
                write!(f, "{}{}", with_interval(summary), if *waits { "*" } else { "" })
            }
            Self::Bytes(bytes) => f.write_str(&format_bytes(*bytes)),
            Self::Count(count) | Self::Ratio(count, None) => f.write_str(&number(*count)),
            Self::Ratio(ratio, Some(interval)) => f.write_str(&with_range(*ratio, *interval)),
            Self::Empty => Ok(()),
        }
    }
}

const COMMON: [Column; 3] = [
    ("trace", |_, row| Cell::Text(row.trace.clone())),
    ("place", |place, _| Cell::Text(place.name.clone())),
    ("planner", |_, row| Cell::Text(planner(row))),
];
const TOTAL: Column = ("total, ms", |_, row| Cell::Time(row.total_ms, row.oversubscribed));
const FAULTS: Column = ("in page faults, ms", |_, row| Cell::time(row.fault_ms));
const SHARE_OF_FAULTS: Column = ("in page faults, %", |_, row| {
    let share = row.fault_ms.map(|faults| 100.0 * faults.median / row.total_ms.median);
    share.map_or(Cell::Empty, Cell::Count)
});
const READ_BY_FAULTS: Column = ("read by faults", |_, row| Cell::bytes(row.fault_read_bytes));
/// From this time on FaaSnap's paper calls faults those that read from disk (3.3), ns. The kernel's
/// count of major faults misses those that KVM leaves to a kernel worker.
const SLOW_NS: u64 = 32_000;
const SLOW: Column = ("touches of 32 µs and more", |_, row| {
    let slow = row.touch_times.get(time_class(SLOW_NS, FIRST_TIME_NS)..).unwrap_or_default();
    Cell::Count(slow.iter().sum())
});
const KVM_FAULTS: Column = ("KVM faults", |_, row| Cell::Count(row.kvm_page_faults as f64));
const OTHERS: [Column; 9] = [
    ("p95", |_, row| Cell::Count(row.total_ms.p95)),
    ("burst, ms", |_, row| Cell::time(row.burst_ms)),
    FAULTS,
    SHARE_OF_FAULTS,
    ("DRAM of a run", |_, row| Cell::Bytes(row.batch_dram_bytes)),
    ("DRAM and pool", |_, row| Cell::Bytes(row.batch_dram_bytes + batch_pool_bytes(row))),
    ("private", |_, row| Cell::Bytes(row.private_bytes)),
    ("read", |_, row| Cell::Bytes(row.read_bytes)),
    KVM_FAULTS,
];
pub(super) const PARTS: [Column; 3] = [
    ("setup, ms", |_, row| Cell::Time(row.start_to_resume_ms, false)),
    ("invocation, ms", |_, row| Cell::Time(row.resume_to_last_page_ms, false)),
    ("warm, ms", |_, row| Cell::time(row.warm_ms)),
];
const FETCH: [Column; 6] = [
    FAULTS,
    ("fetch, ms", |_, row| Cell::time(row.fetch_ms)),
    ("fetched", |_, row| Cell::bytes(row.fetch_bytes)),
    READ_BY_FAULTS,
    SLOW,
    KVM_FAULTS,
];
const SPEED_UP: [Column; 2] = [
    ("speed-up", |place, row| {
        let speed_up = Outcome::speed_up(place, row);
        speed_up.map_or(Cell::Empty, |(ratio, interval)| Cell::Ratio(ratio, interval))
    }),
    READ_BY_FAULTS,
];

/// What the microVMs of a run map of the pool at once: a replica each, or the extent that they
/// share.
fn batch_pool_bytes(row: &Row) -> u64 {
    let replicas = if replicates(&row.planner) { at_once(row) } else { 1 };
    row.pool_bytes * u64::from(replicas)
}

/// MicroVMs of a run that are together.
pub(super) fn at_once(row: &Row) -> u32 {
    row.at_once.unwrap_or(row.concurrency)
}

/// A row's planner, and how many of its microVMs ran together if others waited.
fn planner(row: &Row) -> String {
    let waiting = row.at_once.map_or(String::new(), |at_once| format!(", {at_once} at once"));
    format!("{}{waiting}", row.planner)
}

impl Outcome {
    /// A table in Markdown, with the host and the planners that were left out.
    #[must_use]
    pub fn markdown(&self) -> String {
        let mut tables = Vec::new();
        if !self.sessions.is_empty() {
            tables.push(self.sessions_markdown());
        }
        tables.extend(self.histogram_markdown());
        tables.extend(self.programs_markdown());
        tables.extend(self.kernel_faults_markdown());
        tables.extend(self.budgets_markdown());
        tables.extend(self.costs_markdown());
        let mut text = format!(
            "{} ({})\n\n{}\n\n{}",
            self.title,
            self.source,
            self.host.line(),
            tables.join("\n")
        );
        for remark in &self.remarks {
            text.push_str(&format!("\n{remark}\n"));
        }
        if self.unsanitised {
            text.push_str(
                "\nThe pages that the guests held free have content; only the guests of `faasnap` zero what they free.\n",
            );
        }
        for Place { name, noise, .. } in &self.sessions {
            for Noise { planner, trace, of, ratio, .. } in noise {
                text.push_str(&format!(
                    "\nnoise at {name}: {planner} on {trace} measured twice, {of}, second / first: {ratio}\n"
                ));
            }
        }
        for (planner, reason) in &self.left_out {
            text.push_str(&format!("\nleft out: {planner}: {reason}\n"));
        }
        text
    }

    pub(super) fn rows(&self) -> impl Iterator<Item = (&Place, &Row)> {
        self.sessions.iter().flat_map(|place| place.rows.iter().map(move |row| (place, row)))
    }

    /// The columns of the table of rows.
    pub(super) fn columns(&self) -> Vec<Column> {
        let more: &[Column] = match self.quantity {
            Quantity::Parts => &PARTS,
            Quantity::Fetch | Quantity::FetchCounts => &FETCH,
            Quantity::SpeedUp => &SPEED_UP,
            _ => &OTHERS,
        };
        let warm = self.rows().any(|(_, row)| row.warm_ms.is_some());
        let warm = (warm && self.quantity != Quantity::Parts).then_some(PARTS[2]);
        COMMON.into_iter().chain([TOTAL]).chain(warm).chain(more.iter().copied()).collect()
    }

    fn sessions_markdown(&self) -> String {
        let columns = self.columns();
        let head: Vec<&str> = columns.iter().map(|(head, _)| *head).collect();
        let rows = self.rows().map(|(place, row)| {
            columns.iter().map(|(_, cell)| cell(place, row).to_string()).collect::<Vec<_>>()
        });
        markdown(&head, &rows.collect::<Vec<_>>())
    }

    /// The touches of a microVM by their time.
    pub(super) fn histogram_markdown(&self) -> Option<String> {
        if self.quantity != Quantity::FaultTimes {
            return None;
        }
        let count = self.rows().map(|(_, row)| row.touch_times.len()).max()?;
        let rows: Vec<&Row> = self.rows().map(|(_, row)| row).collect();
        let head = std::iter::once("from, µs".to_owned())
            .chain(rows.iter().map(|row| format!("{} on {}", row.planner, row.trace)));
        let head: Vec<String> = head.collect();
        let head: Vec<&str> = head.iter().map(String::as_str).collect();
        let lines = classes(count).into_iter().enumerate().map(|(class, name)| {
            let cell =
                |row: &&Row| row.touch_times.get(class).map_or(String::new(), |n| number(*n));
            std::iter::once(name).chain(rows.iter().map(cell)).collect::<Vec<_>>()
        });
        Some(markdown(&head, &lines.collect::<Vec<_>>()))
    }

    pub(super) fn programs_markdown(&self) -> Option<String> {
        let head = [
            "trace",
            "ranges",
            "offsets into a map, ms",
            "a call for each range, ms",
            "of the total",
            "capturing program, ms",
        ];
        let rows: Vec<Vec<String>> = self
            .programs
            .iter()
            .map(|programs| {
                let row = self.rows().find(|(_, row)| row.trace == programs.trace);
                let share = row.map(|(_, row)| programs.map_ms.median / row.total_ms.median);
                vec![
                    programs.trace.clone(),
                    programs.ranges.to_string(),
                    with_interval(&programs.map_ms),
                    with_interval(&programs.map_each_ms),
                    share.map_or(String::new(), |share| format!("{} %", number(share * 100.0))),
                    with_interval(&programs.attach_ms),
                ]
            })
            .collect();
        (!rows.is_empty()).then(|| markdown(&head, &rows))
    }

    /// The kernel's functions in the order of their time.
    pub(super) fn kernel_faults_markdown(&self) -> Option<String> {
        let unit = kernel_faults::unit(&self.host);
        let head = ["trace", "planner", "function of the kernel", "calls", unit, "of the total"];
        let mut rows = Vec::new();
        for faults in &self.kernel_faults {
            let row = |name: &str, calls: String, ms: &Summary| {
                let share = 100.0 * ms.median / faults.total_ms.median;
                let share = format!("{} %", number(share));
                vec![
                    faults.trace.clone(),
                    faults.planner.clone(),
                    name.to_owned(),
                    calls,
                    with_interval(ms),
                    share,
                ]
            };
            rows.push(row("(request to last page)", String::new(), &faults.total_ms));
            let mut functions: Vec<_> = faults.functions.iter().collect();
            functions.sort_by(|(_, a), (_, b)| b.ms.median.total_cmp(&a.ms.median));
            rows.extend(
                functions.iter().map(|(name, f)| row(name, with_interval(&f.calls), &f.ms)),
            );
        }
        (!rows.is_empty()).then(|| markdown(&head, &rows))
    }

    fn budgets_markdown(&self) -> Option<String> {
        let head = ["trace", "budget", "planner", "microVMs", "charged", "copies", "pool", "end"];
        let mut rows = Vec::new();
        for budget in &self.budgets {
            for row in &budget.results {
                let end = row.carried.end.clone();
                rows.push(vec![
                    row.trace.clone(),
                    format_bytes(budget.memory),
                    row.planner.clone(),
                    row.number(),
                    format_bytes(row.carried.usage.total),
                    row.copy_bytes.map_or(String::new(), format_bytes),
                    row.pool_bytes.map_or(String::new(), format_bytes),
                    end.unwrap_or_else(|| "no more were started".to_owned()),
                ]);
            }
        }
        rows.sort_by(|a, b| a[0].cmp(&b[0]));
        (!rows.is_empty()).then(|| markdown(&head, &rows))
    }

    fn costs_markdown(&self) -> Option<String> {
        let head = ["trace", "budget", "pool as", "planner", "cost of each", "to the cheapest"];
        let amount =
            |amount: Option<f64>| amount.map_or(String::new(), |cost| format!("{cost:.4}"));
        let mut rows = Vec::new();
        for priced in &self.costs {
            for row in &priced.costs.costs {
                rows.push(vec![
                    row.trace.clone(),
                    format_bytes(priced.memory),
                    priced.pool_as.clone(),
                    row.planner.clone(),
                    amount(row.of_each),
                    row.to_cheapest.map_or(String::new(), |times| format!("{times:.2}")),
                ]);
            }
        }
        rows.sort_by(|a, b| a[0].cmp(&b[0]));
        (!rows.is_empty()).then(|| markdown(&head, &rows))
    }
}
