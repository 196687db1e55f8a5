//! The part `small leaves` of a profile: which of the touched pages the guest maps by leaves of 4 KiB, as its page tables lie in the
//! snapshot.
//!
//! Nobody says where those are: each process of a Linux guest has its own, and the registers name one at most. But who reads memory through them
//! has the processor walk them, which touches them. So they are among the touched pages, and show themselves by what they hold: each entry that is present
//! (Intel SDM, volume 3, 4.5) names a page of guest memory and was used before (accessed). It is a guess: data that looks so is taken for a table, is itself
//! not counted, and what it names is; a table whose entries the guest's kernel has aged is overlooked. A chunk is then copied where sharing it would do,
//! or the reverse.

use firn_base::PAGE_SIZE;
use firn_base::num::usize_of;
use firn_snapshot::{MemoryLayout, PageSet};

use crate::pager::{PageStore, PagerError};

const PRESENT: u64 = 1;
const ACCESSED: u64 = 1 << 5;
/// In the tables above the lowest: a larger leaf. In the lowest it is a rare type of memory.
const LARGE: u64 = 1 << 7;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// The touched pages that a touched table maps, out of image pages. The tables themselves are not among them: the entries that name
/// them are no leaves.
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

/// The image pages that a table names by other than large leaves; `None` where the page is no table.
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
