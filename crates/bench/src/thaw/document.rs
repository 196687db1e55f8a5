//! Results of many sessions for a document: Markdown tables with a row for each trace and a column
//! for each planner, and for its warm invocations, and a picture of their medians.

use std::collections::{BTreeMap, BTreeSet};

use super::invocation::{Invocation, suffix};
use super::results::{Results, Row};
use crate::cache::Cache;
use crate::picture::chart::{Bar, Chart, Marks, Panel};
use crate::stats::{Summary, quantile, sorted};
use crate::text::{self, number};

/// The planner that the picture compares all others with.
const BASE: &str = "firecracker:readahead=on";

const MIB: f64 = 1048576.0;

/// The conditions under which the rows of a table were measured. The papers' conditions come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Conditions {
    sanitised: bool,
    sparse: bool,
    concurrency: u32,
    snapshots: u32,
    cache_order: u8,
}

impl Conditions {
    fn title(self) -> String {
        let Self { sanitised, sparse, concurrency, snapshots, cache_order } = self;
        let microvms = match (concurrency, snapshots) {
            (1, _) => "One microVM".to_owned(),
            (_, 1) => format!("{concurrency} microVMs of one snapshot"),
            _ => format!("{concurrency} microVMs of {snapshots} snapshots"),
        };
        let cache = ["cold", "cached", "cached in 4 KiB"][usize::from(cache_order)];
        let images = if sparse { "sparse" } else { "dense" };
        let guest = if sanitised { "sanitised" } else { "unsanitised" };
        format!("{microvms}, page cache {cache}; {images} images, {guest} guest")
    }

    /// What the sessions showed by measuring a planner twice; empty if none did.
    fn noise(self, sessions: &[Results]) -> String {
        let measured = sessions.iter().filter(|session| {
            let first = session.results.first();
            session.unsanitised != self.sanitised
                && session.dense != self.sparse
                && first.is_some_and(|row| {
                    (row.concurrency, row.snapshots) == (self.concurrency, self.snapshots)
                })
        });
        let noise = measured.flat_map(|session| &session.noise).filter(|noise| {
            cache_order(noise.cache).is_none_or(|cache_order| cache_order == self.cache_order)
        });
        let ratios: Vec<f64> = noise.map(|noise| noise.ratio.median).collect();
        Summary::of(&ratios).map_or(String::new(), |Summary { median, min, max, .. }| {
            format!(
                "Noise: a planner measured twice, second / first, {} times: median {median:.3}, \
                 {min:.3} to {max:.3}.\n\n",
                ratios.len()
            )
        })
    }
}

