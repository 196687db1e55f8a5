//! How long a vCPU was in guest mode, by KVM's tracepoints `kvm_entry` and `kvm_exit` through perf
//! (perf_event_open(2)): what a guest worked, without what the host did in between.
//!
//! Each stay is longer than the guest's work by the way from one tracepoint into the guest and out of it to the other.
//! The shortest stay of all is taken for that way and is subtracted from every one. A stay that ends in a halt counts
//! nothing: how much of it the guest slept is not known.

use std::ffi::c_void;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use thiserror::Error;

/// Where tracefs is mounted.
const TRACEFS: [&str; 2] = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];
const PAGE: usize = 4096;
/// Bytes of the ring: some 60,000 stays.
const RING: usize = 8 << 20;
/// Offsets in the ring's first page (`struct perf_event_mmap_page`).
const DATA_HEAD: usize = 1024;
const DATA_TAIL: usize = 1032;

const PERF_TYPE_TRACEPOINT: u32 = 2;
const PERF_SAMPLE_TIME: u64 = 1 << 2;
const PERF_SAMPLE_RAW: u64 = 1 << 10;
const PERF_FLAG_FD_CLOEXEC: libc::c_ulong = 8;
const PERF_EVENT_IOC_SET_OUTPUT: libc::c_ulong = 0x2405;
const PERF_RECORD_LOST: u32 = 2;
const PERF_RECORD_SAMPLE: u32 = 9;

/// `struct perf_event_attr` in its first version, which every kernel takes.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup_events: u32,
    breakpoint_type: u32,
    config1: u64,
}

