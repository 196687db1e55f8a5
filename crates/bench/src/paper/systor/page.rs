//! The tables of documents that are made of SYSTOR's results.

use super::cell::{Cell, Time, function};
use super::{SystorExperiment, SystorOutcome, systor_experiments};
use crate::paper::page::host_lines;
use crate::text::{markdown, number, with_interval};

impl SystorOutcome {
    /// A table with a column for each tier, with and without read-ahead as measured: a time with
    /// its interval, or the ratio of cold to warm. `only` is a list of functions. By other names:
    /// the host, the classes, the working sets, the comparison with the paper.
    pub(in crate::paper) fn by_tier(&self, column: &str, only: Option<&str>) -> Option<String> {
        let time = |cell: &Cell, time| cell.time(time).as_ref().map(with_interval);
        let value: &dyn Fn(&Cell) -> Option<String> = match column {
            "host" => return Some(self.conditions()),
            "classes" => return self.classes().into_iter().next(),
            "working sets" => return self.working_sets().into_iter().next(),
            "comparison" => return self.comparison(),
            "cold" => &|cell| time(cell, Time::Cold),
            "warm" => &|cell| time(cell, Time::Warm),
            "restoring" => &|cell| time(cell, Time::Restoring),
            "connecting" => &|cell| time(cell, Time::Connecting),
            "executing" => &|cell| time(cell, Time::Executing),
            "slowdown" => &|cell| Some(number(cell.median(Time::Cold)? / cell.median(Time::Warm)?)),
            _ => return None,
        };
        let kinds = [false, true];
        let is_measured = |on: &bool| self.cells.iter().any(|cell| cell.readahead == *on);
        let kinds: Vec<bool> = kinds.into_iter().filter(is_measured).collect();
        let columns: Vec<(&str, bool)> =
            self.names().flat_map(|tier| kinds.iter().map(move |on| (tier, *on))).collect();
        let scale = self.scale();
        let mut rows = Vec::new();
        for trace in self.traces() {
            let name = function(trace);
            if only.is_some_and(|only| only.split(' ').all(|it| it != name)) {
                continue;
            }
            for &microvms in &scale {
                let cell = |(tier, on): &(&str, bool)| {
                    let cell = self.cell(trace, tier, microvms, *on);
                    cell.and_then(value).unwrap_or_default()
                };
                let key = [name.to_owned(), microvms.to_string()];
                let key = key.into_iter().take(if scale.len() > 1 { 2 } else { 1 });
                rows.push(key.chain(columns.iter().map(cell)).collect());
            }
        }
        let mut head = vec!["function".to_owned()];
        head.extend((scale.len() > 1).then(|| "microVMs".to_owned()));
        head.extend(columns.iter().map(|(tier, on)| {
            if *on { format!("{tier} with read-ahead") } else { (*tier).to_owned() }
        }));
        let head: Vec<&str> = head.iter().map(String::as_str).collect();
        (!rows.is_empty()).then(|| markdown(&head, &rows))
    }

    /// The results of an experiment whose cells are all among these.
    pub(in crate::paper) fn as_of(&self, experiment: &SystorExperiment) -> Option<Self> {
        let own = systor_experiments().find(|own| own.name == self.name)?;
        let cells = |of: &SystorExperiment| (of.tiers, of.microvms, of.readahead);
        if cells(own) != cells(experiment) {
            return None;
        }
        let mut made = Self {
            name: experiment.name.to_owned(),
            source: experiment.source.to_owned(),
            title: experiment.title.to_owned(),
            view: experiment.view,
            ..self.clone()
        };
        let is_of = |cell: &Cell| experiment.functions.contains(&&*cell.row.trace);
        made.cells.retain(is_of);
        made.noise.retain(is_of);
        Some(made)
    }

    /// How it was measured, and the noise.
    fn conditions(&self) -> String {
        let noise = self.noise_text().map_or(String::new(), |noise| format!("- {noise}\n"));
        let (runs, order) = (self.runs, self.order);
        format!("{}; {runs} runs; seed {order}\n{noise}", host_lines(&self.host))
    }
}
