//! The report of a request: what it cost and how it got its microVM.

use firn_memory::ProcessCounters;
use firn_run::StartReport;
use serde::Serialize;

use super::usage::usage;
use crate::metrics::StartKind;

/// The report of a request. The report of a failed request covers the steps before the failure.
#[derive(Debug, Default, Serialize)]
pub struct InvocationReport {
    /// How the request got its microVM, if it did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) start: Option<StartKind>,
    /// Why the request failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<String>,
    /// Whether the daemon booted the microVM after a failed thaw. The log has the error.
    pub(crate) thaw_failed: bool,
    /// From the arrival of the request's head until the request was read and checked.
    pub(crate) accept_ns: u64,
    /// Waiting for a microVM, or for room for a new one.
    pub(crate) queue_ns: u64,
    /// Starting the microVM and loading the function; zero for a warm microVM.
    pub(crate) start_ns: u64,
    /// From sending the event to the guest until its answer.
    pub(crate) invoke_ns: u64,
    /// From the arrival of the request's head until the answer.
    pub(crate) total_ns: u64,
    /// Of a cold start: starting the process and booting Linux.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) boot_ns: Option<u64>,
    /// Of a cold start: sending the code and initialising the function.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) load_ns: Option<u64>,
    /// Of a cold start: initialising the function, by the guest's clock; a part of `load_ns`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) init_ns: Option<u64>,
    /// Whether the microVM runs in a standby monitor.
    pub(crate) standby: bool,
    /// The report of the thaw.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) thaw: Option<Box<StartReport>>,
    /// The report of the boot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) boot: Option<Box<StartReport>>,
    /// What the microVM's process used, if it still ran after the answer.
    #[serde(rename = "taken", skip_serializing_if = "Option::is_none")]
    pub(crate) usage: Option<ProcessUsage>,
}

impl InvocationReport {
    /// The report as JSON in printable ASCII, which is valid in a log line and in an HTTP header.
    #[must_use]
    pub fn json(&self) -> String {
        let json = serde_json::to_string(self).unwrap_or_default();
        let mut ascii = String::with_capacity(json.len());
        for c in json.chars() {
            if c.is_ascii() && c != '\x7f' {
                ascii.push(c);
            } else {
                // Other characters occur only inside strings.
                let mut units = [0; 2];
                let units = c.encode_utf16(&mut units).iter();
                ascii.extend(units.map(|unit| format!("\\u{unit:04x}")));
            }
        }
        ascii
    }
}

/// What a microVM's process used, by the kernel's counters.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct ProcessUsage {
    /// Page faults, including the guest's, from the start of the process to the answer; for a warm
    /// microVM, those of this request.
    pub(crate) faults: u64,
    /// Bytes that storage delivered for the process in the same time.
    pub(crate) read_bytes: u64,
    /// Memory that the process does not share, after the answer, bytes.
    pub(crate) private_bytes: u64,
    /// Mapped pages of files and shared memory, bytes.
    pub(crate) shared_bytes: u64,
}

impl ProcessUsage {
    /// The use of `process` since `before`. None if the process has ended.
    pub(crate) fn since(before: ProcessCounters, process: u32) -> Option<Self> {
        let counters = ProcessCounters::of(process).ok()?;
        let usage = usage(process)?;
        let faults = |counters: ProcessCounters| counters.minor_faults + counters.major_faults;
        Some(Self {
            faults: faults(counters).saturating_sub(faults(before)),
            read_bytes: counters.read_bytes.saturating_sub(before.read_bytes),
            private_bytes: usage.private,
            shared_bytes: usage.shared,
        })
    }
}

#[cfg(test)]
#[path = "report_tests.rs"]
mod tests;
