//! A model of persistent memory with simulated power loss, for tests.
//!
//! The model guarantees what the hardware guarantees: a store of an aligned word is atomic, and a
//! stored word is durable after its line was flushed and a fence followed the flush. Before that,
//! the processor may have written the line back at any time (eviction) with any of the words stored
//! so far. A loss of power therefore leaves the durable words plus, for each word with unfenced
//! stores, any one of these stores or none. The words of a line are independent here. This is
//! weaker than x86, which writes a line back with its stores in order, and covers a compiler that
//! reorders a copy.
//!
//! [`SimulatedMedium::epochs`] lists the possible losses just before each fence. The states at all
//! earlier moments since the previous fence are among them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use firn_base::num::{u64_of, usize_of};
use parking_lot::{Mutex, MutexGuard};

use super::{
    Access, Durability, ExtentDescriptor, FlushInstruction, Medium, MediumFacts, MediumKind,
};
use crate::layout::{GRANULE, LINE};

const WORD: u64 = 8;

/// A fault to inject, to check that the tests detect it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// No fault.
    None,
    /// Flushes do nothing.
    NoFlush,
    /// Fences do nothing.
    NoFence,
    /// No range gets memory of its own.
    NoMemory,
}

/// A model of persistent memory. It stores only words that are not zero.
#[derive(Debug)]
pub struct SimulatedMedium {
    facts: MediumFacts,
    fault: Fault,
    state: Mutex<State>,
}

/// The stores to a word since it was last durable, oldest first, and the number of flushed ones.
#[derive(Clone, Debug, Default)]
struct Pending {
    values: Vec<u64>,
    flushed: usize,
}

#[derive(Debug, Default)]
struct State {
    durable: Arc<HashMap<u64, u64>>,
    /// By the word's offset.
    pending: BTreeMap<u64, Pending>,
    epochs: Vec<Epoch>,
    recording: bool,
}

/// The words that were not durable at one moment.
#[derive(Clone, Debug)]
pub struct Epoch {
    size: u64,
    durable: Arc<HashMap<u64, u64>>,
    /// A word's offset and the values that it may hold instead of the durable value.
    pending: Vec<(u64, Vec<u64>)>,
}

/// Limits of the search through the states of an epoch.
#[derive(Clone, Copy, Debug)]
pub struct Search {
    /// Epochs with at most this many states, torn lines included, are searched exhaustively.
    pub states: u64,
    /// In other epochs with at most this many unfenced lines, every subset of whole lines is tried.
    pub lines: u32,
    /// Number of random states tried in addition, torn lines included.
    pub samples: u32,
    /// Seed of the random states.
    pub seed: u64,
}

/// Numbers of tried states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tried {
    /// Epochs.
    pub epochs: u64,
    /// Epochs of which every state was tried.
    pub exhausted: u64,
    /// States, all epochs together.
    pub states: u64,
    /// The maximum number of unfenced lines of an epoch.
    pub most_lines: u64,
}

impl Tried {
    /// Adds the numbers of another search.
    pub fn add(&mut self, other: Self) {
        self.epochs += other.epochs;
        self.exhausted += other.exhausted;
        self.states += other.states;
        self.most_lines = self.most_lines.max(other.most_lines);
    }
}

impl SimulatedMedium {
    /// A medium of `size` bytes, all zero.
    #[must_use]
    pub fn new(size: u64) -> Self {
        Self::with(size, Arc::default(), Fault::None)
    }

    /// A medium with a fault.
    #[must_use]
    pub fn faulty(size: u64, fault: Fault) -> Self {
        Self::with(size, Arc::default(), fault)
    }

    /// The same medium, with a fault from now on.
    #[cfg(test)]
    pub(crate) fn with_fault(self, fault: Fault) -> Self {
        Self { fault, ..self }
    }

