//! Snapshots in the extents of a pool that a manager owns: writing them, and checking what they
//! hold.

use std::io;
use std::sync::Arc;

use firn_base::PAGE_SIZE;
use firn_base::num::usize_of;
use firn_pool::{ExtentGrant, MappedExtent, Window};
use thiserror::Error;

use crate::digests::DigestError;
use crate::disk::identity_of;
use crate::error::OpenError;
use crate::extent::{ExtentTarget, failed};
use crate::freeze_error::FreezeError;
use crate::keys::{Signer, Verifier};
use crate::layout::CHUNK_SIZE;
use crate::read_at::ReadAt;
use crate::section::Section;
use crate::signature::{Covered, sign_extent};
use crate::snapshot::Snapshot;
use crate::transfer::Part;

/// Why the check of an extent failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CheckExtentError {
    /// The tail is invalid.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Guest memory is damaged.
    #[error(transparent)]
    Digest(#[from] DigestError),
    /// The writable disk is damaged.
    #[error("the writable disk is damaged: its digest does not match")]
    Overlay,
    /// The writable disk cannot be read.
    #[error("the writable disk cannot be read")]
    ReadOverlay(#[source] io::Error),
}

/// Checks all that an extent holds: the sections of its tail, every page of guest memory and the
/// writable disk. `name` is the snapshot's name in errors.
///
/// # Errors
/// See [`CheckExtentError`].
pub fn check_extent(name: &str, extent: MappedExtent) -> Result<(), CheckExtentError> {
    check_all(&open_extent(name, &Arc::new(extent), None)?)
}

/// The same of a snapshot that was opened.
pub(crate) fn check_all(snapshot: &Snapshot) -> Result<(), CheckExtentError> {
    snapshot.profile()?;
    check_pages(snapshot)?;
    match (snapshot.manifest().overlay, snapshot.overlay()) {
        (Some(frozen), Some(overlay)) => {
            let found = identity_of(overlay).map_err(CheckExtentError::ReadOverlay)?;
            if found == frozen { Ok(()) } else { Err(CheckExtentError::Overlay) }
        }
        _ => Ok(()),
    }
}

/// Checks every page of the image against its digest.
pub(crate) fn check_pages(snapshot: &Snapshot) -> Result<(), DigestError> {
    let total = snapshot.manifest().layout.total_bytes();
    let mut chunk = vec![0; usize_of(CHUNK_SIZE.min(total))];
    for offset in (0..total).step_by(usize_of(CHUNK_SIZE)) {
        let bytes = &mut chunk[..usize_of(CHUNK_SIZE.min(total - offset))];
        let read = snapshot.image().read_exact_at(bytes, offset);
        read.map_err(|source| DigestError::Io { path: snapshot.path().to_owned(), source })?;
        snapshot.digests().check(offset / PAGE_SIZE, bytes)?;
    }
    Ok(())
}

/// The snapshot that a sealed extent holds, if the verifier confirms it where there is one.
pub(crate) fn open_extent(
    name: &str,
    extent: &Arc<MappedExtent>,
    verifier: Option<&Verifier>,
) -> Result<Snapshot, OpenError> {
    let image = Arc::new(MappedImage(extent.clone()));
    let snapshot = Snapshot::open_extent(name, image, &tail_of(extent), verifier)?;
    // A larger memory, mapped by its manifest, would reach into the next extent.
    if snapshot.manifest().layout.total_bytes() != extent.extent().guest_bytes {
        return Err(OpenError::Malformed {
            path: name.into(),
            section: Section::Manifest,
            reason: "its guest memory is not as large as that of its extent",
        });
    }
    Ok(snapshot)
}

/// The tail of an extent.
pub(crate) fn tail_of(extent: &Arc<MappedExtent>) -> Arc<dyn ReadAt> {
    Arc::new(MappedTail(extent.clone()))
}

/// The guest memory of a mapped extent.
#[derive(Debug)]
struct MappedImage(Arc<MappedExtent>);

impl ReadAt for MappedImage {
    fn size(&self) -> io::Result<u64> {
        Ok(self.0.extent().guest_bytes)
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset.checked_add(buf.len() as u64);
        if end.is_none_or(|end| end > self.0.extent().guest_bytes) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.0.read_guest(offset, buf);
        Ok(())
    }
}

/// The tail of a mapped extent.
#[derive(Debug)]
struct MappedTail(Arc<MappedExtent>);

impl ReadAt for MappedTail {
    fn size(&self) -> io::Result<u64> {
        Ok(self.0.extent().tail_bytes)
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset.checked_add(buf.len() as u64);
        if end.is_none_or(|end| end > self.0.extent().tail_bytes) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.0.read_tail(offset, buf);
        Ok(())
    }
}

/// An extent of a pool that may be written.
#[derive(Debug)]
pub(crate) struct GrantedExtent {
    grant: ExtentGrant,
    mapped: Arc<MappedExtent>,
}

impl GrantedExtent {
    /// Maps what the pool's manager granted.
    pub(crate) fn map(grant: ExtentGrant) -> Result<Self, FreezeError> {
        let mapped = grant.map().map_err(io::Error::other).map_err(failed("map"))?;
        Ok(Self { grant, mapped: Arc::new(mapped) })
    }

    /// Signs what was written. The extent has room for a signature.
    pub(crate) fn sign(&self, covered: Covered, signer: &Signer) -> Result<(), FreezeError> {
        let image = MappedImage(self.mapped.clone());
        sign_extent(self, &image, &tail_of(&self.mapped), covered, signer)
    }
}

impl ExtentTarget for GrantedExtent {
    fn write(&self, part: Part, offset: u64, bytes: &[u8]) -> io::Result<()> {
        match part {
            Part::Guest => self.mapped.write_guest(offset, bytes),
            Part::Tail => self.mapped.write_tail(offset, bytes),
        }
    }

    fn write_from(
        &self,
        part: Part,
        offset: u64,
        window: &Window,
        start: u64,
        len: u64,
    ) -> io::Result<()> {
        match part {
            Part::Guest => self.mapped.write_guest_from(offset, window, start, len),
            Part::Tail => self.mapped.write_tail_from(offset, window, start, len),
        }
    }

    fn is_zeroed(&self, part: Part, offset: u64, len: u64) -> bool {
        let extent = self.grant.extent();
        let start = match part {
            Part::Guest => 0,
            Part::Tail => extent.tail_offset - extent.offset,
        };
        self.grant.is_zeroed(start + offset, len)
    }

    fn flush(&self) -> io::Result<()> {
        self.mapped.flush()
    }
}
