//! The results of an experiment: JSON, a table and a picture.

use std::collections::BTreeMap;

use firn_base::format_bytes;
use serde::{Deserialize, Serialize};

use super::experiments::Quantity;
use crate::capacity::Capacities;
use crate::host::Host;
use crate::picture::chart::{Bar, Chart, Line, Lines, Marks, Panel, Point};
use crate::text::{self, number};
use crate::thaw::{Noise, Results, Row};

/// The results of an experiment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// The version of this form: [`RESULTS_VERSION`](crate::RESULTS_VERSION).
    #[serde(default)]
    pub version: u32,
    /// The experiment's name.
    pub name: String,
    /// The paper, section and figure.
    pub source: String,
    /// The subject of the figure.
    pub title: String,
    /// The quantity that its picture shows.
    pub quantity: Quantity,
    /// The host, the medium and the build.
    pub host: Host,
    /// Whether the pages that the guests held free had content, except in FaaSnap's guests.
    #[serde(default)]
    pub unsanitised: bool,
    /// The seed of the random order in which the planners had their turns.
    #[serde(default)]
    pub order: u64,
    /// Sessions by their place on the scale: the number of microVMs, or the memory limit.
    pub sessions: Vec<Place>,
    /// Budgets that were filled, in an experiment that fills one.
    pub capacities: Option<Capacities>,
    /// The planners that were not measured, with the reasons.
    pub left_out: BTreeMap<String, String>,
}

/// The results at one place on the scale.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Place {
    /// Its name.
    pub name: String,
    /// Rows of all planners that did not fail.
    pub rows: Vec<Row>,
    /// The noise: a planner that was measured twice.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub noise: Vec<Noise>,
}

impl Outcome {
    /// Adds the results of a session.
    pub(super) fn add(&mut self, place: &str, results: Results) {
        let left_out = results.left_out.into_iter().map(|left| (left.planner, left.reason));
        self.left_out.extend(left_out);
        let Results { results: mut rows, noise, .. } = results;
        rows.retain(|row| !row.is_repeated());
        match self.sessions.iter_mut().find(|session| session.name == place) {
            Some(session) => {
                session.rows.extend(rows);
                session.noise.extend(noise);
            }
            None => self.sessions.push(Place { name: place.to_owned(), rows, noise }),
        }
    }

    /// A picture as SVG: bars if there is one place, otherwise lines over the places.
    #[must_use]
    pub fn draw(&self) -> String {
        if let Some(capacities) = &self.capacities {
            return capacities.draw();
        }
        let mut traces: Vec<&str> = Vec::new();
        for row in self.sessions.iter().flat_map(|session| &session.rows) {
            if !traces.contains(&row.trace.as_str()) {
                traces.push(&row.trace);
            }
        }
        let panels = traces.into_iter().map(|trace| match &self.sessions[..] {
            [session] => self.bars(trace, session),
            sessions => self.lines(trace, sessions),
        });
        Chart {
            title: format!("{} ({})", self.title, self.source),
            legend: match self.quantity {
                Quantity::Faults => vec!["in page faults".to_owned(), "other time".to_owned()],
                Quantity::Total | Quantity::Dram => Vec::new(),
            },
            remarks: vec!["medians".to_owned()],
            columns: 1,
            panels: panels.collect(),
            foot: self.host.line(),
        }
        .svg()
    }

    fn bars(&self, trace: &str, session: &Place) -> Panel {
        let rows = session.rows.iter().filter(|row| row.trace == trace);
        let bars = rows.map(|row| {
            let value = self.quantity.of(row).unwrap_or_default();
            let rest = row.total_ms.median - value;
            let parts = match self.quantity {
                Quantity::Faults => vec![(0, value), (1, rest.max(0.0))],
                Quantity::Total | Quantity::Dram => vec![(0, value)],
            };
            let whisker = (self.quantity == Quantity::Total)
                .then_some((row.total_ms.median, row.total_ms.p95));
            Bar { name: row.planner.clone(), parts, whisker, value: number(value) }
        });
        let (title, unit) = (trace.to_owned(), self.quantity.unit().to_owned());
        Panel { title, unit, marks: Marks::Bars(bars.collect()) }
    }

