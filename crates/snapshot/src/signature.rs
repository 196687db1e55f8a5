//! The signature of a snapshot: `snapshot.sig` in a directory, [the end of the tail](extent) in a
//! pool.
//!
//! It is a statement about the snapshot's bytes, behind a signature of that statement. A reader
//! with a [`Verifier`] checks both before it parses any byte of the snapshot. It then uses the
//! bytes that it has checked, which no other process can change.

mod extent;

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use firn_base::PAGE_SIZE;
use sha2::{Digest, Sha256};

use crate::attach::AttachError;
use crate::container::Header;
use crate::directory::{open_container, open_directory, open_file};
use crate::error::OpenError;
use crate::files::{CONTAINER_FILE, IMAGE_FILE, OVERLAY_FILE, SIGNATURE_FILE};
use crate::freeze_error::FreezeError;
use crate::keys::{SIGNATURE_LEN, Signer, Verifier};
use crate::read_at::{Part, ReadAt};
use crate::section::{MAX_HEADER_LEN, Section, digests_len};
use crate::staging::Staging;

pub(crate) use extent::{Covered, SIGNED_LEN, open_checked_tail, sign_extent};

const HASH_LEN: usize = 32;
/// Bytes of a statement: a length, and three hashes.
const STATEMENT_LEN: usize = 8 + 3 * HASH_LEN;
/// Maximum number of bytes that are read at once.
const BLOCK: usize = 1 << 20;

/// SHA-256 of some bytes.
type Hash = [u8; HASH_LEN];

/// What a signature confirms. The first of the signed bytes tell a container from a tail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Statement {
    /// Bytes of `snapshot.firn`, or of a tail, that are signed: all before the digests.
    len: u64,
    /// The hash of these bytes.
    container: Hash,
    /// The hash of `memory.img`, or of an extent's guest memory.
    image: Hash,
    /// The hash of `overlay.img`, or of what a tail stores of it; zeros if there is none.
    overlay: Hash,
}

/// What a checked signature confirms of a snapshot, beyond what was checked at its opening.
#[derive(Debug)]
pub(crate) enum Signed {
    /// Of the files of a directory.
    Files(Statement),
    /// Of an extent.
    Extent {
        /// The statement.
        statement: Statement,
        /// What the tail stores of the writable disk.
        disk: Part<Arc<dyn ReadAt>>,
    },
}

impl Statement {
    /// States what the files in `directory` are.
    fn of(directory: &OwnedFd, path: &Path) -> Result<Self, AttachError> {
        let container = open_container(directory, path)?;
        let image = open_file(directory, path, IMAGE_FILE)?;
        let size = |file: &File, name| file.size().map_err(reading(path, name));
        let pages = size(&image, IMAGE_FILE)? / PAGE_SIZE;
        // A monitor wrote the file, so it is not parsed to find out where the digests begin.
        let len = size(&container, CONTAINER_FILE)?.checked_sub(digests_len(pages));
        let Some(len) = len.filter(|&len| len <= max_len()) else {
            let path = path.join(CONTAINER_FILE);
            return Err(FreezeError::Unsignable { path }.into());
        };
        let overlay = match open_file(directory, path, OVERLAY_FILE) {
            Err(OpenError::MissingFile { .. }) => Hash::default(),
            file => hash(&file?).map_err(reading(path, OVERLAY_FILE))?,
        };
        let mut head = vec![0; usize::try_from(len).unwrap_or(usize::MAX)];
        container.read_exact_at(&mut head, 0).map_err(reading(path, CONTAINER_FILE))?;
        let image = hash(&image).map_err(reading(path, IMAGE_FILE))?;
        Ok(Self { len, container: Sha256::digest(&head).into(), image, overlay })
    }

    fn encode(&self) -> [u8; STATEMENT_LEN] {
        let mut bytes = [0; STATEMENT_LEN];
        bytes[..8].copy_from_slice(&self.len.to_le_bytes());
        let hashes = [self.container, self.image, self.overlay];
        bytes[8..].copy_from_slice(hashes.as_flattened());
        bytes
    }

    fn decode(bytes: &[u8; STATEMENT_LEN]) -> Self {
        let mut len = [0; 8];
        len.copy_from_slice(&bytes[..8]);
        let mut hashes = [Hash::default(); 3];
        hashes.as_flattened_mut().copy_from_slice(&bytes[8..]);
        let [container, image, overlay] = hashes;
        Self { len: u64::from_le_bytes(len), container, image, overlay }
    }

    /// Checks that the signed bytes are all of `snapshot.firn` but the digests.
    fn check_header(&self, header: &Header, path: &Path) -> Result<(), OpenError> {
        if header.range(Section::Digests).start == self.len {
            return Ok(());
        }
        Err(changed(path, CONTAINER_FILE))
    }

    /// Checks every byte of image and writable disk in a directory.
    pub(crate) fn check_files(
        &self,
        image: &dyn ReadAt,
        overlay: Option<&dyn ReadAt>,
        path: &Path,
    ) -> Result<(), OpenError> {
        let check = |name, file, signed: &Hash| match hash(file).map_err(reading(path, name))? {
            found if found == *signed => Ok(()),
            _ => Err(changed(path, name)),
        };
        check(IMAGE_FILE, image, &self.image)?;
        overlay.map_or(Ok(()), |overlay| check(OVERLAY_FILE, overlay, &self.overlay))
    }
}

