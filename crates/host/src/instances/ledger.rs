//! Who may start a microVM: an account of memory, of microVMs, and of requests in flight.

use std::collections::HashMap;

use uuid::Uuid;

/// What a microVM may come to take beyond what those of its version were measured to take, in bytes.
const MARGIN: u64 = 16 << 20;

/// What all microVMs together may take.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Budget {
    /// DRAM, in bytes.
    pub(crate) memory: u64,
    /// MicroVMs.
    pub(crate) monitors: usize,
    /// Whether a version is booked by what its microVMs were measured to take, once they were.
    pub(crate) measured: bool,
}

/// What one microVM may take at worst.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cost {
    /// The revision that it is of.
    pub(crate) revision: Uuid,
    /// What may become its own: all of guest memory, for a guest may write to every page.
    pub(crate) private: u64,
    /// What it shares with the others of its revision: the image. Counted once for all of them.
    pub(crate) shared: u64,
}

/// What microVMs of one revision were seen to take, the most of any.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    /// What belongs to one alone, bytes.
    pub(crate) private: u64,
    /// What one shares with others, bytes.
    pub(crate) shared: u64,
}

/// The account.
#[derive(Debug)]
pub(crate) struct Ledger {
    budget: Budget,
    booked: HashMap<Uuid, Booked>,
    /// Of revisions whose microVMs have answered a request.
    seen: HashMap<Uuid, Usage>,
    in_flight: HashMap<String, u32>,
}

/// The microVMs of one revision.
#[derive(Debug)]
struct Booked {
    worst: Cost,
    /// What each is booked for, bytes.
    private: u64,
    /// What all are booked for together, bytes.
    shared: u64,
    count: usize,
}

impl Ledger {
    pub(crate) fn new(budget: Budget) -> Self {
        let (booked, seen, in_flight) = Default::default();
        Self { budget, booked, seen, in_flight }
    }

    /// What a microVM is booked for: what was seen of its revision and a margin, at most the worst.
    pub(crate) fn expected(&self, worst: &Cost) -> Usage {
        match self.seen.get(&worst.revision).filter(|_| self.budget.measured) {
            None => Usage { private: worst.private, shared: worst.shared },
            Some(seen) => Usage {
                private: seen.private.saturating_add(MARGIN).min(worst.private),
                shared: seen.shared.min(worst.shared),
            },
        }
    }

    /// Whether a microVM could ever start: with nothing else running.
    pub(crate) fn could_fit(&self, worst: &Cost) -> bool {
        let Usage { private, shared } = self.expected(worst);
        self.budget.monitors > 0 && private.saturating_add(shared) <= self.budget.memory
    }

    /// Books a microVM, if there is room for it.
    pub(crate) fn book(&mut self, worst: &Cost) -> bool {
        let expected = self.expected(worst);
        let shared = if self.booked.contains_key(&worst.revision) { 0 } else { expected.shared };
        let sum = self.bytes().saturating_add(expected.private).saturating_add(shared);
        if self.monitors() >= self.budget.monitors || sum > self.budget.memory {
            return false;
        }
        let Usage { private, shared } = expected;
        let new = || Booked { worst: *worst, private, shared, count: 0 };
        self.booked.entry(worst.revision).or_insert_with(new).count += 1;
        true
    }

    /// Takes a booking back.
    pub(crate) fn cancel(&mut self, cost: &Cost) {
        if let Some(booked) = self.booked.get_mut(&cost.revision) {
            booked.count -= 1;
            if booked.count == 0 {
                self.booked.remove(&cost.revision);
            }
        }
    }

    /// Learns what a microVM takes that has answered a request: those of its revision are booked for that from now on.
    pub(crate) fn learn(&mut self, revision: Uuid, usage: Usage) {
        let seen = self.seen.entry(revision).or_default();
        seen.private = seen.private.max(usage.private);
        seen.shared = seen.shared.max(usage.shared);
        if let Some(worst) = self.booked.get(&revision).map(|booked| booked.worst) {
            let Usage { private, shared } = self.expected(&worst);
            self.booked.entry(revision).and_modify(|booked| {
                (booked.private, booked.shared) = (private, shared);
            });
        }
    }

    /// Forgets what was learnt of a revision.
    pub(crate) fn forget(&mut self, revision: Uuid) {
        self.seen.remove(&revision);
    }

    /// Whether more is booked than may be taken: where microVMs grew beyond what was expected.
    pub(crate) fn is_over(&self) -> bool {
        self.bytes() > self.budget.memory
    }

    /// Counts a request of a function, unless `limit` are in flight.
    pub(crate) fn enter(&mut self, function: &str, limit: Option<u32>) -> bool {
        let now = self.in_flight.get(function).copied().unwrap_or(0);
        let free = limit.is_none_or(|limit| now < limit);
        if free {
            self.in_flight.insert(function.to_owned(), now + 1);
        }
        free
    }

    /// Counts a request's end.
    pub(crate) fn leave(&mut self, function: &str) {
        if let Some(count) = self.in_flight.get_mut(function) {
            *count -= 1;
            if *count == 0 {
                self.in_flight.remove(function);
            }
        }
    }

    pub(crate) fn monitors(&self) -> usize {
        self.booked.values().map(|booked| booked.count).sum()
    }

    pub(crate) fn private_bytes(&self) -> u64 {
        let each = |booked: &Booked| {
            booked.private.saturating_mul(u64::try_from(booked.count).unwrap_or(u64::MAX))
        };
        self.booked.values().map(each).sum()
    }

    pub(crate) fn shared_bytes(&self) -> u64 {
        self.booked.values().map(|booked| booked.shared).sum()
    }

    fn bytes(&self) -> u64 {
        self.private_bytes().saturating_add(self.shared_bytes())
    }
}

#[cfg(test)]
#[path = "ledger_tests.rs"]
mod tests;
