//! The transitions: which words are stored, flushed and fenced, and in which order.
//!
//! Only the words of the address table determine which snapshots exist; the words of the extent map
//! determine which space is used. Recovery frees an extent to which no word of the table refers.
//! Each transition therefore commits with one word: a loss of power leaves the old or the new
//! state, and at most an extent that recovery frees.

use std::ops::Range;

use firn_base::num::usize_of;
use parking_lot::MutexGuard;

use super::error::{AllocateError, MediumFailure, PublishError, ReclaimError};
use super::inner::{Held, Inner, Slot, State};
use super::listing::Role;
use super::now;
use super::scan::{bytes_of, granule_of, length, search};
use super::space::{best_fit, gaps};
use super::zeroed::scrub;
use crate::extent::Extent;
use crate::layout::{
    COUNTER_AT, FREE, Kind, LINE, PAGE, Record, Word, encode_name, tail_with_annex,
};

impl Inner {
    pub(super) fn allocate(
        &self,
        name: &str,
        guest_bytes: u64,
        tail_bytes: u64,
    ) -> Result<u32, AllocateError> {
        self.free_released();
        let longest = self.superblock().longest_name;
        let fits = (1..=u64::from(longest)).contains(&length(name.as_bytes()));
        if !fits || name.chars().any(char::is_control) {
            return Err(AllocateError::Name { name: name.to_owned(), longest });
        }
        if guest_bytes == 0 || !guest_bytes.is_multiple_of(PAGE) {
            return Err(AllocateError::GuestBytes(guest_bytes));
        }
        let mut state = self.state();
        let (record, is_new, granule) = loop {
            self.check(&mut state)?;
            if state.is_being_written(name) {
                return Err(AllocateError::BeingWritten(name.to_owned()));
            }
            let (slot, is_new) = match state.names.get(name) {
                Some(slot) => (*slot, false),
                None => (self.free_slot(&state, name)?, true),
            };
            let record = Record {
                kind: Kind::Snapshot,
                slot,
                guest_bytes,
                tail_bytes: tail_with_annex(tail_bytes, self.superblock().granule),
                generation: state.next_generation,
                created: now(),
                source: 0,
            };
            let granule = self.place(&state, &record)?;
            if !self.wait_for_zeroing(&mut state, granule, &record) {
                break (record, is_new, granule);
            }
        };
        if is_new {
            self.write_name(&mut state, record.slot, name);
        }
        self.take(&mut state, granule, record, Role::Staging)?;
        Ok(granule)
    }

    /// Allocates an extent for a replica: guest memory as large as in the pinned extent at
    /// `source`.
    pub(super) fn allocate_replica(&self, source: u32) -> Result<u32, AllocateError> {
        self.free_released();
        let mut state = self.state();
        let (record, granule) = loop {
            self.check(&mut state)?;
            let of = state.record(source);
            let record = Record {
                kind: Kind::Replica,
                tail_bytes: 0,
                generation: state.next_generation,
                created: now(),
                source: of.generation,
                ..of
            };
            let granule = self.place(&state, &record)?;
            if !self.wait_for_zeroing(&mut state, granule, &record) {
                break (record, granule);
            }
        };
        self.take(&mut state, granule, record, Role::Replica)?;
        Ok(granule)
    }

    /// If a part of this place is being zeroed, waits until it is not, and returns `true`: another
    /// place may be better now.
    fn wait_for_zeroing(
        &self,
        state: &mut MutexGuard<'_, State>,
        granule: u32,
        record: &Record,
    ) -> bool {
        let range = self.bytes_of_extent(granule, record);
        let is_busy = state.zeroed.is_busy(&range);
        if is_busy {
            self.changed().wait_while(state, |state| state.zeroed.is_busy(&range));
        }
        is_busy
    }

    /// The granules of an extent, as bytes of the medium.
    fn bytes_of_extent(&self, granule: u32, record: &Record) -> Range<u64> {
        let size = self.superblock().granule;
        let granules = self.granules(granule, record);
        granules.start * size..granules.end * size
    }

    fn granules(&self, granule: u32, record: &Record) -> Range<u64> {
        let begin = u64::from(granule);
        super::scan::extent_range(self.superblock(), granule, record).unwrap_or(begin..begin + 1)
    }

    /// A slot for a new name: the first one on its search path without a name and without an extent
    /// that refers to it.
    fn free_slot(&self, state: &State, name: &str) -> Result<u32, AllocateError> {
        let names = self.superblock().names;
        let full = AllocateError::TableFull { names };
        let staged = state.held.values().filter(|held| {
            let word = state.slots[usize_of(u64::from(held.record.slot))].word;
            held.role == Role::Staging && !matches!(word, Word::Available { .. })
        });
        if length_of(state.names.len()) + length_of(staged.count()) >= u64::from(names) {
            return Err(full);
        }
        let is_free = |slot: &u32| {
            let word = state.slots[usize_of(u64::from(*slot))].word;
            !matches!(word, Word::Available { .. }) && !state.is_referred_to(*slot)
        };
        search(self.superblock(), name).find(is_free).ok_or(full)
    }

