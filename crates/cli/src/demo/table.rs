//! A story as a table.

use firn_base::{format_bytes, format_milliseconds};

use super::story::{Start, Story};
use crate::output::table;

/// The rows are parts and counts, the columns kinds of start.
pub(super) fn of(story: &Story) -> String {
    let mut head = vec!["request in to correct answer out"];
    head.extend(story.starts.iter().map(|start| start.name.as_str()));

    let mut names: Vec<&str> = Vec::new();
    for (name, _) in story.starts.iter().flat_map(|start| &start.parts) {
        if !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    // The answer comes last, whatever came before it.
    names.sort_by_key(|name| *name == "first response");

    let mut rows: Vec<Vec<String>> = names
        .into_iter()
        .map(|name| {
            let times = story.starts.iter().map(|start| {
                let part = start.parts.iter().find(|(part, _)| part == name);
                part.map(|(_, ns)| format_milliseconds(*ns)).unwrap_or_default()
            });
            [name.to_owned()].into_iter().chain(times).collect()
        })
        .collect();
    let mut row = |name: &str, cell: &dyn Fn(&Start) -> String| {
        let cells = story.starts.iter().map(cell);
        rows.push([name.to_owned()].into_iter().chain(cells).collect());
    };
    let count = |value: Option<u64>| value.map(|value| value.to_string()).unwrap_or_default();
    let size = |value: Option<u64>| value.map(format_bytes).unwrap_or_default();
    row("total", &|start| format_milliseconds(start.total_ns));
    row("guest pages touched", &|start| count(start.guest_pages));
    row("KVM faults", &|start| count(start.kvm_faults));
    row("bytes read", &|start| size(start.read_bytes));
    row("DRAM, private", &|start| size(start.private_bytes));
    row("DRAM, shared", &|start| size(start.shared_bytes));

    let freeze: Vec<String> = story
        .freeze
        .iter()
        .map(|(name, ns)| format!("{name} {}", format_milliseconds(*ns)))
        .collect();
    format!(
        "{}: booted, answered input A, frozen, ended; then thawed {} times each way, answering input \
         B\n{}\nfreeze: {}; the snapshot takes {} on disk\n",
        story.function,
        story.thaws,
        table(&head, &rows),
        freeze.join(", "),
        format_bytes(story.snapshot_bytes),
    )
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
