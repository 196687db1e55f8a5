//! Writing a snapshot into an extent of a pool: guest memory, followed by a tail.
//!
//! The extent begins with guest memory; every page is written, except zero pages where the extent
//! is zero. The tail follows at the pool's alignment. It contains a header, the bytes of
//! `snapshot.firn`, and the nonzero parts of the writable disk. This crate writes the bytes; the
//! pool makes them durable and publishes them.

use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::attach::{AttachError, COPY, Edited, copy};
use crate::container::{HEADER_LEN, Header};
use crate::disk::{DiskSource, ScanError, scan};
use crate::freeze_error::FreezeError;
use crate::image::{ImageSink, PageSource, is_zero, write_image, write_nonzero};
use crate::manifest::{Description, DiskIdentity, ImageInfo, ImageKind, Manifest};
use crate::page_set::PageSet;
use crate::profile::Profile;
use crate::section::{NO_PROFILE_VERSION, Section, digests_len};
use crate::tail::{MAX_RUNS, Tail, TailHeader};
use crate::writer::SealReport;

/// The extent that a snapshot is written into. Offsets are relative to guest memory or to the tail.
pub trait ExtentTarget: Sync {
    /// Allocates space for guest memory and the tail, in bytes. It is called once, before the other
    /// methods.
    ///
    /// # Errors
    /// There is not enough space; nothing has changed.
    fn allocate(&mut self, guest_bytes: u64, tail_bytes: u64) -> io::Result<()>;

    /// Writes guest memory at `offset`. Every page is written once, including zero pages, except
    /// where [`is_zeroed`](Self::is_zeroed) is true for them. Several threads call it.
    ///
    /// # Errors
    /// Any error of writing the bytes.
    fn write_memory(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Whether a part of guest memory is zero before it is written. Several threads call it.
    fn is_zeroed(&self, offset: u64, len: u64) -> bool {
        let _ = (offset, len);
        false
    }

    /// Writes the tail at `offset`.
    ///
    /// # Errors
    /// Any error of writing the bytes.
    fn write_tail(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Makes all bytes durable.
    ///
    /// # Errors
    /// Any error of making the bytes durable.
    fn flush(&mut self) -> io::Result<()>;

    /// Publishes the extent under its name, in one step. It is called last.
    ///
    /// # Errors
    /// The previous snapshot keeps the name.
    fn publish(&mut self) -> io::Result<()>;
}

/// What is frozen into an extent.
pub struct ExtentContents<'a> {
    /// Guest memory.
    pub memory: &'a dyn PageSource,
    /// The monitor's description of the microVM.
    pub description: Description,
    /// Version of the machine state.
    pub machine_state_version: u32,
    /// The machine state, opaque to this crate.
    pub machine_state: &'a [u8],
}

/// Freezes into an extent: allocates it, writes it, makes it durable and publishes it. `overlay` is
/// the writable disk, if the microVM has one. It is read twice: first to find its nonzero parts,
/// which determine the length of the tail, then to copy them into the tail.
///
/// # Errors
/// [`FreezeError`]: guest memory or disk cannot be read, or the extent cannot be allocated or
/// written. The target discards what was not published.
pub fn write_extent(
    contents: ExtentContents<'_>,
    mut overlay: Option<&mut dyn DiskSource>,
    target: &mut dyn ExtentTarget,
) -> Result<SealReport, FreezeError> {
    let begin = Instant::now();
    let disk = match &mut overlay {
        Some(overlay) => Some(scan_overlay(&mut **overlay)?),
        None => None,
    };
    let mut overlay_time = begin.elapsed();

    let begin = Instant::now();
    let layout = contents.memory.layout().clone();
    let pages = layout.pages();
    let manifest = Manifest {
        description: contents.description,
        layout,
        image: ImageInfo { kind: ImageKind::Dense, stored_pages: pages },
        overlay: disk.as_ref().map(|disk| disk.identity),
        protected: Vec::new(),
    };
    let guest_bytes = manifest.layout.total_bytes();
    let (version, manifest) = manifest.encode()?;
    let sections_len = HEADER_LEN as u64
        + manifest.len() as u64
        + contents.machine_state.len() as u64
        + PageSet::encoded_len(pages)
        + digests_len(pages);
    let runs = disk.map(|disk| disk.runs).unwrap_or_default();
    let tail = TailHeader {
        container_len: sections_len,
        data_len: runs.iter().map(|run| run.end - run.start).sum(),
        runs,
    };
    target.allocate(guest_bytes, tail.data().end).map_err(failed("allocate"))?;
    let memory = MemorySink { target: &*target, written: AtomicU64::new(0) };
    let image = write_image(&memory, contents.memory, ImageKind::Dense)?;
    let mut bytes_written = memory.written.into_inner();
    let image_time = begin.elapsed();

    let begin = Instant::now();
    let zero_pages = image.zero_map.count();
    let stored_pages = image.info.stored_pages;
    let zero_map = image.zero_map.to_bytes();
    let sections: [(Section, u32, &[u8]); Section::TABLE.len()] = [
        (Section::Manifest, version, &manifest),
        (Section::MachineState, contents.machine_state_version, contents.machine_state),
        (Section::ZeroMap, version, &zero_map),
        (Section::Profile, NO_PROFILE_VERSION, &[]),
        (Section::Digests, version, &image.digests),
    ];
    let header = Header::of(&sections)?;
    debug_assert_eq!(header.file_len(), tail.container_len);
    let mut write = |offset, bytes: &[u8]| {
        bytes_written += bytes.len() as u64;
        target.write_tail(offset, bytes).map_err(failed("write the tail of"))
    };
    write(0, &tail.encode())?;
    let container = tail.container().start;
    write(container, &header.encode())?;
    for (section, _, bytes) in sections {
        write(container + header.range(section).start, bytes)?;
    }
    let sections_time = begin.elapsed();

    let begin = Instant::now();
    if let Some(overlay) = overlay {
        copy_runs(overlay, &tail, &mut write)?;
    }
    overlay_time += begin.elapsed();

    let begin = Instant::now();
    target.flush().map_err(failed("make durable"))?;
    let sync = sections_time + begin.elapsed();
    let begin = Instant::now();
    target.publish().map_err(failed("publish"))?;
    Ok(SealReport {
        stored_pages,
        zero_pages,
        bytes_written,
        disk_bytes: bytes_written,
        image: image_time,
        overlay: overlay_time,
        sync,
        protect: Duration::ZERO,
        protected: Vec::new(),
        publish: begin.elapsed(),
        work: image.work,
    })
}

fn failed(action: &'static str) -> impl FnOnce(io::Error) -> FreezeError {
    move |source| FreezeError::Extent { action, source }
}

struct MemorySink<'a> {
    target: &'a dyn ExtentTarget,
    written: AtomicU64,
}

