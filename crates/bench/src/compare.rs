//! The comparison of two results of one host: which restores became slower or faster beyond the
//! noise.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::bootstrap;
use crate::cache::Cache;
use crate::host::{Host, KvmKind};
use crate::paper::{Outcome, Place};
use crate::saved::{self, ReadResultsError};
use crate::stats::Summary;
use crate::text::{table, with_interval};
use crate::thaw::{Noise, Results, Row};

/// The fewest runs whose extremes say something: with five runs on each side the probability that
/// all of one are above all of the other by chance is below 1 %.
const FEWEST_RUNS: u32 = 5;

/// The condition that names what measured.
const COMMAND: &str = "the command";

/// Results that can be compared: of a session of `firn bench thaw`, or of a paper's experiment.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    path: PathBuf,
    host: Host,
    /// What was measured in the same way for all rows, as text, by name.
    conditions: Vec<(&'static str, String)>,
    places: Vec<Place>,
}

/// Why two results cannot be compared.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CompareError {
    /// A file cannot be read.
    #[error(transparent)]
    Read(#[from] ReadResultsError),
    /// The results are of different hosts.
    #[error(
        "{old} and {new} are of different hosts, whose times cannot be compared: {difference}; measure both on one host"
    )]
    Hosts {
        /// The earlier file.
        old: PathBuf,
        /// The later file.
        new: PathBuf,
        /// What differs.
        difference: String,
    },
    /// The results are of the lab.
    #[error("{0} was measured in the lab, whose times are no performance: measure natively")]
    Lab(PathBuf),
    /// The sessions measured in different ways.
    #[error(
        "{old} and {new} were measured in different ways: {difference}; repeat the new measurement as the old one"
    )]
    Conditions {
        /// The earlier file.
        old: PathBuf,
        /// The later file.
        new: PathBuf,
        /// What differs.
        difference: String,
    },
    /// A session measured no planner twice.
    #[error(
        "{0} measured no planner twice, so its noise is unknown: measure several planners, or add --noise"
    )]
    NoNoise(PathBuf),
    /// No row is in both results.
    #[error("{old} and {new} have no planner, trace, page cache and number of microVMs in common")]
    Nothing {
        /// The earlier file.
        old: PathBuf,
        /// The later file.
        new: PathBuf,
    },
}

/// What happened to a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The new median is higher, and the difference is no noise.
    Regression,
    /// The new median is lower, and the difference is no noise.
    Gain,
    /// The intervals overlap, or the ratio is within the noise floor.
    Noise,
    /// There are fewer than five runs on a side.
    TooFewRuns,
}

/// A planner on a trace, in both results.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ComparedRow {
    /// The place on the scale of a paper's experiment; empty for a session.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub place: String,
    /// The trace.
    pub trace: String,
    /// The planner.
    pub planner: String,
    /// The page cache before each run.
    pub cache: Cache,
    /// MicroVMs that started together.
    pub concurrency: u32,
    /// The compared quantity: `total_ms`, or `cpu_ns_per_page` if there were more microVMs than
    /// processors.
    pub of: &'static str,
    /// The earlier measurements.
    pub old: Summary,
    /// The later measurements.
    pub new: Summary,
    /// The new median divided by the old one.
    pub ratio: f64,
    /// The 95 % bootstrap interval of the ratio; with fewer than 11 runs on a side the ratios of
    /// the extremes.
    pub interval: [f64; 2],
    /// The noise floor: a ratio between its reciprocal and it is noise. The larger one of both
    /// sessions.
    pub noise: f64,
    /// What happened.
    pub verdict: Verdict,
}

/// Two results side by side.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Compared {
    /// The host and the build of the earlier results.
    pub old: Host,
    /// The host and the build of the later results.
    pub new: Host,
    /// Rows of both.
    pub rows: Vec<ComparedRow>,
    /// Rows of one alone, as text.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unmatched: Vec<String>,
}

/// A file that [`Measured`] can be read from.
#[derive(Deserialize)]
#[serde(untagged)]
enum Readable {
    Paper(Box<Outcome>),
    Session(Box<Results>),
}

