//! The handler of SIGBUS: reports the lost page and ends the process.
//!
//! A handler may only call async-signal-safe functions (signal-safety(7)): it formats into an array
//! and makes system calls, and uses neither heap nor locks.

use std::fmt::{self, Write};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use firn_base::{PAGE_SIZE, end_with, handle_signal};
use libc::{c_int, c_void, siginfo_t};

use super::{VERITY, is_protected, maps};
use crate::slot::Slot;

/// The number of slots of guest memory whose pages a report can name. Others are reported by their
/// host address alone.
const MAX_SLOTS: usize = 16;

/// A slot of guest memory; all 0 in a free entry.
#[derive(Debug)]
struct Entry {
    host: AtomicU64,
    guest: AtomicU64,
    /// Bytes; 0 while the entry is free or being written.
    len: AtomicU64,
}

static ENTRIES: [Entry; MAX_SLOTS] =
    [const { Entry { host: AtomicU64::new(0), guest: AtomicU64::new(0), len: AtomicU64::new(0) } };
        MAX_SLOTS];

/// Slots of guest memory whose pages reports can name, until it is dropped.
#[derive(Debug)]
pub(crate) struct RegisteredSlots(Vec<&'static Entry>);

impl RegisteredSlots {
    pub(crate) fn new(slots: &[Slot]) -> Self {
        Self(slots.iter().filter_map(register).collect())
    }
}

impl Drop for RegisteredSlots {
    fn drop(&mut self) {
        for entry in &self.0 {
            entry.len.store(0, Ordering::Release);
            entry.host.store(0, Ordering::Release);
        }
    }
}

fn register(slot: &Slot) -> Option<&'static Entry> {
    ENTRIES.iter().find(|entry| {
        let order = Ordering::AcqRel;
        let claimed = entry.host.compare_exchange(0, slot.host_addr, order, Ordering::Relaxed);
        if claimed.is_ok() {
            entry.guest.store(slot.guest_addr, Ordering::Relaxed);
            entry.len.store(slot.len, Ordering::Release);
        }
        claimed.is_ok()
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

/// Installs a handler that ends this process with a line on standard error and exit code 1 when it
/// accesses mapped memory whose backing is lost. As with a kill, nothing is cleaned up.
///
/// # Errors
/// The handler cannot be installed.
pub fn install() -> io::Result<()> {
    // A second SIGBUS, in the handler itself, kills the process.
    // SAFETY: the handler only calls async-signal-safe functions.
    unsafe { handle_signal(libc::SIGBUS, on_sigbus, libc::SA_RESETHAND) }
}

extern "C" fn on_sigbus(signal: c_int, info: *mut siginfo_t, _: *mut c_void) {
    // SAFETY: the kernel passes a valid siginfo, which nothing else refers to.
    let info = unsafe { &*info };
    if info.si_code <= 0 {
        // Another process sent the signal; SA_RESETHAND has restored the default action.
        // SAFETY: raising a signal touches no memory.
        unsafe { libc::raise(signal) };
        return;
    }
    // SAFETY: a SIGBUS that the kernel generated has an address.
    let address = unsafe { info.si_addr() };
    end_with(Report::of(address.addr() as u64).bytes(), 1)
}

/// A line of limited length.
struct Report {
    text: [u8; 1024],
    len: usize,
}

impl Report {
    fn of(address: u64) -> Self {
        let mut report = Self { text: [0; 1024], len: 0 };
        // `write_str` below always succeeds.
        let _ = report.describe(address);
        report
    }

    fn describe(&mut self, address: u64) -> fmt::Result {
        write!(self, "firn: error: the memory at {address:#x}")?;
        if let Some(page) = guest_page(address) {
            write!(self, ", guest page {page:#x},")?;
        }
        self.write_str(" is lost")?;
        let mut protected = false;
        let _ = maps::scan(|mapped| {
            let found = (mapped.start..mapped.end).contains(&address);
            if found && !mapped.path.is_empty() {
                let offset = mapped.offset + (address - mapped.start);
                let _ = write!(self, ": it is byte {offset:#x} of ");
                self.push(mapped.path);
                protected = is_protected(mapped.inode);
            }
            found
        });
        if protected {
            return writeln!(self, ". The file was truncated, or {VERITY}");
        }
        self.write_str(
            ". The file was truncated, its device failed, or the system has no page for it\n",
        )
    }

    /// Appends bytes, as far as there is room, with `?` in place of control characters.
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
#[path = "handler_tests.rs"]
mod tests;
