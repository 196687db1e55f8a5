//! The results of an experiment of SYSTOR '22: JSON, tables and a picture.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::CONNECTING;
use super::experiments::{Claim, Class, View, paper_function};
use super::tiers::TierUse;
use crate::host::Host;
use crate::picture::chart::{Bar, Chart, Line, Marks, Panel};
use crate::stats::Summary;
use crate::text::{self, number};
use crate::thaw::Row;

const MIB: f64 = (1 << 20) as f64;
/// Bytes of a load.
const LINE: f64 = 64.0;
const PAGE: f64 = 4096.0;

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
    /// Instructions of replayed work between repeated accesses.
    pub again: u32,
    /// Touches that count as connecting the guest.
    pub connect: u64,
    /// The tiers.
    pub tiers: Vec<TierUse>,
    /// The measurements.
    pub cells: Vec<Cell>,
    /// What was not measured, with the reasons.
    pub left_out: BTreeMap<String, String>,
}

/// The measurements of a function on a tier.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// The tier's name.
    pub tier: String,
    /// MicroVMs at once, each of a snapshot of its own.
    pub microvms: u32,
    /// The kernel's read-ahead.
    pub readahead: bool,
    /// Pages that the function's trace touches.
    pub pages: u64,
    /// Pages that it writes.
    pub written: u64,
    /// The measurements.
    pub row: Row,
}

/// A time of a cell. The paper's monitor is started in advance, so the time until it runs is in
/// none but `Loading`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Time {
    /// The monitor's process.
    Loading,
    /// The monitor's first line to running vCPUs.
    Restoring,
    /// Running vCPUs to the first touch that serves the request.
    Connecting,
    /// That touch to the last one; none for the function whose touches all count as connecting.
    Executing,
    /// Restoring, connecting and executing.
    Cold,
    /// A second, identical invocation.
    Warm,
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Loading => "loading the monitor",
            Self::Restoring => "restoring",
            Self::Connecting => "connecting",
            Self::Executing => "executing",
            Self::Cold => "cold",
            Self::Warm => "warm",
        })
    }
}

impl Cell {
    /// The median of a time, ms.
    pub(crate) fn time(&self, time: Time) -> Option<f64> {
        let median = |summary: Option<Summary>| summary.map(|summary| summary.median);
        let row = &self.row;
        let loading = median(row.process_start_ms).unwrap_or_default();
        match time {
            Time::Loading => Some(loading),
            Time::Restoring => Some(row.start_to_resume_ms.median - loading),
            Time::Connecting => median(row.connect_ms),
            Time::Executing if row.trace == CONNECTING => None,
            Time::Executing => Some(row.resume_to_last_page_ms.median - median(row.connect_ms)?),
            Time::Cold => Some(row.total_ms.median - loading),
            Time::Warm => median(row.warm_ms),
        }
    }

    /// The function's name, as the paper has it.
    fn function(&self) -> &str {
        self.row.trace.strip_suffix("-a").unwrap_or(&self.row.trace)
    }

    /// Bytes that one microVM read from the medium up to the end of its last invocation: pages that
    /// entered the page cache, or loads of 64 bytes and copied pages of memory.
    fn medium_bytes(&self, tier: Option<&TierUse>) -> f64 {
        let memory = tier.is_none_or(|tier| tier.throttle.is_none() && !self.is_buffered());
        if memory {
            self.row.read_only_loads.unwrap_or_default() as f64 * LINE + self.written as f64 * PAGE
        } else {
            self.row.batch_page_cache_bytes as f64 / f64::from(self.microvms.max(1))
        }
    }

    fn is_buffered(&self) -> bool {
        self.row.cache == crate::cache::Cache::Cold
    }

    fn read_only(&self) -> f64 {
        (self.pages - self.written.min(self.pages)) as f64 / self.pages.max(1) as f64 * 100.0
    }
}

const PARTS: [Time; 3] = [Time::Restoring, Time::Connecting, Time::Executing];

