//! The module with every `unsafe` block of this crate that touches a medium: mapping it, reading
//! and writing its bytes.
//!
//! Soundness rests on one rule: no Rust reference points into a medium. Its bytes are accessed only
//! by copies through raw pointers and by atomic words, so other processes may change them at any
//! time.

use std::ffi::c_void;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::{copy_nonoverlapping, null_mut, write_bytes};
use std::sync::atomic::{AtomicU64, Ordering};

use firn_base::num::{u64_of, usize_of};
use rustix::io::{Errno, Result};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use super::flush::FlushInstruction;

/// Maximum address alignment of a mapping, so that leaves of 2 MiB and 1 GiB are possible.
const HUGE: u64 = 1 << 30;

/// A shared mapping of a part of a file or device. Dropping it unmaps the range.
#[derive(Debug)]
pub(crate) struct Memory {
    start: *mut c_void,
    reserved: usize,
    base: *mut u8,
    len: usize,
    writable: bool,
    synchronous: bool,
}

// SAFETY: only copies and atomics of this module use the pointers; see the module's rule.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

/// Mapping options.
#[derive(Clone, Copy, Debug)]
pub(crate) struct How {
    /// Map for reading and writing.
    pub(crate) writable: bool,
    /// `MAP_SYNC`: the file system makes its own metadata durable before a store can reach the
    /// page.
    pub(crate) synchronous: bool,
    /// Address alignment in bytes: the largest leaf that the mapping can have.
    pub(crate) align: u64,
}

impl Memory {
    /// Maps `len` bytes of `file` from `offset`, shared.
    pub(crate) fn map(file: impl AsFd, offset: u64, len: u64, how: How) -> Result<Self> {
        let align = how.align.min(HUGE);
        let guarded = len.checked_add(align).ok_or(Errno::NOMEM)?;
        let (reserved, len) = (usize_of(guarded), usize_of(len));
        let How { writable, synchronous, .. } = how;
        let mut protection = ProtFlags::READ;
        if writable {
            protection |= ProtFlags::WRITE;
        }
        let mut shared = MapFlags::SHARED;
        if !writable {
            // A reader needs no huge pages for ranges whose pages are a replica's now.
            shared |= MapFlags::NORESERVE;
        }
        if synchronous {
            shared = MapFlags::SHARED_VALIDATE | MapFlags::SYNC;
            // A file system that refuses this does so after the kernel has unmapped what was at a
            // given address, which may then become another thread's. So it is asked first.
            // SAFETY: a new mapping at an address chosen by the kernel touches no other memory.
            let asked = unsafe { mmap(null_mut(), len, protection, shared, &file, offset) }?;
            // SAFETY: the mapping was made above, and is not used.
            unsafe { munmap(asked, len) }?;
        }
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address chosen by the kernel touches no other memory.
        let start = unsafe { mmap_anonymous(null_mut(), reserved, ProtFlags::empty(), flags) }?;
        let base = start.cast::<u8>();
        let base = base.wrapping_add(base.align_offset(usize_of(align)));
        // SAFETY: the range lies within the reservation. If this fails, none of it is unmapped: the
        // range may be another thread's by then.
        unsafe { mmap(base.cast(), len, protection, MapFlags::FIXED | shared, file, offset) }?;
        Ok(Self { start, reserved, base, len, writable, synchronous })
    }

    /// Whether the mapping is MAP_SYNC.
    pub(crate) fn is_synchronous(&self) -> bool {
        self.synchronous
    }

