//! Who may start a microVM: an account of memory, of microVMs, and of requests in flight.

use std::collections::HashMap;

use uuid::Uuid;

/// What all microVMs together may take.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Budget {
    /// DRAM, in bytes.
    pub(crate) memory: u64,
    /// MicroVMs.
    pub(crate) monitors: usize,
}

/// What one microVM may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cost {
    /// The revision that it is of.
    pub(crate) revision: Uuid,
    /// What may become its own: all of guest memory, for a guest may write to every page.
    pub(crate) private: u64,
    /// What it shares with the others of its revision: the image. Counted once for all of them.
    pub(crate) shared: u64,
}

/// The account.
#[derive(Debug)]
pub(crate) struct Ledger {
    budget: Budget,
    monitors: usize,
    private: u64,
    shared: HashMap<Uuid, (u64, usize)>,
    in_flight: HashMap<String, u32>,
}

impl Ledger {
    pub(crate) fn new(budget: Budget) -> Self {
        Self { budget, monitors: 0, private: 0, shared: HashMap::new(), in_flight: HashMap::new() }
    }

    /// Whether a microVM could ever start: with nothing else running.
    pub(crate) fn could_fit(&self, cost: &Cost) -> bool {
        self.budget.monitors > 0 && cost.private.saturating_add(cost.shared) <= self.budget.memory
    }

    /// Books a microVM, if there is room for it.
    pub(crate) fn book(&mut self, cost: &Cost) -> bool {
        let shared = if self.shared.contains_key(&cost.revision) { 0 } else { cost.shared };
        let sum = self.private_bytes().saturating_add(self.shared_bytes());
        let sum = sum.saturating_add(cost.private).saturating_add(shared);
        if self.monitors >= self.budget.monitors || sum > self.budget.memory {
            return false;
        }
        self.monitors += 1;
        self.private += cost.private;
        self.shared.entry(cost.revision).or_insert((cost.shared, 0)).1 += 1;
        true
    }

    /// Takes a booking back.
    pub(crate) fn cancel(&mut self, cost: &Cost) {
        self.monitors -= 1;
        self.private -= cost.private;
        if let Some((_, users)) = self.shared.get_mut(&cost.revision) {
            *users -= 1;
            if *users == 0 {
                self.shared.remove(&cost.revision);
            }
        }
    }

    /// Counts a request of a function, unless `limit` are in flight.
    pub(crate) fn enter(&mut self, function: &str, limit: Option<u32>) -> bool {
        if !self.may_enter(function, limit) {
            return false;
        }
        *self.in_flight.entry(function.to_owned()).or_default() += 1;
        true
    }

    /// Whether [`Ledger::enter`] would count a request.
    pub(crate) fn may_enter(&self, function: &str, limit: Option<u32>) -> bool {
        let now = self.in_flight.get(function).copied().unwrap_or(0);
        limit.is_none_or(|limit| now < limit)
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
        self.monitors
    }

    pub(crate) fn private_bytes(&self) -> u64 {
        self.private
    }

    pub(crate) fn shared_bytes(&self) -> u64 {
        self.shared.values().map(|(bytes, _)| bytes).sum()
    }
}

#[cfg(test)]
#[path = "ledger_tests.rs"]
mod tests;