impl SystorOutcome {
    /// Traces in the order of their measurement.
    fn traces(&self) -> Vec<&str> {
        let mut traces: Vec<&str> = Vec::new();
        for cell in &self.cells {
            if !traces.contains(&cell.row.trace.as_str()) {
                traces.push(&cell.row.trace);
            }
        }
        traces
    }

    /// The tiers that were measured, from the fastest.
    fn names(&self) -> impl Iterator<Item = &str> {
        self.tiers.iter().map(|tier| tier.name.as_str())
    }

    fn cell(&self, trace: &str, tier: &str, microvms: u32, readahead: bool) -> Option<&Cell> {
        self.cells.iter().find(|cell| {
            cell.row.trace == trace
                && cell.tier == tier
                && cell.microvms == microvms
                && cell.readahead == readahead
        })
    }

    /// The measurements of a trace with one microVM, by tier.
    fn alone<'a>(&'a self, trace: &'a str) -> impl Iterator<Item = &'a Cell> {
        self.names().filter_map(move |tier| self.cell(trace, tier, 1, false))
    }

    fn tier(&self, name: &str) -> Option<&TierUse> {
        self.tiers.iter().find(|tier| tier.name == name)
    }

    /// Numbers of microVMs, ascending.
    fn scale(&self) -> Vec<u32> {
        let mut numbers: Vec<u32> = self.cells.iter().map(|cell| cell.microvms).collect();
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    }

    /// A picture as SVG.
    #[must_use]
    pub fn draw(&self) -> String {
        let panels = match self.view {
            View::Breakdown => self.traces().into_iter().map(|t| self.breakdown(t)).collect(),
            View::Parts => PARTS.map(|part| self.by_function(part)).into(),
            View::Classes => vec![self.by_function(Time::Warm)],
            View::WorkingSets => vec![self.shares()],
            View::Slowdown => vec![self.slowdowns()],
            View::Cold => {
                self.traces().into_iter().map(|t| self.by_number(t, Time::Cold)).collect()
            }
            View::Warm => {
                self.traces().into_iter().map(|t| self.by_number(t, Time::Warm)).collect()
            }
        };
        let legend = match self.view {
            View::Breakdown => {
                let parts = PARTS.iter().map(Time::to_string);
                parts.chain([Time::Warm.to_string()]).collect()
            }
            _ => Vec::new(),
        };
        let how = self.tiers.iter().map(|tier| format!("{} {}", tier.name, tier.how));
        Chart {
            title: format!("{} ({})", self.title, self.source),
            legend,
            remark: format!("medians; {}", how.collect::<Vec<_>>().join(", ")),
            panels,
            foot: self.host.line(),
        }
        .svg()
    }

    fn breakdown(&self, trace: &str) -> Panel {
        let bars = self.alone(trace).flat_map(|cell| {
            let parts = (0..).zip(PARTS).filter_map(|(n, part)| Some((n, cell.time(part)?)));
            let bar = |time: Time, parts: Vec<(usize, f64)>| Bar {
                name: format!("{} {time}", cell.tier),
                parts,
                whisker: None,
                value: number(cell.time(time).unwrap_or_default()),
            };
            let warm = cell.time(Time::Warm).unwrap_or_default();
            [bar(Time::Cold, parts.collect()), bar(Time::Warm, vec![(PARTS.len(), warm)])]
        });
        let marks = Marks::Bars(bars.collect());
        Panel { title: trace.to_owned(), unit: "ms".to_owned(), marks }
    }

    fn by_function(&self, time: Time) -> Panel {
        let traces = self.traces();
        let lines = self.names().map(|tier| {
            let values = traces.iter().map(|trace| self.cell(trace, tier, 1, false)?.time(time));
            Line { name: tier.to_owned(), values: values.collect() }
        });
        let lines = lines.collect();
        let places = traces.iter().map(|trace| trace.trim_end_matches("-a").to_owned()).collect();
        let marks = Marks::Lines(places, lines);
        Panel { title: format!("{time}, ms"), unit: "by function".to_owned(), marks }
    }

