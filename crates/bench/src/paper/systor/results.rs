//! The results of an experiment of SYSTOR '22: JSON and tables.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::SystorError;
use super::cell::{Cell, Time, function};
use super::experiments::{Claim, Class, PAPER_FUNCTIONS, SystorExperiment, View, paper_function};
use super::tiers::TierUse;
use crate::host::Host;
use crate::text::{self, number};

const MB: f64 = 1e6;

/// The results of an experiment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SystorOutcome {
    /// The experiment's name.
    pub name: String,
    /// The paper, section and figure.
    pub source: String,
    /// The subject of the figure.
    pub title: String,
    /// How the results are shown.
    pub view: View,
    /// The host and the build.
    pub host: Host,
    /// Runs of each cell.
    pub runs: u32,
    /// The seed of the random order of each run's cells.
    #[serde(default)]
    pub order: u64,
    /// The command, without its directories.
    #[serde(default)]
    pub command: String,
    /// The tiers.
    pub tiers: Vec<TierUse>,
    /// The measurements.
    pub cells: Vec<Cell>,
    /// Second measurements of the first tier's cells, in the same sessions: the noise.
    pub noise: Vec<Cell>,
    /// What was not measured, with the reasons.
    pub left_out: BTreeMap<String, String>,
}

pub(super) const PARTS: [Time; 3] = [Time::Restoring, Time::Connecting, Time::Executing];

impl SystorOutcome {
    /// No results yet.
    pub(super) fn new(experiment: &SystorExperiment, runs: u32) -> Result<Self, SystorError> {
        let mut host = Host::of(&std::env::temp_dir())?;
        "the tiers".clone_into(&mut host.medium);
        Ok(Self {
            name: experiment.name.to_owned(),
            source: experiment.source.to_owned(),
            title: experiment.title.to_owned(),
            view: experiment.view,
            host,
            runs,
            order: 0,
            command: String::new(),
            tiers: Vec::new(),
            cells: Vec::new(),
            noise: Vec::new(),
            left_out: BTreeMap::new(),
        })
    }

    /// Whether cells of both are measured in the same way.
    pub(super) fn is_comparable(&self, other: &Self) -> bool {
        (&self.host, self.runs) == (&other.host, other.runs)
    }

    /// Leaves a cell out.
    pub(super) fn leave_out(&mut self, trace: &str, tier: &str, microvms: u32, why: String) {
        let microvms =
            if microvms == 1 { "1 microVM".to_owned() } else { format!("{microvms} microVMs") };
        self.left_out.insert(format!("{} on {tier} with {microvms}", function(trace)), why);
    }

    /// Measured traces, in the paper's order of the functions.
    pub(super) fn traces(&self) -> Vec<&str> {
        let measured = |trace: &&str| self.cells.iter().any(|cell| cell.row.trace == **trace);
        PAPER_FUNCTIONS.iter().map(|function| function.trace).filter(measured).collect()
    }

