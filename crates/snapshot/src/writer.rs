//! Writing a snapshot: image, overlay, seal.

use std::path::Path;
use std::time::{Duration, Instant};

use firn_base::PageRange;

use crate::container::Header;
use crate::disk::{DiskSource, ScanError, scan};
use crate::files::{CONTAINER_FILE, IMAGE_FILE, OVERLAY_FILE};
use crate::freeze_error::FreezeError;
use crate::image::{ImageWork, PageSource, WrittenImage, is_zero, write_image, write_nonzero};
use crate::manifest::{Description, DiskIdentity, ImageInfo, ImageKind, Manifest};
use crate::profile::Profile;
use crate::section::{NO_PROFILE_VERSION, PROFILE_VERSION, Section};
use crate::sparse_file::{SparseFile, StoredFile};
use crate::staging::Staging;

/// Writes one snapshot to a staging directory and publishes it in one step.
///
/// [`Writer::create`], [`Writer::write_image`], [`Writer::write_overlay`] if the microVM has a
/// writable disk, and [`Writer::seal`]. The destination does not change before the seal; if the
/// writer is dropped or its process is killed, the previous snapshot remains. A dropped writer
/// removes its files. The next [`Writer::create`] for the same parent directory removes the files
/// of a killed one.
#[derive(Debug)]
pub struct Writer {
    staging: Staging,
    image: Option<(WrittenImage, StoredFile)>,
    overlay: Option<(DiskIdentity, StoredFile)>,
    reported: Vec<PageRange>,
    image_time: Duration,
    overlay_time: Duration,
}

/// What a freeze wrote and the time of each part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SealReport {
    /// Pages that the image stores.
    pub stored_pages: u64,
    /// Pages of guest memory that are zero.
    pub zero_pages: u64,
    /// Bytes written to all files.
    pub bytes_written: u64,
    /// Bytes that all files occupy on the medium.
    pub disk_bytes: u64,
    /// Time to read, digest and write guest memory.
    pub image: Duration,
    /// Time to read, digest and write the writable disk.
    pub overlay: Duration,
    /// Time to write `snapshot.firn` and to make all files durable.
    pub sync: Duration,
    /// Time to protect files with fs-verity, or to find out that their file system has none.
    pub protect: Duration,
    /// The files that fs-verity protects.
    pub protected: Vec<String>,
    /// Time to publish the snapshot and to remove the previous one.
    pub publish: Duration,
    /// The parts of `image`, of all threads.
    pub work: ImageWork,
}

impl Writer {
    /// Begins a snapshot that will be at `destination`. Its parent directory must exist.
    ///
    /// # Errors
    /// [`FreezeError::NotASnapshot`] when the destination exists and is not a snapshot, other
    /// variants when no staging directory can be created.
    pub fn create(destination: impl AsRef<Path>) -> Result<Self, FreezeError> {
        Ok(Self {
            staging: Staging::create(destination.as_ref())?,
            image: None,
            overlay: None,
            reported: Vec::new(),
            image_time: Duration::ZERO,
            overlay_time: Duration::ZERO,
        })
    }

    /// Writes the image: reads guest memory once, chunk by chunk, and finds zero pages and digests
    /// in the same pass, with a thread for each processor.
    ///
    /// It uses memory for the digests: 1/512 of guest memory. Call it once.
    ///
    /// # Errors
    /// [`FreezeError`] when guest memory cannot be read or the file cannot be written.
    pub fn write_image(
        &mut self,
        source: &dyn PageSource,
        kind: ImageKind,
    ) -> Result<ImageInfo, FreezeError> {
        let start = Instant::now();
        let out = self.create_file(IMAGE_FILE, source.layout().total_bytes())?;
        let image = write_image(&out, source, kind)?;
        let info = image.info;
        self.image = Some((image, out.finish()?));
        self.image_time = start.elapsed();
        Ok(info)
    }

