//! Writing a snapshot into an extent of a pool: guest memory, followed by a tail.
//!
//! The extent begins with guest memory; every page is written, except zero pages where the extent
//! is zero. The tail follows at the pool's alignment. It contains a header, the bytes of
//! `snapshot.firn`, and the nonzero parts of the writable disk. The machine passes the bytes, its
//! supervisor writes them and makes them durable, and the pool publishes them.

use std::io;
use std::ops::Range;
use std::path::Path;
use std::time::Instant;

use firn_base::ns_since;
use firn_pool::Window;

use crate::attach::{AttachError, COPY, Edited, copy, read_manifest};
use crate::container::{HEADER_LEN, Header};
use crate::disk::{DiskSource, ScanError, scan};
use crate::freeze::FreezeReport;
use crate::freeze_error::FreezeError;
use crate::image::{PageSource, is_zero, write_image, write_nonzero};
use crate::layout::MemoryLayout;
use crate::manifest::{DiskIdentity, ImageInfo, ImageKind, Manifest};
use crate::page_set::PageSet;
use crate::profile::Profile;
use crate::section::{NO_PROFILE_VERSION, Section, digests_len};
use crate::tail::{MAX_RUNS, Tail, TailHeader};
use crate::transfer::{Part, Sender, TailStream};
use crate::writer::Machine;

/// The extent that a snapshot is written into. Offsets are relative to guest memory or to the tail.
pub(crate) trait ExtentTarget: Sync {
    /// Writes bytes at `offset`. Every byte is written once, except zeros where
    /// [`is_zeroed`](Self::is_zeroed) is true for them. Several threads call it.
    fn write(&self, part: Part, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// The same with `len` bytes at `start` of a window.
    fn write_from(
        &self,
        part: Part,
        offset: u64,
        window: &Window,
        start: u64,
        len: u64,
    ) -> io::Result<()>;

    /// Whether a range is zero before it is written. Several threads call it.
    fn is_zeroed(&self, part: Part, offset: u64, len: u64) -> bool;

    /// Makes all bytes durable.
    fn flush(&self) -> io::Result<()>;
}

/// A snapshot whose sizes in an extent are known.
#[derive(Debug)]
pub(crate) struct ExtentPlan {
    version: u32,
    manifest: Vec<u8>,
    guest_bytes: u64,
    tail: TailHeader,
}

impl ExtentPlan {
    /// Reads the writable disk to find its nonzero parts, which determine the length of the tail.
    pub(crate) fn new(
        machine: &Machine,
        layout: &MemoryLayout,
        disk: Option<&mut dyn DiskSource>,
    ) -> Result<Self, FreezeError> {
        let disk = disk.map(scan_overlay).transpose()?;
        let pages = layout.pages();
        let manifest = Manifest {
            description: machine.description.clone(),
            layout: layout.clone(),
            image: ImageInfo { kind: ImageKind::Dense, stored_pages: pages },
            overlay: disk.as_ref().map(|disk| disk.identity),
            protected: Vec::new(),
        };
        let (version, manifest) = manifest.encode()?;
        let container_len = HEADER_LEN as u64
            + manifest.len() as u64
            + machine.state.len() as u64
            + PageSet::encoded_len(pages)
            + digests_len(pages);
        let runs = disk.map(|disk| disk.runs).unwrap_or_default();
        let data_len = runs.iter().map(|run| run.end - run.start).sum();
        let tail = TailHeader { container_len, data_len, runs };
        Ok(Self { version, manifest, guest_bytes: layout.total_bytes(), tail })
    }

    /// Bytes of guest memory.
    pub(crate) fn guest_bytes(&self) -> u64 {
        self.guest_bytes
    }

    /// Bytes of the tail.
    pub(crate) fn tail_bytes(&self) -> u64 {
        self.tail.data().end
    }

    /// Bytes of the tail that the writable disk takes, at its end.
    pub(crate) fn disk_bytes(&self) -> u64 {
        self.tail.data_len
    }

