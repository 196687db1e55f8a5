//! Changing a sealed snapshot in a pool: a new extent with what changes and copies of all else is
//! published under its name.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use firn_pool::{Client, MappedExtent};
use thiserror::Error;

use crate::attach::AttachError;
use crate::disk::DiskError;
use crate::error::{OpenError, OpenPooledError};
use crate::extent::{CopiedExtent, ExtentTarget, failed};
use crate::freeze_error::FreezeError;
use crate::in_pool::{CheckExtentError, GrantedExtent, check_all, open_extent, tail_of};
use crate::keys::{Signer, Verifier};
use crate::profile::Profile;
use crate::read_at::ReadAt;
use crate::signature::{Covered, SIGNED_LEN, open_checked_tail};
use crate::tail::Tail;
use crate::verify::VerifyReport;

/// Why a snapshot in a pool was not verified, or not signed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum VerifyPooledError {
    /// It cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenPooledError),
    /// It is damaged, or is not what was signed.
    #[error(transparent)]
    Check(#[from] CheckExtentError),
    /// A read-only disk is missing, or differs from the one at the freeze.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// It cannot be signed.
    #[error(transparent)]
    Sign(#[from] AttachError),
}

/// Replaces the profile of the sealed snapshot `name` of the pool whose manager listens on
/// `socket`. It writes a new extent and publishes it under the name in one step. Processes that
/// have the old extent mapped keep it.
///
/// If there is a verifier, it has to confirm the old snapshot, all of it if the new one is signed,
/// which it is if there is a signer.
///
/// # Errors
/// [`AttachError`]; the snapshot is unchanged. If the pool has no space for both extents, the error
/// reports how much is missing.
pub fn set_pooled_profile(
    socket: &Path,
    name: &str,
    profile: &Profile,
    verifier: Option<&Verifier>,
    signer: Option<&Signer>,
) -> Result<(), AttachError> {
    let sealed = Sealed::open(socket, name)?;
    if verifier.is_some() && signer.is_some() {
        // Its pages, too, have to be what was signed.
        open_extent(name, &sealed.extent, verifier)?.check_signed_files()?;
    }
    sealed.replace(&sealed.tail(verifier)?, Some(profile), signer)
}

/// Checks all of the sealed snapshot `name` of the pool whose manager listens on `socket`: what
/// [`check_extent`](crate::check_extent) checks, the read-only disks and, if there is a verifier,
/// what it has to confirm. If there is a signer, a signed copy replaces the snapshot then.
///
/// # Errors
/// [`VerifyPooledError`]; the snapshot is unchanged.
pub fn verify_pooled(
    socket: &Path,
    name: &str,
    verifier: Option<&Verifier>,
    signer: Option<&Signer>,
) -> Result<VerifyReport, VerifyPooledError> {
    let begin = Instant::now();
    let sealed = Sealed::open(socket, name)?;
    let snapshot = open_extent(name, &sealed.extent, verifier).map_err(OpenPooledError::from)?;
    snapshot.check_signed_files().map_err(OpenPooledError::from)?;
    check_all(&snapshot)?;
    let manifest = snapshot.manifest();
    let disks = &manifest.description.disks;
    disks.iter().try_for_each(|disk| disk.check(&mut |_| ()))?;
    let disk_bytes = disks.iter().map(|disk| disk.identity.len);
    let disk_bytes = disk_bytes.chain(manifest.overlay.map(|identity| identity.len));
    let report = VerifyReport {
        pages: manifest.layout.pages(),
        zero_pages: snapshot.zero_map().count(),
        packed_pages: 0,
        disk_bytes: disk_bytes.fold(0, u64::saturating_add),
        protected: Vec::new(),
        duration: begin.elapsed(),
    };
    if let Some(signer) = signer {
        let tail = sealed.tail(verifier).map_err(AttachError::from)?;
        sealed.replace(&tail, None, Some(signer))?;
    }
    Ok(report)
}

/// A sealed extent, which is pinned as long as the connection exists.
struct Sealed<'a> {
    socket: &'a Path,
    name: &'a str,
    generation: u64,
    extent: Arc<MappedExtent>,
    _connection: Client,
}

impl<'a> Sealed<'a> {
    fn open(socket: &'a Path, name: &'a str) -> Result<Self, OpenPooledError> {
        let mut connection = Client::connect(socket)?;
        let grant = connection.snapshot(name)?;
        let (generation, extent) = (grant.extent().generation, Arc::new(grant.map()?));
        Ok(Self { socket, name, generation, extent, _connection: connection })
    }

    /// The tail, which the verifier confirms if there is one.
    fn tail(&self, verifier: Option<&Verifier>) -> Result<Arc<dyn ReadAt>, OpenError> {
        let tail = tail_of(&self.extent);
        let check = |verifier| open_checked_tail(&tail, self.name.as_ref(), verifier);
        Ok(verifier.map(check).transpose()?.map_or(tail.clone(), |(checked, _)| checked))
    }

    /// Publishes a copy with this tail under the name.
    fn replace(
        &self,
        tail: &Arc<dyn ReadAt>,
        profile: Option<&Profile>,
        signer: Option<&Signer>,
    ) -> Result<(), AttachError> {
        let (name, path) = (self.name, Path::new(self.name));
        let tail = Tail::open(tail, path)?;
        let copied = CopiedExtent::new(&tail, path, profile)?;
        let (guest_bytes, tail_bytes) = (copied.guest_bytes(), copied.tail_bytes());
        let room = tail_bytes.saturating_add(signer.map_or(0, |_| SIGNED_LEN));
        let allocate = |error| failed("allocate")(io::Error::other(error));
        let mut connection = Client::connect(self.socket).map_err(allocate)?;
        let grant = connection.begin(name, guest_bytes, room).map_err(allocate)?;
        let new_generation = grant.extent().generation;
        let target = GrantedExtent::map(grant)?;
        copied.write(|offset, bytes| self.extent.read_guest(offset, bytes), &target)?;
        if let Some(signer) = signer {
            let covered = Covered::of(guest_bytes, tail_bytes, copied.disk_bytes());
            let covered = covered.ok_or_else(|| FreezeError::Unsignable { path: path.into() })?;
            target.sign(covered, signer)?;
        }
        target.flush().map_err(failed("make durable"))?;
        drop(target);
        let publish = |error| failed("publish")(io::Error::other(error));
        let current = connection.snapshot(name).map_err(publish)?;
        if current.extent().generation != self.generation {
            let reason = "the function was frozen anew meanwhile; run the command again";
            return Err(failed("publish")(io::Error::other(reason)).into());
        }
        connection.commit(new_generation).map_err(publish)?;
        Ok(())
    }
}

#[cfg(test)]
#[path = "republish_tests.rs"]
mod tests;