    /// Whether the mapping is for writing.
    pub(crate) fn is_writable(&self) -> bool {
        self.writable
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> u64 {
        u64_of(self.len)
    }

    /// The host-virtual address of the first byte.
    pub(crate) fn base(&self) -> *mut u8 {
        self.base
    }

    /// The address of a range, which must lie within the mapping. Callers check untrusted ranges
    /// beforehand.
    fn at(&self, offset: u64, len: u64) -> *mut u8 {
        let within = offset.checked_add(len).is_some_and(|end| end <= self.len());
        assert!(within, "{offset} + {len} is outside of a mapping of {} bytes", self.len);
        self.base.wrapping_add(usize_of(offset))
    }

    fn at_writable(&self, offset: u64, len: u64) -> *mut u8 {
        assert!(self.writable, "a read-only mapping must not be written");
        self.at(offset, len)
    }

    /// Copies bytes from the mapping into `buffer`.
    pub(crate) fn load(&self, offset: u64, buffer: &mut [u8]) {
        let from = self.at(offset, u64_of(buffer.len()));
        // SAFETY: the range is mapped, and the buffer is this process's memory.
        unsafe { copy_nonoverlapping(from, buffer.as_mut_ptr(), buffer.len()) };
    }

    /// Copies bytes into the mapping.
    pub(crate) fn store(&self, offset: u64, bytes: &[u8]) {
        let to = self.at_writable(offset, u64_of(bytes.len()));
        // SAFETY: the range is mapped for writing, and no reference points to it.
        unsafe { copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    /// Copies bytes of another mapping into this one.
    pub(crate) fn copy(&self, offset: u64, from: &Self, start: u64, len: u64) {
        let (to, from) = (self.at_writable(offset, len), from.at(start, len));
        // SAFETY: both ranges are mapped, the one for writing, and no reference points to it. They
        // are two mappings, so they do not overlap.
        unsafe { copy_nonoverlapping(from, to, usize_of(len)) };
    }

    /// Writes bytes of the mapping to a file at `at` (pwrite(2)).
    pub(crate) fn write_to(
        &self,
        mut start: u64,
        len: u64,
        file: &File,
        mut at: u64,
    ) -> std::io::Result<()> {
        let end = start + len;
        while start < end {
            let from = self.at(start, end - start);
            let place = i64::try_from(at).map_err(std::io::Error::other)?;
            // SAFETY: the range is mapped. The kernel copies the bytes, so they may change.
            let written = unsafe {
                libc::pwrite(file.as_raw_fd(), from.cast(), usize_of(end - start), place)
            };
            match u64::try_from(written) {
                Ok(0) => return Err(std::io::ErrorKind::WriteZero.into()),
                Ok(written) => (start, at) = (start + written, at + written),
                Err(_) if last_errno() == Errno::INTR => {}
                Err(_) => return Err(std::io::Error::last_os_error()),
            }
        }
        Ok(())
    }

    /// Writes zeros.
    pub(crate) fn zero(&self, offset: u64, len: u64) {
        let to = self.at_writable(offset, len);
        // SAFETY: as in `store`.
        unsafe { write_bytes(to, 0, usize_of(len)) };
    }

    /// Writes zeros where the bytes are not zero: reading spares media that writing wears out.
    pub(crate) fn zero_if_needed(&self, offset: u64, len: u64) {
        const PIECE: u64 = 64 << 10;
        let mut buffer = vec![0; usize_of(PIECE.min(len))];
        let mut at = offset;
        while at < offset + len {
            let piece = &mut buffer[..usize_of(PIECE.min(offset + len - at))];
            self.load(at, piece);
            if piece.iter().any(|byte| *byte != 0) {
                self.zero(at, u64_of(piece.len()));
            }
            at += u64_of(piece.len());
        }
    }

    fn word(&self, address: *mut u8) -> &AtomicU64 {
        assert!(address.cast::<u64>().is_aligned(), "a word must be aligned to 8 bytes");
        // SAFETY: the word is aligned and mapped for as long as `self` lives, and concurrent
        // accesses are atomic.
        unsafe { AtomicU64::from_ptr(address.cast()) }
    }

    /// Reads an aligned word atomically.
    pub(crate) fn load_word(&self, offset: u64) -> u64 {
        self.word(self.at(offset, 8)).load(Ordering::Acquire)
    }

    /// Writes an aligned word atomically.
    pub(crate) fn store_word(&self, offset: u64, value: u64) {
        self.word(self.at_writable(offset, 8)).store(value, Ordering::Release);
    }

    /// Starts writing the range's cache lines back.
    pub(crate) fn flush(&self, instruction: FlushInstruction, offset: u64, len: u64) {
        let start = self.at(offset, len);
        // SAFETY: the range is mapped.
        unsafe { instruction.flush(start, usize_of(len)) };
    }

    /// Maps another file, from `start`, in place of a range of a mapping for writing.
    pub(crate) fn replace(&self, offset: u64, len: u64, file: impl AsFd, start: u64) -> Result<()> {
        let at = self.at_writable(offset, len);
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::FIXED | MapFlags::SHARED;
        // SAFETY: the range is a part of this mapping, and no reference points into it.
        unsafe { mmap(at.cast(), usize_of(len), protection, flags, file, start) }.map(drop)
    }

    /// Unmaps a range of a mapping for writing, and keeps its addresses. The range must not be used
    /// until it is [replaced](Self::replace).
    pub(crate) fn vacate(&self, offset: u64, len: u64) -> Result<()> {
        let at = self.at_writable(offset, len);
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: the range is a part of this mapping, and no reference points into it.
        unsafe { mmap_anonymous(at.cast(), usize_of(len), ProtFlags::empty(), flags) }.map(drop)
    }

    fn advise(&self, offset: u64, len: u64, advice: Advice) -> Result<()> {
        let start = self.at(offset, len);
        // SAFETY: the range is mapped; the advice used here maps pages and changes no bytes.
        unsafe { madvise(start.cast(), usize_of(len), advice) }
    }

    /// Requests leaves of 2 MiB for a range.
    pub(crate) fn advise_huge(&self, offset: u64, len: u64) -> Result<()> {
        self.advise(offset, len, Advice::LinuxHugepage)
    }

    /// Allocates the 2 MiB at `offset`, a multiple of 2 MiB, of a new memfd as one leaf of zeros.
    /// This works with any system setting for huge pages of shared memory (`MADV_COLLAPSE`, Linux
    /// 6.1).
    pub(crate) fn take_huge(&self, offset: u64) -> Result<()> {
        // MADV_COLLAPSE ignores a range without pages.
        self.zero(offset, 8);
        self.advise_chunk(offset, libc::MADV_COLLAPSE)
    }

    /// Allocates the 2 MiB at `offset`, a multiple of 2 MiB, of a new hugetlb memfd from the
    /// reserved huge pages.
    pub(crate) fn take_reserved(&self, offset: u64) -> Result<()> {
        self.advise_chunk(offset, libc::MADV_POPULATE_WRITE)
    }

    /// Applies advice that changes no byte to one leaf.
    fn advise_chunk(&self, offset: u64, advice: libc::c_int) -> Result<()> {
        const CHUNK: u64 = 2 << 20;
        let chunk = self.at(offset, CHUNK);
        // SAFETY: the range lies in this mapping; the advice allocates pages or moves bytes to
        // other pages, and changes none.
        if unsafe { libc::madvise(chunk.cast(), usize_of(CHUNK), advice) } == 0 {
            return Ok(());
        }
        Err(last_errno())
    }

    /// Maps every page in this process's page tables, for writing if the mapping is writable.
    pub(crate) fn populate(&self) -> Result<()> {
        self.populate_range(0, self.len())
    }

    /// [`populate`](Self::populate) of a range.
    pub(crate) fn populate_range(&self, offset: u64, len: u64) -> Result<()> {
        let advice =
            if self.writable { Advice::LinuxPopulateWrite } else { Advice::LinuxPopulateRead };
        self.advise(offset, len, advice)
    }

    /// Binds the pages of a range to a NUMA node (`mbind`, MPOL_BIND). The policy of shared memory
    /// applies to all its mappings.
    pub(crate) fn bind(&self, offset: u64, len: u64, node: u32) -> Result<()> {
        let mask = node_mask(node)?;
        let start = self.at(offset, len);
        // SAFETY: the range is mapped, and the mask has one bit less than `MASK_BITS`.
        let failed = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                start,
                usize_of(len),
                libc::MPOL_BIND,
                mask.as_ptr(),
                MASK_BITS,
                0,
            )
        } != 0;
        if failed { Err(last_errno()) } else { Ok(()) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: `map` reserved the range, and nothing uses it any more. Unmapping a completely
        // mapped range does not fail.
        let _ = unsafe { munmap(self.start, self.reserved) };
    }
}

/// `maxnode` of [`node_mask`]; the kernel reads one bit less.
const MASK_BITS: usize = NODE_WORDS * 64 + 1;
const NODE_WORDS: usize = 16;

/// A set of one NUMA node.
fn node_mask(node: u32) -> Result<[u64; NODE_WORDS]> {
    let mut mask = [0; NODE_WORDS];
    let word = mask.get_mut(usize_of(u64::from(node / 64))).ok_or(Errno::INVAL)?;
    *word = 1 << (node % 64);
    Ok(mask)
}

/// Lets this thread allocate memory on a NUMA node while that has room (`set_mempolicy`,
/// MPOL_PREFERRED).
pub(crate) fn prefer_node(node: u32) -> Result<()> {
    let mask = node_mask(node)?;
    // SAFETY: the mask has one bit less than `MASK_BITS`, and the call changes no memory.
    let failed = unsafe {
        libc::syscall(libc::SYS_set_mempolicy, libc::MPOL_PREFERRED, mask.as_ptr(), MASK_BITS)
    } != 0;
    if failed { Err(last_errno()) } else { Ok(()) }
}

fn last_errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// Marks an open file description as a client's, at a byte: the first one for a client of the
/// medium, the first one of an extent for a client with that extent.
///
/// The mark is a shared open file description lock (fcntl(2)). It lasts as long as the description,
/// so until the last descriptor is closed and the last mapping, a split or inherited one too, is
/// gone in every process. A process with a descriptor can remove it, so monitors are denied
/// that (`crates/run/src/jail/filter.rs`). It does not conflict with flock(2).
pub(crate) fn mark_client(file: &impl AsRawFd, byte: u64) -> std::io::Result<()> {
    lock(file, libc::F_OFD_SETLK, &mut range(libc::F_RDLCK, byte)?)
}

/// Whether a description of the file is marked at a byte.
pub(crate) fn has_clients(file: &impl AsRawFd, byte: u64) -> std::io::Result<bool> {
    let mut range = range(libc::F_WRLCK, byte)?;
    lock(file, libc::F_OFD_GETLK, &mut range)?;
    Ok(i32::from(range.l_type) != libc::F_UNLCK)
}

/// A lock on a byte.
fn range(kind: i32, byte: u64) -> std::io::Result<libc::flock> {
    let kind = i16::try_from(kind).unwrap_or_default();
    let start = i64::try_from(byte).map_err(std::io::Error::other)?;
    // The kernel requires `l_pid` 0.
    Ok(libc::flock { l_type: kind, l_whence: 0, l_start: start, l_len: 1, l_pid: 0 })
}

fn lock(file: &impl AsRawFd, command: i32, range: &mut libc::flock) -> std::io::Result<()> {
    // SAFETY: the kernel reads and writes only the given lock.
    let failed = unsafe { libc::fcntl(file.as_raw_fd(), command, std::ptr::from_mut(range)) } != 0;
    if failed { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

/// Opens a new file description of the same file, with its own access mode and without the lock of
/// the old one.
pub(crate) fn reopen(file: &impl AsRawFd, writable: bool) -> std::io::Result<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    std::fs::OpenOptions::new().read(true).write(writable).open(path)
}

#[cfg(test)]
#[path = "memory_tests.rs"]
mod tests;