    fn by_number(&self, trace: &str, time: Time) -> Panel {
        let scale = self.scale();
        let mut lines = Vec::new();
        for tier in self.names() {
            for readahead in [false, true] {
                let value = |n: &u32| self.cell(trace, tier, *n, readahead)?.time(time);
                let values: Vec<Option<f64>> = scale.iter().map(value).collect();
                if values.iter().any(Option::is_some) {
                    let suffix = if readahead { ", read-ahead" } else { "" };
                    lines.push(Line { name: format!("{tier}{suffix}"), values });
                }
            }
        }
        let places = scale.iter().map(u32::to_string).collect();
        let marks = Marks::Lines(places, lines);
        Panel { title: format!("{trace}: {time}, ms"), unit: "microVMs".to_owned(), marks }
    }

    fn shares(&self) -> Panel {
        let cells = self.traces().into_iter().filter_map(|trace| self.alone(trace).next());
        let bars = cells.map(|cell| {
            let share = cell.read_only();
            let value = format!("{} %", number(share));
            Bar { name: cell.function().to_owned(), parts: vec![(0, share)], whisker: None, value }
        });
        let marks = Marks::Bars(bars.collect());
        Panel { title: "pages that are only read".to_owned(), unit: "%".to_owned(), marks }
    }

    fn slowdowns(&self) -> Panel {
        let classes = [Class::Light, Class::Mid, Class::Heavy];
        let bars = classes.into_iter().flat_map(|class| {
            self.names().filter_map(move |tier| {
                let (low, high) = self.slowdown(class, tier)?;
                let value = format!("{} to {}", number(low), number(high));
                let name = format!("{class}, {tier}");
                Some(Bar { name, parts: vec![(0, low)], whisker: Some((low, high)), value })
            })
        });
        let marks = Marks::Bars(bars.collect());
        Panel { title: "cold / warm".to_owned(), unit: "times".to_owned(), marks }
    }

