//! userfaultfd: page faults on registered memory as messages, and the calls that resolve them.
//!
//! A thin layer over the kernel's interface (`Documentation/admin-guide/mm/userfaultfd.rst`,
//! ioctl_userfaultfd(2)). It adds checked features, errors that name the address, and messages as
//! values. It applies to any memory; [`GuestMemory::register`](crate::GuestMemory::register)
//! registers guest memory.
//!
//! The [pager](crate::pager) uses missing pages, their removal, copies, zeros and poison. The
//! [recorder](crate::recorders) of faults also uses write protection and thread ids, and moves
//! pages to record their accesses again. The recorder of written pages uses asynchronous write
//! protection, which the kernel lifts itself. Minor faults and [`Uffd::map_present`]
//! (`UFFDIO_CONTINUE`) have no user in firn: they are for shared memory that another process fills.
//!
//! A thread that faults on registered memory sleeps until its fault is resolved, unless a signal
//! wakes it; the same fault may then be reported twice. When the [`Uffd`] is closed, sleeping
//! threads wake and missing pages read as zeros.

use std::ffi::c_void;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::without_provenance_mut;

use bitflags::bitflags;
use linux_raw_sys::general::{
    UFFD_API, UFFD_EVENT_PAGEFAULT, UFFD_EVENT_REMOVE, UFFD_FEATURE_EVENT_REMOVE,
    UFFD_FEATURE_MINOR_SHMEM, UFFD_FEATURE_MOVE, UFFD_FEATURE_PAGEFAULT_FLAG_WP,
    UFFD_FEATURE_POISON, UFFD_FEATURE_THREAD_ID, UFFD_FEATURE_WP_ASYNC, UFFD_PAGEFAULT_FLAG_MINOR,
    UFFD_PAGEFAULT_FLAG_WP, UFFD_PAGEFAULT_FLAG_WRITE, UFFDIO_COPY_MODE_DONTWAKE,
    UFFDIO_COPY_MODE_WP, UFFDIO_REGISTER_MODE_MINOR, UFFDIO_REGISTER_MODE_MISSING,
    UFFDIO_REGISTER_MODE_WP, uffdio_api, uffdio_continue, uffdio_copy, uffdio_move, uffdio_poison,
    uffdio_range, uffdio_register, uffdio_writeprotect, uffdio_zeropage,
};
use linux_raw_sys::ioctl::{
    UFFDIO_API, UFFDIO_CONTINUE, UFFDIO_COPY, UFFDIO_REGISTER, UFFDIO_WAKE, UFFDIO_WRITEPROTECT,
    UFFDIO_ZEROPAGE,
};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, Updater, ioctl, opcode};
use rustix::mm::UserfaultfdFlags;
use thiserror::Error;

use crate::own_files::OwnFiles;

/// Size of a `struct uffd_msg`, in bytes.
const MESSAGE: usize = 32;
/// The number of messages that one read returns at most.
const BATCH: usize = 64;
/// `UFFDIO_WRITEPROTECT_MODE_WP`, which linux-raw-sys does not have.
const WRITEPROTECT: u64 = 1;
/// `UFFDIO_MOVE_MODE_DONTWAKE`, which linux-raw-sys does not have.
const MOVE_DONTWAKE: u64 = 1;
/// Ioctls that linux-raw-sys does not have (Linux 6.6 and 6.8).
const UFFDIO_POISON: Opcode = opcode::read_write::<uffdio_poison>(0xaa, 8);
const UFFDIO_MOVE: Opcode = opcode::read_write::<uffdio_move>(0xaa, 5);
const USERFAULTFD_IOC_NEW: Opcode = opcode::none(0xaa, 0);

