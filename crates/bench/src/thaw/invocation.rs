//! What a row compares: the start of a microVM with its first invocation, and the second
//! invocation, which is warm.

use super::results::Row;
use crate::stats::Summary;

/// An invocation of a row's microVMs. Tables and pictures treat a warm one like a planner of its
/// own.
#[derive(Clone, Copy, Debug)]
pub(super) struct Invocation<'a> {
    pub(super) row: &'a Row,
    /// From the request to the last page; of a warm one, all of it.
    pub(super) ms: Summary,
    pub(super) warm: bool,
}

impl Row {
    /// The first invocation, which is cold, and the second one if there was one.
    pub(super) fn invocations(&self) -> impl Iterator<Item = Invocation<'_>> {
        let cold = Invocation { row: self, ms: self.total_ms, warm: false };
        let warm = self.warm_ms.map(|ms| Invocation { row: self, ms, warm: true });
        std::iter::once(cold).chain(warm)
    }

    /// The planner, with its label if it was measured twice.
    pub(super) fn name(&self) -> String {
        let label = self.label.as_ref().map_or(String::new(), |label| format!(" ({label})"));
        format!("{}{label}", self.planner)
    }
}

/// What follows a planner's name.
pub(super) fn suffix(warm: bool) -> &'static str {
    if warm { ", warm" } else { "" }
}

impl<'a> Invocation<'a> {
    /// The name in a table.
    pub(super) fn name(&self) -> String {
        format!("{}{}", self.row.name(), suffix(self.warm))
    }

    /// The planner, and whether it is warm: what rows of other traces are compared by.
    pub(super) fn subject(&self) -> (&'a str, bool) {
        (&self.row.planner, self.warm)
    }
}
