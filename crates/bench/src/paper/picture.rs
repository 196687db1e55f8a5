//! The pictures of the experiments.

use firn_player::format::FIRST_TIME_NS;

use super::kernel_faults;
use super::outcome::{Outcome, Place};
use super::replays::Quantity;
use crate::bootstrap;
use crate::capacity::CapacityRow;
use crate::cost::CostRow;
use crate::picture::chart::{Bar, Chart, Line, Lines, Marks, Panel, Point};
use crate::stats::Summary;
use crate::text::number;
use crate::thaw::Row;

/// The end of the first class of touch times, us.
const FIRST_CLASS_US: f64 = FIRST_TIME_NS as f64 / 1e3;

/// The names of the classes of touch times: their beginnings, us.
pub(super) fn classes(count: usize) -> Vec<String> {
    let begin = |class: usize| match class {
        0 => format!("<{FIRST_CLASS_US}"),
        _ => {
            let doubled = i32::try_from(class - 1).unwrap_or_default();
            (FIRST_CLASS_US * 2_f64.powi(doubled)).to_string()
        }
    };
    (0..count).map(begin).collect()
}

impl Outcome {
    /// A picture as SVG: bars if there is one place, otherwise lines over the places.
    #[must_use]
    pub fn draw(&self) -> String {
        let mut remarks = vec!["medians".to_owned()];
        remarks.extend(self.remarks.iter().cloned());
        Chart {
            title: format!("{} ({})", self.title, self.source),
            legend: self.quantity.parts().iter().map(|part| (*part).to_owned()).collect(),
            remarks,
            columns: 1,
            panels: self.panels(),
            foot: self.host.line(),
        }
        .svg()
    }

    fn panels(&self) -> Vec<Panel> {
        match self.quantity {
            Quantity::Carried => self.over_budgets(),
            Quantity::Price => self.over_prices(),
            Quantity::FaultTimes => self.histograms(),
            Quantity::Programs => vec![self.program_bars()],
            Quantity::KernelFaults => self.kernel_fault_bars(),
            _ => {
                let traces = self.traces().into_iter();
                let panel = |trace| match &self.sessions[..] {
                    [session] => self.bars(trace, session),
                    sessions => self.lines(trace, sessions),
                };
                traces.map(panel).collect()
            }
        }
    }

    fn traces(&self) -> Vec<&str> {
        names(self.sessions.iter().flat_map(|session| &session.rows).map(|row| &*row.trace))
    }

    /// The speed of a row relative to the first planner at its place, and the 95 % bootstrap
    /// interval of the ratio, if there are enough runs of both and none waits for a processor.
    pub(super) fn speed_up(session: &Place, row: &Row) -> Option<(f64, Option<[f64; 2]>)> {
        let first = session.rows.iter().find(|first| first.trace == row.trace)?;
        let measured = !std::ptr::eq(first, row) && !row.oversubscribed;
        let interval = measured.then(|| bootstrap::ratio(&row.measurements, &first.measurements));
        Some((first.total_ms.median / row.total_ms.median, interval.flatten()))
    }

    fn bars(&self, trace: &str, session: &Place) -> Panel {
        let rows = session.rows.iter().filter(|row| row.trace == trace);
        let mut bars = Vec::new();
        for row in rows {
            let value = match self.quantity {
                Quantity::SpeedUp => Self::speed_up(session, row).map(|(ratio, _)| ratio),
                quantity => quantity.of(row),
            };
            let value = value.unwrap_or_default();
            let rest = (row.total_ms.median - value).max(0.0);
            let (parts, shown) = match self.quantity {
                Quantity::Faults | Quantity::Fetch => (vec![(0, value), (1, rest)], value),
                Quantity::Parts => (vec![(0, value), (1, rest)], row.total_ms.median),
                _ => (vec![(0, value)], value),
            };
            let whisker = (self.quantity == Quantity::Total)
                .then_some((row.total_ms.median, row.total_ms.p95));
            bars.push(Bar { name: row.planner.clone(), parts, whisker, value: number(shown) });
            if let Some(warm) = row.warm_ms.filter(|_| self.quantity == Quantity::Parts) {
                bars.push(Bar {
                    name: format!("{}, warm", row.planner),
                    parts: vec![(1, warm.median)],
                    whisker: None,
                    value: number(warm.median),
                });
            }
        }
        let (title, unit) = (trace.to_owned(), self.quantity.unit().to_owned());
        Panel { title, unit, marks: Marks::Bars(bars) }
    }

    fn lines(&self, trace: &str, sessions: &[Place]) -> Panel {
        let rows = sessions.iter().flat_map(|session| &session.rows);
        let planners = names(rows.filter(|row| row.trace == trace).map(|row| &*row.planner));
        let lines = planners.into_iter().map(|planner| {
            let values = sessions.iter().map(|session| {
                let mut rows = session.rows.iter();
                let row = rows.find(|row| row.planner == planner && row.trace == trace);
                row.and_then(|row| self.quantity.of(row)).map(Point::from)
            });
            Line { name: planner.to_owned(), values: values.collect() }
        });
        let places = sessions.iter().map(|session| session.name.clone()).collect();
        let title = format!("{trace}: {}", self.quantity.unit());
        panel(title, "by place", places, lines.collect(), false)
    }

