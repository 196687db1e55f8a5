//! The traces that one player can replay.

use firn_memory::trace::Trace;
use firn_player::format::INPUTS;
use firn_run::player::SEPARATOR;
use firn_snapshot::{MemoryLayout, PageSet};
use thiserror::Error;

use crate::traces::NamedTrace;

/// The inputs of a player: traces of one function that were recorded from one snapshot of it, so
/// that they share one guest memory. A register selects the replayed trace at the thaw; the memory
/// does not depend on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlayerInputs {
    first: NamedTrace,
    others: Vec<NamedTrace>,
}

/// Why traces cannot be the inputs of one player.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PlayerInputsError {
    /// The number of traces is not supported.
    #[error("a player replays 1 to {INPUTS} traces, not {0}")]
    Number(usize),
    /// A name contains the separator.
    #[error("the name of trace {0:?} contains a comma, which separates names: rename the file")]
    Name(String),
    /// Two traces have the same name.
    #[error("trace {0} is listed twice: a thaw selects a trace by its name, so names must differ")]
    Twice(String),
    /// The traces are of different guest memories.
    #[error(
        "{other} is of another guest memory than {first} (size, or which pages are zero or free): record both from one \
         snapshot, or make a player of each"
    )]
    OtherMemory {
        /// Name of the first trace.
        first: String,
        /// Name of the other trace.
        other: String,
    },
}

impl PlayerInputs {
    /// Uses these traces as inputs, in this order. A thaw that names no input replays the first.
    ///
    /// # Errors
    /// See [`PlayerInputsError`].
    pub fn new(traces: Vec<NamedTrace>) -> Result<Self, PlayerInputsError> {
        let number = traces.len();
        let mut traces = traces.into_iter();
        let first = traces.next().filter(|_| number <= INPUTS);
        let first = first.ok_or(PlayerInputsError::Number(number))?;
        let inputs = Self { first, others: traces.collect() };
        for (index, NamedTrace { name, trace }) in inputs.iter().enumerate() {
            if name.contains(SEPARATOR) {
                return Err(PlayerInputsError::Name(name.clone()));
            }
            if inputs.iter().take(index).any(|other| other.name == *name) {
                return Err(PlayerInputsError::Twice(name.clone()));
            }
            let of = |trace: &Trace| {
                (trace.layout().clone(), trace.zero_map().clone(), trace.free().cloned())
            };
            if of(trace) != of(&inputs.first.trace) {
                let (first, other) = (inputs.first.name.clone(), name.clone());
                return Err(PlayerInputsError::OtherMemory { first, other });
            }
        }
        Ok(inputs)
    }

    /// All traces.
    pub fn iter(&self) -> impl Iterator<Item = &NamedTrace> {
        std::iter::once(&self.first).chain(&self.others)
    }

    /// Their names, in the form of a snapshot's manifest.
    pub(super) fn names(&self) -> String {
        let names: Vec<&str> = self.iter().map(|trace| trace.name.as_str()).collect();
        names.join(&SEPARATOR.to_string())
    }

    pub(super) fn layout(&self) -> &MemoryLayout {
        self.first.trace.layout()
    }

    /// The image pages that are zero: those of the recorded snapshot, and without `sanitised` only
    /// those that the guest did not hold free.
    pub(super) fn zero_map(&self, sanitised: bool) -> PageSet {
        let zero = self.first.trace.zero_map();
        match self.free() {
            Some(free) if !sanitised => {
                let mut rest = PageSet::new(zero.pages());
                let used = free.gaps().flat_map(|used| zero.ranges_in(used));
                used.for_each(|pages| rest.insert_range(pages));
                rest
            }
            _ => zero.clone(),
        }
    }

    /// The image pages that the guest held free at the freeze, if the trace lists them.
    pub(super) fn free(&self) -> Option<&PageSet> {
        self.first.trace.free()
    }
}
