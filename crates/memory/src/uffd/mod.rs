//! userfaultfd: faults on registered memory as messages, and the calls that answer them.
//!
//! A thin layer over the kernel's interface (`Documentation/admin-guide/mm/userfaultfd.rst`, ioctl_userfaultfd(2)).
//! What it adds: features that are checked, errors that name the address, and messages as values. It holds for any
//! memory; [`GuestMemory::register`](crate::GuestMemory::register) registers a guest's.
//!
//! The [pager](crate::pager) uses missing pages, their removal, copies, zeros and poison. The
//! [recorder](crate::recorders) of faults uses write protection and the threads' ids besides, and the one of marks write
//! protection that the kernel lifts by itself. Minor faults, and [`Uffd::map_present`] (`UFFDIO_CONTINUE`), have no user in firn: they
//! are for shared memory that another process fills, and are tested as the rest is, on the kernel.
//!
//! A thread that touches registered memory sleeps until its fault is answered, unless a signal wakes it; the same
//! fault may then be reported twice. When the [`Uffd`] is closed, sleepers wake and missing pages read as zeros.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bitflags::bitflags;
use linux_raw_sys::general::{
    UFFD_API, UFFD_EVENT_PAGEFAULT, UFFD_EVENT_REMOVE, UFFD_FEATURE_EVENT_REMOVE,
    UFFD_FEATURE_MINOR_SHMEM, UFFD_FEATURE_PAGEFAULT_FLAG_WP, UFFD_FEATURE_POISON,
    UFFD_FEATURE_THREAD_ID, UFFD_FEATURE_WP_ASYNC, UFFD_PAGEFAULT_FLAG_MINOR,
    UFFD_PAGEFAULT_FLAG_WP, UFFD_PAGEFAULT_FLAG_WRITE, UFFDIO_COPY_MODE_DONTWAKE,
    UFFDIO_COPY_MODE_WP, UFFDIO_REGISTER_MODE_MINOR, UFFDIO_REGISTER_MODE_MISSING,
    UFFDIO_REGISTER_MODE_WP, uffdio_api, uffdio_continue, uffdio_copy, uffdio_poison, uffdio_range,
    uffdio_register, uffdio_writeprotect, uffdio_zeropage,
};
use linux_raw_sys::ioctl::{
    UFFDIO_API, UFFDIO_CONTINUE, UFFDIO_COPY, UFFDIO_REGISTER, UFFDIO_WAKE, UFFDIO_WRITEPROTECT,
    UFFDIO_ZEROPAGE,
};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};
use rustix::mm::UserfaultfdFlags;
use thiserror::Error;

/// Bytes of a `struct uffd_msg`.
const MESSAGE: usize = 32;
/// Messages that one read takes.
const BATCH: usize = 64;
/// `UFFDIO_WRITEPROTECT_MODE_WP`, which linux-raw-sys leaves out.
const WRITEPROTECT: u64 = 1;
/// The call that linux-raw-sys leaves out (Linux 6.6).
const UFFDIO_POISON: Opcode = opcode::read_write::<uffdio_poison>(0xaa, 8);

bitflags! {
    /// What a userfaultfd is asked to be able to do.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Features: u64 {
        /// Writes to protected pages are reported (Linux 5.7).
        const WRITE_PROTECT = UFFD_FEATURE_PAGEFAULT_FLAG_WP as u64;
        /// A fault names the thread that met it (Linux 4.14).
        const THREAD_ID = UFFD_FEATURE_THREAD_ID as u64;
        /// Pages that are given back (`MADV_DONTNEED`) are reported; who gives them back waits until the report is read.
        const REMOVE = UFFD_FEATURE_EVENT_REMOVE as u64;
        /// Pages of shared memory that are there, but not in the toucher's page tables, are reported (Linux 5.14).
        const MINOR_SHARED = UFFD_FEATURE_MINOR_SHMEM as u64;
        /// Pages can be poisoned (Linux 6.6).
        const POISON = UFFD_FEATURE_POISON as u64;
        /// A write to a protected page is no fault: the kernel lifts the protection and goes on, and the page tables say what was
        /// written (Linux 6.7).
        const WRITE_PROTECT_ASYNC = UFFD_FEATURE_WP_ASYNC as u64;
    }
}

bitflags! {
    /// Which faults on a range are reported.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Watch: u64 {
        /// Touches of pages that are not there.
        const MISSING = UFFDIO_REGISTER_MODE_MISSING as u64;
        /// Writes to pages that are write-protected.
        const WRITE_PROTECT = UFFDIO_REGISTER_MODE_WP as u64;
        /// Touches of pages that are there, but not in the toucher's page tables.
        const MINOR = UFFDIO_REGISTER_MODE_MINOR as u64;
    }
}

