//! Results of many sessions as tables for a document: a row for each trace, a column for each planner.

use std::collections::{BTreeMap, BTreeSet};

use crate::cache::Cache;
use crate::results::{Results, Row};
use crate::svg::number;

/// FaaSnap's paper has a guest that zeroes what it frees: beside guests that do not, it is shown of one that does.
const SANITISES: &str = "faasnap";
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

/// Markdown: tables for each way in which the sessions measured. Of the same planner, trace and way, the later session counts.
#[must_use]
pub fn markdown(sessions: &[Results]) -> String {
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
    let mut text = String::new();
    for (shape, rows) in &shapes {
        let beside = Shape { sanitised: !shape.sanitised, ..*shape };
        let beside = shapes.get(&beside).map_or(&[][..], Vec::as_slice);
        let sanitised: Vec<&Row> = beside
            .iter()
            .copied()
            .filter(|row| !shape.sanitised && sanitises(&row.planner))
            .collect();
        // One that was measured for the tables of unsanitised guests alone needs none of its own.
        if shape.sanitised && !beside.is_empty() && rows.iter().all(|row| sanitises(&row.planner)) {
            continue;
        }
        let rows: Vec<&Row> = if sanitised.is_empty() {
            rows.clone()
        } else {
            rows.iter().copied().filter(|row| !sanitises(&row.planner)).chain(sanitised).collect()
        };
        text.push_str(&format!("## {}\n\n", shape.title()));
        for quantity in QUANTITIES {
            text.push_str(&table(&rows, quantity));
        }
    }
    text
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

/// Whether a planner is shown of guests that zero what they free, also beside guests that do not.
#[must_use]
pub fn sanitises(planner: &str) -> bool {
    planner.starts_with(SANITISES)
}

/// Nothing, where no row has the quantity.
fn table(rows: &[&Row], (name, value): Quantity) -> String {
    let (mut planners, mut traces): (Vec<&str>, Vec<&str>) = (Vec::new(), Vec::new());
    for row in rows.iter().filter(|row| value(row).is_some()) {
        if !planners.contains(&row.planner.as_str()) {
            planners.push(&row.planner);
        }
        if !traces.contains(&row.trace.as_str()) {
            traces.push(&row.trace);
        }
    }
    if planners.is_empty() {
        return String::new();
    }
    let heads = planners.iter().map(|planner| format!(" `{planner}` |")).collect::<String>();
    let mut text = format!("{name}:\n\n| trace |{heads}\n|{}\n", "---|".repeat(planners.len() + 1));
    for trace in traces {
        text.push_str(&format!("| {trace} |"));
        for planner in &planners {
            let row = rows.iter().rev().find(|row| row.planner == *planner && row.trace == trace);
            let cell = row.and_then(|row| value(row)).map_or(String::new(), number);
            text.push_str(&format!(" {cell} |"));
        }
        text.push('\n');
    }
    text.push('\n');
    text
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
