//! A thaw of a player: it replays its trace, checks its memory, and ends.

use std::process::ExitCode;
use std::time::Duration;

use firn_base::{format_bytes, format_milliseconds, nanoseconds};
use firn_bench::player::{Clock, PlayerReport, ReplicaCost, replay};
use firn_memory::planners::Planner;

use super::{Begun, ThawArgs, ThawCommandError};
use crate::output;
use crate::snapshot_args::OpenedSnapshot;

pub(super) fn run(
    arguments: &ThawArgs,
    begun: &Begun,
    planner: &dyn Planner,
    opened: &mut OpenedSnapshot,
    opening: Duration,
) -> Result<ExitCode, ThawCommandError> {
    let clock = Clock {
        begin_ns: begun.at,
        request_ns: begun.request,
        open_ns: nanoseconds(opening),
        hold: arguments.hold.then_some(hold),
        faults: arguments.fault_time,
    };
    let input = arguments.input.as_deref();
    let report =
        replay(opened.snapshot(), opened.grant(), input, planner, &arguments.host.kvm, clock)?;
    let report = PlayerReport {
        replica: opened.replica().map(ReplicaCost::of),
        check_ns: opened.check_ns(),
        ..report
    };
    opened.wrote(report.writes.as_ref());
    opened.give_back(report.written.as_ref());
    if arguments.json {
        output::json(&report);
    } else {
        print(&report);
    }
    Ok(ExitCode::SUCCESS)
}

/// Says that the last page is touched, and waits until standard input ends.
fn hold() {
    output::line("held");
    // An end by an error is an end.
    let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
}

fn print(report: &PlayerReport) {
    let times = &report.times;
    let parts = [
        ("process start", times.process_start_ns),
        ("load", Some(times.load_ns)),
        ("plan", Some(times.plan_ns)),
        ("execute", Some(times.execute_ns)),
        ("resume", Some(times.resume_ns)),
        ("replay", Some(times.replay_ns)),
    ];
    let parts: Vec<String> = parts
        .iter()
        .filter_map(|(name, ns)| ns.map(|ns| format!("{name} {}", format_milliseconds(ns))))
        .collect();
    output::line(&format!(
        "{} thawed by {} in {}: {}; {} touches of {} pages, {} ns a page; {} KVM faults, {} exits, {} minor and {} \
         major faults, {} read, {} private, {} shared, {} of a pool, {} copied ahead, {} of page tables, {} of processors; all memory checked \
         in {}",
        report.trace,
        report.planner,
        format_milliseconds(times.total_ns),
        parts.join(", "),
        report.touches,
        report.pages,
        times.replay_ns.checked_div(report.pages).unwrap_or_default(),
        report.kvm.page_faults,
        report.kvm.exits,
        report.minor_faults,
        report.major_faults,
        format_bytes(report.read_bytes),
        format_bytes(report.private_bytes),
        format_bytes(report.shared_bytes),
        format_bytes(report.pool_bytes),
        format_bytes(report.copy_bytes),
        format_bytes(report.page_table_bytes),
        format_milliseconds(report.cpu_ns),
        format_milliseconds(times.verify_ns),
    ));
}

#[cfg(test)]
#[path = "player_tests.rs"]
mod tests;