impl Measured {
    /// Reads the JSON that `firn bench thaw` or `firn bench paper` wrote.
    ///
    /// # Errors
    ///
    /// [`ReadResultsError`].
    pub fn read(path: &Path) -> Result<Self, ReadResultsError> {
        Ok(match saved::read_results(path)? {
            Readable::Paper(outcome) => Self {
                path: path.to_owned(),
                host: outcome.host,
                conditions: vec![
                    (COMMAND, format!("firn bench paper {}", outcome.name)),
                    ("unsanitised", outcome.unsanitised.to_string()),
                ],
                places: outcome.sessions,
            },
            Readable::Session(results) => Self {
                path: path.to_owned(),
                conditions: results.conditions(),
                host: results.host,
                places: vec![Place {
                    name: String::new(),
                    rows: results.results,
                    noise: results.noise,
                }],
            },
        })
    }

    fn rows(&self) -> impl Iterator<Item = (&Place, &Row)> {
        self.places.iter().flat_map(|place| {
            place.rows.iter().filter(|row| !row.is_repeated()).map(move |row| (place, row))
        })
    }
}

impl Results {
    fn conditions(&self) -> Vec<(&'static str, String)> {
        let Self { leaves, gaps, again, dense, unsanitised, warm_up, mix, .. } = self;
        let or_none = |text: &Option<String>| text.clone().unwrap_or_else(|| "none".to_owned());
        vec![
            (COMMAND, "firn bench thaw".to_owned()),
            ("leaves", or_none(leaves)),
            ("gaps", or_none(gaps)),
            ("again", or_none(again)),
            ("dense", dense.to_string()),
            ("unsanitised", unsanitised.to_string()),
            ("warm-up", warm_up.to_string()),
            ("mix", or_none(&mix.map(|seed| seed.to_string()))),
        ]
    }
}

impl Compared {
    /// Compares two results.
    ///
    /// # Errors
    ///
    /// [`CompareError`] if their times cannot be compared.
    pub fn of(old: &Measured, new: &Measured) -> Result<Self, CompareError> {
        let paths = || (old.path.clone(), new.path.clone());
        let hosts = |Host { machine, kernel, kvm, medium, .. }: &Host| {
            [
                ("machine", machine.clone()),
                ("kernel", kernel.clone()),
                ("KVM", kvm.to_string()),
                ("medium", medium.clone()),
            ]
        };
        if let Some(difference) = difference(&hosts(&old.host), &hosts(&new.host)) {
            let (old, new) = paths();
            return Err(CompareError::Hosts { old, new, difference });
        }
        if new.host.kvm == KvmKind::Lab {
            return Err(CompareError::Lab(new.path.clone()));
        }
        if let Some(difference) = difference(&old.conditions, &new.conditions) {
            let (old, new) = paths();
            return Err(CompareError::Conditions { old, new, difference });
        }
        for measured in [old, new] {
            if measured.places.iter().all(|place| place.noise.is_empty()) {
                return Err(CompareError::NoNoise(measured.path.clone()));
            }
        }
        let mut rows = Vec::new();
        let mut unmatched = Vec::new();
        for (place, row) in new.rows() {
            let Some((before, earlier)) = old.rows().find(|of| same(*of, (place, row))) else {
                unmatched.push(format!("{} in {}", named(row), new.path.display()));
                continue;
            };
            if (earlier.pages, earlier.touches) != (row.pages, row.touches) {
                let (old, new) = paths();
                let touches = |row: &Row| format!("{} touches of {} pages", row.touches, row.pages);
                let (name, was, is) = (named(row), touches(earlier), touches(row));
                let difference = format!("{name}: {was} and {is}");
                return Err(CompareError::Conditions { old, new, difference });
            }
            let noise = floor(before, row).max(floor(place, row));
            rows.push(ComparedRow::of(&place.name, earlier, row, noise));
        }
        if rows.is_empty() {
            let (old, new) = paths();
            return Err(CompareError::Nothing { old, new });
        }
        let gone = old.rows().filter(|of| !new.rows().any(|other| same(*of, other)));
        unmatched.extend(gone.map(|(_, row)| format!("{} in {}", named(row), old.path.display())));
        Ok(Self { old: old.host.clone(), new: new.host.clone(), rows, unmatched })
    }

    /// Whether a row is a regression.
    #[must_use]
    pub fn has_regression(&self) -> bool {
        self.rows.iter().any(|row| row.verdict == Verdict::Regression)
    }