    /// Finds the granule at which the extent can begin.
    fn place(&self, state: &State, record: &Record) -> Result<u32, AllocateError> {
        let superblock = self.superblock();
        let data = superblock.data().unwrap_or_default();
        let granules = |bytes: u64| bytes.div_ceil(superblock.granule);
        let need = granules(record.guest_bytes).saturating_add(granules(record.tail_bytes));
        let align = superblock.alignment(record.guest_bytes) / superblock.granule;
        let used = || state.held.values().map(|held| held.granules.clone());
        best_fit(used(), &data, need, align).map(granule_of).map_err(|missing| {
            let free: u64 = gaps(used(), &data).map(|gap| gap.end - gap.start).sum();
            AllocateError::Full {
                needed: need.saturating_mul(superblock.granule),
                missing: missing.saturating_mul(superblock.granule),
                free: bytes_of(superblock, free),
            }
        })
    }

    /// Writes a name into a slot to which nothing refers. The next fence makes it durable.
    fn write_name(&self, state: &mut State, slot: u32, name: &str) {
        let at = self.superblock().slot_at(slot);
        let body = encode_name(name);
        self.medium().store(at + 8, &body);
        let entry = &mut state.slots[usize_of(u64::from(slot))];
        if entry.word == Word::Empty {
            // Searches must reach names that are placed beyond this slot, even if this name is
            // never published.
            self.medium().store_word(at, Word::Removed.encode());
        }
        self.medium().flush(at, 8 + length(&body));
        *entry = Slot { word: Word::Removed, name: Some(name.to_owned()) };
    }

    /// Transition *allocate*: counter and record, fence; commit: the record's word.
    fn take(
        &self,
        state: &mut State,
        granule: u32,
        record: Record,
        role: Role,
    ) -> Result<(), MediumFailure> {
        let generation = state.next_generation;
        self.medium().store_word(COUNTER_AT, generation + 1);
        self.medium().flush(COUNTER_AT, 8);
        let at = self.superblock().record_at(granule);
        let line = record.encode(self.superblock().uuid, granule);
        self.medium().store(at + 8, &line[8..]);
        self.medium().flush(at, LINE);
        self.fence(state)?;
        state.next_generation = generation + 1;
        self.commit(state, at, crate::layout::u64_at(&line, 0))?;
        let granules = self.granules(granule, &record);
        let zeroed = state.zeroed.take(self.bytes_of_extent(granule, &record));
        let held = Held { record, granules, role, pins: 0, is_ending: false, zeroed };
        state.held.insert(granule, held);
        Ok(())
    }

    /// Transition *publish* and *update*: the content, fence; commit: the slot's word. Then the
    /// name's previous extent is freed if it is not pinned.
    pub(super) fn publish(&self, granule: u32) -> Result<Extent, PublishError> {
        let mut state = self.state();
        self.check(&mut state)?;
        self.fence(&mut state)?;
        let record = state.record(granule);
        let slot = usize_of(u64::from(record.slot));
        let word = Word::available(granule, record.generation);
        self.commit(&mut state, self.superblock().slot_at(record.slot), word.encode())?;
        let old = std::mem::replace(&mut state.slots[slot].word, word);
        if let Some(name) = state.slots[slot].name.clone() {
            state.names.insert(name, record.slot);
        }
        state.set_role(granule, Role::Snapshot);
        if let Word::Available { granule, .. } = old {
            state.set_role(granule, Role::Superseded);
            // The update is durable. If the extent cannot be freed now, the next opening of the
            // pool frees it.
            let _ = self.free_if_unused(&mut state, granule);
        }
        Ok(self.extent(granule, &record))
    }

    /// Transition *reclaim*; commit: the slot's word.
    pub(super) fn reclaim(&self, name: &str) -> Result<u64, ReclaimError> {
        let mut state = self.state();
        let granule = state.published(name)?;
        self.check(&mut state)?;
        let slot = state.record(granule).slot;
        let at = self.superblock().slot_at(slot);
        self.commit(&mut state, at, Word::Removed.encode())?;
        state.slots[usize_of(u64::from(slot))].word = Word::Removed;
        state.names.remove(name);
        state.set_role(granule, Role::Superseded);
        Ok(self.free_if_unused(&mut state, granule)?)
    }

    /// Releases a pin. If the medium fails, the extent stays allocated until the pool is opened
    /// again.
    pub(super) fn unpin(&self, granule: u32) {
        let mut state = self.state();
        if let Some(held) = state.held.get_mut(&granule) {
            held.pins = held.pins.saturating_sub(1);
        }
        let _ = self.free_if_unused(&mut state, granule);
    }

