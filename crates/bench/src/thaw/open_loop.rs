//! Starts at random intervals, as requests arrive: none waits for an earlier one, or for what the
//! pool's manager prepares.

use std::ops::RangeInclusive;
use std::panic::resume_unwind;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;
use firn_run::monitor::Monitor;
use firn_run::{StandbyUse, StartReport};
use firn_vmm::Shape;
use serde::{Deserialize, Serialize};

use super::results::{milliseconds, total_ms};
use crate::batch::{Batch, BatchError, Interrupt, Player, Prepared};
use crate::stats::Summary;

/// Intervals between two starts, µs, each as likely.
const INTERVALS: RangeInclusive<u64> = 5_000..=500_000;
/// The intervals are the same for every planner.
const SEED: u64 = 18;
/// Standby monitors that are kept, where starts are in such.
const STANDBYS: usize = 4;

/// Starts at random intervals.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OpenLoop {
    /// Number of starts.
    pub starts: u64,
    /// Request to a running vCPU.
    pub start_to_resume_ms: Summary,
    /// Request to the last touch.
    pub total_ms: Summary,
    /// Starts that did not find what is made ahead for them: that made their VM at the request,
    /// waited for a replica, or found no copy.
    pub fallbacks: u64,
    /// The 95th percentile of `total_ms`, divided by the median of the runs that waited for all
    /// earlier work.
    pub p95_to_idle_median: f64,
}

/// Starts a player `count` times. `shape` is what standby monitors make, if starts are in such.
pub(super) fn starts(
    player: Player<'_>,
    count: u32,
    shape: Option<&Shape>,
    interrupt: &Interrupt,
    mut started: impl FnMut(),
) -> Result<Vec<StartReport>, BatchError> {
    let mut random = Rng::with_seed(SEED);
    let mut batch = Batch::new(interrupt);
    thread::scope(|scope| {
        let (ready, standbys) = channel::<Monitor>();
        let (wanted, wants) = channel::<()>();
        for _ in 0..STANDBYS {
            let _ = wanted.send(());
        }
        if let Some(shape) = shape {
            scope.spawn(move || {
                // A start without a standby monitor makes its own, and is a fallback.
                while wants.recv().is_ok()
                    && let Ok(monitor) = player.stand_by(shape)
                    && ready.send(monitor).is_ok()
                {}
            });
        }
        let mut running = Vec::new();
        let mut next = Instant::now();
        for number in 1..=count {
            next += Duration::from_micros(random.u64(INTERVALS));
            thread::sleep(next.saturating_duration_since(Instant::now()));
            interrupt.check()?;
            let standby = standbys.try_recv().ok();
            // Its replacement does not run beside the start that took it.
            let wanted = standby.is_some().then(|| wanted.clone());
            batch.start(player, number, standby.map(Prepared::Standby))?;
            if let Some(mut instance) = batch.instances.pop_front() {
                running.push(scope.spawn(move || {
                    instance.wait_until_held(None);
                    if let Some(wanted) = wanted {
                        let _ = wanted.send(());
                    }
                    // What follows is not measured, and others are.
                    instance.lower_priority();
                    instance.release();
                    instance.report()
                }));
            }
            started();
        }
        drop((standbys, wanted));
        let reports: Vec<_> = running
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
            .collect();
        interrupt.check()?;
        reports.into_iter().collect()
    })
}

impl OpenLoop {
    /// Of the reports of all starts; `None` without any. `idle_ms` is the median of `total_ms` of
    /// runs that waited for all earlier work.
    pub(super) fn of(reports: &[StartReport], idle_ms: f64) -> Option<Self> {
        let summary = |value: fn(&StartReport) -> f64| {
            Summary::of(&reports.iter().map(value).collect::<Vec<_>>())
        };
        let total_ms = summary(total_ms)?;
        Some(Self {
            starts: reports.len() as u64,
            start_to_resume_ms: summary(|r| milliseconds(r.times.start_to_resume_ns()))?,
            total_ms,
            fallbacks: reports.iter().filter(|report| fell_back(report)).count() as u64,
            p95_to_idle_median: total_ms.p95 / idle_ms,
        })
    }
}

fn fell_back(report: &StartReport) -> bool {
    let imaged = report.replica.is_some_and(|replica| replica.imaging_ns > 0);
    let no_copy = report.writes.as_ref().is_some_and(|writes| writes.no_copy.is_some());
    report.standby == Some(StandbyUse::Miss) || imaged || no_copy
}

#[cfg(test)]
#[path = "open_loop_tests.rs"]
mod tests;
