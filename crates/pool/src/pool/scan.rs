//! Reading and checking the metadata of a pool.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use firn_base::num::{u64_of, usize_of};
use xxhash_rust::xxh3::xxh3_64;

use super::OpenError;
use super::problem::Problem;
use crate::extent::Extent;
use crate::layout::COUNTER_AT;
use crate::layout::{
    Entry, FREE, Kind, LINE, NameBody, PAGE, Record, SUPERBLOCK_BYTES, Superblock, SuperblockError,
    Word, u64_at,
};
use crate::media::Medium;

/// A pool's metadata as read from the medium.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Scan {
    /// Every slot.
    pub(crate) entries: Vec<Entry>,
    /// By granule; `None` for a damaged record.
    pub(crate) records: BTreeMap<u32, Option<Record>>,
    /// The next generation.
    pub(crate) counter: u64,
}

/// Reads the superblock, and whether its twin is equal.
pub(crate) fn superblock(medium: &dyn Medium) -> Result<(Superblock, bool), OpenError> {
    let facts = medium.facts();
    let name = || facts.name.clone();
    if facts.size < Superblock::twin_of(facts.size) + PAGE || facts.size < 2 * PAGE {
        return Err(OpenError::NoPool(name()));
    }
    let primary = read_superblock(medium, 0);
    let twin = read_superblock(medium, Superblock::twin_of(facts.size));
    let found = match (&primary, &twin) {
        (Ok(found), _) => found,
        (Err(SuperblockError::Version(found)), _) => {
            return Err(OpenError::Version { name: name(), found: *found });
        }
        (Err(_), Ok(_)) => return Err(OpenError::Superblock(name())),
        (Err(_), Err(_)) => return Err(OpenError::NoPool(name())),
    };
    if found.size != facts.size {
        return Err(OpenError::Size { name: name(), pool: found.size, medium: facts.size });
    }
    if !found.granule.is_multiple_of(facts.granule) {
        let (pool, medium) = (found.granule, facts.granule);
        return Err(OpenError::Granule { name: name(), pool, medium });
    }
    Ok((found.clone(), twin.as_ref() == Ok(found)))
}

pub(crate) fn read_superblock(medium: &dyn Medium, at: u64) -> Result<Superblock, SuperblockError> {
    let mut block = [0; SUPERBLOCK_BYTES];
    medium.load(at, &mut block);
    Superblock::decode(&block)
}

/// Reads one slot.
pub(crate) fn read_entry(medium: &dyn Medium, superblock: &Superblock, slot: u32) -> Entry {
    let mut bytes = vec![0; usize_of(superblock.stride())];
    medium.load(superblock.slot_at(slot), &mut bytes);
    Entry::decode(&bytes)
}

/// Reads the record at a granule: `None` if no extent begins there, `Some(None)` if the record is
/// damaged.
pub(crate) fn read_record(
    medium: &dyn Medium,
    superblock: &Superblock,
    granule: u32,
) -> Option<Option<Record>> {
    let mut line = [0; usize_of(LINE)];
    medium.load(superblock.record_at(granule), &mut line);
    decode_line(&line, superblock, granule)
}

fn decode_line(
    line: &[u8; usize_of(LINE)],
    superblock: &Superblock,
    granule: u32,
) -> Option<Option<Record>> {
    (u64_at(line, 0) != FREE).then(|| {
        let record = Record::decode(line, superblock.uuid, granule)?;
        extent_range(superblock, granule, &record).map(|_| record)
    })
}

/// The granules of an extent, if all of them are within the pool's data.
pub(crate) fn extent_range(
    superblock: &Superblock,
    granule: u32,
    record: &Record,
) -> Option<Range<u64>> {
    let begin = u64::from(granule);
    let granules = |bytes: u64| bytes.div_ceil(superblock.granule);
    let count = granules(record.guest_bytes).checked_add(granules(record.tail_bytes))?;
    let range = begin..begin.checked_add(count)?;
    let data = superblock.data()?;
    let sound = record.guest_bytes > 0
        && record.guest_bytes.is_multiple_of(PAGE)
        && record.slot < superblock.slots()
        && data.start <= range.start
        && range.end <= data.end;
    sound.then_some(range)
}

/// The extent that a valid record describes.
pub(crate) fn extent(superblock: &Superblock, granule: u32, record: &Record) -> Extent {
    let size = superblock.granule;
    let offset = u64::from(granule) * size;
    let guest_room = record.guest_bytes.next_multiple_of(size);
    Extent {
        offset,
        guest_bytes: record.guest_bytes,
        tail_offset: offset + guest_room,
        tail_bytes: record.tail_bytes,
        len: guest_room + record.tail_bytes.next_multiple_of(size),
        generation: record.generation,
    }
}

/// The slot at which the search for a name begins: XXH3-64 of its bytes with seed 0, modulo the
/// number of slots.
pub(crate) fn home_slot(superblock: &Superblock, name: &str) -> u32 {
    let slot = xxh3_64(name.as_bytes()) % u64::from(superblock.slots());
    u32::try_from(slot).unwrap_or_default()
}

/// The slots of a search, each once.
pub(crate) fn search(superblock: &Superblock, name: &str) -> impl Iterator<Item = u32> + use<> {
    let (home, slots) = (home_slot(superblock, name), superblock.slots());
    (home..slots).chain(0..home)
}