    /// A table, with the host, both builds and the meaning of the columns.
    #[must_use]
    pub fn text(&self) -> String {
        const HEAD: [&str; 10] =
            ["planner", "trace", "cache", "microVMs", "of", "old", "new", "new / old", "noise", ""];
        let row = |row: &ComparedRow| {
            let [low, high] = row.interval.map(ratio);
            vec![
                row.planner.clone(),
                [&*row.trace, &*row.place].join(" ").trim_end().to_owned(),
                row.cache.to_string(),
                row.concurrency.to_string(),
                row.of.to_owned(),
                with_interval(&row.old),
                with_interval(&row.new),
                format!("{} ({low} to {high})", ratio(row.ratio)),
                ratio(row.noise),
                row.verdict.to_string(),
            ]
        };
        let rows: Vec<Vec<String>> = self.rows.iter().map(row).collect();
        let count = |verdict| self.rows.iter().filter(|row| row.verdict == verdict).count();
        let mut lines = vec![
            format!("old: firn {}; new: {}", self.old.commit, self.new.line()),
            table(&HEAD, &rows),
            LEGEND.to_owned(),
        ];
        lines.extend(self.unmatched.iter().map(|row| format!("not in both: {row}")));
        lines.push(format!(
            "{} rows: {} regressions, {} gains, {} within the noise, {} of too few runs",
            self.rows.len(),
            count(Verdict::Regression),
            count(Verdict::Gain),
            count(Verdict::Noise),
            count(Verdict::TooFewRuns)
        ));
        lines.join("\n")
    }
}

const LEGEND: &str = "intervals: 95 % bootstrap intervals with 11 runs or more, otherwise minimum to maximum; a regression or a gain: the \
intervals of old and new do not overlap, and the ratio is farther from 1 than the noise, which both sessions showed by measuring a \
planner twice";

impl ComparedRow {
    fn of(place: &str, old: &Row, new: &Row, noise: f64) -> Self {
        let ((of, before), (_, after)) = (old.compared(), new.compared());
        let ratio = after.median / before.median;
        let extremes = || [after.min / before.max, after.max / before.min];
        let interval =
            bootstrap::ratio(&old.measurements, &new.measurements).unwrap_or_else(extremes);
        let ([old_low, old_high], [new_low, new_high]) = (before.interval(), after.interval());
        let verdict = if old.runs.min(new.runs) < FEWEST_RUNS {
            Verdict::TooFewRuns
        } else if new_low > old_high && ratio > noise {
            Verdict::Regression
        } else if new_high < old_low && ratio.recip() > noise {
            Verdict::Gain
        } else {
            Verdict::Noise
        };
        Self {
            place: place.to_owned(),
            trace: new.trace.clone(),
            planner: new.planner.clone(),
            cache: new.cache,
            concurrency: new.concurrency,
            of,
            old: before,
            new: after,
            ratio,
            interval,
            noise,
            verdict,
        }
    }
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Regression => "REGRESSION",
            Self::Gain => "gain",
            Self::Noise => "noise",
            Self::TooFewRuns => "too few runs",
        })
    }
}

/// The noise floor of a row: the largest one that its session saw on the same trace with the same
/// page cache; if it saw none there, the largest one of all.
fn floor(place: &Place, row: &Row) -> f64 {
    let alike = |noise: &&Noise| (&noise.trace, noise.cache) == (&row.trace, row.cache);
    let largest = |floors: &mut dyn Iterator<Item = f64>| floors.reduce(f64::max);
    largest(&mut place.noise.iter().filter(alike).map(Noise::floor))
        .or_else(|| largest(&mut place.noise.iter().map(Noise::floor)))
        .unwrap_or(1.0)
}

/// Whether rows measured the same.
fn same((before, old): (&Place, &Row), (after, new): (&Place, &Row)) -> bool {
    let key = |row: &Row| {
        let Row { planner, trace, cache, concurrency, snapshots, recorded_on, .. } = row.clone();
        let prepared = (row.standby_hits.is_some(), row.ready_hits.is_some());
        (planner, trace, cache, concurrency, snapshots, recorded_on, prepared)
    };
    before.name == after.name && key(old) == key(new)
}

fn named(row: &Row) -> String {
    format!("{} on {}, page cache {}", row.planner, row.trace, row.cache)
}

/// What differs between the facts of two results that have the same name; `None` if nothing does.
fn difference(old: &[(&str, String)], new: &[(&str, String)]) -> Option<String> {
    let differing = old.iter().zip(new).filter(|(old, new)| old.0 == new.0 && old.1 != new.1);
    let texts = differing.map(|((name, old), (_, new))| format!("{name} {old:?} and {new:?}"));
    Some(texts.collect::<Vec<_>>().join(", ")).filter(|text| !text.is_empty())
}

/// A ratio with three decimals.
fn ratio(value: f64) -> String {
    format!("{value:.3}")
}

#[cfg(test)]
#[path = "compare_tests.rs"]
mod tests;
