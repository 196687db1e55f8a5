//! A measurement of a function on a tier, and its times.

use std::fmt;

use firn_run::StartReport;
use serde::{Deserialize, Serialize};

use super::tiers::TierUse;
use crate::cache::Cache;
use crate::stats::Summary;
use crate::thaw::{Row, Run};

/// Bytes of a load.
const LINE: f64 = 64.0;
const PAGE: f64 = 4096.0;

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
    /// Instructions in a period of its sampling. In each one a page's first access is in the trace.
    pub period: u64,
    /// The times over the microVMs of all runs, ms.
    pub times: Times,
    /// The other measurements.
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
    /// That touch to the last one.
    Executing,
    /// Restoring, connecting and executing.
    Cold,
    /// A second invocation.
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

impl Time {
    /// The time in one report, ms.
    fn of(self, report: &StartReport) -> Option<f64> {
        let times = &report.times;
        let loading = times.process_start_ns.unwrap_or_default();
        let replay = times.replay_ns.unwrap_or_default();
        let ns = match self {
            Self::Loading => loading,
            Self::Restoring => times.start_to_resume_ns().saturating_sub(loading),
            Self::Connecting => times.connect_ns?,
            Self::Executing => replay.saturating_sub(times.connect_ns?),
            Self::Cold => times.start_to_resume_ns().saturating_sub(loading) + replay,
            Self::Warm => times.warm_ns?,
        };
        Some(ns as f64 / 1e6)
    }
}

/// Each [`Time`] of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Times {
    loading: Option<Summary>,
    restoring: Option<Summary>,
    connecting: Option<Summary>,
    executing: Option<Summary>,
    cold: Option<Summary>,
    warm: Option<Summary>,
}

impl Times {
    /// Of all microVMs of all runs.
    pub(super) fn of(runs: &[Run]) -> Self {
        Self::by(|time| {
            let of_run =
                |run: &Run| run.reports.iter().filter_map(|report| time.of(report)).collect();
            Summary::of_runs(&runs.iter().map(of_run).collect::<Vec<_>>())
        })
    }

    pub(super) fn by(time: impl Fn(Time) -> Option<Summary>) -> Self {
        Self {
            loading: time(Time::Loading),
            restoring: time(Time::Restoring),
            connecting: time(Time::Connecting),
            executing: time(Time::Executing),
            cold: time(Time::Cold),
            warm: time(Time::Warm),
        }
    }
}

impl Cell {
    /// A time, ms.
    pub(super) fn time(&self, time: Time) -> Option<Summary> {
        match time {
            Time::Loading => self.times.loading,
            Time::Restoring => self.times.restoring,
            Time::Connecting => self.times.connecting,
            Time::Executing => self.times.executing,
            Time::Cold => self.times.cold,
            Time::Warm => self.times.warm,
        }
    }

    /// The median of a time, ms.
    pub(super) fn median(&self, time: Time) -> Option<f64> {
        self.time(time).map(|summary| summary.median)
    }

    /// The function's name, as the paper has it.
    pub(super) fn function(&self) -> &str {
        function(&self.row.trace)
    }

    /// Bytes that one microVM read from the medium: pages that entered the page cache up to the end
    /// of its last invocation; of memory by the model, loads of 64 bytes of the first invocation
    /// and copied pages.
    pub(super) fn medium_bytes(&self, tier: Option<&TierUse>) -> f64 {
        let emulated = tier.is_some_and(|tier| tier.delay_for(1).is_some());
        if emulated || self.row.cache == Cache::Cold {
            self.row.batch_page_cache_bytes as f64 / f64::from(self.microvms.max(1))
        } else {
            self.row.read_only_loads.unwrap_or_default() as f64 * LINE + self.written as f64 * PAGE
        }
    }

    /// Bytes of the pages that the trace touches, in MB.
    pub(super) fn megabytes(&self) -> f64 {
        self.pages as f64 * PAGE / 1e6
    }

    /// The share of its pages that are only read, per cent.
    pub(super) fn read_only(&self) -> f64 {
        (self.pages - self.written.min(self.pages)) as f64 / self.pages.max(1) as f64 * 100.0
    }
}

/// The name of a trace's function, as the paper has it.
pub(super) fn function(trace: &str) -> &str {
    trace.strip_suffix("-a2").unwrap_or(trace)
}
