//! Reading a pool while another process changes it.

use std::sync::Arc;

use serde::Serialize;

use super::annex::read_annex;
use super::listing::{Listing, PoolFacts, Role};
use super::problem::Problem;
use super::scan::{Scan, extent, read_entry, read_record, search, superblock};
use super::{LookupError, OpenError};
use crate::extent::Extent;
use crate::layout::{Kind, NameBody, Superblock, Word};
use crate::learnt::{self, LearntSet};
use crate::media::{Medium, MediumFacts};

/// Number of times that metadata is read again if it looks inconsistent and keeps changing.
const ATTEMPTS: u32 = 1000;

/// A pool opened for reading; a manager may change it concurrently. It takes no lock and also reads
/// damaged pools.
#[derive(Debug)]
pub struct PoolReader {
    medium: Arc<dyn Medium>,
    superblock: Superblock,
    twin: bool,
}

/// Result of [`PoolReader::verify`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct VerifyReport {
    /// The problems found.
    pub problems: Vec<Problem>,
    /// Number of snapshots whose content was checked.
    pub snapshots: u64,
    /// Number of extents to which no name refers: being written, used as replicas, still pinned, or
    /// to be freed by the next opening.
    pub unreferenced: u64,
}

/// Reads the bytes of a snapshot in a pool.
#[derive(Debug)]
pub struct ExtentReader<'a> {
    medium: &'a dyn Medium,
    extent: Extent,
}

impl ExtentReader<'_> {
    /// Location on the medium.
    #[must_use]
    pub fn extent(&self) -> Extent {
        self.extent
    }

    /// Copies a part of guest memory into `buffer`.
    ///
    /// # Panics
    /// The range is not within guest memory.
    pub fn read_guest(&self, offset: u64, buffer: &mut [u8]) {
        self.read(self.extent.offset, self.extent.guest_bytes, offset, buffer);
    }

    /// Copies a part of the tail into `buffer`.
    ///
    /// # Panics
    /// The range is not within the tail.
    pub fn read_tail(&self, offset: u64, buffer: &mut [u8]) {
        self.read(self.extent.tail_offset, self.extent.tail_bytes, offset, buffer);
    }

    fn read(&self, begin: u64, room: u64, offset: u64, buffer: &mut [u8]) {
        let end = offset.checked_add(super::scan::length(buffer));
        assert!(end.is_some_and(|end| end <= room), "the range must be within the extent");
        self.medium.load(begin + offset, buffer);
    }
}

impl PoolReader {
    /// Opens the pool on a medium for reading.
    ///
    /// # Errors
    /// The medium contains no pool, or a pool that this firn version cannot read. Damage beyond the
    /// superblock is not an error here.
    pub fn open(medium: Arc<dyn Medium>) -> Result<Self, OpenError> {
        let (superblock, twin) = superblock(&*medium)?;
        Ok(Self { medium, superblock, twin })
    }

    /// The pool's properties.
    #[must_use]
    pub fn facts(&self) -> PoolFacts {
        PoolFacts::of(&self.superblock)
    }

    /// The medium's properties.
    #[must_use]
    pub fn medium(&self) -> &MediumFacts {
        self.medium.facts()
    }

    /// Reads all metadata. Because a transition may be in progress, inconsistent metadata is read
    /// again until it is consistent or unchanged.
    fn scan(&self) -> (Scan, Vec<Problem>) {
        let mut before = None;
        for _ in 0..ATTEMPTS {
            let scan = Scan::read(&*self.medium, &self.superblock);
            let problems = scan.problems(&self.superblock);
            if problems.is_empty() || before.as_ref() == Some(&scan) {
                return (scan, problems);
            }
            before = Some(scan);
        }
        let scan = Scan::read(&*self.medium, &self.superblock);
        let problems = scan.problems(&self.superblock);
        (scan, problems)
    }

    /// Looks a name up in the address table by its hash.
    ///
    /// # Errors
    /// The name has no snapshot.
    pub fn lookup(&self, name: &str) -> Result<Extent, LookupError> {
        for slot in search(&self.superblock, name) {
            let mut entry = read_entry(&*self.medium, &self.superblock, slot);
            if entry.word == Some(Word::Empty) {
                break;
            }
            if entry.name != NameBody::Name(name.to_owned()) {
                continue;
            }
            while let Some(word @ Word::Available { granule, .. }) = entry.word {
                let record = read_record(&*self.medium, &self.superblock, granule).flatten();
                let record = record.filter(|record| {
                    record.kind == Kind::Snapshot
                        && record.slot == slot
                        && word.refers_to(granule, record.generation)
                });
                if let Some(record) = record {
                    return Ok(extent(&self.superblock, granule, &record));
                }
                // The name was updated between the two reads, or the record is lost.
                let again = read_entry(&*self.medium, &self.superblock, slot);
                if again == entry {
                    break;
                }
                entry = again;
            }
        }
        // The snapshot is being written, or its name moved to another slot.
        let listing = self.list();
        let mut named =
            listing.extents.iter().filter(|listed| listed.name.as_deref() == Some(name));
        match named.clone().find(|listed| listed.role == Role::Snapshot) {
            Some(listed) => Ok(listed.extent),
            None if named.any(|listed| listed.role == Role::Staging) => {
                Err(LookupError::BeingWritten(name.to_owned()))
            }
            None => Err(LookupError::Unknown(name.to_owned())),
        }
    }

    /// All extents and the free space.
    #[must_use]
    pub fn list(&self) -> Listing {
        let (scan, _) = self.scan();
        let current = |slot: u32| {
            let snapshot = scan.snapshots().find(|(_, _, record)| record.slot == slot);
            snapshot.map_or(0, |(_, _, record)| record.generation)
        };
        let extents = scan.records.iter().filter_map(|(granule, record)| {
            let record = (*record)?;
            let role = match record.kind {
                Kind::Replica => Role::Replica,
                Kind::Snapshot if scan.is_published(*granule, &record) => Role::Snapshot,
                Kind::Snapshot if record.generation < current(record.slot) => Role::Superseded,
                Kind::Snapshot => Role::Staging,
            };
            Some((*granule, record, scan.name(record.slot).map(str::to_owned), role, None))
        });
        let mut listing = Listing::new(&self.superblock, self.medium.facts(), extents);
        for listed in listing.extents.iter_mut().filter(|listed| listed.role == Role::Snapshot) {
            let stored = read_annex(&*self.medium, self.superblock.uuid, &listed.extent);
            let sets = stored.map(|content| learnt::decode(&content)).unwrap_or_default();
            listed.learnt = sets.into_iter().map(LearntSet::listed).collect();
        }
        listing
    }

    /// Checks the pool's metadata, and each snapshot's content with `check`, which returns a
    /// description of a problem. A manager may update or remove a snapshot meanwhile: pin the
    /// snapshots, or verify a pool that has no manager.
    pub fn verify(
        &self,
        check: &mut dyn FnMut(&str, &ExtentReader<'_>) -> Result<(), String>,
    ) -> VerifyReport {
        let (scan, problems) = self.scan();
        let mut report = VerifyReport { problems, ..VerifyReport::default() };
        if !self.twin {
            report.problems.push(Problem::Twin);
        }
        for (name, granule, record) in scan.snapshots() {
            let extent = extent(&self.superblock, granule, record);
            let reader = ExtentReader { medium: &*self.medium, extent };
            if let Err(what) = check(name, &reader) {
                report.problems.push(Problem::Content { name: name.to_owned(), what });
            }
            report.snapshots += 1;
        }
        let used = scan.records.len();
        report.unreferenced = firn_base::num::u64_of(used) - report.snapshots;
        report
    }
}