impl ImageSink for MemorySink<'_> {
    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), FreezeError> {
        self.written.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        self.target.write_memory(offset, bytes).map_err(failed("write guest memory into"))
    }

    fn is_zeroed(&self, offset: u64, len: u64) -> bool {
        self.target.is_zeroed(offset, len)
    }

    fn finish_chunk(&self, _: u64, _: u64) {}
}

/// The nonzero parts of a writable disk.
struct OverlayRuns {
    identity: DiskIdentity,
    runs: Vec<Range<u64>>,
}

impl OverlayRuns {
    /// Adds a part behind the others.
    fn add(&mut self, offset: u64, bytes: &[u8]) -> Result<(), FreezeError> {
        let end = offset + bytes.len() as u64;
        let full = self.runs.len() as u64 == MAX_RUNS;
        match self.runs.last_mut() {
            Some(last) if last.end == offset => last.end = end,
            _ if full => return Err(FreezeError::TooManyRuns { max: MAX_RUNS }),
            _ => self.runs.push(offset..end),
        }
        Ok(())
    }
}

fn scan_overlay(source: &mut dyn DiskSource) -> Result<OverlayRuns, FreezeError> {
    let identity = DiskIdentity { len: 0, head: 0, digest: 0 };
    let mut overlay = OverlayRuns { identity, runs: Vec::new() };
    let identity = scan(source, |offset, bytes| {
        write_nonzero(offset, bytes, |_, page| is_zero(page), |at, bytes| overlay.add(at, bytes))
            .map_err(ScanError::Write)
    })
    .map_err(FreezeError::from)?;
    overlay.identity = identity;
    Ok(overlay)
}

/// Copies the runs' bytes into the tail.
fn copy_runs(
    source: &mut dyn DiskSource,
    tail: &TailHeader,
    mut write: impl FnMut(u64, &[u8]) -> Result<(), FreezeError>,
) -> Result<(), FreezeError> {
    let mut buf = vec![0; COPY];
    let mut at = tail.data().start;
    for run in &tail.runs {
        let mut offset = run.start;
        while offset < run.end {
            let bytes = &mut buf[..usize::try_from(run.end - offset).unwrap_or(COPY).min(COPY)];
            source.read(bytes, offset).map_err(|source| FreezeError::Overlay { source })?;
            write(at, bytes)?;
            offset += bytes.len() as u64;
            at += bytes.len() as u64;
        }
    }
    Ok(())
}

/// Writes the extent of a snapshot with a new profile: copies guest memory and disk, and replaces
/// the profile section.
pub(crate) fn write_with_profile(
    tail: &Tail,
    path: &Path,
    profile: &Profile,
    mut read_memory: impl FnMut(u64, &mut [u8]),
    target: &mut dyn ExtentTarget,
) -> Result<(), AttachError> {
    let container = Edited::with_profile(&tail.container, path, profile)?;
    let header = TailHeader { container_len: container.header.file_len(), ..tail.header.clone() };
    let guest_bytes = container.manifest.layout.total_bytes();
    target.allocate(guest_bytes, header.data().end).map_err(failed("allocate"))?;
    let mut buf = vec![0; COPY];
    let mut offset = 0;
    while offset < guest_bytes {
        let bytes = &mut buf[..usize::try_from(guest_bytes - offset).unwrap_or(COPY).min(COPY)];
        read_memory(offset, bytes);
        target.write_memory(offset, bytes).map_err(failed("write guest memory into"))?;
        offset += bytes.len() as u64;
    }
    target.write_tail(0, &header.encode()).map_err(failed("write the tail of"))?;
    let start = header.container().start;
    container.write(&tail.container, path, &mut |offset, bytes| {
        target.write_tail(start + offset, bytes).map_err(failed("write the tail of"))
    })?;
    let to = header.data().start;
    copy(&tail.container.whole, path, tail.header.data(), to, &mut |offset, bytes| {
        target.write_tail(offset, bytes).map_err(failed("write the tail of"))
    })?;
    target.flush().map_err(failed("make durable"))?;
    Ok(target.publish().map_err(failed("publish"))?)
}

#[cfg(test)]
#[path = "extent_tests.rs"]
mod tests;
