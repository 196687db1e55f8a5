//! The part `small leaves` of a profile: the touched pages that the guest maps by leaves of 4 KiB,
//! from its page tables in the snapshot.
//!
//! The locations of the page tables are unknown: each process of a Linux guest has its own, and the
//! registers point to one at most. But the processor walks, and so touches, every table that is
//! used. A touched page is taken for a table when each of its present entries (Intel SDM, volume 3,
//! 4.5) points to guest memory and has the accessed bit. This is a heuristic. Data of this form is
//! taken for a table, is not counted itself, and the pages that it points to are. A table whose
//! accessed bits the guest's kernel has cleared is missed. The only effect of an error is that a
//! chunk is copied instead of shared, or the reverse.

use firn_base::PAGE_SIZE;
use firn_base::num::usize_of;
use firn_snapshot::{MemoryLayout, PageSet};

use crate::pager::{PageStore, PagerError};

const PRESENT: u64 = 1;
const ACCESSED: u64 = 1 << 5;
/// In all levels but the lowest: a large leaf. In the lowest level: a rare memory type.
const LARGE: u64 = 1 << 7;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// The touched image pages that a touched table maps. Tables are not included: the entries that
/// point to them are not leaves.
pub(super) fn small_leaves(
    store: &PageStore,
    layout: &MemoryLayout,
    touched: &PageSet,
) -> Result<PageSet, PagerError> {
    let (mut tables, mut mapped) = (PageSet::new(layout.pages()), PageSet::new(layout.pages()));
    let mut bytes = [0; usize_of(PAGE_SIZE)];
    for page in touched.iter() {
        store.read(page, &mut bytes)?;
        if let Some(leaves) = leaves_of(&bytes, layout) {
            tables.insert(page);
            leaves.into_iter().for_each(|leaf| mapped.insert(leaf));
        }
    }
    let mut small = PageSet::new(layout.pages());
    let leaves = mapped.iter().filter(|page| touched.get(*page) && !tables.get(*page));
    leaves.for_each(|page| small.insert(page));
    Ok(small)
}

/// The image pages that the entries of a table point to, without large leaves; `None` where the
/// page is not a table.
fn leaves_of(bytes: &[u8; usize_of(PAGE_SIZE)], layout: &MemoryLayout) -> Option<Vec<u64>> {
    let (entries, _) = bytes.as_chunks();
    let present = entries.iter().map(|entry| u64::from_le_bytes(*entry));
    let mut leaves = Vec::new();
    let mut any = false;
    for entry in present.filter(|entry| entry & PRESENT != 0) {
        if entry & ACCESSED == 0 {
            return None;
        }
        let page = layout.image_offset(entry & ADDRESS)? / PAGE_SIZE;
        any = true;
        if entry & LARGE == 0 {
            leaves.push(page);
        }
    }
    any.then_some(leaves)
}

#[cfg(test)]
#[path = "small_leaves_tests.rs"]
mod tests;
