//! Results of many sessions as tables for a document: a row for each trace, a column for each
//! planner. And as a picture: what is typical of each planner.

use std::collections::{BTreeMap, BTreeSet};

use super::results::{Results, Row};
use crate::cache::Cache;
use crate::picture::chart::{Bar, Chart, Marks, Panel};
use crate::players::sanitises;
use crate::stats::{quantile, sorted};
use crate::text::{self, number};

/// What the others are compared with in the picture: what is there without any of them.
const BASE: &str = "firecracker:readahead=on";

const MIB: f64 = 1048576.0;

/// How the rows of a table were measured. The papers' comparisons come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Shape {
    sanitised: bool,
    sparse: bool,
    concurrency: u32,
    snapshots: u32,
    warm: u8,
}

impl Shape {
    fn title(self) -> String {
        let Self { sanitised, sparse, concurrency, snapshots, warm } = self;
        let microvms = match (concurrency, snapshots) {
            (1, _) => "One microVM".to_owned(),
            (_, 1) => format!("{concurrency} microVMs of one snapshot"),
            _ => format!("{concurrency} microVMs of {snapshots} snapshots"),
        };
        let cache = ["cold", "cached", "cached in 4 KiB"][usize::from(warm)];
        let images = if sparse { "sparse" } else { "dense" };
        let guest = if sanitised { "sanitised" } else { "unsanitised" };
        format!("{microvms}, page cache {cache}; {images} images, {guest} guest")
    }
}

