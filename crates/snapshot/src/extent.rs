//! A snapshot in an extent of a pool: guest memory, and a tail that holds the rest.
//!
//! The extent begins with guest memory, every page of it written. The tail, which lies behind at an alignment of the
//! pool's, holds the bytes that `snapshot.firn` has in a directory and what is not zero of the writable disk, behind a
//! header of its own. This crate writes and reads bytes; making them durable and publishing them is the pool's.

use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use crate::attach::{AttachError, COPY, WithProfile, copy};
use crate::container::{
    CONTAINER_VERSION, HEADER_LEN, Header, NO_PROFILE_VERSION, Section, digests_len,
};
use crate::disk::{DiskIdentity, DiskSource, ScanError, scan};
use crate::error::OpenError;
use crate::freeze_error::FreezeError;
use crate::image::{ImageSink, PageSource, is_zero, write_image, write_nonzero};
use crate::manifest::{Description, ImageInfo, ImageKind, Manifest};
use crate::page_set::PageSet;
use crate::profile::Profile;
use crate::read_at::{Part, ReadAt};
use crate::writer::SealReport;

/// First bytes of a tail, in every version.
const MAGIC: [u8; 16] = *b"firn tail\n\0\0\0\0\0\0";
/// Version of the tail's header; what it frames has versions of its own.
const TAIL_VERSION: u32 = 1;
/// Magic, version, CRC-32 of all that follows up to the container, then the container's length, the number of runs and
/// the length of their bytes.
const HEAD_LEN: usize = 48;
const TAIL_HEADER_LEN: u64 = HEAD_LEN as u64;
/// Bytes of a run in the table: offset in the disk and length.
const RUN_LEN: u64 = 16;
/// Most runs that a writable disk may have: it bounds what a reader allocates.
const MAX_RUNS: u64 = 1 << 20;

/// An extent to be: where the parts of a snapshot in a pool are written. Offsets are within guest memory, and within the
/// tail.
pub trait ExtentTarget {
    /// Makes room for so many bytes of guest memory, and for a tail of so many. It is called first, once.
    ///
    /// # Errors
    /// There is no room; nothing has changed then.
    fn allocate(&mut self, guest_bytes: u64, tail_bytes: u64) -> io::Result<()>;

    /// Takes guest memory from `offset` on. Every page is written once, zero pages too.
    ///
    /// # Errors
    /// Whatever keeps the bytes from being written.
    fn write_memory(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Takes the tail's bytes from `offset` on.
    ///
    /// # Errors
    /// Whatever keeps the bytes from being written.
    fn write_tail(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Makes all of it durable.
    ///
    /// # Errors
    /// Whatever keeps the bytes from the medium.
    fn flush(&mut self) -> io::Result<()>;

    /// Gives the extent its name, in one step. It is called last.
    ///
    /// # Errors
    /// The snapshot that had the name before still has it.
    fn publish(&mut self) -> io::Result<()>;
}

/// What is frozen into an extent.
pub struct ExtentContents<'a> {
    /// Guest memory.
    pub memory: &'a mut dyn PageSource,
    /// What the monitor says of the microVM.
    pub description: Description,
    /// Version of the machine state.
    pub machine_state_version: u32,
    /// The machine state, opaque here.
    pub machine_state: &'a [u8],
}

/// Freezes into an extent: allocates it, writes it, makes it durable and publishes it. `overlay` is the writable disk, when
/// the microVM has one. It is read twice: first to know what of it is not zero, so that the tail gets its true length, then
/// straight into the tail.
///
/// # Errors
/// [`FreezeError`]: guest memory or disk cannot be read, or the extent not be had or written. The target then drops what
/// was not published.
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
    };
    let guest_bytes = manifest.layout.total_bytes();
    let manifest = manifest.encode()?;
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
    let mut memory = MemorySink { target: &mut *target, written: 0 };
    let image = write_image(&mut memory, contents.memory, ImageKind::Dense)?;
    let mut bytes_written = memory.written;
    let image_time = begin.elapsed();

    let begin = Instant::now();
    let zero_pages = image.zero_map.count();
    let stored_pages = image.info.stored_pages;
    let zero_map = image.zero_map.to_bytes();
    let sections: [(Section, u32, &[u8]); Section::TABLE.len()] = [
        (Section::Manifest, CONTAINER_VERSION, &manifest),
        (Section::MachineState, contents.machine_state_version, contents.machine_state),
        (Section::ZeroMap, CONTAINER_VERSION, &zero_map),
        (Section::Profile, NO_PROFILE_VERSION, &[]),
        (Section::Digests, CONTAINER_VERSION, &image.digests),
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
        publish: begin.elapsed(),
    })
}

