//! Writing a snapshot: image, overlay, seal.

use std::path::Path;
use std::time::{Duration, Instant};

use firn_base::PageRange;

use crate::container::{
    CONTAINER_FILE, CONTAINER_VERSION, Header, IMAGE_FILE, NO_PROFILE_VERSION, OVERLAY_FILE,
    PROFILE_VERSION, Section,
};
use crate::disk::{DiskIdentity, DiskSource, ScanError, scan};
use crate::freeze_error::FreezeError;
use crate::image::{
    PageSource, SparseFile, StoredFile, WrittenImage, is_zero, write_image, write_nonzero,
};
use crate::manifest::{Description, ImageInfo, ImageKind, Manifest};
use crate::profile::Profile;
use crate::staging::Staging;

/// Writes one snapshot aside and publishes it whole.
///
/// [`Writer::create`], [`Writer::write_image`], [`Writer::write_overlay`] when the microVM has a writable disk, and
/// [`Writer::seal`]. Until the seal the destination stays as it is; a writer that is dropped before it, or whose process is
/// killed, leaves the previous snapshot whole. A dropped writer removes what it wrote; a killed one's is removed by the
/// next [`Writer::create`] for the same parent directory.
#[derive(Debug)]
pub struct Writer {
    staging: Staging,
    image: Option<(WrittenImage, StoredFile)>,
    overlay: Option<(DiskIdentity, StoredFile)>,
    reported: Vec<PageRange>,
    image_time: Duration,
    overlay_time: Duration,
}

/// What a freeze wrote and how long its parts took.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SealReport {
    /// Pages that the image stores.
    pub stored_pages: u64,
    /// Pages of guest memory that are zero.
    pub zero_pages: u64,
    /// Bytes written to all files.
    pub bytes_written: u64,
    /// Bytes that all files take on the medium.
    pub disk_bytes: u64,
    /// Time to read, digest and write guest memory.
    pub image: Duration,
    /// Time to read, digest and write the writable disk.
    pub overlay: Duration,
    /// Time to write `snapshot.firn` and to make all files durable.
    pub sync: Duration,
    /// Time to put the snapshot in its place and to remove the one it replaces.
    pub publish: Duration,
}

impl Writer {
    /// Begins a snapshot that will be at `destination`. Its parent directory must exist.
    ///
    /// # Errors
    /// [`FreezeError::NotASnapshot`] when something else than a snapshot is there, with nothing written; others when
    /// no directory can be made beside it.
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

    /// Writes the image: reads guest memory once, chunk by chunk, and finds zero pages and digests in the same pass.
    ///
    /// It takes memory for the digests: 1/512 of guest memory. Call it once.
    ///
    /// # Errors
    /// [`FreezeError`] when guest memory cannot be read or the file not be written.
    pub fn write_image(
        &mut self,
        source: &mut dyn PageSource,
        kind: ImageKind,
    ) -> Result<ImageInfo, FreezeError> {
        let start = Instant::now();
        let mut out = self.create_file(IMAGE_FILE, source.layout().total_bytes())?;
        let image = write_image(&mut out, source, kind)?;
        let info = image.info;
        self.image = Some((image, out.finish()?));
        self.image_time = start.elapsed();
        Ok(info)
    }

    /// Writes the writable disk's content. Blocks of 4 KiB that are all zero become holes. Call it once.
    ///
    /// # Errors
    /// [`FreezeError`] when the disk cannot be read or the file not be written.
    pub fn write_overlay(
        &mut self,
        source: &mut dyn DiskSource,
    ) -> Result<DiskIdentity, FreezeError> {
        let start = Instant::now();
        let len = source.size().map_err(|source| FreezeError::Overlay { source })?;
        let mut out = self.create_file(OVERLAY_FILE, len)?;
        let identity = scan(source, |offset, bytes| {
            write_nonzero(&mut out, offset, bytes, |_, page| is_zero(page))
                .map_err(ScanError::Write)
        })
        .map_err(FreezeError::from)?;
        self.overlay = Some((identity, out.finish()?));
        self.overlay_time = start.elapsed();
        Ok(identity)
    }

    /// Says which image pages the guest had reported free and not touched since, ascending. They are put into a profile.
    pub fn set_reported(&mut self, reported: Vec<PageRange>) {
        self.reported = reported;
    }

    /// Writes `snapshot.firn`, makes every file durable, and puts the snapshot in its place in one step. One that
    /// is there is replaced and removed; who has it open keeps it.
    ///
    /// # Errors
    /// [`FreezeError`]; the destination is then as it was before, unless the error is that its parent directory
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
        let WrittenImage { layout, info, zero_map, digests } = image;
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
        let manifest = Manifest { description, layout, image: info, overlay }.encode()?;
        let container_file = self.write_container(&[
            (Section::Manifest, CONTAINER_VERSION, &manifest),
            (Section::MachineState, machine_state_version, machine_state),
            (Section::ZeroMap, CONTAINER_VERSION, &zero_map.to_bytes()),
            (Section::Profile, profile.0, &profile.1),
            (Section::Digests, CONTAINER_VERSION, &digests),
        ])?;
        let (mut bytes_written, mut disk_bytes) = (0, 0);
        for file in [Some(image_file), overlay_file, Some(container_file)].iter().flatten() {
            bytes_written += file.written;
            disk_bytes += file.sync()?;
        }
        let sync = start.elapsed();
        self.staging.publish()?;
        Ok(SealReport {
            stored_pages: info.stored_pages,
            zero_pages,
            bytes_written,
            disk_bytes,
            image: self.image_time,
            overlay: self.overlay_time,
            sync,
            publish: start.elapsed() - sync,
        })
    }

    /// Where the snapshot will be; links are resolved.
    #[must_use]
    pub fn destination(&self) -> &Path {
        self.staging.destination()
    }

    fn create_file(&self, name: &str, len: u64) -> Result<SparseFile, FreezeError> {
        SparseFile::new(self.staging.create_file(name)?, self.staging.path_of(name), len)
    }

    /// Writes header and sections, in the order of the section table. Equal input gives equal bytes.
    fn write_container(
        &self,
        sections: &[(Section, u32, &[u8]); Section::TABLE.len()],
    ) -> Result<StoredFile, FreezeError> {
        let header = Header::of(sections)?;
        let mut out = self.create_file(CONTAINER_FILE, header.file_len())?;
        out.write(0, &header.encode())?;
        for &(section, _, bytes) in sections {
            out.write(header.range(section).start, bytes)?;
        }
        out.finish()
    }
}
