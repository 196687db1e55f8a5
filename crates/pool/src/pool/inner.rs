//! The state of an open pool: a copy of its metadata, and the users of its extents.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use firn_base::num::usize_of;
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::error::{LookupError, MediumFailure};
use super::listing::{Listing, Role};
use super::scan::{Scan, extent, extent_range};
use super::zeroed::Zeroed;
use crate::extent::Extent;
use crate::layout::{NameBody, Record, SUPERBLOCK_BYTES, Superblock, Word};
use crate::media::Medium;

/// An extent that is not free.
#[derive(Clone, Debug)]
pub(super) struct Held {
    pub(super) record: Record,
    pub(super) granules: Range<u64>,
    pub(super) role: Role,
    pub(super) pins: u32,
    /// It is being freed.
    pub(super) is_ending: bool,
    /// The parts, as bytes of the medium, that were zero when it was allocated.
    pub(super) zeroed: Vec<Range<u64>>,
}

/// A slot of the address table.
#[derive(Clone, Debug)]
pub(super) struct Slot {
    pub(super) word: Word,
    /// The name in the slot, even if the word does not refer to it.
    pub(super) name: Option<String>,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) slots: Vec<Slot>,
    /// The slots of published names.
    pub(super) names: HashMap<String, u32>,
    /// By first granule.
    pub(super) held: BTreeMap<u32, Held>,
    pub(super) next_generation: u64,
    /// A fence failed: which bytes are durable is unknown.
    pub(super) failed: bool,
    /// Free space that is known to be zero.
    pub(super) zeroed: Zeroed,
}

#[derive(Debug)]
pub(super) struct Inner {
    medium: Arc<dyn Medium>,
    superblock: Superblock,
    state: Mutex<State>,
    /// Space was freed or zeroed.
    changed: Condvar,
}

impl Inner {
    /// An empty pool.
    pub(super) fn new(medium: Arc<dyn Medium>, superblock: Superblock) -> Self {
        let slot = Slot { word: Word::Empty, name: None };
        let state = State {
            slots: vec![slot; usize_of(u64::from(superblock.slots()))],
            names: HashMap::new(),
            held: BTreeMap::new(),
            next_generation: 1,
            failed: false,
            zeroed: Zeroed::default(),
        };
        Self { medium, superblock, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// A pool from its scanned metadata, without unreferenced extents.
    pub(super) fn from_scan(medium: Arc<dyn Medium>, superblock: Superblock, scan: &Scan) -> Self {
        let slots = scan.entries.iter().map(|entry| Slot {
            word: entry.word.unwrap_or(Word::Removed),
            name: match &entry.name {
                NameBody::Name(name) => Some(name.clone()),
                NameBody::Damaged => None,
            },
        });
        let mut names = HashMap::new();
        let mut held = BTreeMap::new();
        for (name, granule, record) in scan.snapshots() {
            let Some(granules) = extent_range(&superblock, granule, record) else { continue };
            names.insert(name.to_owned(), record.slot);
            held.insert(
                granule,
                Held {
                    record: *record,
                    granules,
                    role: Role::Snapshot,
                    pins: 0,
                    is_ending: false,
                    zeroed: Vec::new(),
                },
            );
        }
        let state = State {
            slots: slots.collect(),
            names,
            held,
            next_generation: scan.counter.max(1),
            failed: false,
            zeroed: Zeroed::default(),
        };
        Self { medium, superblock, state: Mutex::new(state), changed: Condvar::new() }
    }

    pub(super) fn medium(&self) -> &Arc<dyn Medium> {
        &self.medium
    }

    pub(super) fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    pub(super) fn changed(&self) -> &Condvar {
        &self.changed
    }

    /// Checks that the medium is still the one that was opened.
    pub(super) fn check(&self, state: &mut State) -> Result<(), MediumFailure> {
        let facts = self.medium.facts();
        let name = || facts.name.clone();
        if state.failed {
            return Err(MediumFailure::Earlier(name()));
        }
        let is = self
            .medium
            .current_size()
            .map_err(|source| MediumFailure::Io { name: name(), source })?;
        if is != facts.size {
            return Err(MediumFailure::Resized { name: name(), was: facts.size, is });
        }
        let mut block = [0; SUPERBLOCK_BYTES];
        self.medium.load(0, &mut block);
        if block != self.superblock.encode() {
            state.failed = true;
            return Err(MediumFailure::Overwritten { name: name(), uuid: self.superblock.uuid });
        }
        Ok(())
    }

    /// Waits until the flushed bytes are durable.
    pub(super) fn fence(&self, state: &mut State) -> Result<(), MediumFailure> {
        self.medium.fence().map_err(|source| {
            state.failed = true;
            MediumFailure::Io { name: self.medium.facts().name.clone(), source }
        })
    }

    /// Commits a transition: stores one word and waits until it is durable.
    pub(super) fn commit(
        &self,
        state: &mut State,
        at: u64,
        word: u64,
    ) -> Result<(), MediumFailure> {
        self.medium.store_word(at, word);
        self.medium.flush(at, 8);
        self.fence(state)
    }

    /// The extent that begins at a granule.
    pub(super) fn extent(&self, granule: u32, record: &Record) -> Extent {
        extent(&self.superblock, granule, record)
    }

    pub(super) fn lookup(&self, name: &str) -> Result<Extent, LookupError> {
        let state = self.state();
        let granule = state.published(name)?;
        let held = state.held.get(&granule);
        held.map(|held| self.extent(granule, &held.record))
            .ok_or_else(|| LookupError::Unknown(name.to_owned()))
    }

    /// Pins the extent of a name and returns its granule.
    pub(super) fn pin(&self, name: &str) -> Result<u32, LookupError> {
        let mut state = self.state();
        let granule = state.published(name)?;
        if let Some(held) = state.held.get_mut(&granule) {
            held.pins += 1;
        }
        Ok(granule)
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.state().names.keys().cloned().collect()
    }

    pub(super) fn list(&self) -> Listing {
        let state = self.state();
        let extents = state.held.iter().map(|(granule, held)| {
            let name = state.slots[usize_of(u64::from(held.record.slot))].name.clone();
            (*granule, held.record, name, held.role, Some(held.pins))
        });
        let zeroed_bytes = state.zeroed.bytes();
        Listing { zeroed_bytes, ..Listing::new(&self.superblock, self.medium.facts(), extents) }
    }
}

impl State {
    /// The granule of a name's snapshot.
    pub(super) fn published(&self, name: &str) -> Result<u32, LookupError> {
        let slot = self.names.get(name).map(|slot| usize_of(u64::from(*slot)));
        match slot.map(|slot| self.slots[slot].word) {
            Some(Word::Available { granule, .. }) => Ok(granule),
            _ if self.is_being_written(name) => Err(LookupError::BeingWritten(name.to_owned())),
            _ => Err(LookupError::Unknown(name.to_owned())),
        }
    }

    /// Whether a staging extent of this name exists.
    pub(super) fn is_being_written(&self, name: &str) -> bool {
        self.held.values().any(|held| {
            held.role == Role::Staging
                && self.slots[usize_of(u64::from(held.record.slot))].name.as_deref() == Some(name)
        })
    }

    /// Whether an extent belongs to the slot's name.
    pub(super) fn is_referred_to(&self, slot: u32) -> bool {
        self.held.values().any(|held| held.record.slot == slot)
    }
}