    /// Writes the writable disk's content. Blocks of 4 KiB that are all zero become holes. Call it
    /// once.
    ///
    /// # Errors
    /// [`FreezeError`] when the disk cannot be read or the file cannot be written.
    pub fn write_overlay(
        &mut self,
        source: &mut dyn DiskSource,
    ) -> Result<DiskIdentity, FreezeError> {
        let start = Instant::now();
        let len = source.size().map_err(|source| FreezeError::Overlay { source })?;
        let out = self.create_file(OVERLAY_FILE, len)?;
        let identity = scan(source, |offset, bytes| {
            write_nonzero(offset, bytes, |_, page| is_zero(page), |at, bytes| out.write(at, bytes))
                .map_err(ScanError::Write)
        })
        .map_err(FreezeError::from)?;
        self.overlay = Some((identity, out.finish()?));
        self.overlay_time = start.elapsed();
        Ok(identity)
    }

    /// Sets the image pages that the guest had reported free and not touched since, ascending. They
    /// become part of a profile.
    pub fn set_reported(&mut self, reported: Vec<PageRange>) {
        self.reported = reported;
    }

    /// Writes `snapshot.firn`, makes every file durable, and publishes the snapshot in one step. An
    /// existing snapshot is replaced and removed; processes that have it open keep it.
    ///
    /// # Errors
    /// [`FreezeError`]; the destination is unchanged, unless the error is that its parent directory
    /// could not be synced.
    pub fn seal(
        mut self,
        description: Description,
        machine_state_version: u32,
        machine_state: &[u8],
    ) -> Result<SealReport, FreezeError> {
        let start = Instant::now();
        let Some((image, image_file)) = self.image.take() else { return Err(FreezeError::NoImage) };
        let (overlay, overlay_file) = self.overlay.take().unzip();
        let WrittenImage { layout, info, zero_map, digests, work } = image;
        let zero_pages = zero_map.count();
        let mut profile = (NO_PROFILE_VERSION, Vec::new());
        if !self.reported.is_empty() {
            let reported = Some(std::mem::take(&mut self.reported));
            let of = Profile { reported, ..Profile::of(description.id) };
            profile = (
                PROFILE_VERSION,
                postcard::to_stdvec(&of).map_err(|source| FreezeError::Encode { source })?,
            );
        }
        let (mut bytes_written, mut disk_bytes, mut protect) = (0, 0, Duration::ZERO);
        let mut protected = Vec::new();
        for (name, file) in [(IMAGE_FILE, Some(image_file)), (OVERLAY_FILE, overlay_file)] {
            let Some(file) = file else { continue };
            bytes_written += file.written;
            disk_bytes += file.sync()?;
            // The kernel protects no file that is open for writing.
            drop(file);
            let begin = Instant::now();
            protected.extend(self.staging.protect(name)?);
            protect += begin.elapsed();
        }
        let protected_names = protected.iter().map(|file| file.name.clone()).collect();
        let manifest = Manifest { description, layout, image: info, overlay, protected };
        let (version, manifest) = manifest.encode()?;
        let container_file = self.write_container(&[
            (Section::Manifest, version, &manifest),
            (Section::MachineState, machine_state_version, machine_state),
            (Section::ZeroMap, version, &zero_map.to_bytes()),
            (Section::Profile, profile.0, &profile.1),
            (Section::Digests, version, &digests),
        ])?;
        bytes_written += container_file.written;
        disk_bytes += container_file.sync()?;
        let sync = start.elapsed() - protect;
        self.staging.publish()?;
        Ok(SealReport {
            stored_pages: info.stored_pages,
            zero_pages,
            bytes_written,
            disk_bytes,
            image: self.image_time,
            overlay: self.overlay_time,
            sync,
            protect,
            protected: protected_names,
            publish: start.elapsed() - sync - protect,
            work,
        })
    }

    /// The destination, with links resolved.
    #[must_use]
    pub fn destination(&self) -> &Path {
        self.staging.destination()
    }

    fn create_file(&self, name: &str, len: u64) -> Result<SparseFile, FreezeError> {
        SparseFile::new(self.staging.create_file(name)?, self.staging.path_of(name), len)
    }

    /// Writes header and sections, in the order of the section table. The output is deterministic.
    fn write_container(
        &self,
        sections: &[(Section, u32, &[u8]); Section::TABLE.len()],
    ) -> Result<StoredFile, FreezeError> {
        let header = Header::of(sections)?;
        let out = self.create_file(CONTAINER_FILE, header.file_len())?;
        out.write(0, &header.encode())?;
        for &(section, _, bytes) in sections {
            out.write(header.range(section).start, bytes)?;
        }
        out.begin_writeback(0, header.file_len());
        out.finish()
    }
}
