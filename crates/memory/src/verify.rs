//! Verifies what a plan maps from files, before the guest runs on it.
//!
//! Planners whose papers let the kernel page in from files do not verify what it reads: their plans
//! say *unchecked*. This check reads all of that first, so it also loads it into the page cache.

use std::io;
use std::path::{Path, PathBuf};

use firn_base::PAGE_SIZE;
use firn_snapshot::{DigestError, ReadAt, Snapshot};
use thiserror::Error;

use crate::executor::Sources;
use crate::plan::{Integrity, Plan, Source};

/// Bytes that are read at once.
const PIECE: u64 = 1 << 20;

/// What a plan maps from a file is not what was frozen, or could not be verified.
#[derive(Debug, Error)]
pub enum VerifyPlanError {
    /// The file cannot be read.
    #[error("cannot read {} at {offset:#x}", file.display())]
    Read {
        /// The packed file, or the snapshot whose image it is.
        file: PathBuf,
        /// The offset, bytes.
        offset: u64,
        /// The cause.
        source: io::Error,
    },
    /// A page of it differs.
    #[error("{} is damaged", file.display())]
    Damaged {
        /// The packed file, or the snapshot whose image it is.
        file: PathBuf,
        /// The page.
        source: DigestError,
    },
}

/// Compares every page that `plan` maps unchecked from the files of a snapshot in a directory with
/// its digest.
///
/// # Errors
/// See [`VerifyPlanError`].
pub fn verify_plan(
    plan: &Plan,
    snapshot: &Snapshot,
    sources: &Sources<'_>,
) -> Result<(), VerifyPlanError> {
    let mut bytes = Vec::new();
    for segment in plan.segments.iter().filter(|one| one.integrity == Integrity::Unchecked) {
        let packed = sources.packed();
        let (file, path, offset, image): (&dyn ReadAt, &Path, u64, u64) =
            match (segment.source, packed) {
                (Source::Image { offset }, _) => {
                    (snapshot.image(), snapshot.path(), offset, offset)
                }
                (Source::Packed { offset, image }, Some(packed)) => {
                    (packed.file(), packed.path(), offset, image)
                }
                // The executor refuses a plan without its packed file.
                _ => continue,
            };
        for done in (0..segment.guest.len).step_by(usize::try_from(PIECE).unwrap_or(usize::MAX)) {
            let len = PIECE.min(segment.guest.len - done);
            bytes.resize(usize::try_from(len).unwrap_or(usize::MAX), 0);
            let offset = offset + done;
            file.read_exact_at(&mut bytes, offset).map_err(|source| VerifyPlanError::Read {
                file: path.to_owned(),
                offset,
                source,
            })?;
            let checked = snapshot.digests().check((image + done) / PAGE_SIZE, &bytes);
            checked.map_err(|source| VerifyPlanError::Damaged { file: path.to_owned(), source })?;
        }
    }
    Ok(())
}
