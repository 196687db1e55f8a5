//! The pictures of the experiments of SYSTOR '22.

use super::cell::{Time, function};
use super::experiments::{Class, View, paper_function};
use super::results::{PARTS, SystorOutcome};
use super::tiers::TierUse;
use crate::picture::chart::{Bar, Chart, Line, Lines, Marks, Panel, Point};
use crate::stats::Summary;
use crate::text::number;

impl SystorOutcome {
    /// A picture as SVG.
    #[must_use]
    pub fn draw(&self) -> String {
        let traces = self.traces();
        let (panels, columns): (Vec<Panel>, usize) = match self.view {
            View::Breakdown => (traces.iter().map(|t| self.breakdown(t)).collect(), 2),
            View::Parts => (PARTS.map(|part| self.by_function(part)).into(), 1),
            View::Classes => (vec![self.by_function(Time::Warm)], 1),
            View::WorkingSets => (self.working_set_panels(), 2),
            View::Slowdown => (self.slowdowns(), 1),
            View::Cold => (traces.iter().map(|t| self.by_number(t, Time::Cold)).collect(), 2),
            View::Warm => (traces.iter().map(|t| self.by_number(t, Time::Warm)).collect(), 2),
        };
        let legend: Vec<String> = match self.view {
            View::Breakdown => {
                PARTS.into_iter().chain([Time::Warm]).map(|t| t.to_string()).collect()
            }
            View::WorkingSets => vec!["measured".to_owned(), "in the paper".to_owned()],
            _ => Vec::new(),
        };
        let shown = match self.view {
            View::WorkingSets => "counts of the recorded invocation".to_owned(),
            View::Slowdown => "medians; smallest to largest of a class's functions".to_owned(),
            _ => format!("medians; whiskers: smallest to largest; runs: {}", self.runs),
        };
        let mut remarks = vec![shown];
        remarks.extend(self.tiers.iter().map(TierUse::summary));
        remarks.extend(self.noise_text());
        let title = format!("{} ({})", self.title, self.source);
        Chart { title, legend, remarks, panels, columns, foot: self.host.line() }.svg()
    }

    fn breakdown(&self, trace: &str) -> Panel {
        let bars = self.alone(trace).flat_map(|cell| {
            let parts = (0..).zip(PARTS).filter_map(|(n, part)| Some((n, cell.median(part)?)));
            let bar = |time: Time, parts: Vec<(usize, f64)>| Bar {
                name: format!("{} {time}", cell.tier),
                parts,
                whisker: cell.time(time).map(range),
                value: number(cell.median(time).unwrap_or_default()),
            };
            let warm = cell.median(Time::Warm).unwrap_or_default();
            [bar(Time::Cold, parts.collect()), bar(Time::Warm, vec![(PARTS.len(), warm)])]
        });
        let marks = Marks::Bars(bars.collect());
        Panel { title: function(trace).to_owned(), unit: "ms".to_owned(), marks }
    }

    fn by_function(&self, time: Time) -> Panel {
        let traces = self.traces();
        let lines = self.names().map(|tier| {
            let values =
                traces.iter().map(|trace| self.cell(trace, tier, 1, false)?.time(time).map(point));
            Line { name: tier.to_owned(), values: values.collect() }
        });
        let lines = lines.collect();
        let places = traces.iter().map(|trace| function(trace).to_owned()).collect();
        let marks = Marks::Lines(Lines { places, lines, log: true, joined: false });
        Panel { title: format!("{time}, ms"), unit: "function".to_owned(), marks }
    }

    fn by_number(&self, trace: &str, time: Time) -> Panel {
        let scale = self.scale();
        let mut lines = Vec::new();
        for tier in self.names() {
            for readahead in [false, true] {
                let value = |n: &u32| self.cell(trace, tier, *n, readahead)?.time(time).map(point);
                let values: Vec<Option<Point>> = scale.iter().map(value).collect();
                if values.iter().any(Option::is_some) {
                    let suffix = if readahead { ", read-ahead" } else { "" };
                    lines.push(Line { name: format!("{tier}{suffix}"), values });
                }
            }
        }
        let places = scale.iter().map(u32::to_string).collect();
        let marks = Marks::Lines(Lines { places, lines, log: true, joined: true });
        let title = format!("{}: {time}, ms", function(trace));
        Panel { title, unit: "microVMs at once".to_owned(), marks }
    }

    /// Working sets and shares of pages that are only read, each with the paper's.
    fn working_set_panels(&self) -> Vec<Panel> {
        let bars = |own: &dyn Fn(&super::Cell) -> f64, paper: &dyn Fn(&str) -> Option<f64>| {
            let cells = self.traces().into_iter().filter_map(|trace| self.alone(trace).next());
            let bars = cells.flat_map(|cell| {
                let paper = paper(&cell.row.trace).unwrap_or_default();
                let bar = |name: &str, part, length| Bar {
                    name: name.to_owned(),
                    parts: vec![(part, length)],
                    whisker: None,
                    value: number(length),
                };
                [bar(cell.function(), 0, own(cell)), bar("", 1, paper)]
            });
            Marks::Bars(bars.collect())
        };
        let size =
            bars(&|cell| cell.megabytes(), &|trace| Some(paper_function(trace)?.working_set));
        let share = bars(&|cell| cell.read_only(), &|trace| Some(paper_function(trace)?.read_only));
        let panel = |title: &str, unit: &str, marks| Panel {
            title: title.to_owned(),
            unit: unit.to_owned(),
            marks,
        };
        vec![panel("working set", "MB", size), panel("pages that are only read", "%", share)]
    }

    /// A panel for each class that has measured functions.
    fn slowdowns(&self) -> Vec<Panel> {
        let panel = |class: Class| {
            let bars = self.names().filter_map(move |tier| {
                let (low, high) = self.slowdown(class, tier)?;
                let value = format!("{} to {}", number(low), number(high));
                let (name, parts) = (tier.to_owned(), vec![(0, low)]);
                Some(Bar { name, parts, whisker: Some((low, high)), value })
            });
            let marks = Marks::Bars(bars.collect());
            let title = format!("{class} functions: cold / warm");
            Panel { title, unit: "times".to_owned(), marks }
        };
        let has_bars =
            |panel: &Panel| !matches!(&panel.marks, Marks::Bars(bars) if bars.is_empty());
        Class::ALL.into_iter().map(panel).filter(has_bars).collect()
    }
}

fn range(time: Summary) -> (f64, f64) {
    (time.min, time.max)
}

fn point(time: Summary) -> Point {
    Point { value: time.median, whisker: Some(range(time)) }
}