/// A quantity: its name and unit, and its value of a row.
type Quantity = (&'static str, fn(&Row) -> Option<f64>);

const QUANTITIES: [Quantity; 3] = [
    ("Request to last page, ms", |row| Some(row.total_ms.median)),
    ("DRAM of all microVMs, MiB", |row| Some(row.batch_dram_bytes as f64 / MIB)),
    ("Read of free pages, MiB", |row| Some(row.batch_free_read_bytes? as f64 / MIB)),
];

/// Markdown: tables for each way in which the sessions measured. Of the same planner, trace and
/// way, the later session counts.
#[must_use]
pub fn sessions_markdown(sessions: &[Results]) -> String {
    let mut text = String::new();
    for (shape, rows) in &grouped(sessions) {
        text.push_str(&format!("## {}\n\n", shape.title()));
        for quantity in QUANTITIES {
            text.push_str(&table(rows, quantity));
        }
    }
    text
}

/// A picture: for each way in which the sessions measured, how long each planner takes, and how
/// much DRAM, as parts of what Firecracker takes on the same trace. A bar is the median over the
/// traces, its whisker the middle half of them.
#[must_use]
pub fn draw_sessions(sessions: &[Results]) -> String {
    let mut panels = Vec::new();
    for (shape, rows) in &grouped(sessions) {
        for (name, value) in QUANTITIES.into_iter().take(2) {
            let bars: Vec<Bar> = names(rows, |row| &row.planner)
                .into_iter()
                .filter_map(|planner| bar(rows, planner, value))
                .collect();
            if bars.len() > 1 {
                // Its unit is of no ratio.
                let name = name.split(',').next().unwrap_or(name);
                panels.push(Panel {
                    title: format!("{name}: {}", shape.title()),
                    unit: format!("parts of {BASE}"),
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
        title: "All restores beside Firecracker".to_owned(),
        legend: Vec::new(),
        remark: "bars: medians over the traces; whiskers: the middle half of them".to_owned(),
        panels,
        foot: hosts.join("; "),
    }
    .svg()
}

/// A planner beside Firecracker, over all traces that both were measured on.
fn bar(rows: &[&Row], planner: &str, value: fn(&Row) -> Option<f64>) -> Option<Bar> {
    let ratio =
        |trace| Some(value(row_of(rows, planner, trace)?)? / value(row_of(rows, BASE, trace)?)?);
    let ratios: Vec<f64> = names(rows, |row| &row.trace).into_iter().filter_map(ratio).collect();
    let ratios = sorted(&ratios)?;
    let (low, median, high) =
        (quantile(&ratios, 0.25), quantile(&ratios, 0.5), quantile(&ratios, 0.75));
    Some(Bar {
        name: planner.to_owned(),
        parts: vec![(0, median)],
        whisker: Some((low, high)),
        value: format!("{} ({} to {})", number(median), number(low), number(high)),
    })
}

/// Rows by the way in which they were measured, as they are shown: of unsanitised guests with
/// planners beside them whose papers have sanitised ones.
fn grouped(sessions: &[Results]) -> BTreeMap<Shape, Vec<&Row>> {
    let mut shapes: BTreeMap<Shape, Vec<&Row>> = BTreeMap::new();
    for session in sessions {
        let all: BTreeSet<u8> = session.results.iter().filter_map(|row| warm(row.cache)).collect();
        for row in &session.results {
            // Planners that map from a pool use no page cache: theirs are all of the session's.
            let measured = match warm(row.cache) {
                Some(warm) => vec![warm],
                None if all.is_empty() => vec![0],
                None => all.iter().copied().collect(),
            };
            for warm in measured {
                let shape = Shape {
                    sanitised: !session.unsanitised,
                    sparse: !session.dense,
                    concurrency: row.concurrency,
                    snapshots: row.snapshots,
                    warm,
                };
                shapes.entry(shape).or_default().push(row);
            }
        }
    }
    let shown = shapes.iter().filter_map(|(shape, rows)| {
        let beside = Shape { sanitised: !shape.sanitised, ..*shape };
        let beside = shapes.get(&beside).map_or(&[][..], Vec::as_slice);
        // One that was measured for the tables of unsanitised guests alone needs none of its own.
        if shape.sanitised && !beside.is_empty() && rows.iter().all(|row| sanitises(&row.planner)) {
            return None;
        }
        let sanitised: Vec<&Row> = beside
            .iter()
            .copied()
            .filter(|row| !shape.sanitised && sanitises(&row.planner))
            .collect();
        let rows = if sanitised.is_empty() {
            rows.clone()
        } else {
            rows.iter().copied().filter(|row| !sanitises(&row.planner)).chain(sanitised).collect()
        };
        Some((*shape, rows))
    });
    shown.collect()
}

/// A state of the page cache as a place in the order of tables, where it plays a part.
fn warm(cache: Cache) -> Option<u8> {
    match cache {
        Cache::Cold => Some(0),
        Cache::Cached => Some(1),
        Cache::CachedSmall => Some(2),
        Cache::Unused => None,
    }
}

/// Nothing, where no row has the quantity.
fn table(rows: &[&Row], (name, value): Quantity) -> String {
    let rows: Vec<&Row> = rows.iter().copied().filter(|row| value(row).is_some()).collect();
    let planners = names(&rows, |row| &row.planner);
    if planners.is_empty() {
        return String::new();
    }
    let columns = planners.iter().map(|planner| format!("`{planner}`"));
    let head: Vec<String> = ["trace".to_owned()].into_iter().chain(columns).collect();
    let head: Vec<&str> = head.iter().map(String::as_str).collect();
    let lines = names(&rows, |row| &row.trace).into_iter().map(|trace| {
        let cells = planners.iter().map(|planner| {
            row_of(&rows, planner, trace).and_then(value).map_or(String::new(), number)
        });
        [trace.to_owned()].into_iter().chain(cells).collect()
    });
    let lines: Vec<Vec<String>> = lines.collect();
    format!("{name}:\n\n{}\n", text::markdown(&head, &lines))
}

/// The names in rows, each once, in their order.
fn names<'a>(rows: &[&'a Row], name: impl Fn(&'a Row) -> &'a str) -> Vec<&'a str> {
    let mut names = Vec::new();
    for name in rows.iter().map(|row| name(row)) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

/// The later one of a planner and a trace.
fn row_of<'a>(rows: &[&'a Row], planner: &str, trace: &str) -> Option<&'a Row> {
    rows.iter().rev().copied().find(|row| row.planner == planner && row.trace == trace)
}

#[cfg(test)]
#[path = "document_tests.rs"]
mod tests;
