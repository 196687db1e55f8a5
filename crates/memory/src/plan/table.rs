//! A plan as text tables and as a summary.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{Plan, Source};

/// A table to print: a title, column heads, and rows of as many cells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanTable {
    /// The title.
    pub title: &'static str,
    /// The heads of the columns.
    pub head: &'static [&'static str],
    /// The rows.
    pub rows: Vec<Vec<String>>,
}

/// Bytes of guest memory by the properties of their segments, named as in the plan.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PlanSummary {
    /// Bytes of guest memory.
    pub bytes: u64,
    /// Bytes by source: `zero`, `image`, `packed file`, `pool extent`, `copy`, `pager`.
    pub by_source: BTreeMap<String, u64>,
    /// Bytes by sharing.
    pub by_sharing: BTreeMap<String, u64>,
    /// Bytes by leaf.
    pub by_leaf: BTreeMap<String, u64>,
    /// Bytes by integrity.
    pub by_integrity: BTreeMap<String, u64>,
    /// Number of mmaps.
    pub layers: u64,
    /// Number of steps.
    pub steps: u64,
}

impl Plan {
    /// The summary of the plan. O(number of segments).
    pub fn summary(&self) -> PlanSummary {
        let mut summary = PlanSummary {
            layers: self.layers.len() as u64,
            steps: self.schedule.len() as u64,
            ..PlanSummary::default()
        };
        for segment in &self.segments {
            let source = match segment.source {
                Source::Zero => "zero",
                Source::Image { .. } => "image",
                Source::Packed { .. } => "packed file",
                Source::Extent { .. } => "pool extent",
                Source::Copy { .. } => "copy",
                Source::Pager { .. } => "pager",
            };
            let len = segment.guest.len;
            summary.bytes += len;
            for (bytes, name) in [
                (&mut summary.by_source, source.to_owned()),
                (&mut summary.by_sharing, segment.sharing.to_string()),
                (&mut summary.by_leaf, segment.leaf.to_string()),
                (&mut summary.by_integrity, segment.integrity.to_string()),
            ] {
                *bytes.entry(name).or_default() += len;
            }
        }
        summary
    }

    /// The plan as tables: segments, layers and schedule, in the order of the plan.
    pub fn tables(&self) -> [PlanTable; 3] {
        let segments = self.segments.iter().map(|s| {
            vec![
                s.guest.to_string(),
                size(s.guest.len),
                s.source.to_string(),
                s.sharing.to_string(),
                s.leaf.to_string(),
                s.integrity.to_string(),
            ]
        });
        let layers = self.layers.iter().map(|l| {
            vec![
                l.guest.to_string(),
                size(l.guest.len),
                l.source.to_string(),
                l.sharing.to_string(),
                l.advice.to_string(),
            ]
        });
        let steps = self.schedule.iter().map(|s| vec![s.when.to_string(), s.work.to_string()]);
        [
            PlanTable {
                title: "segments",
                head: &["guest", "size", "source", "sharing", "leaf", "integrity"],
                rows: segments.collect(),
            },
            PlanTable {
                title: "layers",
                head: &["guest", "size", "source", "sharing", "advice"],
                rows: layers.collect(),
            },
            PlanTable { title: "schedule", head: &["when", "work"], rows: steps.collect() },
        ]
    }
}

/// A number of bytes in the largest unit that gives a whole number: `512 MiB`.
fn size(bytes: u64) -> String {
    [(30, "GiB"), (20, "MiB"), (10, "KiB")]
        .into_iter()
        .find(|(shift, _)| bytes != 0 && bytes.trailing_zeros() >= *shift)
        .map_or_else(|| format!("{bytes} B"), |(shift, unit)| format!("{} {unit}", bytes >> shift))
}
