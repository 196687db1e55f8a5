//! The machine's side of a freeze: writing image, disk and everything else through descriptors.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use firn_base::{PageRange, nanoseconds, ns_since};

use crate::container::Header;
use crate::disk::{DiskSource, ScanError, scan};
use crate::extent::ExtentPlan;
use crate::files::{CONTAINER_FILE, IMAGE_FILE, OVERLAY_FILE};
use crate::freeze::{Begun, FreezeReport, Seal, Target};
use crate::freeze_error::FreezeError;
use crate::image::{
    ImageWork, PageSource, WrittenImage, WrittenPages, is_zero, write_image, write_nonzero,
};
use crate::manifest::{Description, DiskIdentity, ImageKind, Manifest, ProtectedFile};
use crate::profile::Profile;
use crate::section::{NO_PROFILE_VERSION, PROFILE_VERSION, Section};
use crate::sparse_file::SparseFile;
use crate::transfer::Sender;

/// What a snapshot contains besides guest memory and the writable disk.
#[derive(Debug, Clone)]
pub struct Machine {
    /// The monitor's description of the microVM.
    pub description: Description,
    /// Version of the machine state.
    pub state_version: u32,
    /// The machine state, opaque to this crate.
    pub state: Vec<u8>,
    /// Image pages that the guest had reported free and not touched since, ascending. They become
    /// part of the profile of a snapshot in a directory.
    pub reported: Vec<PageRange>,
}

/// A freeze between its two steps.
#[derive(Debug)]
pub struct Writer {
    machine: Machine,
    begun: Parts,
    report: FreezeReport,
}

#[derive(Debug)]
enum Parts {
    Files { image: WrittenImage, overlay: Option<DiskIdentity> },
    Extent(ExtentPlan),
}

impl Writer {
    /// Takes the first step. For [`Target::Files`] it reads guest memory once, chunk by chunk, and
    /// finds zero pages and digests in the same pass, with a thread for each processor; blocks of
    /// the disk that are all zero become holes. For [`Target::Extent`] it only reads the disk.
    ///
    /// It uses memory for the digests: 1/512 of guest memory.
    ///
    /// # Errors
    /// [`FreezeError`] when guest memory or disk cannot be read, or a file cannot be written.
    pub fn begin(
        machine: Machine,
        memory: &dyn PageSource,
        disk: Option<&mut dyn DiskSource>,
        target: Target,
        files: Vec<OwnedFd>,
    ) -> Result<(Self, Begun), FreezeError> {
        let mut report = FreezeReport::default();
        let (begun, answer) = match target {
            Target::Files { .. } | Target::Written => {
                let [image, overlay] = exactly(files)?;
                let image = store_image(image, memory, target, &mut report)?;
                let overlay = disk.map(|disk| store_overlay(overlay, disk, &mut report));
                let overlay = overlay.transpose()?;
                let answer = Begun::Files { overlay: overlay.is_some() };
                (Parts::Files { image, overlay }, answer)
            }
            Target::Extent => {
                let [] = exactly(files)?;
                let begin = Instant::now();
                let plan = ExtentPlan::new(&machine, memory.layout(), disk)?;
                report.overlay_ns = ns_since(begin);
                let answer = Begun::Extent {
                    guest_bytes: plan.guest_bytes(),
                    tail_bytes: plan.tail_bytes(),
                    disk_bytes: plan.disk_bytes(),
                };
                (Parts::Extent(plan), answer)
            }
        };
        Ok((Self { machine, begun, report }, answer))
    }

    /// Takes the second step: writes `snapshot.firn`, or passes the bytes of the extent, for which
    /// guest memory and disk are read now and must not have changed.
    ///
    /// # Errors
    /// [`FreezeError`] when guest memory or disk cannot be read, or the file cannot be written, or
    /// the supervisor takes no more bytes.
    pub fn seal(
        self,
        memory: &dyn PageSource,
        disk: Option<&mut dyn DiskSource>,
        seal: Seal,
        files: Vec<OwnedFd>,
    ) -> Result<FreezeReport, FreezeError> {
        let Self { machine, begun, mut report } = self;
        match (begun, seal) {
            (Parts::Files { image, overlay }, Seal::Container { protected }) => {
                let [file] = exactly(files)?;
                let begin = Instant::now();
                let written = store_container(file, machine, image, overlay, protected)?;
                report.bytes_written += written;
                report.sync_ns = ns_since(begin);
            }
            (Parts::Extent(plan), Seal::Extent) => {
                let sender = Sender::new(exactly(files)?);
                plan.pass(&machine, memory, disk, &sender, &mut report)?;
            }
            (Parts::Files { .. }, Seal::Extent) => {
                return Err(FreezeError::Steps { begun: "files", sealed: "an extent" });
            }
            (Parts::Extent(_), Seal::Container { .. }) => {
                return Err(FreezeError::Steps { begun: "an extent", sealed: "files" });
            }
        }
        Ok(report)
    }
}