bitflags! {
    /// Features of a userfaultfd.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Features: u64 {
        /// Writes to protected pages are reported (Linux 5.7).
        const WRITE_PROTECT = UFFD_FEATURE_PAGEFAULT_FLAG_WP as u64;
        /// A fault contains the id of its thread (Linux 4.14).
        const THREAD_ID = UFFD_FEATURE_THREAD_ID as u64;
        /// Discarded pages (`MADV_DONTNEED`) are reported; the thread that discards them waits
        /// until the report is read.
        const REMOVE = UFFD_FEATURE_EVENT_REMOVE as u64;
        /// Faults on pages of shared memory that are present, but not in the page tables of the
        /// thread, are reported (Linux 5.14).
        const MINOR_SHARED = UFFD_FEATURE_MINOR_SHMEM as u64;
        /// Pages can be poisoned (Linux 6.6).
        const POISON = UFFD_FEATURE_POISON as u64;
        /// A write to a protected page is not reported: the kernel lifts the protection and marks
        /// the page as written in the page tables (Linux 6.7).
        const WRITE_PROTECT_ASYNC = UFFD_FEATURE_WP_ASYNC as u64;
        /// Pages can be moved (Linux 6.8).
        const MOVE = UFFD_FEATURE_MOVE as u64;
    }
}

bitflags! {
    /// Which faults on a registered range are reported.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct RegisterMode: u64 {
        /// Accesses to missing pages.
        const MISSING = UFFDIO_REGISTER_MODE_MISSING as u64;
        /// Writes to pages that are write-protected.
        const WRITE_PROTECT = UFFDIO_REGISTER_MODE_WP as u64;
        /// Accesses to pages that are present, but not in the page tables of the thread.
        const MINOR = UFFDIO_REGISTER_MODE_MINOR as u64;
    }
}

bitflags! {
    /// How pages are filled.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Fill: u64 {
        /// The first write to them is a fault.
        const WRITE_PROTECTED = UFFDIO_COPY_MODE_WP as u64;
        /// Threads that wait for the pages sleep until [`Uffd::wake`].
        const DONT_WAKE = UFFDIO_COPY_MODE_DONTWAKE as u64;
    }
}

/// An event on registered memory. Addresses are those of the process that owns the memory, in
/// bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A thread waits for a page.
    Fault(Fault),
    /// The pages of the range are being discarded, and will be missing.
    Remove(Range<u64>),
}

/// A page fault of a waiting thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// First byte of the page.
    pub address: u64,
    /// The kind of the fault.
    pub kind: FaultKind,
    /// The system-wide id of the waiting thread; 0 without [`Features::THREAD_ID`].
    pub thread: u32,
}

/// Kinds of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// A read of a missing page.
    MissingRead,
    /// A write to a missing page.
    MissingWrite,
    /// A write to a write-protected page.
    WriteProtected,
    /// The page is present, but not in the page tables of the thread: [`Uffd::map_present`] maps
    /// it.
    Minor,
}

