//! Reading a pool beside the process that changes it.

use std::sync::Arc;

use serde::Serialize;

use super::listing::{Listing, PoolFacts, Role};
use super::problem::Problem;
use super::scan::{Scan, extent, read_entry, read_record, search, superblock};
use super::{LookupError, OpenError};
use crate::extent::Extent;
use crate::layout::{Kind, NameBody, Superblock, Word};
use crate::media::{Medium, MediumFacts};

/// How often metadata is read again that looks wrong and changes all the time.
const ATTEMPTS: u32 = 1000;

/// A pool that this process only reads; a manager may change it meanwhile. It needs no lock, and takes damaged pools too.
#[derive(Debug)]
pub struct PoolReader {
    medium: Arc<dyn Medium>,
    superblock: Superblock,
    twin: bool,
}

/// What [`PoolReader::verify`] found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct VerifyReport {
    /// All that is wrong.
    pub problems: Vec<Problem>,
    /// Snapshots whose content was checked.
    pub snapshots: u64,
    /// Extents that no name refers to: being written, run in, still read; or to be freed by the next opening.
    pub unreferenced: u64,
}

/// The bytes of a snapshot in a pool.
#[derive(Debug)]
pub struct ExtentReader<'a> {
    medium: &'a dyn Medium,
    extent: Extent,
}

impl ExtentReader<'_> {
    /// Where it is.
    #[must_use]
    pub fn extent(&self) -> Extent {
        self.extent
    }

    /// Copies a part of guest memory out.
    ///
    /// # Panics
    /// The range is not within guest memory.
    pub fn read_guest(&self, offset: u64, buffer: &mut [u8]) {
        self.read(self.extent.offset, self.extent.guest_bytes, offset, buffer);
    }

    /// Copies a part of the tail out.
    ///
    /// # Panics
    /// The range is not within the tail.
    pub fn read_tail(&self, offset: u64, buffer: &mut [u8]) {
        self.read(self.extent.tail_offset, self.extent.tail_bytes, offset, buffer);
    }

    fn read(&self, begin: u64, room: u64, offset: u64, buffer: &mut [u8]) {
        let end = offset.checked_add(super::scan::length(buffer));
        assert!(end.is_some_and(|end| end <= room), "within the extent");
        self.medium.load(begin + offset, buffer);
    }
}

impl PoolReader {
    /// Opens the pool on a medium for reading.
    ///
    /// # Errors
    /// There is no pool, or one that this firn cannot read. Damage behind the superblock is no error here.
    pub fn open(medium: Arc<dyn Medium>) -> Result<Self, OpenError> {
        let (superblock, twin) = superblock(&*medium)?;
        Ok(Self { medium, superblock, twin })
    }

    /// What the pool is.
    #[must_use]
    pub fn facts(&self) -> PoolFacts {
        PoolFacts::of(&self.superblock)
    }

    /// What is known of the medium.
    #[must_use]
    pub fn medium(&self) -> &MediumFacts {
        self.medium.facts()
    }

    /// All metadata. What looks wrong is read again until it looks right, or the same twice: a transition may have been in the
    /// middle of it.
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

    /// Searches the address table for a name, as its hash says.
    ///
    /// # Errors
    /// There is no such snapshot.
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
        // Being written, or moved to another slot meanwhile.
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

    /// All extents, and what is free.
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
        Listing::new(&self.superblock, self.medium.facts(), extents)
    }

    /// Checks the pool's own metadata, and each snapshot's content with `check`, which says what is wrong with it. A manager may
    /// update or reclaim a snapshot meanwhile: pin what must stay, or verify a pool that nobody serves.
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
