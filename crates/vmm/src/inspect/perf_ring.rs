//! The samples of a tracepoint, read from the ring buffer of perf (perf_event_open(2)).

use std::io;
use std::mem::offset_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use perf_event_open_sys::bindings::{
    PERF_FLAG_FD_CLOEXEC, PERF_RECORD_LOST, PERF_RECORD_SAMPLE, PERF_SAMPLE_RAW, PERF_SAMPLE_TIME,
    PERF_TYPE_TRACEPOINT, perf_event_attr, perf_event_mmap_page,
};
use perf_event_open_sys::{ioctls, perf_event_open};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use thiserror::Error;

/// Why samples cannot be read.
#[derive(Debug, Error)]
pub enum PerfError {
    /// perf refuses to open a tracepoint.
    #[error("cannot open KVM's tracepoints with perf: run as root, or with CAP_PERFMON")]
    Open(#[source] io::Error),
    /// The ring buffer cannot be mapped.
    #[error("cannot map perf's ring buffer")]
    Map(#[source] io::Error),
    /// More samples arrived between two reads than the ring buffer holds.
    #[error("perf lost {0} samples: the guest exits too often between two faults")]
    Lost(u64),
    /// A sample is invalid.
    #[error("a sample of perf is invalid: a defect of firn or of the kernel")]
    Sample,
}

/// Bytes of the page with the counters, before the ring.
const COUNTERS: usize = 4096;
/// Bytes of the ring: about 60,000 entries and exits of a guest.
const RING: usize = 8 << 20;

/// A sample of a tracepoint.
pub(super) struct Sample<'a> {
    /// perf's clock, ns.
    pub(super) time: u64,
    /// The tracepoint's number.
    pub(super) tracepoint: u16,
    /// The tracepoint's record.
    pub(super) record: &'a [u8],
}

impl<'a> Sample<'a> {
    /// Parses the body of a record with `PERF_SAMPLE_TIME | PERF_SAMPLE_RAW`.
    pub(super) fn parse(body: &'a [u8]) -> Option<Self> {
        let time = u64_at(body, 0)?;
        let len = u32::from_ne_bytes(*body.get(8..)?.first_chunk()?);
        let record = body.get(12..)?.get(..usize::try_from(len).ok()?)?;
        // Every tracepoint's record begins with the tracepoint's number.
        let tracepoint = u16::from_ne_bytes(*record.first_chunk()?);
        Some(Self { time, tracepoint, record })
    }