/// Why an operation on a userfaultfd failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum UffdError {
    /// The userfaultfd cannot be opened.
    #[error(
        "cannot open a userfaultfd; run as root, or set the sysctl vm.unprivileged_userfaultfd to 1"
    )]
    Open(#[source] std::io::Error),
    /// The kernel does not support a feature.
    #[error("this kernel's userfaultfd lacks {missing:?}; use Linux 6.8 or newer")]
    Features {
        /// The missing features.
        missing: Features,
    },
    /// A range cannot be registered.
    #[error("cannot register {len} bytes at {address:#x} with a userfaultfd")]
    Register {
        /// First byte.
        address: u64,
        /// Length in bytes.
        len: u64,
        /// The error of the system call.
        source: std::io::Error,
    },
    /// Messages cannot be read.
    #[error("cannot read the messages of a userfaultfd")]
    Read(#[source] std::io::Error),
    /// A message of an unexpected kind.
    #[error("the userfaultfd reports an event of the unexpected kind {0:#x}")]
    Unexpected(u8),
    /// A thread is discarding memory: read the events, then try again.
    #[error("memory at {address:#x} is being discarded; read the userfaultfd's events first")]
    Changing {
        /// First byte that is not done.
        address: u64,
    },
    /// A page is already present and was not changed.
    #[error("the page at {address:#x} is already present")]
    Present {
        /// First byte that is not done.
        address: u64,
    },
    /// The memory was unmapped or mapped again. Waiting threads must be woken; they then access
    /// what is mapped there.
    #[error("the memory at {address:#x} is no longer registered with the userfaultfd")]
    Unregistered {
        /// First byte that is not done.
        address: u64,
    },
    /// A page that is to be moved is missing.
    #[error("the page at {address:#x} is missing and cannot be moved")]
    Missing {
        /// First byte that is not done.
        address: u64,
    },
    /// A page that is to be moved is in use by the kernel.
    #[error("the page at {address:#x} is pinned by the kernel and cannot be moved")]
    Pinned {
        /// First byte that is not done.
        address: u64,
    },
    /// The process that owns the memory has ended.
    #[error("the process that owns the registered memory has ended")]
    ProcessEnded,
    /// Pages cannot be filled.
    #[error("cannot fill pages at {address:#x} through a userfaultfd")]
    Fill {
        /// First byte that is not done.
        address: u64,
        /// The error of the system call.
        source: std::io::Error,
    },
    /// The protection of pages cannot be changed.
    #[error("cannot change the write protection of pages at {address:#x} through a userfaultfd")]
    Protect {
        /// First byte.
        address: u64,
        /// The error of the system call.
        source: std::io::Error,
    },
    /// Waiting threads cannot be woken.
    #[error("cannot wake the threads that wait for pages at {address:#x}")]
    Wake {
        /// First byte.
        address: u64,
        /// The error of the system call.
        source: std::io::Error,
    },
}

/// A userfaultfd. All methods may be called from any thread.
#[derive(Debug)]
pub struct Uffd {
    fd: OwnedFd,
}

impl AsFd for Uffd {
    /// The descriptor, to wait for events: it is readable while events are pending.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Uffd {
    /// Opens a userfaultfd for faults of user space and of the kernel, with these features.
    ///
    /// # Errors
    /// [`UffdError::Open`], [`UffdError::Features`].
    pub fn open(features: Features) -> Result<Self, UffdError> {
        let fd = open().map_err(|errno| UffdError::Open(errno.into()))?;
        let mut api = uffdio_api { api: UFFD_API.into(), features: features.bits(), ioctls: 0 };
        // SAFETY: the value is what UFFDIO_API takes; it changes no memory but the value.
        let agreed = unsafe { call::<UFFDIO_API, _>(&fd, &mut api) };
        match agreed {
            Ok(()) => Ok(Self { fd }),
            // The kernel refuses the call when it lacks any feature, and does not return its own
            // features: a second call does.
            Err(Errno::INVAL) => Err(UffdError::Features { missing: features - offered()? }),
            Err(errno) => Err(UffdError::Open(errno.into())),
        }
    }

    /// Takes over a userfaultfd that another process has opened and registered its memory with.
    /// Addresses and features are those of that process.
    ///
    /// # Errors
    /// [`UffdError::Open`] when it cannot be made non-blocking.
    pub fn of(fd: OwnedFd) -> Result<Self, UffdError> {
        let flags = fcntl_getfl(&fd).map_err(|errno| UffdError::Open(errno.into()))?;
        fcntl_setfl(&fd, flags | OFlags::NONBLOCK)
            .map_err(|errno| UffdError::Open(errno.into()))?;
        Ok(Self { fd })
    }

    /// Registers whole pages of this process: faults on them are reported until they are unmapped.
    ///
    /// # Safety
    /// No Rust reference points into the range: its contents may change at any time.
    ///
    /// # Errors
    /// [`UffdError::Register`]: not whole pages, not mapped, or memory of a kind that cannot be
    /// registered.
    pub unsafe fn register(&self, range: Range<u64>, mode: RegisterMode) -> Result<(), UffdError> {
        let mut value = uffdio_register { range: span(&range), mode: mode.bits(), ioctls: 0 };
        // SAFETY: the value is what UFFDIO_REGISTER takes; the caller answers for the range.
        unsafe { call::<UFFDIO_REGISTER, _>(&self.fd, &mut value) }.map_err(|errno| {
            UffdError::Register {
                address: range.start,
                len: range.end.saturating_sub(range.start),
                source: errno.into(),
            }
        })
    }

    /// The pending events, oldest first. Never blocks.
    ///
    /// # Errors
    /// [`UffdError::Read`], [`UffdError::Unexpected`].
    pub fn events(&self) -> Result<Vec<Event>, UffdError> {
        let mut bytes = [0; MESSAGE * BATCH];
        match rustix::io::read(&self.fd, &mut bytes) {
            Ok(len) => bytes[..len].as_chunks::<MESSAGE>().0.iter().map(event).collect(),
            Err(Errno::AGAIN | Errno::INTR) => Ok(Vec::new()),
            Err(errno) => Err(UffdError::Read(errno.into())),
        }
    }

    /// Fills whole missing pages with bytes, and wakes the threads that wait for them.
    ///
    /// # Errors
    /// [`UffdError::Changing`], [`UffdError::Present`], [`UffdError::Unregistered`],
    /// [`UffdError::Fill`]: pages before the address are done; [`UffdError::ProcessEnded`].
    pub fn copy(&self, address: u64, bytes: &[u8], fill: Fill) -> Result<(), UffdError> {
        let (source, len) = (bytes.as_ptr().addr() as u64, bytes.len() as u64);
        until_full(address, len, |done| {
            let mut value = uffdio_copy {
                dst: address + done,
                src: source + done,
                len: len - done,
                mode: fill.bits(),
                copy: 0,
            };
            // SAFETY: the value is what UFFDIO_COPY takes, and its source lies in `bytes`; the
            // kernel fills missing pages of registered ranges alone, into which no references
            // point.
            let copied = unsafe { call::<UFFDIO_COPY, _>(&self.fd, &mut value) };
            (value.copy, copied)
        })
    }

    /// Fills missing pages with zeros, which use no DRAM until they are written, and wakes the
    /// threads that wait for them.
    ///
    /// # Errors
    /// As [`Uffd::copy`].
    pub fn zero(&self, range: Range<u64>) -> Result<(), UffdError> {
        let uffdio_range { start, len } = span(&range);
        until_full(start, len, |done| {
            let range = uffdio_range { start: start + done, len: len - done };
            let mut value = uffdio_zeropage { range, mode: 0, zeropage: 0 };
            // SAFETY: the value is what UFFDIO_ZEROPAGE takes; the rest is as in `copy`.
            let filled = unsafe { call::<UFFDIO_ZEROPAGE, _>(&self.fd, &mut value) };
            (value.zeropage, filled)
        })
    }

    /// Moves present pages of private anonymous memory to missing pages of a registered range,
    /// without a copy: no write of another thread is lost. The moved pages are not write-protected.
    /// Threads that wait for them sleep until [`Uffd::wake`].
    ///
    /// # Errors
    /// As [`Uffd::copy`], with addresses in `from`; [`UffdError::Missing`],
    /// [`UffdError::Pinned`].
    pub fn move_pages(&self, from: Range<u64>, to: u64) -> Result<(), UffdError> {
        let uffdio_range { start, len } = span(&from);
        let moved = until_full(start, len, |done| {
            let mut value = uffdio_move {
                dst: to + done,
                src: start + done,
                len: len - done,
                mode: MOVE_DONTWAKE,
                move_: 0,
            };
            // SAFETY: the value is what UFFDIO_MOVE takes. The kernel fills missing pages of
            // registered ranges, into which no references point.
            let moved = unsafe { call::<UFFDIO_MOVE, _>(&self.fd, &mut value) };
            (value.move_, moved)
        });
        moved.map_err(|error| match error {
            UffdError::Unregistered { address } => UffdError::Missing { address },
            UffdError::Fill { address, source }
                if Errno::from_io_error(&source) == Some(Errno::BUSY) =>
            {
                UffdError::Pinned { address }
            }
            error => error,
        })
    }

    /// Maps present pages of shared memory in the page tables, and wakes the threads that wait for
    /// them.
    ///
    /// # Errors
    /// As [`Uffd::copy`].
    pub fn map_present(&self, range: Range<u64>) -> Result<(), UffdError> {
        let uffdio_range { start, len } = span(&range);
        until_full(start, len, |done| {
            let range = uffdio_range { start: start + done, len: len - done };
            let mut value = uffdio_continue { range, mode: 0, mapped: 0 };
            // SAFETY: the value is what UFFDIO_CONTINUE takes; it maps the bytes that the memory's
            // file already holds.
            let mapped = unsafe { call::<UFFDIO_CONTINUE, _>(&self.fd, &mut value) };
            (value.mapped, mapped)
        })
    }

    /// Poisons missing pages, and wakes the threads that wait for them: every later access ends in
    /// SIGBUS, or in the error EFAULT of a system call.
    ///
    /// # Errors
    /// As [`Uffd::copy`].
    pub fn poison(&self, range: Range<u64>) -> Result<(), UffdError> {
        let uffdio_range { start, len } = span(&range);
        until_full(start, len, |done| {
            let range = uffdio_range { start: start + done, len: len - done };
            let mut value = uffdio_poison { range, mode: 0, updated: 0 };
            // SAFETY: the value is what UFFDIO_POISON takes; pages that are missing become
            // unusable, no others.
            let poisoned = unsafe { call::<UFFDIO_POISON, _>(&self.fd, &mut value) };
            (value.updated, poisoned)
        })
    }

    /// Write-protects present pages, or lifts the protection and wakes the threads that wait for
    /// it.
    ///
    /// # Errors
    /// [`UffdError::Changing`], [`UffdError::Protect`].
    pub fn write_protect(&self, range: Range<u64>, protect: bool) -> Result<(), UffdError> {
        let mode = if protect { WRITEPROTECT } else { 0 };
        let mut value = uffdio_writeprotect { range: span(&range), mode };
        // SAFETY: the value is what UFFDIO_WRITEPROTECT takes; protection alone changes.
        unsafe { call::<UFFDIO_WRITEPROTECT, _>(&self.fd, &mut value) }.map_err(|errno| match errno
        {
            Errno::AGAIN => UffdError::Changing { address: range.start },
            _ => UffdError::Protect { address: range.start, source: errno.into() },
        })
    }

    /// Wakes the threads that wait for pages of a range; they repeat their access.
    ///
    /// # Errors
    /// [`UffdError::Wake`].
    pub fn wake(&self, range: Range<u64>) -> Result<(), UffdError> {
        let mut value = span(&range);
        // SAFETY: the value is what UFFDIO_WAKE takes; no memory changes.
        unsafe { call::<UFFDIO_WAKE, _>(&self.fd, &mut value) }
            .map_err(|errno| UffdError::Wake { address: range.start, source: errno.into() })
    }
}

/// How a userfaultfd is made.
const FLAGS: UserfaultfdFlags = UserfaultfdFlags::CLOEXEC.union(UserfaultfdFlags::NONBLOCK);

/// Makes a userfaultfd of the device.
struct New;

// SAFETY: `USERFAULTFD_IOC_NEW` takes flags in place of a pointer, changes no memory, and returns a
// new descriptor.
unsafe impl Ioctl for New {
    type Output = OwnedFd;

    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        USERFAULTFD_IOC_NEW
    }

    fn as_ptr(&mut self) -> *mut c_void {
        without_provenance_mut(usize::try_from(FLAGS.bits()).unwrap_or_default())
    }

    unsafe fn output_from_ptr(fd: IoctlOutput, _: *mut c_void) -> rustix::io::Result<OwnedFd> {
        // SAFETY: the kernel has just returned the descriptor, and nothing else has it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

/// From the device, which needs no capability, or by the system call, which needs one
/// (userfaultfd(2)).
fn open() -> Result<OwnedFd, Errno> {
    if let Some(device) = OwnFiles::of_process().userfaultfd() {
        // SAFETY: as below.
        return unsafe { ioctl(device, New) };
    }
    // SAFETY: a userfaultfd without a registered range changes no memory.
    unsafe { rustix::mm::userfaultfd(FLAGS) }
}

/// The features of this kernel.
fn offered() -> Result<Features, UffdError> {
    let fd = open().map_err(|errno| UffdError::Open(errno.into()))?;
    let mut api = uffdio_api { api: UFFD_API.into(), features: 0, ioctls: 0 };
    // SAFETY: the value is what UFFDIO_API takes; it changes no memory but the value.
    unsafe { call::<UFFDIO_API, _>(&fd, &mut api) }
        .map_err(|errno| UffdError::Open(errno.into()))?;
    Ok(Features::from_bits_truncate(api.features))
}

/// # Safety
/// `T` is what the operation takes, and what it does to other memory is sound.
unsafe fn call<const OPERATION: Opcode, T>(fd: &OwnedFd, value: &mut T) -> Result<(), Errno> {
    // SAFETY: the caller guarantees the type.
    let operation = unsafe { Updater::<OPERATION, T>::new(value) };
    // SAFETY: the caller guarantees that the effects are sound.
    unsafe { ioctl(fd, operation) }
}

fn span(range: &Range<u64>) -> uffdio_range {
    uffdio_range { start: range.start, len: range.end.saturating_sub(range.start) }
}

/// Repeats an operation that may stop early, until all bytes are done. The operation takes the
/// number of bytes done so far and returns how many more it did. The kernel returns EAGAIN for an
/// early stop, and the cause of the stop on the next call.
fn until_full(
    address: u64,
    len: u64,
    mut operation: impl FnMut(u64) -> (i64, Result<(), Errno>),
) -> Result<(), UffdError> {
    let mut done = 0;
    loop {
        let (more, result) = operation(done);
        // The kernel stores a negative error number where it did nothing.
        let more = u64::try_from(more).unwrap_or(0);
        done += more;
        let address = address + done;
        match result {
            Ok(()) => return Ok(()),
            Err(Errno::AGAIN) if more > 0 && done < len => {}
            Err(Errno::AGAIN) => return Err(UffdError::Changing { address }),
            Err(Errno::EXIST) => return Err(UffdError::Present { address }),
            Err(Errno::NOENT) => return Err(UffdError::Unregistered { address }),
            Err(Errno::SRCH) => return Err(UffdError::ProcessEnded),
            Err(errno) => return Err(UffdError::Fill { address, source: errno.into() }),
        }
    }
}

/// Reads a `struct uffd_msg`.
fn event(message: &[u8; MESSAGE]) -> Result<Event, UffdError> {
    let word = |at: usize| {
        message[at..at + 8].iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
    };
    match u32::from(message[0]) {
        UFFD_EVENT_PAGEFAULT => {
            let flag = |flag: u32| word(8) & u64::from(flag) != 0;
            let kind = if flag(UFFD_PAGEFAULT_FLAG_WP) {
                FaultKind::WriteProtected
            } else if flag(UFFD_PAGEFAULT_FLAG_MINOR) {
                FaultKind::Minor
            } else if flag(UFFD_PAGEFAULT_FLAG_WRITE) {
                FaultKind::MissingWrite
            } else {
                FaultKind::MissingRead
            };
            let thread = u32::try_from(word(24) & u64::from(u32::MAX)).unwrap_or(0);
            Ok(Event::Fault(Fault { address: word(16), kind, thread }))
        }
        UFFD_EVENT_REMOVE => Ok(Event::Remove(word(8)..word(16))),
        _ => Err(UffdError::Unexpected(message[0])),
    }
}

#[cfg(test)]
mod tests;
