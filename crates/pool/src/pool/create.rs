//! Creating a pool.

use std::io;
use std::sync::Arc;

use firn_base::num::usize_of;
use uuid::Uuid;

use super::scan::{length, read_superblock};
use super::zeroed::scrub;
use super::{CreateError, Pool, now};
use crate::layout::{
    COUNTER_AT, MAGIC, PAGE, SUPERBLOCK_BYTES, Superblock, SuperblockError, u64_at,
};
use crate::media::Medium;

/// Capacity of a new pool, fixed at creation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CreateOptions {
    /// Number of names that the address table holds.
    pub names: u32,
    /// Maximum length of a name, bytes.
    pub longest_name: u32,
    /// Guest-size classes in bytes, ascending. An extent is aligned to the largest class that is
    /// not larger than its guest memory. Empty: one class, the granule. PASS aligns to 1 GiB, which
    /// leaves of 1 GiB require.
    pub classes: Vec<u64>,
    /// Overwrite existing content of the medium.
    pub overwrite: bool,
    /// Write zeros over an extent before it is free, so that free space has no byte of a snapshot
    /// that was removed. An earlier firn does not open such a pool.
    pub scrub: bool,
}

impl Default for CreateOptions {
    fn default() -> Self {
        Self { names: 1024, longest_name: 112, classes: Vec::new(), overwrite: false, scrub: false }
    }
}

impl Pool {
    /// Creates an empty pool on a medium, which must be open for writing.
    ///
    /// The magic number at the beginning of the superblock is the commit: after an earlier loss of
    /// power the medium holds no pool.
    ///
    /// # Errors
    /// See [`CreateError`].
    pub fn create(medium: Arc<dyn Medium>, options: &CreateOptions) -> Result<Self, CreateError> {
        let superblock = plan(&*medium, options)?;
        if !options.overwrite {
            check_empty(&*medium)?;
        }
        write(&*medium, &superblock)
            .map_err(|source| CreateError::Medium { name: medium.facts().name.clone(), source })?;
        Ok(Self::fresh(medium, superblock))
    }
}

fn plan(medium: &dyn Medium, options: &CreateOptions) -> Result<Superblock, CreateError> {
    let facts = medium.facts();
    let granule = facts.granule;
    let classes = if options.classes.is_empty() { vec![granule] } else { options.classes.clone() };
    let superblock = Superblock {
        uuid: Uuid::new_v4(),
        size: facts.size,
        granule,
        names: options.names,
        longest_name: options.longest_name,
        created: now(),
        classes,
        scrub: options.scrub,
    };
    if superblock.is_sound() {
        return Ok(superblock);
    }
    // If the same values are invalid on a large medium, the values are wrong, not the size.
    let roomy = Superblock { size: u64::from(u32::MAX) * granule, ..superblock };
    if !roomy.is_sound() {
        return Err(CreateError::Options { granule });
    }
    let mut least = Superblock { size: 2 * granule, ..roomy };
    while !least.is_sound() {
        least.size += granule;
    }
    let CreateOptions { names, longest_name, .. } = *options;
    let (name, size) = (facts.name.clone(), facts.size);
    Err(CreateError::TooSmall { name, size, names, longest_name, least: least.size })
}

fn check_empty(medium: &dyn Medium) -> Result<(), CreateError> {
    let facts = medium.facts();
    let not_empty = |what: String| CreateError::NotEmpty { name: facts.name.clone(), what };
    for at in [0, Superblock::twin_of(facts.size)] {
        match read_superblock(medium, at) {
            Ok(found) => return Err(not_empty(format!("the pool {}", found.uuid))),
            Err(SuperblockError::Version(version)) => {
                return Err(not_empty(format!("a pool of version {version}")));
            }
            Err(_) => {}
        }
    }
    let mut page = vec![0; usize_of(PAGE)];
    medium.load(0, &mut page);
    // An interrupted creation leaves no magic number and no data.
    if u64_at(&page, 0) != 0 || (page.iter().any(|byte| *byte != 0) && !is_unfinished(&page)) {
        return Err(not_empty("data".to_owned()));
    }
    Ok(())
}

/// Whether a page without a magic number is otherwise a superblock's page.
fn is_unfinished(page: &[u8]) -> bool {
    let counter = usize_of(COUNTER_AT);
    page[SUPERBLOCK_BYTES..counter].iter().chain(&page[counter + 8..]).all(|byte| *byte == 0)
}

fn write(medium: &dyn Medium, superblock: &Superblock) -> io::Result<()> {
    let twin = superblock.twin_at();
    // Invalidates an existing pool before overwriting parts of it.
    for at in [0, twin] {
        medium.store_word(at, 0);
        medium.flush(at, 8);
    }
    medium.fence()?;
    let zeros = vec![0; 1 << 20];
    let end = superblock.metadata_end();
    let mut at = 8;
    while at < end {
        let part = &zeros[..usize_of((end - at).min(length(&zeros)))];
        medium.store(at, part);
        medium.flush(at, length(part));
        at += length(part);
    }
    if superblock.scrub
        && let Some(data) = superblock.data()
    {
        let data = data.start * superblock.granule..data.end * superblock.granule;
        scrub(medium, &data)?;
    }
    medium.store_word(COUNTER_AT, 1);
    medium.flush(COUNTER_AT, 8);
    let block = superblock.encode();
    for at in [0, twin] {
        medium.store(at + 8, &block[8..]);
        medium.flush(at, length(&block));
    }
    medium.fence()?;
    // The twin first: a superblock with a magic number has a valid twin.
    for at in [twin, 0] {
        medium.store_word(at, u64::from_le_bytes(MAGIC));
        medium.flush(at, 8);
        medium.fence()?;
    }
    Ok(())
}
