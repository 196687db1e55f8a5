//! SIGBUS: what is told, and the end of the process.
//!
//! A handler may call little (signal-safety(7)): it formats into an array, makes system calls, and touches no heap and no lock.

use std::fmt::{self, Write};
use std::io;
use std::mem::zeroed;
use std::os::fd::BorrowedFd;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};

use firn_base::PAGE_SIZE;
use libc::{c_int, c_void, siginfo_t};

use super::maps;
use crate::guest_memory::Slot;

/// Slots of guest memory whose pages a report can name. What is more is reported by its host address alone.
const MOST: usize = 16;

/// A slot of guest memory: all 0 where there is none.
#[derive(Debug)]
struct Entry {
    host: AtomicU64,
    guest: AtomicU64,
    /// Bytes; 0 while the entry is free or being written.
    len: AtomicU64,
}

static ENTRIES: [Entry; MOST] =
    [const { Entry { host: AtomicU64::new(0), guest: AtomicU64::new(0), len: AtomicU64::new(0) } };
        MOST];

/// Slots of guest memory that reports can name pages of, until it is dropped.
#[derive(Debug)]
pub(crate) struct Told(Vec<&'static Entry>);

impl Told {
    pub(crate) fn of(slots: &[Slot]) -> Self {
        Self(slots.iter().filter_map(enter).collect())
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        for entry in &self.0 {
            entry.len.store(0, Ordering::Release);
            entry.host.store(0, Ordering::Release);
        }
    }
}

fn enter(slot: &Slot) -> Option<&'static Entry> {
    ENTRIES.iter().find(|entry| {
        let order = Ordering::AcqRel;
        let taken = entry.host.compare_exchange(0, slot.host_addr, order, Ordering::Relaxed);
        if taken.is_ok() {
            entry.guest.store(slot.guest_addr, Ordering::Relaxed);
            entry.len.store(slot.len, Ordering::Release);
        }
        taken.is_ok()
    })
}

/// The guest page at a host address.
fn guest_page(address: u64) -> Option<u64> {
    ENTRIES.iter().find_map(|entry| {
        let len = entry.len.load(Ordering::Acquire);
        let inside = address.checked_sub(entry.host.load(Ordering::Relaxed))?;
        let guest = entry.guest.load(Ordering::Relaxed);
        (inside < len).then(|| (guest + inside) / PAGE_SIZE)
    })
}

/// Has this process end with a line on standard error and exit code 1 when it touches mapped memory that is not there any more
/// (SIGBUS), instead of being killed without a word. What it leaves is what a killed process leaves.
///
/// # Errors
/// The handler cannot be installed.
pub fn report_lost_memory() -> io::Result<()> {
    // SAFETY: all zeros is an empty mask and no flags.
    let mut action: libc::sigaction = unsafe { zeroed() };
    action.sa_sigaction = on_sigbus as extern "C" fn(c_int, *mut siginfo_t, *mut c_void) as usize;
    // The second one, by the handler itself, kills.
    action.sa_flags = libc::SA_SIGINFO | libc::SA_RESETHAND;
    // SAFETY: the handler keeps to what a handler may do.
    let failed = unsafe { libc::sigaction(libc::SIGBUS, &raw const action, null_mut()) } != 0;
    if failed {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

extern "C" fn on_sigbus(signal: c_int, info: *mut siginfo_t, _: *mut c_void) {
    // SAFETY: the kernel passes what it tells of the signal, and nobody else has it.
    let info = unsafe { &*info };
    if info.si_code <= 0 {
        // Another process sent it. Its default action is in force again.
        // SAFETY: raising a signal touches no memory.
        unsafe { libc::raise(signal) };
        return;
    }
    // SAFETY: it is SIGBUS, of the kernel's, which has an address.
    let address = unsafe { info.si_addr() };
    let report = Report::of(address.addr() as u64);
    // SAFETY: standard error may be closed, and then the write fails.
    let stderr = unsafe { BorrowedFd::borrow_raw(libc::STDERR_FILENO) };
    // There is nobody else to tell.
    let _ = rustix::io::write(stderr, report.bytes());
    // SAFETY: it ends the process, and runs nothing of it.
    unsafe { libc::_exit(1) };
}

/// A line of limited length.
struct Report {
    text: [u8; 1024],
    len: usize,
}

impl Report {
    fn of(address: u64) -> Self {
        let mut report = Self { text: [0; 1024], len: 0 };
        // Writing to it does not fail.
        let _ = report.describe(address);
        report
    }

    fn describe(&mut self, address: u64) -> fmt::Result {
        write!(self, "firn: error: the memory at {address:#x}")?;
        if let Some(page) = guest_page(address) {
            write!(self, ", guest page {page:#x},")?;
        }
        self.write_str(" is lost")?;
        let _ = maps::scan(|mapped| {
            let found = (mapped.start..mapped.end).contains(&address);
            if found && !mapped.path.is_empty() {
                let offset = mapped.offset + (address - mapped.start);
                let _ = write!(self, ": it is byte {offset:#x} of ");
                self.push(mapped.path);
            }
            found
        });
        self.write_str(
            ". The file was truncated, its device failed, or the system has no page for it\n",
        )
    }

    /// Puts bytes in, without what a terminal takes as a command.
    fn push(&mut self, bytes: &[u8]) {
        for byte in bytes {
            let Some(place) = self.text.get_mut(self.len) else { return };
            *place = if byte.is_ascii_control() && *byte != b'\n' { b'?' } else { *byte };
            self.len += 1;
        }
    }

    fn bytes(&self) -> &[u8] {
        &self.text[..self.len]
    }
}

impl Write for Report {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.push(text.as_bytes());
        Ok(())
    }
}

#[cfg(test)]
#[path = "signal_tests.rs"]
mod tests;