    /// Releases a staging extent or a replica. If the medium fails, the extent stays allocated
    /// until the pool is opened again.
    pub(super) fn abandon(&self, granule: u32) {
        let mut state = self.state();
        state.set_role(granule, Role::Superseded);
        let _ = self.free_if_unused(&mut state, granule);
    }

    /// Transition *free*, for an extent to which no slot's word refers; commit: the record's word.
    /// Returns the number of freed bytes.
    ///
    /// An extent that a process can still read or write stays: another use of its space would give
    /// this process the bytes of another snapshot. [`Inner::free_released`] frees it later.
    ///
    /// In a pool that scrubs, the extent is zeros durably before the commit. The state is unlocked
    /// meanwhile.
    fn free_if_unused(
        &self,
        state: &mut MutexGuard<'_, State>,
        granule: u32,
    ) -> Result<u64, MediumFailure> {
        let Some(held) = state.held.get_mut(&granule).filter(|held| held.is_unused()) else {
            return Ok(0);
        };
        let granules = held.granules.end - held.granules.start;
        let bytes = self.bytes_of_extent(granule, &held.record);
        if self.medium().is_held(bytes.start) {
            return Ok(0);
        }
        held.is_ending = true;
        let freed = self.free_space(state, granule, &bytes);
        if freed.is_ok() {
            state.held.remove(&granule);
        } else if let Some(held) = state.held.get_mut(&granule) {
            // A later call tries again.
            held.is_ending = false;
        }
        self.changed().notify_all();
        freed.map(|()| bytes_of(self.superblock(), granules))
    }

    fn free_space(
        &self,
        state: &mut MutexGuard<'_, State>,
        granule: u32,
        bytes: &Range<u64>,
    ) -> Result<(), MediumFailure> {
        self.check(state)?;
        let medium = &**self.medium();
        let scrubs = self.superblock().scrub;
        let zeros = MutexGuard::unlocked(state, || {
            let joined = medium.join(bytes.start, bytes.end - bytes.start)?;
            if scrubs && !joined {
                scrub(medium, bytes)?;
            }
            Ok(scrubs || joined)
        });
        let zeros = zeros
            .map_err(|source| MediumFailure::Io { name: medium.facts().name.clone(), source })?;
        self.check(state)?;
        self.commit(state, self.superblock().record_at(granule), FREE)?;
        if zeros {
            state.zeroed.scrubbed(bytes);
        } else {
            state.zeroed.freed(bytes);
        }
        Ok(())
    }

    /// Frees the extents that are unused since the last process that could reach them let go of
    /// them, and waits for those that other threads are freeing. Returns the number of those that
    /// still have such a process.
    pub(super) fn free_released(&self) -> usize {
        let mut state = self.state();
        let unused = state.held.iter().filter(|(_, held)| held.is_unused());
        let unused: Vec<u32> = unused.map(|(granule, _)| *granule).collect();
        for granule in unused {
            // If the medium fails, the next opening of the pool frees it.
            let _ = self.free_if_unused(&mut state, granule);
        }
        let is_freeing = |state: &mut State| state.held.values().any(|held| held.is_ending);
        self.changed().wait_while(&mut state, is_freeing);
        state.held.values().filter(|held| held.is_unused()).count()
    }

    /// Clears removed slots at which no search has to continue. Clearing one word is independent of
    /// clearing the others of the same fence.
    pub(super) fn gc(&self) -> Result<u32, MediumFailure> {
        let mut state = self.state();
        self.check(&mut state)?;
        let slots = state.slots.len();
        let mut cleared = 0;
        // From the end, twice around: the first slot follows the last one.
        for position in (0..2 * slots).rev() {
            let (slot, next) = (position % slots, (position + 1) % slots);
            let number = granule_of(length_of(slot));
            let clearable = state.slots[slot].word == Word::Removed
                && state.slots[next].word == Word::Empty
                && !state.is_referred_to(number);
            if clearable {
                let at = self.superblock().slot_at(number);
                self.medium().store_word(at, Word::Empty.encode());
                self.medium().flush(at, 8);
                state.slots[slot] = Slot { word: Word::Empty, name: None };
                cleared += 1;
            }
        }
        if cleared > 0 {
            self.fence(&mut state)?;
        }
        Ok(cleared)
    }
}

fn length_of(count: usize) -> u64 {
    firn_base::num::u64_of(count)
}

impl Held {
    /// Whether no name and no handle refers to it, and it is not being freed.
    fn is_unused(&self) -> bool {
        self.role == Role::Superseded && self.pins == 0 && !self.is_ending
    }
}

impl State {
    /// The record of an extent that a handle refers to. The extent is held while the handle exists.
    pub(super) fn record(&self, granule: u32) -> Record {
        assert!(self.held.contains_key(&granule), "the extent of a handle must be held");
        self.held[&granule].record
    }

    fn set_role(&mut self, granule: u32, role: Role) {
        if let Some(held) = self.held.get_mut(&granule) {
            held.role = role;
        }
    }
}