    fn lines(&self, trace: &str, sessions: &[Place]) -> Panel {
        let mut planners: Vec<&str> = Vec::new();
        for row in sessions.iter().flat_map(|session| &session.rows) {
            if row.trace == trace && !planners.contains(&row.planner.as_str()) {
                planners.push(&row.planner);
            }
        }
        let lines = planners.into_iter().map(|planner| {
            let values = sessions.iter().map(|session| {
                let mut rows = session.rows.iter();
                let row = rows.find(|row| row.planner == planner && row.trace == trace);
                row.and_then(|row| self.quantity.of(row)).map(Point::from)
            });
            Line { name: planner.to_owned(), values: values.collect() }
        });
        let places = sessions.iter().map(|session| session.name.clone()).collect();
        let lines = Lines { places, lines: lines.collect(), log: false, joined: true };
        let title = format!("{trace}: {}", self.quantity.unit());
        let unit = "by place".to_owned();
        Panel { title, unit, marks: Marks::Lines(lines) }
    }

    /// A table in Markdown, with the host and the planners that were left out.
    #[must_use]
    pub fn markdown(&self) -> String {
        let table = match &self.capacities {
            Some(capacities) => capacities_markdown(capacities),
            None => self.sessions_markdown(),
        };
        let mut text =
            format!("{} ({})\n\n{}\n\n{table}", self.title, self.source, self.host.line());
        if self.unsanitised {
            text.push_str(
                "\nThe pages that the guests held free have content; only the guests of `faasnap` zero what they free.\n",
            );
        }
        for Place { name, noise, .. } in &self.sessions {
            for Noise { planner, trace, of, ratio, .. } in noise {
                text.push_str(&format!(
                    "\nnoise at {name}: {planner} on {trace} measured twice, {of}, second / first: {ratio}\n"
                ));
            }
        }
        for (planner, reason) in &self.left_out {
            text.push_str(&format!("\nleft out: {planner}: {reason}\n"));
        }
        text
    }

    fn sessions_markdown(&self) -> String {
        const HEAD: [&str; 10] = [
            "trace",
            "place",
            "planner",
            "total, ms",
            "p95",
            "in page faults, ms",
            "DRAM of a run",
            "private",
            "read",
            "KVM faults",
        ];
        let row = |place: &str, row: &Row| {
            let mark = if row.oversubscribed { "*" } else { "" };
            vec![
                row.trace.clone(),
                place.to_owned(),
                row.planner.clone(),
                format!("{}{mark}", text::with_interval(&row.total_ms)),
                number(row.total_ms.p95),
                row.fault_ms.map_or(String::new(), |faults| number(faults.median)),
                format_bytes(row.batch_dram_bytes),
                format_bytes(row.private_bytes),
                format_bytes(row.read_bytes),
                row.kvm_page_faults.to_string(),
            ]
        };
        let rows = self
            .sessions
            .iter()
            .flat_map(|session| session.rows.iter().map(|measured| row(&session.name, measured)));
        text::markdown(&HEAD, &rows.collect::<Vec<_>>())
    }
}

fn capacities_markdown(capacities: &Capacities) -> String {
    let rows = capacities.results.iter().map(|row| {
        vec![
            row.trace.clone(),
            row.planner.clone(),
            row.carried.microvms.to_string(),
            format_bytes(row.carried.usage.total),
            row.pool_bytes.map_or(String::new(), format_bytes),
        ]
    });
    let head = ["trace", "planner", "microVMs", "charged", "pool"];
    text::markdown(&head, &rows.collect::<Vec<_>>())
}