    /// The smallest and the largest ratio of cold to warm, of the functions that the paper has in a
    /// class.
    fn slowdown(&self, class: Class, tier: &str) -> Option<(f64, f64)> {
        let of_class = |cell: &&Cell| {
            cell.tier == tier
                && cell.microvms == 1
                && paper_function(&cell.row.trace).is_some_and(|function| function.class == class)
        };
        let ratio = |cell: &Cell| Some(cell.time(Time::Cold)? / cell.time(Time::Warm)?);
        let ratios = self.cells.iter().filter(of_class).filter_map(ratio);
        ratios.map(|ratio| (ratio, ratio)).reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)))
    }

    /// Tables in Markdown: the measurements, the comparison with the paper, and the tiers.
    #[must_use]
    pub fn markdown(&self) -> String {
        let Self { title, source, host, runs, again, connect, .. } = self;
        let mut parts = vec![
            format!("{title} ({source})"),
            host.line(),
            format!(
                "Medians of {runs} runs; one repeated access after each {again} instructions; the first {connect} touches count \
                 as connecting."
            ),
            match self.view {
                View::Classes => self.classes(),
                View::WorkingSets => self.working_sets(),
                _ => self.times(),
            },
        ];
        parts.extend(self.comparison());
        parts.push(self.tier_table());
        parts.extend(self.left_out.iter().map(|(what, why)| format!("left out: {what}: {why}")));
        parts.join("\n\n") + "\n"
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
            "cold",
            "warm",
            "cold / warm",
        ];
        let rows = self.cells.iter().map(|cell| {
            let mark = if cell.row.oversubscribed { "*" } else { "" };
            let value = |time| cell.time(time).map_or(String::new(), number);
            let suffix = if cell.readahead { ", read-ahead" } else { "" };
            let ratio = cell.time(Time::Cold).zip(cell.time(Time::Warm));
            let mut row = vec![
                cell.function().to_owned(),
                format!("{}{mark}", cell.microvms),
                format!("{}{suffix}", cell.tier),
                value(Time::Loading),
            ];
            row.extend(PARTS.map(value));
            row.extend([Time::Cold, Time::Warm].map(value));
            row.push(ratio.map_or(String::new(), |(cold, warm)| number(cold / warm)));
            row
        });
        let table = text::markdown(&HEAD, &rows.collect::<Vec<_>>());
        let oversubscribed = self.cells.iter().any(|cell| cell.row.oversubscribed);
        let remark = format!("\n* more microVMs than the {} processors", self.host.cpus);
        format!("{}{}", table.trim_end(), if oversubscribed { remark } else { String::new() })
    }

    fn classes(&self) -> String {
        let rows = self.traces().into_iter().filter_map(|trace| {
            let cell = self.alone(trace).next()?;
            let warm = cell.time(Time::Warm)?;
            let (own, paper) = (Class::of_warm(warm), paper_function(trace)?.class);
            let same = if own == paper { "agrees" } else { "differs" };
            let row = [cell.function(), &number(warm), &own.to_string(), &paper.to_string(), same];
            Some(row.map(str::to_owned).to_vec())
        });
        let head = ["function", "warm, ms", "class", "class in the paper", ""];
        text::markdown(&head, &rows.collect::<Vec<_>>()).trim_end().to_owned()
    }

    fn working_sets(&self) -> String {
        let mut head =
            vec!["function", "working set, MiB", "paper, MB", "only read, %", "paper, %"];
        let tiers: Vec<String> =
            self.names().map(|tier| format!("read from {tier}, MiB")).collect();
        head.extend(tiers.iter().map(String::as_str));
        head.push("paper, from dcpm, MB");
        let rows = self.traces().into_iter().filter_map(|trace| {
            let (first, paper) = (self.alone(trace).next()?, paper_function(trace)?);
            let mut row = vec![
                first.function().to_owned(),
                number(first.pages as f64 * PAGE / MIB),
                number(paper.working_set),
                number(first.read_only()),
                number(paper.read_only),
            ];
            row.extend(self.names().map(|tier| {
                let cell = self.cell(trace, tier, 1, false);
                cell.map_or(String::new(), |c| number(c.medium_bytes(self.tier(tier)) / MIB))
            }));
            row.push(number(paper.dcpm_reads));
            Some(row)
        });
        text::markdown(&head, &rows.collect::<Vec<_>>()).trim_end().to_owned()
    }

    /// What agrees with the paper, and what does not: a range within the paper's
    /// agrees, one that overlaps it agrees in part.
    fn comparison(&self) -> Option<String> {
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
            let limits = tier.throttle.map_or(String::new(), |limits| {
                let iops = limits.read_iops.map_or("no".to_owned(), |iops| iops.to_string());
                format!("{iops} reads/s, {} MB/s", limits.read_bps / 1_000_000)
            });
            let model = tier.model.map_or(String::new(), |model| {
                format!(
                    "{} ns a load, {} ns a copied page",
                    number(model.load_ns),
                    number(model.copy_ns)
                )
            });
            vec![
                tier.name.clone(),
                tier.how.to_string(),
                tier.description.clone(),
                tier.parameters.map_or(String::new(), |parameters| us(parameters.latency_ns)),
                tier.own_latency_ns.map_or(String::new(), us),
                format!("{limits}{model}"),
                tier.guest_fault_ns.map_or(String::new(), |(without, with)| {
                    format!("{}, {} with limits", us(without), us(with))
                }),
            ]
        });
        const HEAD: [&str; 7] = [
            "tier",
            "how",
            "what it was",
            "latency in table 1, µs",
            "without limits, µs",
            "limits or model",
            "a guest's cold fault, µs",
        ];
        text::markdown(&HEAD, &rows.collect::<Vec<_>>()).trim_end().to_owned()
    }
}