/// Why time in guest mode cannot be measured.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum GuestTimeError {
    /// A tracepoint's description cannot be read.
    #[error(
        "reading KVM's tracepoint {name} from tracefs: load KVM, mount tracefs at {}, and run as root",
        TRACEFS[0]
    )]
    Tracepoint {
        /// Its name.
        name: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// A tracepoint is not described as expected.
    #[error("KVM's tracepoint {0} has no field that this firn knows: use Linux 6.1 or newer")]
    Format(&'static str),
    /// perf refuses.
    #[error("watching KVM's tracepoints by perf: run as root, or with CAP_PERFMON")]
    Perf(#[source] io::Error),
    /// The ring between kernel and firn cannot be mapped.
    #[error("mapping the ring of perf's samples")]
    Map(#[source] io::Error),
    /// More was traced between two looks than the ring holds.
    #[error("{0} of perf's samples were lost: too many exits of the guest between two touches")]
    Lost(u64),
    /// A sample that cannot be read.
    #[error("a sample of perf's cannot be read: a defect of firn or of the kernel")]
    Sample,
}

/// What a vCPU worked, in all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GuestTimeTotals {
    /// Stays in guest mode.
    pub stays: u64,
    /// Stays that ended in a halt, and count nothing.
    pub halts: u64,
    /// The shortest stay, ns, which was subtracted from each.
    pub shortest: u64,
    /// What the guest worked, ns.
    pub worked: u64,
}

/// Samples of one vCPU's thread.
#[derive(Debug)]
pub(crate) struct GuestTime {
    _events: [OwnedFd; 2],
    ring: Ring,
    entry: u16,
    exit: u16,
    rip_at: usize,
    entered: Option<u64>,
    shortest: u64,
    totals: GuestTimeTotals,
}

impl GuestTime {
    /// Watches a thread from now on.
    pub(crate) fn of_thread(thread: u32) -> Result<Self, GuestTimeError> {
        let (entry, _) = tracepoint("kvm_entry")?;
        let (exit, format) = tracepoint("kvm_exit")?;
        let rip_at = offset(&format, "guest_rip").ok_or(GuestTimeError::Format("kvm_exit"))?;
        let events = [open(entry, thread)?, open(exit, thread)?];
        let ring = Ring::map(&events[0])?;
        // SAFETY: the operation takes a descriptor and touches no memory of ours.
        let joined = unsafe {
            libc::ioctl(events[1].as_raw_fd(), PERF_EVENT_IOC_SET_OUTPUT, events[0].as_raw_fd())
        };
        if joined != 0 {
            return Err(GuestTimeError::Perf(io::Error::last_os_error()));
        }
        Ok(Self {
            _events: events,
            ring,
            entry,
            exit,
            rip_at,
            entered: None,
            shortest: u64::MAX,
            totals: GuestTimeTotals::default(),
        })
    }

    /// What the guest worked in the stays that ended since the last call, ns. `halted` says whether a guest that left
    /// guest mode at an instruction pointer had halted.
    pub(crate) fn take(&mut self, halted: impl Fn(u64) -> bool) -> Result<u64, GuestTimeError> {
        let Self { ring, entry, exit, rip_at, entered, shortest, totals, .. } = self;
        let mut stays: Vec<u64> = Vec::new();
        ring.drain(|kind, body| {
            match kind {
                // struct { u64 id, lost }
                PERF_RECORD_LOST => {
                    return Err(GuestTimeError::Lost(
                        u64_at(body, 8).ok_or(GuestTimeError::Sample)?,
                    ));
                }
                PERF_RECORD_SAMPLE => {}
                _ => return Ok(()),
            }
            let sample = Sample::read(body).ok_or(GuestTimeError::Sample)?;
            if sample.tracepoint == *entry {
                *entered = Some(sample.time);
            } else if sample.tracepoint == *exit
                && let Some(since) = entered.take()
            {
                let stay = sample.time.saturating_sub(since);
                let rip = u64_at(sample.raw, *rip_at).ok_or(GuestTimeError::Sample)?;
                totals.stays += 1;
                *shortest = (*shortest).min(stay);
                if halted(rip) {
                    totals.halts += 1;
                } else {
                    stays.push(stay);
                }
            }
            Ok(())
        })?;
        let worked = stays.iter().map(|stay| stay - *shortest).sum();
        totals.worked += worked;
        Ok(worked)
    }

    pub(crate) fn totals(&self) -> GuestTimeTotals {
        let shortest = if self.totals.stays == 0 { 0 } else { self.shortest };
        GuestTimeTotals { shortest, ..self.totals }
    }
}

/// A sample's parts: what `PERF_SAMPLE_TIME | PERF_SAMPLE_RAW` lays down.
struct Sample<'a> {
    time: u64,
    tracepoint: u16,
    raw: &'a [u8],
}

impl<'a> Sample<'a> {
    fn read(body: &'a [u8]) -> Option<Self> {
        let time = u64_at(body, 0)?;
        let len = u32::from_ne_bytes(*body.get(8..)?.first_chunk()?);
        let raw = body.get(12..)?.get(..usize::try_from(len).ok()?)?;
        // Every tracepoint's record begins with its number.
        let tracepoint = u16::from_ne_bytes(*raw.first_chunk()?);
        Some(Self { time, tracepoint, raw })
    }
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// A KVM tracepoint's number and description.
fn tracepoint(name: &'static str) -> Result<(u16, String), GuestTimeError> {
    let read = |file: &str| {
        let path = |root: &str| format!("{root}/events/kvm/{name}/{file}");
        fs::read_to_string(path(TRACEFS[0])).or_else(|first| {
            // The first place's error is the one worth telling.
            fs::read_to_string(path(TRACEFS[1])).map_err(|_| first)
        })
    };
    let failed = |source| GuestTimeError::Tracepoint { name, source };
    let number = read("id").map_err(failed)?.trim().parse();
    let number = number.map_err(|_| GuestTimeError::Format(name))?;
    Ok((number, read("format").map_err(failed)?))
}

/// Where a field of 8 bytes lies in a tracepoint's record.
fn offset(format: &str, field: &str) -> Option<usize> {
    let line = format.lines().find(|line| line.contains(&format!(" {field};")))?;
    let number = |name: &str| line.split(';').find_map(|part| part.trim().strip_prefix(name));
    (number("size:")? == "8").then_some(())?;
    number("offset:")?.parse().ok()
}

fn open(tracepoint: u16, thread: u32) -> Result<OwnedFd, GuestTimeError> {
    let attributes = Attributes {
        kind: PERF_TYPE_TRACEPOINT,
        // All of the first version.
        size: 64,
        config: tracepoint.into(),
        sample_period: 1,
        sample_type: PERF_SAMPLE_TIME | PERF_SAMPLE_RAW,
        ..Attributes::default()
    };
    let (any_processor, no_group): (libc::c_int, libc::c_int) = (-1, -1);
    // SAFETY: the attributes live through the call and are as long as they say.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            &raw const attributes,
            thread,
            any_processor,
            no_group,
            PERF_FLAG_FD_CLOEXEC,
        )
    };
    match i32::try_from(fd) {
        // SAFETY: the kernel just gave us this descriptor; nothing else owns it.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(GuestTimeError::Perf(io::Error::last_os_error())),
    }
}

