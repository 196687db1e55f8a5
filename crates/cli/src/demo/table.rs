//! Scenarios as tables.

use firn_base::{PAGE_SIZE, format_bytes, format_milliseconds};

use super::scenario::{Cost, Scenario, Start};
use crate::output::table;

/// One table of all functions: a row for each kind of start.
pub(super) fn summary(scenarios: &[Scenario]) -> String {
    let mut head = vec!["request to correct answer"];
    head.extend(scenarios.iter().map(|scenario| scenario.function.as_str()));
    let kinds = scenarios.first().map_or(0, |scenario| scenario.starts.len());
    let rows: Vec<Vec<String>> = (0..kinds)
        .map(|kind| {
            let starts: Vec<&Start> =
                scenarios.iter().filter_map(|scenario| scenario.starts.get(kind)).collect();
            let name = starts.first().map(|start| start.name.clone()).unwrap_or_default();
            let cells = starts.iter().map(|start| match &start.cost {
                Some(cost) => format!(
                    "{}, {} DRAM",
                    format_milliseconds(start.total_ns),
                    format_bytes(cost.private_bytes)
                ),
                None => format_milliseconds(start.total_ns),
            });
            [name].into_iter().chain(cells).collect()
        })
        .collect();
    table(&head, &rows)
}

/// All of one function: the rows are parts and counts, the columns kinds of start.
pub(super) fn details(scenario: &Scenario) -> String {
    let mut head = vec!["request to correct answer"];
    head.extend(scenario.starts.iter().map(|start| start.name.as_str()));

    let mut names: Vec<&str> = Vec::new();
    for (name, _) in scenario.starts.iter().flat_map(|start| &start.parts) {
        if !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    // The response comes after all other parts.
    names.sort_by_key(|name| *name == "first response");

    let mut rows: Vec<Vec<String>> = names
        .into_iter()
        .map(|name| {
            let times = scenario.starts.iter().map(|start| {
                let part = start.parts.iter().find(|(part, _)| part == name);
                part.map(|(_, ns)| format_milliseconds(*ns)).unwrap_or_default()
            });
            [name.to_owned()].into_iter().chain(times).collect()
        })
        .collect();
    let mut row = |name: &str, cell: &dyn Fn(&Start) -> Option<String>| {
        let cells = scenario.starts.iter().map(|start| cell(start).unwrap_or_default());
        rows.push([name.to_owned()].into_iter().chain(cells).collect());
    };
    let count = |start: &Start, value: fn(&Cost) -> u64| {
        start.cost.as_ref().map(|cost| value(cost).to_string())
    };
    let size = |start: &Start, value: fn(&Cost) -> u64| {
        start.cost.as_ref().map(|cost| format_bytes(value(cost)))
    };
    row("total", &|start| Some(format_milliseconds(start.total_ns)));
    row("guest pages mapped", &|start| count(start, |cost| cost.guest_pages));
    row("KVM faults", &|start| count(start, |cost| cost.kvm_faults));
    row("bytes read", &|start| size(start, |cost| cost.read_bytes));
    row("DRAM, private", &|start| size(start, |cost| cost.private_bytes));
    row("page cache or pool, shared", &|start| size(start, |cost| cost.shared_bytes));

    let freezes: Vec<String> = scenario
        .freezes
        .iter()
        .map(|(place, freeze)| {
            let (total, stored) =
                (format_milliseconds(freeze.total_ns), freeze.report.stored_pages * PAGE_SIZE);
            format!("{place} {total}, {} stored", format_bytes(stored))
        })
        .collect();
    format!(
        "{}: booted, answered input A, frozen, ended; then thawed {} times each way, answering input B\n{}\nfreeze: {}\n",
        scenario.function,
        scenario.thaws,
        table(&head, &rows),
        freezes.join("; "),
    )
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
