//! Admission: an account of memory, microVMs and requests in flight against their limits.

use std::collections::HashMap;

use firn_base::format_bytes;
use uuid::Uuid;

use super::usage::Usage;

/// Memory that is reserved beyond the measured use of a revision's microVMs, bytes.
const MARGIN: u64 = 16 << 20;

/// The limits of all microVMs together.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Budget {
    /// Memory (DRAM), bytes.
    pub(crate) memory: u64,
    /// Number of microVMs.
    pub(crate) monitors: usize,
    /// Space for their disks in the scratch directory, bytes.
    pub(crate) scratch: u64,
    /// Whether reservations follow the measured memory use, once there is a measurement.
    pub(crate) measured: bool,
}

/// The largest memory use of one microVM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cost {
    /// The microVM's revision.
    pub(crate) revision: Uuid,
    /// Memory that it does not share, bytes: all of guest memory, because a guest can write every
    /// page.
    pub(crate) private: u64,
    /// Memory that it shares with the other microVMs of its revision, bytes: the image.
    pub(crate) shared: u64,
    /// Limit of what it writes to its disk, bytes. It is reserved whatever the microVM uses,
    /// because its monitor enforces this limit, and no other.
    pub(crate) disk: u64,
    /// Whether that takes memory.
    pub(crate) disk_in_memory: bool,
}

/// Why a microVM cannot start now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Shortage {
    /// There is too little memory.
    #[error(
        "it needs {} of memory{}, and {} of {} are free (--memory)",
        format_bytes(*needed), of_disk(*disk), format_bytes(*free), format_bytes(*limit)
    )]
    Memory {
        /// What it needs, bytes.
        needed: u64,
        /// The part of it for a disk in memory, bytes.
        disk: u64,
        /// Free memory, bytes.
        free: u64,
        /// The limit, bytes.
        limit: u64,
    },
    /// Too many microVMs run.
    #[error(
        "{0} microVMs run, which is the limit (--monitors, or the number of tap devices with --network tap)"
    )]
    Monitors(usize),
    /// There is too little space for its disk.
    #[error(
        "its disk needs {} (EphemeralStorage, --disk), and {} of {} for disks are free (--scratch-size)",
        format_bytes(*needed), format_bytes(*free), format_bytes(*limit)
    )]
    Disk {
        /// What it needs, bytes.
        needed: u64,
        /// Free space, bytes.
        free: u64,
        /// The limit, bytes.
        limit: u64,
    },
}

fn of_disk(bytes: u64) -> String {
    if bytes == 0 {
        String::new()
    } else {
        format!(" ({} for its disk, --disk)", format_bytes(bytes))
    }
}

/// Current reservations and requests in flight.
#[derive(Debug)]
pub(crate) struct Ledger {
    budget: Budget,
    reserved: HashMap<Uuid, Reserved>,
    /// The largest measured use of a microVM, by revision.
    measured: HashMap<Uuid, Usage>,
    in_flight: HashMap<String, u32>,
}

impl Cost {
    /// Memory of its disk, bytes.
    fn disk_memory(&self) -> u64 {
        if self.disk_in_memory { self.disk } else { 0 }
    }
}

/// The reservations of one revision.
#[derive(Debug)]
struct Reserved {
    worst: Cost,
    /// Memory reserved for each microVM, bytes.
    private: u64,
    /// Memory reserved once for all microVMs, bytes.
    shared: u64,
    count: usize,
}

impl Ledger {
    pub(crate) fn new(budget: Budget) -> Self {
        let (reserved, measured, in_flight) = Default::default();
        Self { budget, reserved, measured, in_flight }
    }

    /// The memory to reserve for a microVM: the measured use of its revision plus a margin, at most
    /// `worst`; and its disk.
    pub(crate) fn expected(&self, worst: &Cost) -> Usage {
        let Usage { private, shared } =
            match self.measured.get(&worst.revision).filter(|_| self.budget.measured) {
                None => Usage { private: worst.private, shared: worst.shared },
                Some(measured) => Usage {
                    private: measured.private.saturating_add(MARGIN).min(worst.private),
                    shared: measured.shared.min(worst.shared),
                },
            };
        Usage { private: private.saturating_add(worst.disk_memory()), shared }
    }

    /// Why a microVM could not start even if no other ran.
    pub(crate) fn never_fits(&self, worst: &Cost) -> Option<Shortage> {
        let Usage { private, shared } = self.expected(worst);
        let empty = Self::new(self.budget);
        empty.lacks(private.saturating_add(shared), worst)
    }

