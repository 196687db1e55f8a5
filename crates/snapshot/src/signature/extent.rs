//! The signature of a snapshot in a pool: the last bytes of its extent's tail.
//!
//! The tail of an extent ends with a mark, the signature and the statement. A reader without a key
//! ignores them. A snapshot that was frozen without a key has other bytes there.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use firn_base::PAGE_SIZE;
use sha2::{Digest, Sha256};

use super::{Checked, Hash, STATEMENT_LEN, Signed, Statement, hash, max_len};
use crate::error::OpenError;
use crate::extent::{ExtentTarget, failed};
use crate::freeze_error::FreezeError;
use crate::keys::{SIGNATURE_LEN, Signer, Verifier};
use crate::read_at::{Part, ReadAt};
use crate::section::digests_len;
use crate::tail::max_table_len;
use crate::transfer;

const MARK: [u8; 16] = *b"firn signature\n\0";
const LEN: usize = MARK.len() + SIGNATURE_LEN + STATEMENT_LEN;
/// Bytes that a tail needs for a signature.
pub(crate) const SIGNED_LEN: u64 = LEN as u64;

/// What is signed of an extent, apart from guest memory.
#[derive(Clone, Debug)]
pub(crate) struct Covered {
    /// Bytes of the tail before the digests.
    head: u64,
    /// What the tail stores of the writable disk, which follows the digests.
    disk: Range<u64>,
}

impl Covered {
    /// The parts of a tail of `tail_bytes`, the last `disk_bytes` of which are the disk's. A
    /// monitor may have named these lengths. `None` if they contradict each other.
    pub(crate) fn of(guest_bytes: u64, tail_bytes: u64, disk_bytes: u64) -> Option<Self> {
        let disk = tail_bytes.checked_sub(disk_bytes)?..tail_bytes;
        let head = disk.start.checked_sub(digests_len(guest_bytes / PAGE_SIZE))?;
        (head <= max_head()).then_some(Self { head, disk })
    }
}

/// The most bytes of a tail that can be signed.
fn max_head() -> u64 {
    max_table_len() + max_len()
}

/// Signs what was written to an extent, which `image` and `tail` read, and writes the signature to
/// the end of the tail.
pub(crate) fn sign_extent(
    target: &dyn ExtentTarget,
    image: &dyn ReadAt,
    tail: &Arc<dyn ReadAt>,
    covered: Covered,
    signer: &Signer,
) -> Result<(), FreezeError> {
    let Covered { head, disk } = covered;
    let part = |range| Part { whole: tail.clone(), range };
    let read = failed("read");
    let statement = Statement {
        len: head,
        container: hash(&part(0..head)).map_err(read)?,
        image: hash(image).map_err(read)?,
        overlay: hash_of_disk(&part(disk)).map_err(read)?,
    };
    let statement = statement.encode();
    let bytes = [&MARK[..], &signer.sign(&statement), &statement].concat();
    let write = failed("write");
    let at = tail.size().map_err(read)?.checked_sub(SIGNED_LEN);
    let at = at.ok_or_else(|| write(std::io::ErrorKind::UnexpectedEof.into()))?;
    target.write(transfer::Part::Tail, at, &bytes).map_err(write)
}

/// Zeros where nothing is stored.
fn hash_of_disk(disk: &Part<Arc<dyn ReadAt>>) -> std::io::Result<Hash> {
    if disk.range.is_empty() { Ok(Hash::default()) } else { hash(disk) }
}

/// Checks the signature of the snapshot `name`, whose tail this is. Nothing of the tail is parsed.
/// The first bytes of the returned tail, up to the digests, are those that were checked.
pub(crate) fn open_checked_tail(
    tail: &Arc<dyn ReadAt>,
    name: &Path,
    verifier: &Verifier,
) -> Result<(Arc<dyn ReadAt>, Statement), OpenError> {
    let io = |source| OpenError::Io { path: name.into(), action: "read", source };
    let unsigned = || OpenError::UnsignedInPool { name: name.into() };
    let size = tail.size().map_err(io)?;
    let mut bytes = [0; LEN];
    tail.read_exact_at(&mut bytes, size.checked_sub(SIGNED_LEN).ok_or_else(unsigned)?)
        .map_err(io)?;
    let signed = bytes.strip_prefix(&MARK).and_then(|rest| rest.split_first_chunk());
    let Some((signature, statement)) = signed else { return Err(unsigned()) };
    let statement = statement.first_chunk().filter(|said| verifier.confirms(&said[..], signature));
    let Some(statement) = statement.map(Statement::decode) else {
        let tenant = verifier.tenant().to_owned();
        return Err(OpenError::Signature { path: name.into(), tenant });
    };
    let len = statement.len;
    if len > max_head() || len > size {
        return Err(changed(name, TAIL));
    }
    let mut head = vec![0; usize::try_from(len).unwrap_or(usize::MAX)];
    tail.read_exact_at(&mut head, 0).map_err(io)?;
    if Hash::from(Sha256::digest(&head)) != statement.container {
        return Err(changed(name, TAIL));
    }
    Ok((Arc::new(Checked { head, rest: tail.clone() }), statement))
}

impl Statement {
    /// What the statement confirms of an opened extent, whose digests begin at `digests` of its
    /// tail: that must be where the signed bytes end.
    pub(crate) fn of_extent(
        self,
        digests: u64,
        disk: Part<Arc<dyn ReadAt>>,
        name: &Path,
    ) -> Result<Signed, OpenError> {
        if digests == self.len {
            return Ok(Signed::Extent { statement: self, disk });
        }
        Err(changed(name, TAIL))
    }
}

impl Signed {
    /// Checks every byte of image and writable disk. `path` is the snapshot's path or its name.
    pub(crate) fn check(
        &self,
        image: &dyn ReadAt,
        overlay: Option<&dyn ReadAt>,
        path: &Path,
    ) -> Result<(), OpenError> {
        let (statement, disk) = match self {
            Self::Files(statement) => return statement.check_files(image, overlay, path),
            Self::Extent { statement, disk } => (statement, disk),
        };
        let io = |source| OpenError::Io { path: path.into(), action: "read", source };
        if hash(image).map_err(io)? != statement.image {
            return Err(changed(path, "guest memory"));
        }
        if hash_of_disk(disk).map_err(io)? != statement.overlay {
            return Err(changed(path, "writable disk"));
        }
        Ok(())
    }
}

const TAIL: &str = "tail";

fn changed(name: &Path, part: &'static str) -> OpenError {
    OpenError::NotSignedInPool { name: name.into(), part }
}

#[cfg(test)]
#[path = "extent_tests.rs"]
mod tests;
