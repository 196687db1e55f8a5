//! How long a vCPU computes: its time in guest mode, measured with KVM's tracepoints `kvm_entry`
//! and `kvm_exit`, without the time that the host spends in between.
//!
//! Each stay in guest mode includes the way from the first tracepoint into the guest and from the
//! guest to the second. The shortest stay of all is taken for that way and is subtracted from every
//! stay. A stay that ends in a halt counts as zero: how much of it the guest slept is unknown.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::perf_ring::{PerfError, PerfRing};

/// Mount points of tracefs.
const TRACEFS: [&str; 2] = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];

/// Why time in guest mode cannot be measured.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum GuestTimeError {
    /// A tracepoint's description cannot be read.
    #[error(
        "cannot read KVM's tracepoint {name} from tracefs: load KVM, mount tracefs at {}, and run as root",
        TRACEFS[0]
    )]
    Tracepoint {
        /// The tracepoint's name.
        name: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// A tracepoint has an unknown format.
    #[error("KVM's tracepoint {0} has an unknown format: use Linux 6.1 or newer")]
    Format(&'static str),
    /// The tracepoints cannot be sampled.
    #[error(transparent)]
    Perf(#[from] PerfError),
}

/// A vCPU's time in guest mode, in total.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestTimeTotals {
    /// Stays in guest mode.
    pub stays: u64,
    /// Stays that ended in a halt, and count as zero.
    pub halts: u64,
    /// The shortest stay, ns, which is subtracted from each.
    pub shortest: u64,
    /// Time in guest mode, ns.
    pub worked: u64,
}

/// KVM's tracepoints of one thread, open, for a process that may not open them itself. They are
/// recorded as long as this value lives.
#[derive(Debug)]
pub struct Tracepoints {
    ring: PerfRing,
    format: TracepointFormat,
}

/// How the records of [`Tracepoints`] are to be read.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct TracepointFormat {
    entry: u16,
    exit: u16,
    /// Offset of the instruction pointer in the record of `kvm_exit`.
    rip_at: usize,
}

impl Tracepoints {
    /// Records the tracepoints of a thread, by its system-wide id, from now on.
    ///
    /// # Errors
    /// See [`GuestTimeError`].
    pub fn of_thread(thread: u32) -> Result<Self, GuestTimeError> {
        let (entry, _) = tracepoint("kvm_entry")?;
        let (exit, format) = tracepoint("kvm_exit")?;
        let rip_at = offset(&format, "guest_rip").ok_or(GuestTimeError::Format("kvm_exit"))?;
        let ring = PerfRing::open([entry, exit], thread)?;
        Ok(Self { ring, format: TracepointFormat { entry, exit, rip_at } })
    }

    /// Their format.
    #[must_use]
    pub fn format(&self) -> TracepointFormat {
        self.format
    }

    /// Their descriptors, for [`AttributionControl::attach`](super::AttributionControl::attach).
    ///
    /// # Errors
    /// That of dup(2).
    pub fn events(&self) -> io::Result<[OwnedFd; 2]> {
        self.ring.events()
    }
}

/// The time of one vCPU's thread in guest mode.
#[derive(Debug)]
pub(super) struct GuestTime {
    ring: PerfRing,
    format: TracepointFormat,
    entered: Option<u64>,
    shortest: u64,
    totals: GuestTimeTotals,
}

impl GuestTime {
    /// The time by the tracepoints of the vCPU's thread, from when they were opened.
    pub(super) fn new(
        format: TracepointFormat,
        events: [OwnedFd; 2],
    ) -> Result<Self, GuestTimeError> {
        Ok(Self {
            ring: PerfRing::of(events)?,
            format,
            entered: None,
            shortest: u64::MAX,
            totals: GuestTimeTotals::default(),
        })
    }

    /// The time in guest mode of the stays that ended since the last call, ns. `halted` returns
    /// whether a guest that exited at an instruction pointer had halted.
    pub(super) fn take(&mut self, halted: impl Fn(u64) -> bool) -> Result<u64, GuestTimeError> {
        let Self { ring, format, entered, shortest, totals } = self;
        let TracepointFormat { entry, exit, rip_at } = *format;
        let mut stays: Vec<u64> = Vec::new();
        ring.drain(|sample| {
            if sample.tracepoint == entry {
                *entered = Some(sample.time);
            } else if sample.tracepoint == exit
                && let Some(since) = entered.take()
            {
                let stay = sample.time.saturating_sub(since);
                let rip = sample.u64_at(rip_at).ok_or(PerfError::Sample)?;
                totals.stays += 1;
                *shortest = (*shortest).min(stay);
                if halted(rip) {
                    totals.halts += 1;
                } else {
                    stays.push(stay);
                }
            }
            Ok(())
        })?;
        let worked = stays.iter().map(|stay| stay - *shortest).sum();
        totals.worked += worked;
        Ok(worked)
    }

    pub(super) fn totals(&self) -> GuestTimeTotals {
        let shortest = if self.totals.stays == 0 { 0 } else { self.shortest };
        GuestTimeTotals { shortest, ..self.totals }
    }
}

/// The number and the format description of a KVM tracepoint.
fn tracepoint(name: &'static str) -> Result<(u16, String), GuestTimeError> {
    let read = |file: &str| {
        let path = |root: &str| format!("{root}/events/kvm/{name}/{file}");
        fs::read_to_string(path(TRACEFS[0])).or_else(|first| {
            // The error of the usual mount point is reported.
            fs::read_to_string(path(TRACEFS[1])).map_err(|_| first)
        })
    };
    let failed = |source| GuestTimeError::Tracepoint { name, source };
    let number = read("id").map_err(failed)?.trim().parse();
    let number = number.map_err(|_| GuestTimeError::Format(name))?;
    Ok((number, read("format").map_err(failed)?))
}

/// The offset of a field of 8 bytes in a tracepoint's record.
fn offset(format: &str, field: &str) -> Option<usize> {
    let line = format.lines().find(|line| line.contains(&format!(" {field};")))?;
    let number = |name: &str| line.split(';').find_map(|part| part.trim().strip_prefix(name));
    (number("size:")? == "8").then_some(())?;
    number("offset:")?.parse().ok()
}

#[cfg(test)]
#[path = "guest_time_tests.rs"]
mod tests;