/// The descriptors of a step.
fn exactly<const N: usize>(files: Vec<OwnedFd>) -> Result<[OwnedFd; N], FreezeError> {
    let actual = files.len();
    files.try_into().map_err(|_| FreezeError::Descriptors { expected: N, actual })
}

fn store_image(
    file: OwnedFd,
    memory: &dyn PageSource,
    target: Target,
    report: &mut FreezeReport,
) -> Result<WrittenImage, FreezeError> {
    let begin = Instant::now();
    let out = SparseFile::new(File::from(file), IMAGE_FILE, memory.layout().total_bytes())?;
    let (image, out) = match target {
        Target::Written => {
            let written = memory.written().ok_or(FreezeError::NotTracked)?;
            let out = WrittenPages { out, written };
            (write_image(&out, memory, ImageKind::Sparse)?, out.out)
        }
        Target::Files { .. } | Target::Extent => {
            let dense = matches!(target, Target::Files { dense: true });
            let kind = if dense { ImageKind::Dense } else { ImageKind::Sparse };
            (write_image(&out, memory, kind)?, out)
        }
    };
    let written = out.finish()?;
    report.add_image(&image, begin.elapsed(), written);
    Ok(image)
}

fn store_overlay(
    file: OwnedFd,
    disk: &mut dyn DiskSource,
    report: &mut FreezeReport,
) -> Result<DiskIdentity, FreezeError> {
    let begin = Instant::now();
    let len = disk.size().map_err(|source| FreezeError::Overlay { source })?;
    let out = SparseFile::new(File::from(file), OVERLAY_FILE, len)?;
    let identity = scan(disk, |offset, bytes| {
        write_nonzero(offset, bytes, |_, page| is_zero(page), |at, bytes| out.write(at, bytes))
            .map_err(ScanError::Write)
    })
    .map_err(FreezeError::from)?;
    report.bytes_written += out.finish()?;
    report.overlay_ns = ns_since(begin);
    Ok(identity)
}

/// Writes header and sections, in the order of the section table. The output is deterministic.
fn store_container(
    file: OwnedFd,
    machine: Machine,
    image: WrittenImage,
    overlay: Option<DiskIdentity>,
    protected: Vec<ProtectedFile>,
) -> Result<u64, FreezeError> {
    let Machine { description, state_version, state, reported } = machine;
    let WrittenImage { layout, info, zero_map, digests, .. } = image;
    let mut profile = (NO_PROFILE_VERSION, Vec::new());
    if !reported.is_empty() {
        let of = Profile { reported: Some(reported), ..Profile::of(description.id) };
        let bytes = postcard::to_stdvec(&of).map_err(|source| FreezeError::Encode { source })?;
        profile = (PROFILE_VERSION, bytes);
    }
    let manifest = Manifest { description, layout, image: info, overlay, protected };
    let (version, manifest) = manifest.encode()?;
    let sections: [(Section, u32, &[u8]); Section::TABLE.len()] = [
        (Section::Manifest, version, &manifest),
        (Section::MachineState, state_version, &state),
        (Section::ZeroMap, version, &zero_map.to_bytes()),
        (Section::Profile, profile.0, &profile.1),
        (Section::Digests, version, &digests),
    ];
    let header = Header::of(&sections)?;
    let out = SparseFile::new(File::from(file), CONTAINER_FILE, header.file_len())?;
    out.write(0, &header.encode())?;
    for (section, _, bytes) in sections {
        out.write(header.range(section).start, bytes)?;
    }
    out.begin_writeback(0, header.file_len());
    out.finish()
}

impl FreezeReport {
    /// Adds an image that took `time` and of which `written` bytes were written.
    pub(crate) fn add_image(&mut self, image: &WrittenImage, time: Duration, written: u64) {
        let ImageWork { read, digest, write, zero_pages_written } = image.work;
        self.image_ns = nanoseconds(time);
        self.read_ns = nanoseconds(read);
        self.digest_ns = nanoseconds(digest);
        self.write_ns = nanoseconds(write);
        self.stored_pages = image.info.stored_pages;
        self.zero_pages = image.zero_map.count();
        self.zero_pages_written = zero_pages_written;
        self.bytes_written += written;
    }
}
