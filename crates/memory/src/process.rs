//! Counters of a process: bytes read and page faults.

use std::fs;
use std::io;

use firn_base::PAGE_SIZE;
use firn_base::num::usize_of;
use nix::sys::resource::{UsageWho, getrusage};
use procfs::ProcError;
use procfs::process::Process;
use rustix::mm::{Advice, madvise};
use serde::Serialize;
use thiserror::Error;

/// Bytes of the unit in which the kernel counts reads from storage.
const BLOCK: u64 = 512;

/// Counters of a process, over all its threads. Take the difference of two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ProcessCounters {
    /// Bytes that were read from storage.
    pub read_bytes: u64,
    /// Page faults that did not wait for storage.
    pub minor_faults: u64,
    /// Page faults that waited for storage.
    pub major_faults: u64,
}

/// Why the counters of a process could not be read.
#[derive(Debug, Error)]
#[error("cannot read the counters of process {process} from /proc")]
pub struct ProcessCountersError {
    /// The process.
    process: u32,
    /// The file and its error.
    source: ProcError,
}

/// Maps this program's code and constants in advance (`MADV_POPULATE_READ`), so that no later step
/// waits for a page fault on them. It takes page tables, and no other memory: the pages are in the
/// page cache.
pub fn map_program() {
    // SAFETY: the callback keeps to the contract of dl_iterate_phdr(3), and uses no data.
    unsafe { libc::dl_iterate_phdr(Some(map_segments), std::ptr::null_mut()) };
}

/// Maps the segments of one program that cannot be written, and ends the iteration: the first
/// program is this one.
unsafe extern "C" fn map_segments(
    program: *mut libc::dl_phdr_info,
    _: libc::size_t,
    _: *mut libc::c_void,
) -> libc::c_int {
    // SAFETY: dl_iterate_phdr(3) passes the description of a program that is loaded.
    let libc::dl_phdr_info { dlpi_addr: base, dlpi_phdr, dlpi_phnum, .. } = unsafe { *program };
    // SAFETY: the program's headers stay as long as the program.
    let headers = unsafe { std::slice::from_raw_parts(dlpi_phdr, dlpi_phnum.into()) };
    let is_constant =
        |h: &&libc::Elf64_Phdr| h.p_type == libc::PT_LOAD && h.p_flags & libc::PF_W == 0;
    for segment in headers.iter().filter(is_constant) {
        let start = (base + segment.p_vaddr) / PAGE_SIZE * PAGE_SIZE;
        let len = base + segment.p_vaddr + segment.p_memsz - start;
        let at = std::ptr::without_provenance_mut(usize_of(start));
        // SAFETY: it changes page tables only. A failure leaves the pages to later faults.
        let _ = unsafe { madvise(at, usize_of(len), Advice::LinuxPopulateRead) };
    }
    1
}

impl ProcessCounters {
    /// Reads this process's counters as they are now (getrusage(2)).
    ///
    /// # Errors
    ///
    /// That of the system call.
    pub fn read() -> io::Result<Self> {
        Self::of_usage(UsageWho::RUSAGE_SELF)
    }

    /// Reads the counters of another process of this user.
    ///
    /// # Errors
    ///
    /// [`ProcessCountersError`] when the process has ended, or belongs to another user.
    pub fn of(process: u32) -> Result<Self, ProcessCountersError> {
        let counters = || {
            // No process has a number above i32::MAX.
            let process = Process::new(i32::try_from(process).unwrap_or(i32::MAX))?;
            let (stat, read_bytes) = (process.stat()?, process.io()?.read_bytes);
            Ok(Self { read_bytes, minor_faults: stat.minflt, major_faults: stat.majflt })
        };
        counters().map_err(|source| ProcessCountersError { process, source })
    }

    /// Reads the counters of the calling thread alone.
    pub(crate) fn of_this_thread() -> io::Result<Self> {
        Self::of_usage(UsageWho::RUSAGE_THREAD)
    }

    fn of_usage(whose: UsageWho) -> io::Result<Self> {
        let usage = getrusage(whose)?;
        let count = i64::cast_unsigned;
        Ok(Self {
            read_bytes: count(usage.block_reads()) * BLOCK,
            minor_faults: count(usage.minor_page_faults()),
            major_faults: count(usage.major_page_faults()),
        })
    }
}

/// Has the kernel end this process, which runs a microVM, when memory is short, before the process
/// that started it (proc(5), `oom_score_adj`). Raising the score needs no privileges.
///
/// # Errors
///
/// The error of the write to /proc.
pub fn prefer_as_victim() -> io::Result<()> {
    fs::write("/proc/self/oom_score_adj", "1000")
}

#[cfg(test)]
#[path = "process_tests.rs"]
mod tests;