bitflags! {
    /// How pages are filled.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Fill: u64 {
        /// The first write to them is a fault.
        const WRITE_PROTECTED = UFFDIO_COPY_MODE_WP as u64;
        /// Who waits for them goes on sleeping until [`Uffd::wake`].
        const DONT_WAKE = UFFDIO_COPY_MODE_DONTWAKE as u64;
    }
}

/// What happened on registered memory. Addresses are of this process, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A thread sleeps on a page.
    Fault(Fault),
    /// The pages of the range are being given back, and will be missing.
    Remove(Range<u64>),
}

/// A touch that waits for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// First byte of the page.
    pub address: u64,
    /// What is to be done about it.
    pub kind: FaultKind,
    /// The thread that sleeps, by its system-wide id; 0 without [`Features::THREAD_ID`].
    pub thread: u32,
}

/// Kinds of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// The page is not there, and was read.
    MissingRead,
    /// The page is not there, and was to be written.
    MissingWrite,
    /// The page is there, and is write-protected.
    WriteProtected,
    /// The page is there, but not in the toucher's page tables: [`Uffd::map_present`] puts it in.
    Minor,
}

/// Why an operation on a userfaultfd failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum UffdError {
    /// There is none for this process.
    #[error(
        "opening a userfaultfd: run as root, or set the sysctl vm.unprivileged_userfaultfd to 1"
    )]
    Open(#[source] std::io::Error),
    /// The kernel does not know what it is asked for.
    #[error("this kernel's userfaultfd lacks {missing:?}: use Linux 6.7 or newer")]
    Features {
        /// What is missing.
        missing: Features,
    },
    /// A range cannot be registered.
    #[error("registering {len} bytes at {address:#x} with a userfaultfd")]
    Register {
        /// First byte.
        address: u64,
        /// Length in bytes.
        len: u64,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// Messages cannot be read.
    #[error("reading the messages of a userfaultfd")]
    Read(#[source] std::io::Error),
    /// A message of a kind that was not asked for.
    #[error("the userfaultfd reports {0:#x}, which was not asked for")]
    Unexpected(u8),
    /// Somebody is giving memory back: read the events, then try again.
    #[error("memory at {address:#x} is being given back: read the userfaultfd's events first")]
    Changing {
        /// First byte that is not done.
        address: u64,
    },
    /// A page was there already; it was left as it is.
    #[error("the page at {address:#x} is there already")]
    Present {
        /// First byte that is not done.
        address: u64,
    },
    /// Something else was mapped there meanwhile, or nothing: whoever waits has to be woken, and meets that.
    #[error("the memory at {address:#x} is no longer registered with the userfaultfd")]
    Unregistered {
        /// First byte that is not done.
        address: u64,
    },
    /// The process that the memory is of has ended.
    #[error("the process whose pages a userfaultfd serves has ended")]
    ProcessEnded,
    /// Pages cannot be filled.
    #[error("filling pages at {address:#x} through a userfaultfd")]
    Fill {
        /// First byte that is not done.
        address: u64,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// The protection of pages cannot be changed.
    #[error("changing the write protection of pages at {address:#x} through a userfaultfd")]
    Protect {
        /// First byte.
        address: u64,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// Sleeping threads cannot be woken.
    #[error("waking the threads that wait for pages at {address:#x}")]
    Wake {
        /// First byte.
        address: u64,
        /// What the kernel said.
        source: std::io::Error,
    },
}

/// A userfaultfd. All methods may be called from any thread.
#[derive(Debug)]
pub struct Uffd {
    fd: OwnedFd,
}

impl AsFd for Uffd {
    /// To wait for events: readable while there are some.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Uffd {
    /// Opens a userfaultfd that serves faults of user space and of the kernel, with these features.
    ///
    /// # Errors
    /// [`UffdError::Open`], [`UffdError::Features`].
    pub fn open(features: Features) -> Result<Self, UffdError> {
        let fd = open().map_err(|errno| UffdError::Open(errno.into()))?;
        let mut api = uffdio_api { api: UFFD_API.into(), features: features.bits(), ioctls: 0 };
        // SAFETY: the value is what UFFDIO_API takes; it changes no memory but the value.
        let asked = unsafe { call::<UFFDIO_API, _>(&fd, &mut api) };
        match asked {
            Ok(()) => Ok(Self { fd }),
            // The kernel refuses all when it lacks one, and leaves nothing in the value: a second one tells.
            Err(Errno::INVAL) => Err(UffdError::Features { missing: features - offered()? }),
            Err(errno) => Err(UffdError::Open(errno.into())),
        }
    }

    /// Takes over one that another process has opened and registered its memory with. Addresses are of that process; the
    /// features are those that it asked for.
    ///
    /// # Errors
    /// [`UffdError::Open`] when it cannot be kept from blocking.
    pub fn of(fd: OwnedFd) -> Result<Self, UffdError> {
        let flags = fcntl_getfl(&fd).map_err(|errno| UffdError::Open(errno.into()))?;
        fcntl_setfl(&fd, flags | OFlags::NONBLOCK)
            .map_err(|errno| UffdError::Open(errno.into()))?;
        Ok(Self { fd })
    }

    /// Has faults on whole pages of this process reported, until they are unmapped.
    ///
    /// # Safety
    /// No Rust reference points into the range: its contents come from whoever answers, at any time.
    ///
    /// # Errors
    /// [`UffdError::Register`]: not whole pages, not mapped, or memory of a kind that cannot be watched.
    pub unsafe fn register(&self, range: Range<u64>, watch: Watch) -> Result<(), UffdError> {
        let mut value = uffdio_register { range: span(&range), mode: watch.bits(), ioctls: 0 };
        // SAFETY: the value is what UFFDIO_REGISTER takes; the caller answers for the range.
        unsafe { call::<UFFDIO_REGISTER, _>(&self.fd, &mut value) }.map_err(|errno| {
            UffdError::Register {
                address: range.start,
                len: range.end.saturating_sub(range.start),
                source: errno.into(),
            }
        })
    }

    /// The events that wait, oldest first; none where nothing happened. Never blocks.
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

    /// Fills missing pages with bytes, whole pages, and wakes who waits for them.
    ///
    /// # Errors
    /// [`UffdError::Changing`], [`UffdError::Present`], [`UffdError::Unregistered`], [`UffdError::Fill`]: pages before the
    /// address are done; [`UffdError::ProcessEnded`].
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
            // SAFETY: the value is what UFFDIO_COPY takes, and its source lies in `bytes`; the kernel fills missing pages
            // of registered ranges alone, into which no references point.
            let copied = unsafe { call::<UFFDIO_COPY, _>(&self.fd, &mut value) };
            (value.copy, copied)
        })
    }

    /// Fills missing pages with zeros, which cost no DRAM until they are written, and wakes who waits for them.
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

    /// Puts pages of shared memory that are there into the page tables, and wakes who waits for them.
    ///
    /// # Errors
    /// As [`Uffd::copy`].
    pub fn map_present(&self, range: Range<u64>) -> Result<(), UffdError> {
        let uffdio_range { start, len } = span(&range);
        until_full(start, len, |done| {
            let range = uffdio_range { start: start + done, len: len - done };
            let mut value = uffdio_continue { range, mode: 0, mapped: 0 };
            // SAFETY: the value is what UFFDIO_CONTINUE takes; it maps what the memory's file holds already.
            let mapped = unsafe { call::<UFFDIO_CONTINUE, _>(&self.fd, &mut value) };
            (value.mapped, mapped)
        })
    }

    /// Marks missing pages as lost, and wakes who waits for them: touching one is SIGBUS, or the error EFAULT of a system
    /// call, for good.
    ///
    /// # Errors
    /// As [`Uffd::copy`].
    pub fn poison(&self, range: Range<u64>) -> Result<(), UffdError> {
        let uffdio_range { start, len } = span(&range);
        until_full(start, len, |done| {
            let range = uffdio_range { start: start + done, len: len - done };
            let mut value = uffdio_poison { range, mode: 0, updated: 0 };
            // SAFETY: the value is what UFFDIO_POISON takes; pages that are missing become unusable, no others.
            let poisoned = unsafe { call::<UFFDIO_POISON, _>(&self.fd, &mut value) };
            (value.updated, poisoned)
        })
    }

    /// Protects pages that are there against writing, or lifts the protection and wakes who waits for that.
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

    /// Wakes the threads that wait for pages of a range; they touch them again.
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

fn open() -> Result<OwnedFd, Errno> {
    // SAFETY: a userfaultfd without a registered range changes no memory.
    unsafe { rustix::mm::userfaultfd(UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK) }
}

/// What this kernel offers.
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
    // SAFETY: the caller's promise.
    let operation = unsafe { Updater::<OPERATION, T>::new(value) };
    // SAFETY: the caller's promise.
    unsafe { ioctl(fd, operation) }
}

fn span(range: &Range<u64>) -> uffdio_range {
    uffdio_range { start: range.start, len: range.end.saturating_sub(range.start) }
}

/// Goes on with an operation that may stop half-way. It is told how many bytes are done, and says how many more it did;
/// the kernel reports such a stop as EAGAIN, and its cause only when asked to go on.
fn until_full(
    address: u64,
    len: u64,
    mut operation: impl FnMut(u64) -> (i64, Result<(), Errno>),
) -> Result<(), UffdError> {
    let mut done = 0;
    loop {
        let (more, result) = operation(done);
        // What is not done at all is a negative number, the error's.
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
