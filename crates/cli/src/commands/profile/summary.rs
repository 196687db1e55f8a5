//! A profile in numbers.

use std::fmt;
use std::path::PathBuf;

use firn_base::{PAGE_SIZE, PageRange, format_bytes};
use serde::Serialize;

use firn_snapshot::{PageSet, Profile, Snapshot};
use uuid::Uuid;

use crate::output;

/// What a profile holds, counted.
#[derive(Debug, Serialize)]
pub(super) struct Summary {
    snapshot: PathBuf,
    /// The snapshot's id, which the profile names.
    id: Uuid,
    /// What the runs were given.
    inputs: Vec<String>,
    /// Pages of guest memory.
    pages: u64,
    /// Those of them that are all zero.
    zero_pages: u64,
    /// The parts that were recorded.
    parts: Vec<PartSummary>,
    /// Working-set groups, where they were recorded.
    groups: Option<usize>,
    /// Pages that were touched and not written, where faults and writes were recorded.
    read_pages: Option<u64>,
    /// Pages that are zero in the image and were touched, where faults were recorded.
    zero_pages_touched: Option<u64>,
    /// Pages that the host read ahead: in a group and not touched, where both were recorded. The
    /// runs may differ.
    read_ahead_pages: Option<u64>,
}

#[derive(Debug, Serialize)]
struct PartSummary {
    part: &'static str,
    pages: u64,
    bytes: u64,
    runs: usize,
    zero_pages: u64,
}

impl Summary {
    pub(super) fn of(profile: &Profile, snapshot: &Snapshot) -> Self {
        let manifest = snapshot.manifest();
        let pages = manifest.layout.pages();
        let zero = snapshot.zero_map();
        let part = |part, runs: Vec<&PageRange>| {
            let set = PageSet::of(runs.iter().copied(), pages);
            let zero_pages = common(&set, zero);
            let runs = runs.len();
            PartSummary {
                part,
                pages: set.count(),
                bytes: set.count() * PAGE_SIZE,
                runs,
                zero_pages,
            }
        };
        let of = |name, runs: Option<Vec<&PageRange>>| runs.map(|runs| part(name, runs));
        let set = |runs: Option<Vec<&PageRange>>| runs.map(|runs| PageSet::of(runs, pages));
        let flat = |groups: &'_ Option<Vec<Vec<PageRange>>>| {
            groups.as_ref().map(|groups| groups.iter().flatten().copied().collect::<Vec<_>>())
        };
        let grouped = flat(&profile.groups);
        let faults = || profile.faults.as_ref().map(|runs| runs.iter().collect());
        let written = || profile.written.as_ref().map(|runs| runs.iter().collect());
        let groups = || grouped.as_ref().map(|runs| runs.iter().collect());
        let cached = || profile.cached.as_ref().map(|runs| runs.iter().map(|c| &c.run).collect());
        let free = || profile.free.as_ref().map(|runs| runs.iter().collect());
        let small = || profile.small_leaves.as_ref().map(|runs| runs.iter().collect());
        let reported = || profile.reported.as_ref().map(|runs| runs.iter().collect());
        let (touched, grown) = (set(faults()), set(groups()));
        let both =
            |a: &Option<PageSet>, b: &Option<PageSet>, of: &dyn Fn(&PageSet, &PageSet) -> u64| {
                Some(of(a.as_ref()?, b.as_ref()?))
            };
        let without = |a: &PageSet, b: &PageSet| a.count() - common(a, b);
        Self {
            snapshot: snapshot.path().to_owned(),
            id: manifest.description.id,
            inputs: profile.inputs.clone(),
            pages,
            zero_pages: zero.count(),
            parts: [
                of("faults", faults()),
                of("writes", written()),
                of("groups", groups()),
                of("cache", cached()),
                of("free", free()),
                of("reported", reported()),
                of("small leaves", small()),
            ]
            .into_iter()
            .flatten()
            .collect(),
            groups: profile.groups.as_ref().map(Vec::len),
            read_pages: both(&touched, &set(written()), &without),
            zero_pages_touched: touched.as_ref().map(|touched| common(touched, zero)),
            read_ahead_pages: both(&grown, &touched, &without),
        }
    }
}

impl Summary {
    /// Whether nothing was recorded.
    pub(super) fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// What it is of, in a line.
    pub(super) fn title(&self) -> String {
        format!(
            "{}, recorded on {}",
            self.snapshot.display(),
            output::plain(&self.inputs.join(", "))
        )
    }
}

/// How many pages are in both sets.
fn common(a: &PageSet, b: &PageSet) -> u64 {
    a.ranges().flat_map(|range| b.ranges_in(range)).map(|range| range.end - range.start).sum()
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "profile of {} ({}), recorded on {}; guest memory has {} pages, {} of them zero",
            self.snapshot.display(),
            self.id,
            output::plain(&self.inputs.join(", ")),
            self.pages,
            self.zero_pages,
        )?;
        let row = |part: &PartSummary| {
            let [pages, runs, zero] =
                [part.pages.to_string(), part.runs.to_string(), part.zero_pages.to_string()];
            vec![part.part.to_owned(), pages, format_bytes(part.bytes), runs, zero]
        };
        let rows: Vec<Vec<String>> = self.parts.iter().map(row).collect();
        write!(f, "{}", output::table(&["part", "pages", "size", "runs", "zero pages"], &rows))?;
        if let Some(groups) = self.groups {
            write!(f, "\n{groups} working-set groups")?;
        }
        if let Some(read) = self.read_pages {
            write!(f, "\n{read} pages were touched and not written")?;
        }
        if let Some(ahead) = self.read_ahead_pages {
            write!(f, "\n{ahead} pages came into the page cache and were not touched")?;
        }
        Ok(())
    }
}
