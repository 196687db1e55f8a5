//! The log of written pages, for comparisons after the guest ran.

use std::sync::atomic::{AtomicU64, Ordering};

use firn_base::PAGE_SIZE;
use firn_base::num::usize_of;
use firn_snapshot::{MemoryLayout, PageSet};

use super::GuestMemory;

/// One bit for each page that may have been written.
#[derive(Debug)]
pub(super) struct WriteLog {
    layout: MemoryLayout,
    words: Box<[AtomicU64]>,
}

impl WriteLog {
    fn new(layout: &MemoryLayout) -> Self {
        let words = (0..layout.pages().div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        Self { layout: layout.clone(), words }
    }

    /// Marks the pages of `len` bytes at a guest-physical address. Addresses outside guest memory
    /// are ignored.
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
    /// Starts to log writes: every write through a [view](Self::vm_memory) that is taken from now
    /// on, by page.
    pub fn track_writes(&mut self) {
        self.written = Some(WriteLog::new(&self.layout).into());
    }

    /// Whether writes are logged; KVM must log the guest's writes then.
    #[must_use]
    pub fn tracks_writes(&self) -> bool {
        self.written.is_some()
    }

    /// Forgets the writes that were logged, once they are saved. The guest must not run.
    pub fn forget_writes(&self) {
        let Some(written) = &self.written else { return };
        written.words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }

    /// Logs image pages that KVM reports as written. Without [tracking](Self::track_writes) nothing
    /// is done.
    pub fn mark_written(&self, pages: &PageSet) {
        let Some(written) = &self.written else { return };
        pages.iter().for_each(|page| written.insert(page));
    }

    /// The image pages that may have been written through views, that were
    /// [marked](Self::mark_written), and that the guest has [discarded](Self::discard), because
    /// their contents are lost, since they were last [forgotten](Self::forget_writes). `None`
    /// without [tracking](Self::track_writes).
    #[must_use]
    pub fn written(&self) -> Option<PageSet> {
        let written = self.written.as_ref()?;
        let pages = self.layout.pages();
        let mut set = PageSet::new(pages);
        for (word, first) in written.words.iter().zip((0..pages).step_by(64)) {
            let bits = word.load(Ordering::Relaxed);
            (0..64).filter(|bit| bits >> bit & 1 == 1).for_each(|bit| set.insert(first + bit));
        }
        Some(set)
    }
}