impl Scan {
    pub(crate) fn read(medium: &dyn Medium, superblock: &Superblock) -> Self {
        let entries =
            (0..superblock.slots()).map(|slot| read_entry(medium, superblock, slot)).collect();
        let mut map = vec![0; usize_of(LINE * superblock.granules())];
        medium.load(superblock.record_at(0), &mut map);
        let lines = map.as_chunks::<{ usize_of(LINE) }>().0;
        let mut records = BTreeMap::new();
        for (granule, line) in (0_u32..).zip(lines) {
            if let Some(record) = decode_line(line, superblock, granule) {
                records.insert(granule, record);
            }
        }
        Self { entries, records, counter: medium.load_word(COUNTER_AT) }
    }

    /// The name in a slot, if it is valid.
    pub(crate) fn name(&self, slot: u32) -> Option<&str> {
        match self.entries.get(usize_of(u64::from(slot))) {
            Some(Entry { name: NameBody::Name(name), .. }) => Some(name),
            _ => None,
        }
    }

    /// Whether the record's slot refers to it.
    pub(crate) fn is_published(&self, granule: u32, record: &Record) -> bool {
        let word = self.entries.get(usize_of(u64::from(record.slot))).and_then(|entry| entry.word);
        record.kind == Kind::Snapshot
            && word.is_some_and(|word| word.refers_to(granule, record.generation))
    }

    /// The snapshots: name, granule and record.
    pub(crate) fn snapshots(&self) -> impl Iterator<Item = (&str, u32, &Record)> {
        self.records.iter().filter_map(|(granule, record)| {
            let record = record.as_ref().filter(|record| self.is_published(*granule, record))?;
            Some((self.name(record.slot)?, *granule, record))
        })
    }

    /// The problems that a crash cannot cause.
    pub(crate) fn problems(&self, superblock: &Superblock) -> Vec<Problem> {
        let mut problems = Vec::new();
        let mut whole: Vec<(&str, u32, u32, &Record)> = Vec::new();
        for (slot, entry) in (0_u32..).zip(&self.entries) {
            let (granule, generation) = match entry.word {
                None => {
                    problems.push(Problem::Slot { slot });
                    continue;
                }
                Some(Word::Empty | Word::Removed) => continue,
                Some(Word::Available { granule, generation }) => (granule, generation),
            };
            let NameBody::Name(name) = &entry.name else {
                problems.push(Problem::Name { slot });
                continue;
            };
            let record = self.records.get(&granule).and_then(Option::as_ref).filter(|record| {
                record.slot == slot
                    && record.kind == Kind::Snapshot
                    && Word::available(granule, record.generation)
                        == Word::Available { granule, generation }
            });
            match record {
                Some(record) => whole.push((name, slot, granule, record)),
                None => problems.push(Problem::Extent { name: name.clone(), slot }),
            }
        }
        self.check_names(superblock, &whole, &mut problems);
        check_overlaps(superblock, whole, &mut problems);
        let found = self.records.values().flatten().map(|record| record.generation).max();
        if let Some(found) = found.filter(|found| *found >= self.counter) {
            problems.push(Problem::Counter { counter: self.counter, found });
        }
        problems
    }

    fn check_names(
        &self,
        superblock: &Superblock,
        whole: &[(&str, u32, u32, &Record)],
        problems: &mut Vec<Problem>,
    ) {
        let mut seen: HashMap<&str, (u32, u64)> = HashMap::new();
        for (name, slot, _, record) in whole {
            match seen.insert(name, (*slot, record.generation)) {
                Some((other, generation)) => {
                    let older = if generation < record.generation { other } else { *slot };
                    problems.push(Problem::Twice { name: (*name).to_owned(), slot: older });
                }
                None => {
                    let mut path = search(superblock, name).take_while(|other| other != slot);
                    let ends =
                        |slot| self.entries[usize_of(u64::from(slot))].word == Some(Word::Empty);
                    if path.any(ends) {
                        let name = (*name).to_owned();
                        problems.push(Problem::Unreachable { name, slot: *slot });
                    }
                }
            }
        }
    }
}

fn check_overlaps(
    superblock: &Superblock,
    mut whole: Vec<(&str, u32, u32, &Record)>,
    problems: &mut Vec<Problem>,
) {
    whole.sort_by_key(|(_, _, granule, _)| *granule);
    for pair in whole.windows(2) {
        let [(name, slot, granule, record), (other, other_slot, other_granule, other_record)] =
            pair
        else {
            continue;
        };
        let overlap = extent_range(superblock, *granule, record)
            .is_none_or(|range| range.end > u64::from(*other_granule));
        if overlap {
            let older_first = record.generation < other_record.generation;
            let (name, slot, other) =
                if older_first { (name, slot, other) } else { (other, other_slot, name) };
            problems.push(Problem::Overlap {
                name: (*name).to_owned(),
                slot: *slot,
                other: (*other).to_owned(),
            });
        }
    }
}

/// Converts a number of granules to bytes.
pub(crate) fn bytes_of(superblock: &Superblock, granules: u64) -> u64 {
    granules * superblock.granule
}

/// Converts a granule number to the type used in the extent map.
pub(crate) fn granule_of(number: u64) -> u32 {
    // A valid superblock has at most `u32::MAX` granules.
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// Length of a buffer, bytes.
pub(crate) fn length(bytes: &[u8]) -> u64 {
    u64_of(bytes.len())
}