    /// Why a microVM cannot start now.
    pub(crate) fn shortage(&self, worst: &Cost) -> Option<Shortage> {
        let Usage { private, shared } = self.expected(worst);
        let shared = if self.reserved.contains_key(&worst.revision) { 0 } else { shared };
        let needed = private.saturating_add(shared);
        self.lacks(needed, worst)
    }

    fn lacks(&self, needed: u64, worst: &Cost) -> Option<Shortage> {
        let Budget { memory, monitors, scratch, .. } = self.budget;
        if self.monitors() >= monitors {
            return Some(Shortage::Monitors(monitors));
        }
        let free = scratch.saturating_sub(self.disks());
        if worst.disk > free {
            return Some(Shortage::Disk { needed: worst.disk, free, limit: scratch });
        }
        let free = memory.saturating_sub(self.bytes());
        let disk = worst.disk_memory();
        (needed > free).then_some(Shortage::Memory { needed, disk, free, limit: memory })
    }

    /// Reserved space for disks, bytes.
    fn disks(&self) -> u64 {
        self.sum(|reserved| reserved.worst.disk)
    }

    /// The sum of `each` over all microVMs.
    fn sum(&self, each: impl Fn(&Reserved) -> u64) -> u64 {
        let of = |reserved: &Reserved| {
            each(reserved).saturating_mul(u64::try_from(reserved.count).unwrap_or(u64::MAX))
        };
        self.reserved.values().map(of).fold(0, u64::saturating_add)
    }

    /// Reserves memory for a microVM. Returns whether there is enough.
    pub(crate) fn reserve(&mut self, worst: &Cost) -> bool {
        if self.shortage(worst).is_some() {
            return false;
        }
        let expected = self.expected(worst);
        let Usage { private, shared } = expected;
        let new = || Reserved { worst: *worst, private, shared, count: 0 };
        self.reserved.entry(worst.revision).or_insert_with(new).count += 1;
        true
    }

    /// Releases a reservation.
    pub(crate) fn release(&mut self, cost: &Cost) {
        if let Some(reserved) = self.reserved.get_mut(&cost.revision) {
            reserved.count -= 1;
            if reserved.count == 0 {
                self.reserved.remove(&cost.revision);
            }
        }
    }

    /// Records the memory use of a microVM that has answered a request, and adjusts the
    /// reservations of its revision.
    pub(crate) fn record_usage(&mut self, revision: Uuid, usage: Usage) {
        let measured = self.measured.entry(revision).or_default();
        measured.private = measured.private.max(usage.private);
        measured.shared = measured.shared.max(usage.shared);
        if let Some(worst) = self.reserved.get(&revision).map(|reserved| reserved.worst) {
            let Usage { private, shared } = self.expected(&worst);
            self.reserved.entry(revision).and_modify(|reserved| {
                (reserved.private, reserved.shared) = (private, shared);
            });
        }
    }

    /// Drops the measurements of a revision.
    pub(crate) fn forget(&mut self, revision: Uuid) {
        self.measured.remove(&revision);
    }

    /// Whether the reservations exceed the limit, which happens when microVMs grow beyond earlier
    /// measurements.
    pub(crate) fn is_over(&self) -> bool {
        self.bytes() > self.budget.memory
    }

    /// Counts a new request of a function. Returns false if `limit` requests are already in flight.
    pub(crate) fn begin_request(&mut self, function: &str, limit: Option<u32>) -> bool {
        let now = self.in_flight.get(function).copied().unwrap_or(0);
        let free = limit.is_none_or(|limit| now < limit);
        if free {
            self.in_flight.insert(function.to_owned(), now + 1);
        }
        free
    }

    /// Counts the end of a request.
    pub(crate) fn end_request(&mut self, function: &str) {
        if let Some(count) = self.in_flight.get_mut(function) {
            *count -= 1;
            if *count == 0 {
                self.in_flight.remove(function);
            }
        }
    }

    /// The number of reservations.
    pub(crate) fn monitors(&self) -> usize {
        self.reserved.values().map(|reserved| reserved.count).sum()
    }

    /// Reserved memory that microVMs do not share, bytes.
    pub(crate) fn private_bytes(&self) -> u64 {
        self.sum(|reserved| reserved.private)
    }

    /// Reserved memory that microVMs share, bytes.
    pub(crate) fn shared_bytes(&self) -> u64 {
        self.reserved.values().map(|reserved| reserved.shared).sum()
    }

    fn bytes(&self) -> u64 {
        self.private_bytes().saturating_add(self.shared_bytes())
    }
}

#[cfg(test)]
#[path = "ledger_tests.rs"]
mod tests;