/// An open `snapshot.firn`.
pub(crate) struct Opened {
    pub(crate) container: Arc<dyn ReadAt>,
    pub(crate) header: Header,
    /// What its signature confirms, if it was checked.
    pub(crate) statement: Option<Statement>,
}

/// Opens `snapshot.firn` of the snapshot at `path`. Nothing is parsed before `verifier`, where
/// there is one, has confirmed it by the file with the signature.
pub(crate) fn open_checked(
    container: File,
    signature: Option<&File>,
    path: &Path,
    verifier: Option<&Verifier>,
) -> Result<Opened, OpenError> {
    let container_path = path.join(CONTAINER_FILE);
    let Some(verifier) = verifier else {
        let header = Header::read(&container, &container_path)?;
        return Ok(Opened { container: Arc::new(container), header, statement: None });
    };
    let statement = read_statement(signature, path, verifier)?;
    let len = usize::try_from(statement.len.min(max_len())).unwrap_or(usize::MAX);
    let mut head = vec![0; len];
    match container.read_exact_at(&mut head, 0) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            return Err(changed(path, CONTAINER_FILE));
        }
        read => read.map_err(reading(path, CONTAINER_FILE))?,
    }
    if Hash::from(Sha256::digest(&head)) != statement.container {
        return Err(changed(path, CONTAINER_FILE));
    }
    let container = Arc::new(Checked { head, rest: Arc::new(container) });
    let header = Header::read(&*container, &container_path)?;
    statement.check_header(&header, path)?;
    Ok(Opened { container, header, statement: Some(statement) })
}

fn read_statement(
    file: Option<&File>,
    path: &Path,
    verifier: &Verifier,
) -> Result<Statement, OpenError> {
    let Some(file) = file else {
        return Err(OpenError::Unsigned { path: path.join(SIGNATURE_FILE) });
    };
    let (mut signature, mut statement) = ([0; SIGNATURE_LEN], [0; STATEMENT_LEN]);
    let read = file
        .read_exact_at(&mut signature, 0)
        .and_then(|()| file.read_exact_at(&mut statement, SIGNATURE_LEN as u64));
    match read {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {}
        read => {
            read.map_err(reading(path, SIGNATURE_FILE))?;
            if verifier.confirms(&statement, &signature) {
                return Ok(Statement::decode(&statement));
            }
        }
    }
    let tenant = verifier.tenant().to_owned();
    Err(OpenError::Signature { path: path.join(SIGNATURE_FILE), tenant })
}

/// Signs the snapshot in directory `path`, and replaces a signature that it has.
///
/// # Errors
/// [`AttachError`]; the snapshot is unchanged.
pub fn sign(path: &Path, signer: &Signer) -> Result<(), AttachError> {
    let directory = open_directory(path)?;
    let staging = Staging::create(path)?;
    write_signature(&staging, &directory, path, signer)?;
    Ok(staging.move_into(&directory, SIGNATURE_FILE)?)
}

/// Signs the files in `directory`, and writes and syncs the signature into a staging directory.
pub(crate) fn write_signature(
    staging: &Staging,
    directory: &OwnedFd,
    path: &Path,
    signer: &Signer,
) -> Result<(), AttachError> {
    let statement = Statement::of(directory, path)?.encode();
    let mut file = staging.create_file(SIGNATURE_FILE)?;
    let written = file.write_all(&[&signer.sign(&statement)[..], &statement].concat());
    written.map_err(|source| FreezeError::Io {
        path: path.join(SIGNATURE_FILE),
        action: "write",
        source,
    })?;
    staging.sync(&file, SIGNATURE_FILE)?;
    Ok(())
}

/// A container or a tail whose first bytes were checked, and are not read from the medium again.
#[derive(Debug)]
struct Checked {
    head: Vec<u8>,
    /// The whole. Only what follows the checked bytes is read from it.
    rest: Arc<dyn ReadAt>,
}

impl ReadAt for Checked {
    fn size(&self) -> io::Result<u64> {
        self.rest.size()
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(self.head.len());
        let checked = &self.head[start..];
        let (own, others) = buf.split_at_mut(buf.len().min(checked.len()));
        own.copy_from_slice(&checked[..own.len()]);
        self.rest.read_exact_at(others, offset.saturating_add(own.len() as u64))
    }
}

/// The most bytes that can be signed: a header, and all sections before the digests.
fn max_len() -> u64 {
    let sections = Section::TABLE.into_iter().filter(|&section| section != Section::Digests);
    MAX_HEADER_LEN as u64 + sections.map(Section::max_len).sum::<u64>()
}

/// The hash of all bytes of a file.
fn hash(file: &dyn ReadAt) -> io::Result<Hash> {
    let (mut hasher, mut block) = (Sha256::new(), vec![0; BLOCK]);
    let (size, mut offset) = (file.size()?, 0);
    while offset < size {
        let len = usize::try_from(size - offset).unwrap_or(usize::MAX).min(BLOCK);
        file.read_exact_at(&mut block[..len], offset)?;
        hasher.update(&block[..len]);
        offset += len as u64;
    }
    Ok(hasher.finalize().into())
}

fn changed(path: &Path, name: &str) -> OpenError {
    OpenError::NotSigned { path: path.join(name) }
}

fn reading(path: &Path, name: &'static str) -> impl FnOnce(io::Error) -> OpenError {
    let path = path.join(name);
    move |source| OpenError::Io { path, action: "read", source }
}

#[cfg(test)]
#[path = "signature_tests.rs"]
mod tests;