    /// The 8 bytes of the record at an offset.
    pub(super) fn u64_at(&self, at: usize) -> Option<u64> {
        u64_at(self.record, at)
    }
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Opens a tracepoint for one thread.
fn open(tracepoint: u16, thread: u32) -> Result<OwnedFd, PerfError> {
    let mut attributes = perf_event_attr {
        type_: PERF_TYPE_TRACEPOINT,
        size: u32::try_from(size_of::<perf_event_attr>()).unwrap_or(u32::MAX),
        config: tracepoint.into(),
        sample_type: u64::from(PERF_SAMPLE_TIME | PERF_SAMPLE_RAW),
        ..Default::default()
    };
    attributes.__bindgen_anon_1.sample_period = 1;
    let thread = thread.cast_signed();
    let (any_processor, no_group) = (-1, -1);
    let flags = u64::from(PERF_FLAG_FD_CLOEXEC);
    // SAFETY: the attributes live during the call and have the size that they state.
    let fd =
        unsafe { perf_event_open(&raw mut attributes, thread, any_processor, no_group, flags) };
    if fd < 0 {
        return Err(PerfError::Open(io::Error::last_os_error()));
    }
    // SAFETY: the kernel just returned this descriptor; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The samples of two tracepoints of one thread, in the order of their times. Another process can
/// read them, too, as long as this one is alive.
#[derive(Debug)]
pub(super) struct PerfRing {
    /// The mapping: the page of [`perf_event_mmap_page`], then the ring.
    base: NonNull<u8>,
    /// The tracepoints stay enabled while these are open.
    events: [OwnedFd; 2],
}

// SAFETY: the mapping belongs to this value alone and may be used from any one thread.
unsafe impl Send for PerfRing {}
// SAFETY: through a shared reference only the counters are accessed, which are atomic.
unsafe impl Sync for PerfRing {}

impl PerfRing {
    /// Samples two tracepoints of a thread from now on.
    pub(super) fn open(tracepoints: [u16; 2], thread: u32) -> Result<Self, PerfError> {
        let ring = Self::of([open(tracepoints[0], thread)?, open(tracepoints[1], thread)?])?;
        let [first, second] = &ring.events;
        // SAFETY: the operation takes a descriptor and accesses no memory of this process.
        if unsafe { ioctls::SET_OUTPUT(second.as_raw_fd(), first.as_raw_fd()) } != 0 {
            return Err(PerfError::Open(io::Error::last_os_error()));
        }
        Ok(ring)
    }

    /// The samples of tracepoints that are open. The first has the ring.
    pub(super) fn of(events: [OwnedFd; 2]) -> Result<Self, PerfError> {
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        let (anywhere, len) = (std::ptr::null_mut(), COUNTERS + RING);
        // SAFETY: a new mapping at an address that the kernel chooses affects no other memory.
        let base = unsafe { mmap(anywhere, len, protection, flags, &events[0], 0) };
        let base = base.map_err(|errno| PerfError::Map(errno.into()))?;
        let base = NonNull::new(base.cast()).ok_or(PerfError::Sample)?;
        Ok(Self { base, events })
    }

    /// The tracepoints, for the process that reads the samples.
    pub(super) fn events(&self) -> io::Result<[OwnedFd; 2]> {
        let [first, second] = &self.events;
        Ok([first.try_clone()?, second.try_clone()?])
    }

    fn counter(&self, offset: usize) -> &AtomicU64 {
        let place = self.base.as_ptr().wrapping_add(offset).cast::<AtomicU64>();
        // SAFETY: the counters lie in the first page of the mapping, aligned; the kernel and this
        // process access them atomically.
        unsafe { &*place }
    }

    /// Passes each new sample to `take` and releases its space in the ring.
    pub(super) fn drain(
        &mut self,
        mut take: impl FnMut(&Sample<'_>) -> Result<(), PerfError>,
    ) -> Result<(), PerfError> {
        // Both counters are bytes since the start. The kernel's data is complete up to the head.
        let head = self.counter(offset_of!(perf_event_mmap_page, data_head));
        let head = head.load(Ordering::Acquire);
        let released = self.counter(offset_of!(perf_event_mmap_page, data_tail));
        let mut tail = released.load(Ordering::Relaxed);
        let mut bytes = Vec::new();
        let mut result = Ok(());
        while tail != head && result.is_ok() {
            // struct perf_event_header { u32 type; u16 misc; u16 size; }
            bytes.resize(8, 0);
            self.copy(tail, &mut bytes);
            let header = u64_at(&bytes, 0).ok_or(PerfError::Sample)?;
            let (kind, len) = (header & 0xffff_ffff, header >> 48);
            let available = head.wrapping_sub(tail);
            let (Ok(kind), 8.., true) = (u32::try_from(kind), len, len <= available) else {
                return Err(PerfError::Sample);
            };
            bytes.resize(usize::from(u16::try_from(len).unwrap_or(0)), 0);
            self.copy(tail, &mut bytes);
            let body = &bytes[8..];
            result = match kind {
                // struct { u64 id, lost }
                PERF_RECORD_LOST => Err(u64_at(body, 8).map_or(PerfError::Sample, PerfError::Lost)),
                PERF_RECORD_SAMPLE => {
                    Sample::parse(body).ok_or(PerfError::Sample).and_then(|sample| take(&sample))
                }
                _ => Ok(()),
            };
            tail = tail.wrapping_add(len);
        }
        released.store(tail, Ordering::Release);
        result
    }

    /// Copies bytes from a position of the stream. Bytes past the end of the ring continue at its
    /// start.
    fn copy(&self, from: u64, to: &mut [u8]) {
        let ring = self.base.as_ptr().wrapping_add(COUNTERS);
        for (at, byte) in (from..).zip(to) {
            let place = usize::try_from(at % RING as u64).unwrap_or(0);
            // SAFETY: the address is in the mapping, and the kernel writes nothing there until the
            // space is released.
            *byte = unsafe { ring.wrapping_add(place).read_volatile() };
        }
    }
}

impl Drop for PerfRing {
    fn drop(&mut self) {
        // SAFETY: this is the mapping that `of` made, and nothing uses it any more.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), COUNTERS + RING) };
    }
}

#[cfg(test)]
#[path = "perf_ring_tests.rs"]
mod tests;