/// The memory in which the kernel lays samples down, and the place up to which they were read.
#[derive(Debug)]
struct Ring {
    base: NonNull<u8>,
}

// SAFETY: the mapping belongs to this value alone, and may be used from any one thread.
unsafe impl Send for Ring {}

impl Ring {
    fn map(event: &OwnedFd) -> Result<Self, GuestTimeError> {
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let base = unsafe { mmap(std::ptr::null_mut(), PAGE + RING, protection, flags, event, 0) };
        let base = base.map_err(|errno| GuestTimeError::Map(errno.into()))?;
        let base = NonNull::new(base.cast()).ok_or(GuestTimeError::Sample)?;
        Ok(Self { base })
    }

    fn counter(&self, at: usize) -> &AtomicU64 {
        let place = self.base.as_ptr().wrapping_add(at).cast::<AtomicU64>();
        // SAFETY: the counters lie in the mapping's first page, aligned; kernel and firn change them atomically.
        unsafe { &*place }
    }

    /// Hands each record on, its kind and its body, and gives its place back.
    fn drain(
        &mut self,
        mut record: impl FnMut(u32, &[u8]) -> Result<(), GuestTimeError>,
    ) -> Result<(), GuestTimeError> {
        // Both count bytes since the beginning. The kernel's data is whole up to its head.
        let head = self.counter(DATA_HEAD).load(Ordering::Acquire);
        let mut tail = self.counter(DATA_TAIL).load(Ordering::Relaxed);
        let mut bytes = Vec::new();
        let mut result = Ok(());
        while tail != head && result.is_ok() {
            // struct perf_event_header { u32 type; u16 misc; u16 size; }
            bytes.resize(8, 0);
            self.copy(tail, &mut bytes);
            let header = u64_at(&bytes, 0).ok_or(GuestTimeError::Sample)?;
            let (kind, len) = (header & 0xffff_ffff, header >> 48);
            let waiting = head.wrapping_sub(tail);
            let (Ok(kind), 8.., true) = (u32::try_from(kind), len, len <= waiting) else {
                return Err(GuestTimeError::Sample);
            };
            bytes.resize(usize::from(u16::try_from(len).unwrap_or(0)), 0);
            self.copy(tail, &mut bytes);
            result = record(kind, &bytes[8..]);
            tail = tail.wrapping_add(len);
        }
        self.counter(DATA_TAIL).store(tail, Ordering::Release);
        result
    }

    /// Copies from a place in the stream; what passes the ring's end goes on at its beginning.
    fn copy(&self, from: u64, to: &mut [u8]) {
        let ring = self.base.as_ptr().wrapping_add(PAGE);
        for (at, byte) in (from..).zip(to) {
            let place = usize::try_from(at % RING as u64).unwrap_or(0);
            // SAFETY: the place lies in the mapping, and the kernel writes nothing there before it is given back.
            *byte = unsafe { ring.wrapping_add(place).read_volatile() };
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: the range is the one that `map` got, and nobody uses it any more. That cannot fail.
        let _ = unsafe { munmap(self.base.as_ptr().cast::<c_void>(), PAGE + RING) };
    }
}

#[cfg(test)]
#[path = "guest_time_tests.rs"]
mod tests;
