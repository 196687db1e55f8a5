//! Comparing guest memory with the image, page by page.

use std::fs::File;
use std::io;

use firn_base::num::usize_of;
use firn_base::{PAGE_SIZE, PageRange};
use firn_snapshot::{Content, PageSet, ReadAt, Snapshot};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use vm_memory::{Bytes, GuestAddress};

use crate::guest_memory::GuestMemory;

/// Pages read at once.
const PAGES_AT_ONCE: u64 = 256;
/// The largest number of differing pages that a report lists.
const MAX_LISTED: usize = 16;

/// How guest memory differs from the image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompareReport {
    /// Pages of guest memory.
    pub pages: u64,
    /// Pages that were written since the restore, and are not compared.
    pub written: u64,
    /// Those of them that the guest has reported free, whose contents are lost.
    #[serde(default)]
    pub reported: u64,
    /// Pages that differ.
    pub differing: u64,
    /// The first differing pages (guest-physical address / 4096), at most 16.
    pub first_differing: Vec<u64>,
    /// The differing pages that are all zero, as image pages, ascending.
    pub zeros: Vec<PageRange>,
}

impl CompareReport {
    /// Whether no page differs.
    pub fn is_equal(&self) -> bool {
        self.differing == 0
    }
}

/// Why the comparison failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CompareError {
    /// The zero map is for another size of guest memory.
    #[error("the zero map is for {zero_map} pages, guest memory has {memory}")]
    OtherSize {
        /// Pages that the zero map is for.
        zero_map: u64,
        /// Pages of guest memory.
        memory: u64,
    },
    /// The image could not be read.
    #[error("cannot read the image at {offset:#x}")]
    Image {
        /// The offset in bytes.
        offset: u64,
        /// The error of the read.
        #[source]
        source: io::Error,
    },
    /// Guest memory could not be read.
    #[error("cannot read guest memory at {guest_addr:#x}")]
    Memory {
        /// The guest-physical address.
        guest_addr: u64,
        /// The error of vm-memory.
        #[source]
        source: vm_memory::GuestMemoryError,
    },
}

/// Compares every page of guest memory with the snapshot: zeros for pages in the zero map,
/// otherwise the bytes of the image. It reads, and so maps, all guest memory, and does not need
/// KVM. The guest must not run.
///
/// # Errors
///
/// [`CompareError`] when a page cannot be read. A difference is not an error; the report contains
/// it.
pub fn compare(
    memory: &GuestMemory,
    image: &File,
    zero_map: &PageSet,
) -> Result<CompareReport, CompareError> {
    compare_without(memory, image, zero_map, &PageSet::new(zero_map.pages()))
}

/// The image and the zero map of a snapshot, for a comparison in another thread. For a snapshot in
/// a pool it must not outlive the grant that keeps the extent pinned.
#[derive(Debug)]
pub struct Original {
    image: Content,
    zero_map: PageSet,
}

impl Original {
    /// The image file of a snapshot in a directory, or the sealed extent of one in a pool. The
    /// original of a replica is the sealed extent that it was copied from.
    #[must_use]
    pub fn of(snapshot: &Snapshot) -> Self {
        Self { image: snapshot.image().clone(), zero_map: snapshot.zero_map().clone() }
    }

    /// [`compare`] after the guest ran: image pages in `written` are not compared.
    ///
    /// # Errors
    ///
    /// [`CompareError`].
    pub fn compare(
        &self,
        memory: &GuestMemory,
        written: &PageSet,
    ) -> Result<CompareReport, CompareError> {
        compare_without(memory, &self.image, &self.zero_map, written)
    }
}

fn compare_without(
    memory: &GuestMemory,
    image: &dyn ReadAt,
    zero_map: &PageSet,
    written: &PageSet,
) -> Result<CompareReport, CompareError> {
    let mut report = CompareReport { pages: memory.layout().pages(), ..CompareReport::default() };
    if zero_map.pages() != report.pages {
        return Err(CompareError::OtherSize { zero_map: zero_map.pages(), memory: report.pages });
    }
    let mut zeros = PageSet::new(report.pages);
    let reported = memory.reported();
    let view = memory.vm_memory();
    let bytes_at_once = usize_of(PAGES_AT_ONCE * PAGE_SIZE);
    let (mut is, mut should_be) = (vec![0; bytes_at_once], vec![0; bytes_at_once]);
    for region in memory.layout().regions() {
        let mut inside = 0;
        while inside < region.len {
            let bytes = usize_of((region.len - inside).min(PAGES_AT_ONCE * PAGE_SIZE));
            let (is, should_be) = (&mut is[..bytes], &mut should_be[..bytes]);
            let (guest_addr, offset) = (region.guest_addr + inside, region.image_offset + inside);
            view.read_slice(is, GuestAddress(guest_addr))
                .map_err(|source| CompareError::Memory { guest_addr, source })?;
            image
                .read_exact_at(should_be, offset)
                .map_err(|source| CompareError::Image { offset, source })?;
            let page_bytes = usize_of(PAGE_SIZE);
            let pairs = is.chunks(page_bytes).zip(should_be.chunks_mut(page_bytes));
            for (page, (is, should_be)) in (0..).zip(pairs) {
                if zero_map.get(offset / PAGE_SIZE + page) {
                    should_be.fill(0);
                }
                let image_page = offset / PAGE_SIZE + page;
                if written.get(image_page) {
                    report.written += 1;
                    report.reported += u64::from(reported.get(image_page));
                    continue;
                }
                if is == should_be {
                    continue;
                }
                report.differing += 1;
                if is.iter().all(|byte| *byte == 0) {
                    zeros.insert(image_page);
                }
                if report.first_differing.len() < MAX_LISTED {
                    report.first_differing.push(guest_addr / PAGE_SIZE + page);
                }
            }
            inside += bytes as u64;
        }
    }
    report.zeros = zeros.to_ranges();
    Ok(report)
}

#[cfg(test)]
#[path = "compare_tests.rs"]
mod tests;