    fn with(size: u64, durable: Arc<HashMap<u64, u64>>, fault: Fault) -> Self {
        let facts = MediumFacts {
            kind: MediumKind::Simulated,
            name: "simulated".to_owned(),
            size,
            granule: GRANULE,
            durability: Durability::CacheLines(FlushInstruction::Clwb),
            index: None,
            nodes: Vec::new(),
        };
        Self { facts, fault, state: Mutex::new(State { durable, ..State::default() }) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Starts recording what each moment could lose.
    pub fn record(&self) {
        self.state().recording = true;
    }

    /// The words that a loss of power could lose before each fence since
    /// [`SimulatedMedium::record`], and now. Ends the recording.
    #[must_use]
    pub fn epochs(&self) -> Vec<Epoch> {
        let mut state = self.state();
        let now = state.epoch(self.facts.size);
        state.epochs.push(now);
        state.recording = false;
        std::mem::take(&mut state.epochs)
    }

    /// A copy of the medium after a loss of power that keeps every store.
    #[must_use]
    pub fn clone_now(&self) -> Self {
        let state = self.state();
        let mut words = HashMap::clone(&state.durable);
        for (word, pending) in &state.pending {
            if let Some(value) = pending.values.last() {
                words.insert(*word, *value);
            }
        }
        Self::with(self.facts.size, Arc::new(words), Fault::None)
    }

    /// Whether all bytes of the range are zero.
    #[cfg(test)]
    pub(crate) fn is_zero(&self, range: &std::ops::Range<u64>) -> bool {
        let state = self.state();
        let stored = state.pending.keys().chain(state.durable.keys());
        !stored.filter(|word| range.contains(word)).any(|word| state.word(*word) != 0)
    }

    fn check(&self, offset: u64, len: u64) {
        let within = offset.checked_add(len).is_some_and(|end| end <= self.facts.size);
        assert!(within, "{offset} + {len} is outside of the medium");
    }
}

impl State {
    fn word(&self, word: u64) -> u64 {
        match self.pending.get(&word).and_then(|pending| pending.values.last()) {
            Some(value) => *value,
            None => self.durable.get(&word).copied().unwrap_or(0),
        }
    }

    fn store(&mut self, word: u64, value: u64) {
        self.pending.entry(word).or_default().values.push(value);
    }

    fn epoch(&self, size: u64) -> Epoch {
        let durable = Arc::clone(&self.durable);
        let mut pending = Vec::new();
        for (word, stores) in &self.pending {
            let old = self.durable.get(word).copied().unwrap_or(0);
            let values: BTreeSet<u64> =
                stores.values.iter().copied().filter(|value| *value != old).collect();
            if !values.is_empty() {
                pending.push((*word, values.into_iter().collect()));
            }
        }
        Epoch { size, durable, pending }
    }

    fn fence(&mut self) {
        let done = self.pending.values().any(|pending| pending.flushed > 0);
        if !done {
            return;
        }
        let durable = Arc::make_mut(&mut self.durable);
        self.pending.retain(|word, pending| {
            if let Some(last) = pending.flushed.checked_sub(1) {
                match pending.values[last] {
                    0 => durable.remove(word),
                    value => durable.insert(*word, value),
                };
                pending.values.drain(..pending.flushed);
                pending.flushed = 0;
            }
            !pending.values.is_empty()
        });
    }
}

impl Medium for SimulatedMedium {
    fn facts(&self) -> &MediumFacts {
        &self.facts
    }

    fn load(&self, offset: u64, buffer: &mut [u8]) {
        self.check(offset, u64_of(buffer.len()));
        let state = self.state();
        let mut at = offset;
        let mut rest = buffer;
        while !rest.is_empty() {
            let word = at - at % WORD;
            let bytes = state.word(word).to_le_bytes();
            let part = &bytes[usize_of(at - word)..];
            let len = part.len().min(rest.len());
            let (head, tail) = rest.split_at_mut(len);
            head.copy_from_slice(&part[..len]);
            rest = tail;
            at += u64_of(len);
        }
    }

    fn load_word(&self, offset: u64) -> u64 {
        self.check(offset, WORD);
        assert_eq!(offset % WORD, 0);
        self.state().word(offset)
    }

    fn store(&self, offset: u64, bytes: &[u8]) {
        self.check(offset, u64_of(bytes.len()));
        let mut state = self.state();
        let mut at = offset;
        let mut rest = bytes;
        while !rest.is_empty() {
            let word = at - at % WORD;
            let mut value = state.word(word).to_le_bytes();
            let part = &mut value[usize_of(at - word)..];
            let len = part.len().min(rest.len());
            part[..len].copy_from_slice(&rest[..len]);
            state.store(word, u64::from_le_bytes(value));
            rest = &rest[len..];
            at += u64_of(len);
        }
    }

    fn store_word(&self, offset: u64, value: u64) {
        self.check(offset, WORD);
        assert_eq!(offset % WORD, 0);
        self.state().store(offset, value);
    }

    fn flush(&self, offset: u64, len: u64) {
        self.check(offset, len);
        if self.fault == Fault::NoFlush {
            return;
        }
        let lines = offset - offset % LINE..(offset + len).next_multiple_of(LINE);
        for (_, pending) in self.state().pending.range_mut(lines) {
            pending.flushed = pending.values.len();
        }
    }

    fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        self.check(offset, len);
        let mut state = self.state();
        let stored: BTreeSet<u64> =
            state.pending.keys().chain(state.durable.keys()).copied().collect();
        for word in stored.range(offset..offset + len) {
            if state.word(*word) != 0 {
                state.store(*word, 0);
            }
        }
        drop(state);
        self.flush(offset, len);
        self.fence()
    }

    fn fence(&self) -> io::Result<()> {
        let mut state = self.state();
        if state.recording {
            let now = state.epoch(self.facts.size);
            state.epochs.push(now);
        }
        if self.fault != Fault::NoFence {
            state.fence();
        }
        Ok(())
    }

    fn current_size(&self) -> io::Result<u64> {
        Ok(self.facts.size)
    }

    fn descriptor(&self, _: Access) -> io::Result<OwnedFd> {
        Err(io::Error::new(io::ErrorKind::Unsupported, "a simulated medium has no descriptor"))
    }

    fn grant(&self, access: Access, offset: u64) -> io::Result<ExtentDescriptor> {
        let descriptor = self.descriptor(access)?;
        Ok(ExtentDescriptor { descriptor, offset, leaf: self.facts.leaf() })
    }

    fn is_held(&self, _: u64) -> bool {
        false
    }

    fn separate(&self, _: u64, _: u64) -> io::Result<()> {
        match self.fault {
            Fault::NoMemory => Err(io::ErrorKind::OutOfMemory.into()),
            _ => Ok(()),
        }
    }

    fn join(&self, _: u64, _: u64) -> io::Result<bool> {
        Ok(false)
    }
}

impl Epoch {
    /// Calls `check` with the media that a loss of power may leave.
    pub fn try_states(&self, search: &Search, check: &mut dyn FnMut(SimulatedMedium)) -> Tried {
        let lines: BTreeSet<u64> = self.pending.iter().map(|(word, _)| word / LINE).collect();
        let lines: Vec<u64> = lines.into_iter().collect();
        let mut tried = Tried { epochs: 1, most_lines: u64_of(lines.len()), ..Tried::default() };
        let mut attempt = |choice: &dyn Fn(usize, u64, u64) -> u64| {
            tried.states += 1;
            check(self.medium(choice));
        };
        let all = self.pending.iter().try_fold(1_u64, |product, (_, values)| {
            product.checked_mul(u64_of(values.len()) + 1).filter(|states| *states <= search.states)
        });
        if let Some(all) = all {
            for number in 0..all {
                // The choice is the digits of the number in the mixed base of the words' possible
                // values.
                let mut digits = Vec::with_capacity(self.pending.len());
                let mut rest = number;
                for (_, values) in &self.pending {
                    let base = u64_of(values.len()) + 1;
                    digits.push(rest % base);
                    rest /= base;
                }
                attempt(&|position, _, _| digits[position]);
            }
            tried.exhausted = 1;
            return tried;
        }
        if u64_of(lines.len()) <= u64::from(search.lines) {
            for subset in 0..1_u64 << lines.len() {
                let kept = |word: u64| {
                    lines.binary_search(&(word / LINE)).is_ok_and(|line| subset >> line & 1 == 1)
                };
                attempt(&|_, word, last| if kept(word) { last } else { 0 });
            }
        }
        for sample in 0..u64::from(search.samples) {
            let seed = search.seed ^ sample.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            attempt(&|_, word, last| mix(seed ^ word) % (last + 1));
        }
        tried
    }

    /// A medium in which `choice(position, word, number of values)` selects the value of each
    /// unfenced word: 0 for the durable value.
    fn medium(&self, choice: &dyn Fn(usize, u64, u64) -> u64) -> SimulatedMedium {
        let mut words = HashMap::clone(&self.durable);
        for (position, (word, values)) in self.pending.iter().enumerate() {
            if let Some(value) = choice(position, *word, u64_of(values.len())).checked_sub(1) {
                words.insert(*word, values[usize_of(value)]);
            }
        }
        SimulatedMedium::with(self.size, Arc::new(words), Fault::None)
    }
}

/// A bijection that mixes all bits (the finaliser of `SplitMix64`).
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
#[path = "simulated_tests.rs"]
mod tests;