    /// Passes everything to the supervisor. The disk is read a second time.
    pub(crate) fn pass(
        self,
        machine: &Machine,
        memory: &dyn PageSource,
        disk: Option<&mut dyn DiskSource>,
        sender: &Sender,
        report: &mut FreezeReport,
    ) -> Result<(), FreezeError> {
        let begin = Instant::now();
        // The supervisor writes the zero pages.
        let image = write_image(sender, memory, ImageKind::Sparse)?;
        report.add_image(&image, begin.elapsed(), 0);

        let begin = Instant::now();
        let zero_map = image.zero_map.to_bytes();
        let sections: [(Section, u32, &[u8]); Section::TABLE.len()] = [
            (Section::Manifest, self.version, &self.manifest),
            (Section::MachineState, machine.state_version, &machine.state),
            (Section::ZeroMap, self.version, &zero_map),
            (Section::Profile, NO_PROFILE_VERSION, &[]),
            (Section::Digests, self.version, &image.digests),
        ];
        let header = Header::of(&sections)?;
        debug_assert_eq!(header.file_len(), self.tail.container_len);
        let mut tail = sender.tail(self.guest_bytes);
        tail.write(&self.tail.encode())?;
        tail.write(&header.encode())?;
        for (_, _, bytes) in sections {
            tail.write(bytes)?;
        }
        report.sync_ns = ns_since(begin);

        let begin = Instant::now();
        if let Some(disk) = disk {
            pass_runs(disk, &self.tail, &mut tail)?;
        }
        tail.finish()?;
        report.overlay_ns += ns_since(begin);
        Ok(())
    }
}

/// The failure of an action with the extent.
pub(crate) fn failed(action: &'static str) -> impl Fn(io::Error) -> FreezeError + Copy {
    move |source| FreezeError::Extent { action, source }
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

/// Passes the runs' bytes.
fn pass_runs(
    source: &mut dyn DiskSource,
    header: &TailHeader,
    tail: &mut TailStream<'_>,
) -> Result<(), FreezeError> {
    let mut buf = vec![0; COPY];
    for run in &header.runs {
        let mut offset = run.start;
        while offset < run.end {
            let bytes = &mut buf[..usize::try_from(run.end - offset).unwrap_or(COPY).min(COPY)];
            source.read(bytes, offset).map_err(|source| FreezeError::Overlay { source })?;
            tail.write(bytes)?;
            offset += bytes.len() as u64;
        }
    }
    Ok(())
}

/// A second extent of a snapshot: a copy of guest memory, disk and container, with another profile
/// if there is one.
pub(crate) struct CopiedExtent<'a> {
    tail: &'a Tail,
    path: &'a Path,
    profiled: Option<Edited>,
    guest_bytes: u64,
    header: TailHeader,
}

impl<'a> CopiedExtent<'a> {
    pub(crate) fn new(
        tail: &'a Tail,
        path: &'a Path,
        profile: Option<&Profile>,
    ) -> Result<Self, AttachError> {
        let edit = |profile| Edited::with_profile(&tail.container, path, profile);
        let profiled = profile.map(edit).transpose()?;
        let (container, manifest) = match &profiled {
            Some(edited) => (edited.header.clone(), edited.manifest.clone()),
            None => read_manifest(&tail.container, path)?,
        };
        let guest_bytes = manifest.layout.total_bytes();
        let header = TailHeader { container_len: container.file_len(), ..tail.header.clone() };
        Ok(Self { tail, path, profiled, guest_bytes, header })
    }

    /// Bytes of guest memory.
    pub(crate) fn guest_bytes(&self) -> u64 {
        self.guest_bytes
    }

    /// Bytes of the tail.
    pub(crate) fn tail_bytes(&self) -> u64 {
        self.header.data().end
    }

    /// Bytes of the tail that the writable disk takes.
    pub(crate) fn disk_bytes(&self) -> u64 {
        self.header.data_len
    }

    /// Writes everything.
    pub(crate) fn write(
        &self,
        mut read_memory: impl FnMut(u64, &mut [u8]),
        target: &dyn ExtentTarget,
    ) -> Result<(), AttachError> {
        let (guest_bytes, source) = (self.guest_bytes, &self.tail.container);
        let mut buf = vec![0; COPY];
        let mut offset = 0;
        while offset < guest_bytes {
            let bytes = &mut buf[..usize::try_from(guest_bytes - offset).unwrap_or(COPY).min(COPY)];
            read_memory(offset, bytes);
            target.write(Part::Guest, offset, bytes).map_err(failed("write"))?;
            offset += bytes.len() as u64;
        }
        let mut write =
            |offset, bytes: &[u8]| target.write(Part::Tail, offset, bytes).map_err(failed("write"));
        write(0, &self.header.encode())?;
        let start = self.header.container().start;
        match &self.profiled {
            Some(edited) => {
                edited.write(source, self.path, &mut |at, bytes| write(start + at, bytes))?;
            }
            None => copy(source, self.path, 0..self.header.container_len, start, &mut write)?,
        }
        let to = self.header.data().start;
        copy(&source.whole, self.path, self.tail.header.data(), to, &mut write)
    }
}

#[cfg(test)]
#[path = "extent_tests.rs"]
mod tests;
