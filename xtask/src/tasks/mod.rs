//! The tasks: each is a target of the Makefile.

mod bench;
mod checks;
mod guests;
mod load;
mod regression;
mod restores;
mod traces;
mod unit;
mod workloads;

use std::path::Path;

use crate::context::Context;
use crate::host::Host;
use crate::step::Step;
use crate::{Result, prose, unused};

type Task = fn(&Context) -> Result<()>;

/// Name, purpose and function of every task.
pub(crate) const ALL: [(&str, &str, Task); 22] = [
    ("guests", "build the files for Linux guests, and the lab if they run there", guests),
    ("test", "run all checks and tests of a change", test),
    ("lint", "check formatting, lints, documentation and dependencies", checks::lint),
    ("prose", "check the style of texts and comments", prose::check),
    ("unused-dependencies", "find dependencies that no source file uses", unused::check),
    ("deny", "run cargo-deny", checks::deny),
    ("unit-tests", "run every test that needs no Linux guest", unit::unit_tests),
    ("monitor-tests", "run the tests that need a KVM in the lab", unit::monitor_tests),
    ("lab-tests", "run the tests of the lab, and those that need its kernel", unit::lab_tests),
    ("test-snapbpf", "run the tests that need SnapBPF's module", unit::snapbpf),
    ("guest-tests", "run the tests in real guests", guests::guest_tests),
    ("lab-and-guest-tests", "run the tests of both at once", guests::lab_and_guest_tests),
    ("long-guest-tests", "run the long tests in real guests", guests::long_guest_tests),
    ("test-load", "send requests to the daemon beside random kills", load::test),
    ("test-load-short", "the same with few requests, to players only", load::short),
    ("matrix", "check every byte of every planner's restores", restores::matrix),
    ("restores-table", "measure the table of all restores", restores::table),
    ("test-workloads", "run every function behind the daemon", workloads::test),
    ("bench", "measure how a thaw grows with guest memory", bench::bench),
    ("bench-regression", "find restores that became slower", regression::regression),
    ("traces", "record the functions' traces", traces::record),
    ("require", "print the parts of this machine that tests require", require),
];

fn guests(context: &Context) -> Result<()> {
    context.runner.run(&Step::new("make").arg(context.host.guests()))
}

/// The guests' tests come last, so that the last lines are their result.
fn test(context: &Context) -> Result<()> {
    let Host { kvm, hardware, .. } = context.host;
    let targets = [
        ("lint", true),
        ("unit-tests", true),
        ("monitor-tests", !kvm),
        ("guest-tests", hardware),
        ("lab-and-guest-tests", !hardware),
    ];
    for (target, _) in targets.into_iter().filter(|(_, needed)| *needed) {
        context.runner.run(&Step::new("make").arg(target))?;
    }
    Ok(())
}

fn require(context: &Context) -> Result<()> {
    context.runner.note(&format!("FIRN_REQUIRE={}", context.host.required()));
    Ok(())
}

/// The value of a variable for a task, if it is set and not empty.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.trim().is_empty())
}

/// The names of the entries of a folder, sorted.
fn entries(folder: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests;