fn failed(action: &'static str) -> impl FnOnce(io::Error) -> FreezeError {
    move |source| FreezeError::Extent { action, source }
}

struct MemorySink<'a> {
    target: &'a mut dyn ExtentTarget,
    written: u64,
}

impl ImageSink for MemorySink<'_> {
    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), FreezeError> {
        self.written += bytes.len() as u64;
        self.target.write_memory(offset, bytes).map_err(failed("write guest memory into"))
    }
}

/// Where a writable disk is not zero.
struct OverlayRuns {
    identity: DiskIdentity,
    runs: Vec<Range<u64>>,
}

impl ImageSink for OverlayRuns {
    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), FreezeError> {
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
        write_nonzero(&mut overlay, offset, bytes, |_, page| is_zero(page))
            .map_err(ScanError::Write)
    })
    .map_err(FreezeError::from)?;
    overlay.identity = identity;
    Ok(overlay)
}

/// Writes the runs' bytes to where the tail has them.
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

/// Writes the extent that a snapshot has with another profile: guest memory and disk are copied, the container gets the
/// new section.
pub(crate) fn write_with_profile(
    tail: &Tail,
    path: &Path,
    profile: &Profile,
    mut read_memory: impl FnMut(u64, &mut [u8]),
    target: &mut dyn ExtentTarget,
) -> Result<(), AttachError> {
    let container = WithProfile::of(&tail.container, path, profile)?;
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

/// What frames the parts of a tail.
#[derive(Clone)]
struct TailHeader {
    container_len: u64,
    /// Ranges of the writable disk whose bytes follow, ascending.
    runs: Vec<Range<u64>>,
    data_len: u64,
}

impl TailHeader {
    /// Where the container lies in the tail.
    fn container(&self) -> Range<u64> {
        let start = TAIL_HEADER_LEN + self.runs.len() as u64 * RUN_LEN;
        start..start + self.container_len
    }

    /// Where the runs' bytes lie in the tail.
    fn data(&self) -> Range<u64> {
        let start = self.container().end;
        start..start + self.data_len
    }

    fn encode(&self) -> Vec<u8> {
        let mut body = Vec::new();
        for len in [self.container_len, self.runs.len() as u64, self.data_len] {
            body.extend(len.to_le_bytes());
        }
        for run in &self.runs {
            body.extend(run.start.to_le_bytes());
            body.extend((run.end - run.start).to_le_bytes());
        }
        let mut bytes = MAGIC.to_vec();
        bytes.extend(TAIL_VERSION.to_le_bytes());
        bytes.extend(crc32fast::hash(&body).to_le_bytes());
        bytes.extend(body);
        bytes
    }

    fn read(tail: &dyn ReadAt, path: &Path) -> Result<Self, OpenError> {
        let io = |source| OpenError::Io { path: path.into(), action: "read", source };
        let damaged = || OpenError::Damaged { path: path.into(), section: Section::Header };
        let size = tail.size().map_err(io)?;
        if size < TAIL_HEADER_LEN {
            return Err(damaged());
        }
        let mut head = [0; HEAD_LEN];
        tail.read_exact_at(&mut head, 0).map_err(io)?;
        if head[..16] != MAGIC {
            return Err(OpenError::NotASnapshot {
                path: path.into(),
                reason: "its tail does not start with \"firn tail\"",
            });
        }
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&head[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let version_and_crc = word(16);
        let version = u32::try_from(version_and_crc & u64::from(u32::MAX)).unwrap_or_default();
        if version != TAIL_VERSION {
            return Err(OpenError::ContainerVersion {
                path: path.into(),
                found: version,
                supported: TAIL_VERSION,
            });
        }
        let (container_len, count, data_len) = (word(24), word(32), word(40));
        let fits = TAIL_HEADER_LEN
            .checked_add(count.saturating_mul(RUN_LEN))
            .and_then(|sum| sum.checked_add(container_len))
            .and_then(|sum| sum.checked_add(data_len))
            .is_some_and(|sum| sum <= size);
        if count > MAX_RUNS || !fits {
            return Err(damaged());
        }
        let mut table = vec![0; usize::try_from(count * RUN_LEN).unwrap_or(usize::MAX)];
        tail.read_exact_at(&mut table, TAIL_HEADER_LEN).map_err(io)?;
        let mut crc = crc32fast::Hasher::new();
        crc.update(&head[24..]);
        crc.update(&table);
        if u64::from(crc.finalize()) != version_and_crc >> 32 {
            return Err(damaged());
        }
        let (words, _) = table.as_chunks::<8>();
        let runs = words.chunks_exact(2).map(|pair| {
            let start = u64::from_le_bytes(pair[0]);
            start..start.saturating_add(u64::from_le_bytes(pair[1]))
        });
        Ok(Self { container_len, runs: runs.collect(), data_len })
    }
}

/// The parts of an opened tail.
pub(crate) struct Tail {
    /// What `snapshot.firn` holds in a directory.
    pub(crate) container: Part<Arc<dyn ReadAt>>,
    header: TailHeader,
}

impl Tail {
    pub(crate) fn open(tail: &Arc<dyn ReadAt>, path: &Path) -> Result<Self, OpenError> {
        let header = TailHeader::read(tail, path)?;
        Ok(Self { container: Part { whole: tail.clone(), range: header.container() }, header })
    }

    /// The writable disk of `len` bytes.
    pub(crate) fn overlay(&self, len: u64, path: &Path) -> Result<OverlayInTail, OpenError> {
        let malformed =
            |reason| OpenError::Malformed { path: path.into(), section: Section::Header, reason };
        let mut runs = Vec::with_capacity(self.header.runs.len());
        let (mut end, mut at) = (0, self.header.data().start);
        for run in &self.header.runs {
            if run.start < end || run.end <= run.start || run.end > len {
                return Err(malformed("the runs of its disk are not in order within the disk"));
            }
            runs.push(StoredRange { disk: run.clone(), at });
            end = run.end;
            // Runs that are longer than any tail cannot end where the tail does.
            at = at.saturating_add(run.end - run.start);
        }
        if at != self.header.data().end {
            return Err(malformed("the runs of its disk are not as long as their bytes"));
        }
        Ok(OverlayInTail { tail: self.container.whole.clone(), len, runs })
    }
}

/// A writable disk's content in a tail.
#[derive(Debug)]
pub(crate) struct OverlayInTail {
    tail: Arc<dyn ReadAt>,
    len: u64,
    runs: Vec<StoredRange>,
}

#[derive(Debug)]
struct StoredRange {
    disk: Range<u64>,
    /// Where its bytes begin in the tail.
    at: u64,
}

impl ReadAt for OverlayInTail {
    fn size(&self) -> io::Result<u64> {
        Ok(self.len)
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset.checked_add(buf.len() as u64).filter(|end| *end <= self.len);
        let end = end.ok_or(io::ErrorKind::UnexpectedEof)?;
        buf.fill(0);
        let first = self.runs.partition_point(|run| run.disk.end <= offset);
        for run in self.runs[first..].iter().take_while(|run| run.disk.start < end) {
            let part = run.disk.start.max(offset)..run.disk.end.min(end);
            let within = |at: u64| usize::try_from(at - offset).unwrap_or(usize::MAX);
            let at = run.at + (part.start - run.disk.start);
            self.tail.read_exact_at(&mut buf[within(part.start)..within(part.end)], at)?;
        }
        Ok(())
    }

    fn next_data(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        let next = self.runs.partition_point(|run| run.disk.end <= offset);
        Ok(self.runs.get(next).map(|run| run.disk.start.max(offset)..run.disk.end))
    }
}

/// What is read of a tail, as a disk.
struct Disk<'a>(&'a dyn ReadAt);

impl DiskSource for Disk<'_> {
    fn size(&mut self) -> io::Result<u64> {
        self.0.size()
    }

    fn next_data(&mut self, offset: u64) -> io::Result<Option<Range<u64>>> {
        self.0.next_data(offset)
    }

    fn read(&mut self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.0.read_exact_at(buf, offset)
    }
}

/// The identity of what a writable disk holds.
pub(crate) fn identity_of(disk: &dyn ReadAt) -> io::Result<DiskIdentity> {
    scan(&mut Disk(disk), |_, _| Ok(()))
}

/// An extent stores every page of guest memory.
pub(crate) fn check_dense(manifest: &Manifest, path: &Path) -> Result<(), OpenError> {
    if manifest.image.kind == ImageKind::Dense {
        return Ok(());
    }
    Err(OpenError::Malformed {
        path: path.into(),
        section: Section::Manifest,
        reason: "an extent stores every page, but it says that the image has holes",
    })
}

#[cfg(test)]
#[path = "extent_tests.rs"]
mod tests;