    /// The tiers that were measured, from the fastest.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.tiers.iter().map(|tier| tier.name.as_str())
    }

    pub(super) fn cell(
        &self,
        trace: &str,
        tier: &str,
        microvms: u32,
        readahead: bool,
    ) -> Option<&Cell> {
        self.cells.iter().find(|cell| {
            cell.row.trace == trace
                && cell.tier == tier
                && cell.microvms == microvms
                && cell.readahead == readahead
        })
    }

    /// The measurements of a trace with one microVM, by tier.
    pub(super) fn alone<'a>(&'a self, trace: &'a str) -> impl Iterator<Item = &'a Cell> {
        self.names().filter_map(move |tier| self.cell(trace, tier, 1, false))
    }

    fn tier(&self, name: &str) -> Option<&TierUse> {
        self.tiers.iter().find(|tier| tier.name == name)
    }

    /// Numbers of microVMs, ascending.
    pub(super) fn scale(&self) -> Vec<u32> {
        let mut numbers: Vec<u32> = self.cells.iter().map(|cell| cell.microvms).collect();
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    }

    /// The smallest and the largest ratio of cold to warm, of the functions that the paper has in a
    /// class.
    pub(super) fn slowdown(&self, class: Class, tier: &str) -> Option<(f64, f64)> {
        let of_class = |cell: &&Cell| {
            cell.tier == tier
                && cell.microvms == 1
                && paper_function(&cell.row.trace).is_some_and(|function| function.class == class)
        };
        let ratio = |cell: &Cell| Some(cell.median(Time::Cold)? / cell.median(Time::Warm)?);
        let ratios = self.cells.iter().filter(of_class).filter_map(ratio);
        smallest_and_largest(ratios)
    }

    /// How much the medians of a tier differ that was measured twice in the same sessions.
    pub(super) fn noise_text(&self) -> Option<String> {
        let tier = &self.noise.first()?.tier;
        let range = |time: Time| {
            let ratios = self.noise.iter().filter_map(|again| {
                let microvms = again.microvms;
                let cell = self.cell(&again.row.trace, tier, microvms, again.readahead)?;
                Some(again.median(time)? / cell.median(time)?)
            });
            let (low, high) = smallest_and_largest(ratios)?;
            Some(format!("{time} {} to {}", number(low), number(high)))
        };
        let ranges: Vec<String> = [Time::Cold, Time::Warm].into_iter().filter_map(range).collect();
        Some(format!("noise: {tier} measured twice, second / first: {}", ranges.join(", ")))
    }

    /// Tables in Markdown: the measurements, the comparison with the paper, and the tiers.
    #[must_use]
    pub fn markdown(&self) -> String {
        let Self { title, source, host, runs, .. } = self;
        let mut parts = vec![
            format!("{title} ({source})"),
            host.line(),
            format!(
                "Medians; runs: {runs} (the paper: averages of ten), each with all tiers in another order."
            ),
        ];
        parts.extend(self.models());
        parts.extend(self.noise_text());
        parts.extend(match self.view {
            View::Classes => self.classes(),
            View::WorkingSets => self.working_sets(),
            _ => vec![self.times()],
        });
        parts.extend(self.comparison());
        parts.push(self.tier_table());
        parts.extend(self.left_out.iter().map(|(what, why)| format!("left out: {what}: {why}")));
        parts.join("\n\n") + "\n"
    }

    /// What the guest replays.
    fn models(&self) -> Option<String> {
        let periods = || self.cells.iter().map(|cell| cell.period);
        let millions = |period| number(period as f64 / 1e6);
        let (least, most) = (millions(periods().min()?), millions(periods().max()?));
        Some(format!(
            "Models: the guest is a player that replays recorded touches and work, and of repeated accesses the first one of \
             each page in every {least} to {most} million instructions, depending on the function; the warm invocation is \
             the recorded second one; connecting ends where the request reached the runtime."
        ))
    }

    fn times(&self) -> String {
        const HEAD: [&str; 10] = [
            "function",
            "microVMs",
            "tier",
            "loading the monitor, ms",
            "restoring",
            "connecting",
            "executing",
            "cold (smallest to largest)",
            "warm (smallest to largest)",
            "cold / warm",
        ];
        let rows = self.in_order().map(|cell| {
            let mark = if cell.row.oversubscribed { "*" } else { "" };
            let value = |time| cell.median(time).map_or(String::new(), number);
            let suffix = if cell.readahead { ", read-ahead" } else { "" };
            let ratio = cell.median(Time::Cold).zip(cell.median(Time::Warm));
            let mut row = vec![
                cell.function().to_owned(),
                format!("{}{mark}", cell.microvms),
                format!("{}{suffix}", cell.tier),
                value(Time::Loading),
            ];
            row.extend(PARTS.map(value));
            row.extend([Time::Cold, Time::Warm].map(|time| {
                cell.time(time).map_or(String::new(), |time| {
                    format!("{} ({})", number(time.median), text::interval(&time))
                })
            }));
            row.push(ratio.map_or(String::new(), |(cold, warm)| number(cold / warm)));
            row
        });
        let table = text::markdown(&HEAD, &rows.collect::<Vec<_>>());
        let oversubscribed = self.cells.iter().any(|cell| cell.row.oversubscribed);
        let remark = format!("\n* more microVMs than the {} processors", self.host.cpus);
        format!("{}{}", table.trim_end(), if oversubscribed { remark } else { String::new() })
    }

    /// The measurements by function, number of microVMs and tier.
    fn in_order(&self) -> impl Iterator<Item = &Cell> {
        let scale = self.scale();
        self.traces().into_iter().flat_map(move |trace| {
            let numbers = scale.clone().into_iter();
            numbers.flat_map(move |number| {
                let tiers = self.names();
                tiers.flat_map(move |tier| {
                    [false, true]
                        .into_iter()
                        .filter_map(move |on| self.cell(trace, tier, number, on))
                })
            })
        })
    }

    pub(super) fn classes(&self) -> Vec<String> {
        let rows = self.traces().into_iter().filter_map(|trace| {
            let cell = self.alone(trace).next()?;
            let warm = cell.median(Time::Warm)?;
            let (own, paper) = (Class::of_warm(warm), paper_function(trace)?.class);
            let same = if own == paper { "agrees" } else { "differs" };
            let row = [
                cell.function(),
                &cell.tier,
                &number(warm),
                &own.to_string(),
                &paper.to_string(),
                same,
            ];
            Some(row.map(str::to_owned).to_vec())
        });
        let head = ["function", "tier", "warm, ms", "class", "class in the paper", ""];
        let table = text::markdown(&head, &rows.collect::<Vec<_>>()).trim_end().to_owned();
        let rule = "The paper classifies functions by how their warm invocations behave, without limits (4.1). The limits \
                    here are those of its takeaways 2 and 4: Light is less than 100 ms, Heavy more than 500 ms.";
        vec![table, rule.to_owned()]
    }

    pub(super) fn working_sets(&self) -> Vec<String> {
        let mut head = vec!["function", "working set, MB", "paper, MB", "only read, %", "paper, %"];
        let tiers: Vec<String> = self.names().map(|tier| format!("read from {tier}, MB")).collect();
        head.extend(tiers.iter().map(String::as_str));
        head.push("paper, from dcpm, MB");
        let rows = self.traces().into_iter().filter_map(|trace| {
            let (first, paper) = (self.alone(trace).next()?, paper_function(trace)?);
            let mut row = vec![
                first.function().to_owned(),
                number(first.megabytes()),
                number(paper.working_set),
                number(first.read_only()),
                number(paper.read_only),
            ];
            row.extend(self.names().map(|tier| {
                let cell = self.cell(trace, tier, 1, false);
                cell.map_or(String::new(), |c| number(c.medium_bytes(self.tier(tier)) / MB))
            }));
            row.push(number(paper.dcpm_reads));
            Some(row)
        });
        let table = text::markdown(&head, &rows.collect::<Vec<_>>()).trim_end().to_owned();
        let text = "Working sets and shares are counts of the recorded invocation: pages that it touches, and those of them \
                    that it never writes. The paper counts EPT violations for the shares, and takes as the working set \
                    what `dstat` sees read from the NVMe: compare that with what is read from `nvme` here, which is \
                    the pages that entered the page cache. What is read from memory is a model: 64 bytes for each load of \
                    the cold invocation from a page that is never written, and each copied page. The paper measures it \
                    with `pmwatch`.";
        vec![table, text.to_owned()]
    }

    /// What agrees with the paper, and what does not: a range within the paper's
    /// agrees, one that overlaps it agrees in part.
    pub(super) fn comparison(&self) -> Option<String> {
        let range = |(low, high): (f64, f64)| format!("{} to {}", number(low), number(high));
        let rows = Claim::of(self.view).filter_map(|claim| {
            let measured = claim.measured(&self.cells)?;
            let within = claim.paper.0 <= measured.0 && measured.1 <= claim.paper.1;
            let overlaps = measured.0 <= claim.paper.1 && claim.paper.0 <= measured.1;
            let verdict = match (within, overlaps) {
                (true, _) => "agrees",
                (false, true) => "agrees in part",
                (false, false) => "differs",
            };
            Some(vec![claim.text(), range(claim.paper), range(measured), verdict.to_owned()])
        });
        let rows: Vec<Vec<String>> = rows.collect();
        let head = ["class and ratio", "paper", "measured", ""];
        (!rows.is_empty()).then(|| text::markdown(&head, &rows).trim_end().to_owned())
    }

    fn tier_table(&self) -> String {
        let us = |ns: f64| number(ns / 1e3);
        let rows = self.tiers.iter().map(|tier| {
            vec![
                tier.name.clone(),
                tier.how.to_string(),
                tier.description.clone(),
                tier.parameters.map_or(String::new(), |parameters| parameters.to_string()),
                tier.own_latency_ns.map_or(String::new(), us),
                tier.changed().unwrap_or_default(),
                tier.guest_fault.map_or(String::new(), |fault| {
                    let (without, with) = (us(fault.without_ns), us(fault.with_ns));
                    format!("{without}, {with} with delays (guests at once: {})", fault.readers)
                }),
            ]
        });
        const HEAD: [&str; 7] = [
            "tier",
            "how",
            "what it was",
            "parameters",
            "without delays, µs",
            "delays or model",
            "a guest's cold fault, µs",
        ];
        text::markdown(&HEAD, &rows.collect::<Vec<_>>()).trim_end().to_owned()
    }
}

/// The smallest and the largest of ratios; none without ratios.
pub(super) fn smallest_and_largest(ratios: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    ratios.map(|ratio| (ratio, ratio)).reduce(|all, one| (all.0.min(one.0), all.1.max(one.1)))
}
