//! Which pages were written, for those who ask what a restore gave and not what was done with it since.

use std::sync::atomic::{AtomicU64, Ordering};

use firn_base::PAGE_SIZE;
use firn_base::num::usize_of;
use firn_snapshot::{MemoryLayout, PageSet};

use super::GuestMemory;

/// The pages that were handed out for writing, a bit for each.
#[derive(Debug)]
pub(super) struct Written {
    layout: MemoryLayout,
    words: Box<[AtomicU64]>,
}

impl Written {
    fn new(layout: &MemoryLayout) -> Self {
        let words = (0..layout.pages().div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        Self { layout: layout.clone(), words }
    }

    /// Marks the pages of `len` bytes at a guest-physical address. What is no guest memory is left out.
    pub(super) fn mark(&self, guest_addr: u64, len: u64) {
        let end = guest_addr.saturating_add(len);
        for region in self.layout.regions() {
            let (start, end) =
                (guest_addr.max(region.guest_addr), end.min(region.guest_range().end));
            if start < end {
                let page = |addr: u64| (addr - region.guest_addr + region.image_offset) / PAGE_SIZE;
                (page(start)..=page(end - 1)).for_each(|page| self.insert(page));
            }
        }
    }

    fn insert(&self, page: u64) {
        self.words[usize_of(page / 64)].fetch_or(1 << (page % 64), Ordering::Relaxed);
    }
}

impl GuestMemory {
    /// Has every write through a [view](Self::vm_memory) that is taken from now on written down, page by page.
    pub fn track_writes(&mut self) {
        self.written = Some(Written::new(&self.layout).into());
    }

    /// Whether writes are written down: then KVM has to log the guest's, too.
    #[must_use]
    pub fn tracks_writes(&self) -> bool {
        self.written.is_some()
    }

    /// Puts down image pages that KVM says were written. Without [tracking](Self::track_writes) nothing is done.
    pub fn note_written(&self, pages: &PageSet) {
        let Some(written) = &self.written else { return };
        pages.iter().for_each(|page| written.insert(page));
    }

    /// The image pages that may have been written through views, that were [noted](Self::note_written), and those that the guest
    /// has given back: what they held is gone. `None` where that was not [asked for](Self::track_writes).
    #[must_use]
    pub fn written(&self) -> Option<PageSet> {
        let written = self.written.as_ref()?;
        let pages = self.layout.pages();
        let mut set = PageSet::new(pages);
        for (word, first) in written.words.iter().zip((0..pages).step_by(64)) {
            let bits = word.load(Ordering::Relaxed);
            (0..64).filter(|bit| bits >> bit & 1 == 1).for_each(|bit| set.insert(first + bit));
        }
        let reported = self.reported.lock();
        for region in self.layout.regions() {
            for (part, _) in reported.split(region.guest_range()).iter().filter(|(_, is)| *is) {
                let page = |addr: u64| (addr - region.guest_addr + region.image_offset) / PAGE_SIZE;
                set.insert_range(page(part.start)..page(part.end));
            }
        }
        Some(set)
    }
}
