//! Installing the pages of a packed file before their page faults.

use std::fs::File;
use std::ops::Range;

use firn_base::PAGE_SIZE;
use firn_base::num::usize_of;
use firn_snapshot::Packed;
use rustix::io::{Errno, pread, retry_on_intr};

use super::{Area, Pager, PagerError, Shared, add};
use crate::uffd::{Fill, UffdError};

/// A buffer at an address that is aligned for `O_DIRECT`.
struct Aligned {
    room: Vec<u8>,
    start: usize,
    len: usize,
}

impl Aligned {
    fn new(len: u64) -> Self {
        // The kernel provides zeroed pages on first access, so the zeroing costs no second write.
        let room = vec![0; usize_of(len + PAGE_SIZE)];
        let start =
            room.as_ptr().addr().next_multiple_of(usize_of(PAGE_SIZE)) - room.as_ptr().addr();
        Self { room, start, len: usize_of(len) }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.room[self.start..self.start + self.len]
    }
}

impl Pager {
    /// Reads all pages of a packed file at once, bypassing the page cache, checks them, installs
    /// each run, and wakes the threads that wait for any of them (REAP; FaaSnap, 2.5).
    ///
    /// # Errors
    /// [`PagerError`]: some pages may be installed, all of them checked.
    pub fn install(&self, packed: &Packed) -> Result<(), PagerError> {
        let shared = &*self.shared;
        let data = packed.data();
        let mut buffer = Aligned::new(data.end - data.start);
        let first = packed.runs().first().map_or(0, |packed| packed.run.first);
        let direct = read(packed, data.clone(), buffer.bytes()).map_err(|errno| match errno {
            Some(errno) => PagerError::Packed {
                file: packed.path().display().to_string(),
                source: errno.into(),
            },
            None => PagerError::Truncated { image_page: first, file: "the packed file" },
        })?;
        add(&shared.counters.direct_reads, direct);
        add(&shared.counters.packed_bytes, data.end - data.start);
        let bytes = buffer.bytes();
        for packed in packed.runs() {
            let inside = usize_of(packed.offset - data.start);
            let bytes = &bytes[inside..inside + usize_of(packed.run.pages * PAGE_SIZE)];
            shared.store.check(packed.run.first, bytes)?;
            for (address, part) in shared.parts(packed.run.range()) {
                let inside = usize_of((part.start - packed.run.first) * PAGE_SIZE);
                let len = usize_of((part.end - part.start) * PAGE_SIZE);
                shared.put(address, &bytes[inside..inside + len])?;
                shared.filled().insert_range(part);
            }
        }
        // One call for all areas: no thread waits for addresses between them.
        let ends = shared.areas.iter().map(Area::addresses);
        let all = ends.reduce(|all, area| all.start.min(area.start)..all.end.max(area.end));
        let Some(all) = all else { return Ok(()) };
        add(&shared.counters.install_wakes, 1);
        Ok(shared.uffd.wake(all)?)
    }
}

impl Shared {
    /// Installs pages without waking threads. Present pages are not changed.
    fn put(&self, mut address: u64, mut bytes: &[u8]) -> Result<(), PagerError> {
        while !bytes.is_empty() {
            let present = match self.uffd.copy(address, bytes, Fill::DONT_WAKE) {
                Ok(()) => address + bytes.len() as u64,
                Err(UffdError::Present { address }) => address,
                Err(UffdError::Changing { .. }) => {
                    // The pager's thread reads the event of the discarded pages.
                    std::thread::yield_now();
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            add(&self.counters.installed_pages, (present - address) / PAGE_SIZE);
            let skipped = usize_of(present - address + PAGE_SIZE).min(bytes.len());
            bytes = &bytes[skipped..];
            address = present + PAGE_SIZE;
        }
        Ok(())
    }
}

/// Reads bytes of a file, bypassing the page cache, and returns the number of reads: 0 where the
/// file system only supports reads through the page cache. One read returns up to 2 GiB.
/// `Err(None)` means that the file ends early.
fn read(packed: &Packed, range: Range<u64>, bytes: &mut [u8]) -> Result<u64, Option<Errno>> {
    match packed.direct() {
        Some(direct) => fill(direct, range, bytes),
        None => fill(packed.file(), range, bytes).map(|_| 0),
    }
}

fn fill(file: &File, range: Range<u64>, mut bytes: &mut [u8]) -> Result<u64, Option<Errno>> {
    let (mut at, mut reads) = (range.start, 0);
    while !bytes.is_empty() {
        let count = retry_on_intr(|| pread(file, &mut *bytes, at)).map_err(Some)?;
        if count == 0 {
            return Err(None);
        }
        reads += 1;
        at += count as u64;
        bytes = &mut bytes[count..];
    }
    Ok(reads)
}