/// A quantity: its name and unit, and the functions that read it and show it in a table.
type Quantity = (&'static str, Value, fn(Invocation<'_>, f64) -> String);
type Value = fn(Invocation<'_>) -> Option<f64>;

const QUANTITIES: [Quantity; 3] = [
    (
        "Request to last page, ms",
        |invocation| Some(invocation.ms.median),
        |invocation, _| text::with_interval(&invocation.ms),
    ),
    (
        "DRAM of all microVMs, MiB",
        |Invocation { row, warm, .. }| (!warm).then(|| row.batch_dram_bytes as f64 / MIB),
        |_, value| number(value),
    ),
    (
        "Read of free pages, MiB",
        |Invocation { row, warm, .. }| {
            if warm { None } else { Some(row.batch_free_read_bytes? as f64 / MIB) }
        },
        |_, value| number(value),
    ),
];

/// Markdown tables for each set of conditions. A time is the median, with its 95 % bootstrap
/// interval from 11 runs on, otherwise with minimum and maximum. If sessions measured the same
/// planner and trace under the same conditions, the last one counts.
#[must_use]
pub fn sessions_markdown(sessions: &[Results]) -> String {
    let mut text = String::new();
    for (conditions, rows) in &grouped(sessions) {
        text.push_str(&format!("## {}\n\n", conditions.title()));
        for quantity in QUANTITIES {
            text.push_str(&table(&invocations(rows), quantity));
        }
        text.push_str(&conditions.noise(sessions));
    }
    text
}

/// A picture as SVG: for each set of conditions, the time and the DRAM of each planner relative to
/// Firecracker's cold start on the same trace. A bar is the median over the traces, its whisker the
/// interquartile range.
#[must_use]
pub fn draw_sessions(sessions: &[Results]) -> String {
    let mut panels = Vec::new();
    for (conditions, rows) in &grouped(sessions) {
        for (name, value, _) in QUANTITIES.into_iter().take(2) {
            let rows = invocations(rows);
            let subjects = distinct(&rows, Invocation::subject);
            let bars = subjects.into_iter().filter_map(|subject| bar(&rows, subject, value));
            let bars: Vec<Bar> = bars.collect();
            if bars.len() > 1 {
                // A ratio has no unit.
                let name = name.split(',').next().unwrap_or(name);
                panels.push(Panel {
                    title: format!("{name}: {}", conditions.title()),
                    unit: format!("relative to {BASE}"),
                    marks: Marks::Bars(bars),
                });
            }
        }
    }
    let mut hosts: Vec<String> = Vec::new();
    for host in sessions.iter().map(|session| session.host.line()) {
        if !hosts.contains(&host) {
            hosts.push(host);
        }
    }
    Chart {
        title: "All restores relative to Firecracker".to_owned(),
        legend: Vec::new(),
        remarks: vec!["bars: medians over the traces; whiskers: interquartile ranges".to_owned()],
        columns: 1,
        panels,
        foot: hosts.join("; "),
    }
    .svg()
}

/// A planner, or its warm invocation, relative to Firecracker's cold start, over all traces that
/// both were measured on.
fn bar(rows: &[Invocation<'_>], subject: (&str, bool), value: Value) -> Option<Bar> {
    let ratio = |trace| {
        Some(value(row_of(rows, subject, trace)?)? / value(row_of(rows, (BASE, false), trace)?)?)
    };
    let traces = distinct(rows, |invocation| invocation.row.trace.as_str());
    let ratios: Vec<f64> = traces.into_iter().filter_map(ratio).collect();
    let ratios = sorted(&ratios)?;
    let (low, median, high) =
        (quantile(&ratios, 0.25), quantile(&ratios, 0.5), quantile(&ratios, 0.75));
    Some(Bar {
        name: format!("{}{}", subject.0, suffix(subject.1)),
        parts: vec![(subject.1.into(), median)],
        whisker: Some((low, high)),
        value: text::with_range(median, [low, high]),
    })
}

/// Rows by their conditions.
fn grouped(sessions: &[Results]) -> BTreeMap<Conditions, Vec<&Row>> {
    let mut groups: BTreeMap<Conditions, Vec<&Row>> = BTreeMap::new();
    for session in sessions {
        let all: BTreeSet<u8> =
            session.results.iter().filter_map(|row| cache_order(row.cache)).collect();
        for row in session.results.iter().filter(|row| !row.is_repeated()) {
            // Planners that map from a pool use no page cache, so their rows belong to every state
            // of the session.
            let measured = match cache_order(row.cache) {
                Some(cache_order) => vec![cache_order],
                None if all.is_empty() => vec![0],
                None => all.iter().copied().collect(),
            };
            for cache_order in measured {
                let conditions = Conditions {
                    sanitised: !session.unsanitised,
                    sparse: !session.dense,
                    concurrency: row.concurrency,
                    snapshots: row.snapshots,
                    cache_order,
                };
                groups.entry(conditions).or_default().push(row);
            }
        }
    }
    groups
}

/// The position of a state of the page cache in the order of tables; `None` if it has no effect.
fn cache_order(cache: Cache) -> Option<u8> {
    match cache {
        Cache::Cold => Some(0),
        Cache::Cached => Some(1),
        Cache::CachedSmall => Some(2),
        Cache::Unused => None,
    }
}

/// A table of one quantity; empty if no row has it.
fn table(rows: &[Invocation<'_>], (name, value, show): Quantity) -> String {
    let rows: Vec<Invocation<'_>> =
        rows.iter().copied().filter(|row| value(*row).is_some()).collect();
    let subjects = distinct(&rows, Invocation::subject);
    if subjects.is_empty() {
        return String::new();
    }
    let columns = subjects.iter().map(|(planner, warm)| format!("`{planner}`{}", suffix(*warm)));
    let head: Vec<String> = ["trace".to_owned()].into_iter().chain(columns).collect();
    let head: Vec<&str> = head.iter().map(String::as_str).collect();
    let traces = distinct(&rows, |invocation| invocation.row.trace.as_str());
    let lines = traces.into_iter().map(|trace| {
        let cells = subjects.iter().map(|subject| {
            let row = row_of(&rows, *subject, trace);
            row.and_then(|row| Some(show(row, value(row)?))).unwrap_or_default()
        });
        [trace.to_owned()].into_iter().chain(cells).collect()
    });
    let lines: Vec<Vec<String>> = lines.collect();
    format!("{name}:\n\n{}\n", text::markdown(&head, &lines))
}

fn invocations<'a>(rows: &[&'a Row]) -> Vec<Invocation<'a>> {
    rows.iter().flat_map(|row| row.invocations()).collect()
}

/// The values of invocations, without duplicates, in order.
fn distinct<'a, T: PartialEq>(
    rows: &[Invocation<'a>],
    value: impl Fn(&Invocation<'a>) -> T,
) -> Vec<T> {
    let mut values = Vec::new();
    for value in rows.iter().map(value) {
        if !values.contains(&value) {
            values.push(value);
        }
    }
    values
}

/// The last row of a subject and a trace.
fn row_of<'a>(
    rows: &[Invocation<'a>],
    subject: (&str, bool),
    trace: &str,
) -> Option<Invocation<'a>> {
    rows.iter().rev().copied().find(|row| row.subject() == subject && row.row.trace == trace)
}

#[cfg(test)]
#[path = "document_tests.rs"]
mod tests;