    /// A panel for each trace, with a line for each planner over the classes of times.
    fn histograms(&self) -> Vec<Panel> {
        let rows = || self.sessions.iter().flat_map(|session| &session.rows);
        let panel_of = |trace: &str| {
            let rows = rows().filter(|row| row.trace == trace);
            let rows: Vec<&Row> = rows.collect();
            let classes_of = rows.iter().map(|row| row.touch_times.len()).max().unwrap_or_default();
            let lines = rows.iter().map(|row| {
                // Both axes are logarithmic, as in the paper, so a class without touches is a gap.
                let count = |count: &f64| Some(*count).filter(|n| *n > 0.0).map(Point::from);
                let values = row.touch_times.iter().map(count).collect();
                Line { name: row.planner.clone(), values }
            });
            let title = format!("{trace}: {}", self.quantity.unit());
            panel(title, "µs, from this on", classes(classes_of), lines.collect(), true)
        };
        self.traces().into_iter().map(panel_of).collect()
    }

    fn over_budgets(&self) -> Vec<Panel> {
        let carried = |row: &CapacityRow| Some(f64::from(row.carried.microvms));
        let all = self.budgets.iter().flat_map(|budget| &budget.results);
        let traces = names(all.map(|row| &*row.trace)).into_iter();
        let panel_of = |trace: &str| {
            let of = |row: &&CapacityRow| row.trace == trace;
            let rows = self.budgets.iter().flat_map(|budget| &budget.results).filter(of);
            let lines = names(rows.map(|row| &*row.planner)).into_iter().map(|planner| {
                let values = self.budgets.iter().map(|budget| {
                    let mut rows = budget.results.iter().filter(of);
                    rows.find(|row| row.planner == planner).and_then(carried).map(Point::from)
                });
                Line { name: planner.to_owned(), values: values.collect() }
            });
            let places = self.budgets.iter().map(|b| format!("{} MiB", b.memory >> 20)).collect();
            let title = format!("{trace}: {}", self.quantity.unit());
            panel(title, "memory of all microVMs", places, lines.collect(), false)
        };
        traces.map(panel_of).collect()
    }

    fn over_prices(&self) -> Vec<Panel> {
        let mut panels = Vec::new();
        for medium in names(self.costs.iter().map(|priced| &*priced.pool_as)) {
            let budgets = || self.costs.iter().filter(move |priced| priced.pool_as == medium);
            let all = budgets().flat_map(|priced| &priced.costs.costs);
            for trace in names(all.map(|row| &*row.trace)) {
                let of = |row: &&CostRow| row.trace == trace;
                let rows = budgets().flat_map(|priced| &priced.costs.costs).filter(of);
                let lines = names(rows.map(|row| &*row.planner)).into_iter().map(|planner| {
                    let values = budgets().map(|priced| {
                        let mut rows = priced.costs.costs.iter().filter(of);
                        rows.find(|row| row.planner == planner)?.of_each.map(Point::from)
                    });
                    Line { name: planner.to_owned(), values: values.collect() }
                });
                let places = budgets().map(|p| format!("{} MiB", p.memory >> 20)).collect();
                let title = format!("{trace}, pool priced as {medium}: {}", self.quantity.unit());
                panels.push(panel(title, "memory of all microVMs", places, lines.collect(), true));
            }
        }
        panels
    }

    /// A panel for each trace and planner: the total, and the kernel's functions, of which one
    /// contains another.
    fn kernel_fault_bars(&self) -> Vec<Panel> {
        let bar = |name: &str, ms: &Summary| Bar {
            name: name.to_owned(),
            parts: vec![(0, ms.median)],
            whisker: None,
            value: number(ms.median),
        };
        let panels = self.kernel_faults.iter().map(|faults| {
            let total = bar("request to last page", &faults.total_ms);
            let functions = faults.functions.iter().rev().map(|(name, f)| bar(name, &f.ms));
            let title = format!("{} on {}", faults.planner, faults.trace);
            let marks = Marks::Bars(std::iter::once(total).chain(functions).collect());
            Panel { title, unit: kernel_faults::unit(&self.host).to_owned(), marks }
        });
        panels.collect()
    }

    fn program_bars(&self) -> Panel {
        let bars = self.programs.iter().map(|programs| Bar {
            name: programs.trace.clone(),
            parts: vec![(0, programs.map_ms.median)],
            whisker: Some((programs.map_ms.median, programs.map_ms.p95)),
            value: number(programs.map_ms.median),
        });
        let title = "loading the offsets into a BPF map".to_owned();
        Panel { title, unit: self.quantity.unit().to_owned(), marks: Marks::Bars(bars.collect()) }
    }
}

/// Names in the order of their first occurrence.
pub(super) fn names<'a>(all: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut names = Vec::new();
    for name in all {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

fn panel(title: String, unit: &str, places: Vec<String>, lines: Vec<Line>, log: bool) -> Panel {
    let lines = Lines { places, lines, log, joined: true };
    Panel { title, unit: unit.to_owned(), marks: Marks::Lines(lines) }
}
