//! Zip files with functions' code, checked when they come and read when a microVM needs them.
//!
//! Nothing is unpacked on the host: a file goes from the zip to the guest.

use std::fs::{self, File};
use std::io::{self, Cursor, Read};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use zip::ZipArchive;
use zip::result::ZipError;

use super::Code;

/// The largest zip file, in bytes (AWS Lambda's limit for one that is uploaded directly).
pub(crate) const MAX_ZIP: usize = 50 << 20;

/// The size of all files in a zip, unpacked, in bytes (AWS Lambda's limit).
const MAX_UNPACKED: u64 = 262_144_000;

/// The number of files in a zip. AWS Lambda has no limit; this bounds what a small zip can ask for.
const MAX_FILES: usize = 65_536;

/// The longest path in a zip, in bytes.
const MAX_PATH: usize = 1024;

/// Why a zip file is not taken.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CodeError {
    #[error("Could not unzip uploaded file. Please check your file, then try to upload again.")]
    NoZip(#[source] ZipError),
    #[error("Could not unzip uploaded file: it is empty.")]
    Empty,
    #[error("Could not unzip uploaded file: {path:?} cannot be read.")]
    Unreadable { path: String, source: io::Error },
    #[error("Could not unzip uploaded file: {0:?} does not stay inside the function's folder.")]
    Path(String),
    #[error("Could not unzip uploaded file: {0:?} is neither a file nor a folder.")]
    Kind(String),
    #[error("Could not unzip uploaded file: it holds two files named {0:?}.")]
    Twice(String),
    #[error("Unzipped size must be smaller than {MAX_UNPACKED} bytes")]
    TooLarge,
    #[error("The zip file must hold at most {MAX_FILES} files")]
    TooMany,
    #[error("the code cannot be stored in {}", path.display())]
    Store { path: PathBuf, source: io::Error },
}

impl CodeError {
    /// Whether the host failed, and not the zip file.
    pub(crate) fn is_ours(&self) -> bool {
        matches!(self, Self::Store { .. })
    }
}

/// A file of a function.
#[derive(Debug)]
pub(crate) struct PackageFile {
    /// Relative, `/` between components, no `.` or `..`.
    pub(crate) path: String,
    pub(crate) executable: bool,
    pub(crate) contents: Vec<u8>,
}

/// The folder with the zip files, by their digests.
#[derive(Debug, Clone)]
pub(crate) struct CodeStore {
    folder: PathBuf,
}

impl CodeStore {
    /// The store in `folder`, which is made.
    pub(crate) fn open(folder: PathBuf) -> io::Result<Self> {
        fs::create_dir_all(&folder)?;
        Ok(Self { folder })
    }

    /// What [`CodeStore::put`] returns for `zip`.
    pub(crate) fn code_of(zip: &[u8]) -> Code {
        let digest = Sha256::digest(zip);
        let sha256 = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        Code { sha256, size: u64::try_from(zip.len()).unwrap_or(u64::MAX) }
    }

    /// Checks `zip`, every byte of it, and keeps it.
    pub(crate) fn put(&self, zip: &[u8]) -> Result<Code, CodeError> {
        read(Cursor::new(zip), |_| Ok::<_, CodeError>(()))?;
        let code = Self::code_of(zip);
        let path = self.path(&code);
        let failed = |source| CodeError::Store { path: path.clone(), source };
        if path.exists() {
            return Ok(code);
        }
        let mut file = tempfile::NamedTempFile::new_in(&self.folder).map_err(failed)?;
        io::Write::write_all(&mut file, zip).map_err(failed)?;
        file.as_file().sync_all().map_err(failed)?;
        file.persist(&path).map_err(|error| failed(error.error))?;
        Ok(code)
    }

    /// Hands every file of `code` to `each`.
    pub(crate) fn files<E: From<CodeError>>(
        &self,
        code: &Code,
        each: impl FnMut(PackageFile) -> Result<(), E>,
    ) -> Result<(), E> {
        let path = self.path(code);
        let file =
            File::open(&path).map_err(|source| CodeError::Store { path: path.clone(), source })?;
        read(io::BufReader::new(file), each)
    }

    /// Where the zip file lies.
    pub(crate) fn path(&self, code: &Code) -> PathBuf {
        self.folder.join(format!("{}.zip", code.sha256))
    }

    /// Removes all files but those of `keep`.
    pub(crate) fn keep(&self, keep: impl Fn(&Path) -> bool) -> io::Result<()> {
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            if !keep(&path) {
                fs::remove_file(path)?;
            }
        }
        Ok(())
    }
}

/// Reads a zip file that nobody has checked.
fn read<E: From<CodeError>>(
    zip: impl Read + io::Seek,
    mut each: impl FnMut(PackageFile) -> Result<(), E>,
) -> Result<(), E> {
    let mut archive = ZipArchive::new(zip).map_err(CodeError::NoZip)?;
    if archive.is_empty() {
        return Err(CodeError::Empty.into());
    }
    if archive.len() > MAX_FILES {
        return Err(CodeError::TooMany.into());
    }
    let mut seen = std::collections::BTreeSet::new();
    let mut left = MAX_UNPACKED;
    for index in 0..archive.len() {
        let mut entry = archive.by_index(index).map_err(CodeError::NoZip)?;
        let path = entry.name().map_err(CodeError::NoZip)?.into_owned();
        if entry.is_dir() {
            continue;
        }
        let mode = entry.unix_mode().unwrap_or(0o644);
        // S_IFMT; zero where the zip was made on a system without modes.
        if !matches!(mode & 0o170_000, 0 | 0o100_000) {
            return Err(CodeError::Kind(path).into());
        }
        let plain = |part: &str| !matches!(part, "" | "." | "..") && part.len() < 256;
        let inside = path.split('/').all(plain) && !path.contains(['\0', '\\']);
        if !inside || path.len() > MAX_PATH {
            return Err(CodeError::Path(path).into());
        }
        if !seen.insert(path.clone()) {
            return Err(CodeError::Twice(path).into());
        }
        // The size that the zip announces is not believed.
        let mut contents = Vec::new();
        let read = (&mut entry).take(left + 1).read_to_end(&mut contents);
        read.map_err(|source| CodeError::Unreadable { path: path.clone(), source })?;
        let length = u64::try_from(contents.len()).unwrap_or(u64::MAX);
        left = left.checked_sub(length).ok_or(CodeError::TooLarge)?;
        each(PackageFile { path, executable: mode & 0o111 != 0, contents })?;
    }
    if seen.is_empty() {
        return Err(CodeError::Empty.into());
    }
    Ok(())
}

#[cfg(test)]
#[path = "code_tests.rs"]
mod tests;
