//! Stores the zip files with the code of functions and layers.
//!
//! A zip file is checked when it is uploaded and read when a microVM boots. The host unpacks
//! nothing: each file goes from the zip file straight to the guest.

use std::fs::{self, File};
use std::io::{self, Cursor, Read};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use zip::ZipArchive;
use zip::result::ZipError;

use super::Code;

/// The largest zip file, bytes (AWS Lambda's limit for a direct upload).
pub const MAX_ZIP: usize = 50 << 20;

/// A file in a guest takes a multiple of this, bytes.
const BLOCK: u64 = 4096;

/// The largest size of all unpacked files of a zip file together, bytes (AWS Lambda's limit).
pub const MAX_UNPACKED: u64 = 262_144_000;

/// The largest number of entries in a zip file. AWS Lambda has no such limit; this one bounds the
/// cost of a small zip file.
const MAX_FILES: usize = 65_536;

/// Names of zip files that are being stored begin with it.
const PARTIAL: &str = ".firn-code-";

/// The longest path in a zip file, bytes.
const MAX_PATH: usize = 1024;

/// A zip file is not valid, or could not be stored.
#[derive(Debug, thiserror::Error)]
pub enum CodeError {
    /// It is not a zip file, or is damaged.
    #[error("the zip file is not valid")]
    NotZip(#[source] ZipError),
    /// It holds no file.
    #[error("the zip file is empty")]
    Empty,
    /// A file in it cannot be read.
    #[error("{path:?} in the zip file cannot be read")]
    Unreadable {
        /// The file.
        path: String,
        /// The cause.
        source: io::Error,
    },
    /// A path in it leads out of the function's folder.
    #[error("{0:?} in the zip file is outside the function's folder")]
    Path(String),
    /// It holds a link or a special file.
    #[error("{0:?} in the zip file is neither a file nor a folder")]
    Kind(String),
    /// It holds two files of one name.
    #[error("the zip file holds two files named {0:?}")]
    Duplicate(String),
    /// Its files are too large.
    #[error("the unpacked files are larger than {MAX_UNPACKED} bytes")]
    TooLarge,
    /// It holds too many files and folders.
    #[error("the zip file holds more than {MAX_FILES} entries")]
    TooMany,
    /// The host cannot write or read the stored file.
    #[error("cannot access the stored code {}", path.display())]
    Store {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// A file of a function.
#[derive(Debug)]
pub(crate) struct PackageFile {
    /// Relative, with `/` between components, without `.` and `..`.
    pub(crate) path: String,
    pub(crate) executable: bool,
    pub(crate) contents: Vec<u8>,
}

/// The folder with the zip files, each named by its digest.
#[derive(Debug, Clone)]
pub(crate) struct CodeStore {
    folder: PathBuf,
    /// Makes a file, or the names in a folder, last: `fsync`.
    sync: fn(&File) -> io::Result<()>,
}

impl CodeStore {
    /// Opens the store in `folder`, which it creates where needed.
    pub(crate) fn open(folder: PathBuf) -> io::Result<Self> {
        Self::with_sync(folder, File::sync_all)
    }

    fn with_sync(folder: PathBuf, sync: fn(&File) -> io::Result<()>) -> io::Result<Self> {
        fs::create_dir_all(&folder)?;
        if let Some(parent) = folder.parent() {
            sync(&File::open(parent)?)?;
        }
        Ok(Self { folder, sync })
    }

    /// Free space for code, bytes; 0 if it cannot be read.
    pub(crate) fn free(&self) -> u64 {
        let system = rustix::fs::statvfs(&self.folder);
        system.map_or(0, |system| system.f_bavail.saturating_mul(system.f_frsize))
    }

    /// The value that [`CodeStore::put`] returns for `zip`, but for the space that its files take.
    pub(crate) fn code_of(zip: &[u8]) -> Code {
        let digest = Sha256::digest(zip);
        let sha256 = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        Code { sha256, size: u64::try_from(zip.len()).unwrap_or(u64::MAX), unpacked: 0, content: 0 }
    }

    /// Checks all of `zip` and stores it. When this returns, the file and its name survive a loss
    /// of power, so that the database can refer to it.
    pub(crate) fn put(&self, zip: &[u8]) -> Result<Code, CodeError> {
        check_entries(zip)?;
        let mut code = Self::code_of(zip);
        let skip = |contents: &mut dyn Read| io::copy(contents, &mut io::sink());
        read(Cursor::new(zip), skip, |_, _, size| {
            code.unpacked += size.next_multiple_of(BLOCK);
            code.content += size;
            Ok::<_, CodeError>(())
        })?;
        let path = self.path(&code);
        let failed = |source| CodeError::Store { path: path.clone(), source };
        if !path.exists() {
            let mut partial = tempfile::Builder::new();
            let mut file = partial.prefix(PARTIAL).tempfile_in(&self.folder).map_err(failed)?;
            io::Write::write_all(&mut file, zip).map_err(failed)?;
            (self.sync)(file.as_file()).map_err(failed)?;
            file.persist(&path).map_err(|error| failed(error.error))?;
        }
        // Also the name of a file that was there: the upload that made it may have failed here.
        File::open(&self.folder).and_then(|folder| (self.sync)(&folder)).map_err(failed)?;
        Ok(code)
    }

    /// Calls `each` with every file of `code`.
    pub(crate) fn files<E: From<CodeError>>(
        &self,
        code: &Code,
        mut each: impl FnMut(PackageFile) -> Result<(), E>,
    ) -> Result<(), E> {
        let path = self.path(code);
        let file =
            File::open(&path).map_err(|source| CodeError::Store { path: path.clone(), source })?;
        let load = |from: &mut dyn Read| {
            let mut contents = Vec::new();
            from.read_to_end(&mut contents).map(|_| contents)
        };
        read(io::BufReader::new(file), load, |path, executable, contents| {
            each(PackageFile { path, executable, contents })
        })
    }

    /// The path of the zip file.
    pub(crate) fn path(&self, code: &Code) -> PathBuf {
        self.folder.join(format!("{}.zip", code.sha256))
    }

    /// Removes all stored code for which `keep` is false. Everything else in the folder stays.
    pub(crate) fn keep(&self, keep: impl Fn(&Path) -> bool) -> io::Result<()> {
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            let path = entry.path();
            if entry.file_name().to_str().is_some_and(is_code_file) && !keep(&path) {
                fs::remove_file(path)?;
            }
        }
        Ok(())
    }
}

/// Whether a name has the form of a stored zip file, or of one that was not completed.
pub(crate) fn is_code_file(name: &str) -> bool {
    let digest = |name: &str| {
        name.len() == 64 && name.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
    };
    name.starts_with(PARTIAL) || name.strip_suffix(".zip").is_some_and(digest)
}

/// Refuses a zip file with too many entries before anything is decoded: each takes memory of its
/// own. Counts the signatures of entries, whatever count its directory has; entries of zip files
/// that are stored in it uncompressed count too.
fn check_entries(zip: &[u8]) -> Result<(), CodeError> {
    let entries = memchr::memmem::find_iter(zip, b"PK\x01\x02");
    match entries.take(MAX_FILES + 1).count() {
        count if count > MAX_FILES => Err(CodeError::TooMany),
        _ => Ok(()),
    }
}

/// Reads an untrusted zip file: `load` reads the contents of each file, `each` gets its path and
/// whether it is executable.
fn read<T, E: From<CodeError>>(
    zip: impl Read + io::Seek,
    mut load: impl FnMut(&mut dyn Read) -> io::Result<T>,
    mut each: impl FnMut(String, bool, T) -> Result<(), E>,
) -> Result<(), E> {
    let mut archive = ZipArchive::new(zip).map_err(CodeError::NotZip)?;
    if archive.is_empty() {
        return Err(CodeError::Empty.into());
    }
    if archive.len() > MAX_FILES {
        return Err(CodeError::TooMany.into());
    }
    let mut seen = std::collections::BTreeSet::new();
    let mut left = MAX_UNPACKED;
    for index in 0..archive.len() {
        let mut entry = archive.by_index(index).map_err(CodeError::NotZip)?;
        let path = entry.name().map_err(CodeError::NotZip)?.into_owned();
        if entry.is_dir() {
            continue;
        }
        let mode = entry.unix_mode().unwrap_or(0o644);
        // S_IFMT. Zero if the system that made the zip file has no modes.
        if !matches!(mode & 0o170_000, 0 | 0o100_000) {
            return Err(CodeError::Kind(path).into());
        }
        let plain = |part: &str| !matches!(part, "" | "." | "..") && part.len() < 256;
        let inside = path.split('/').all(plain) && !path.contains(['\0', '\\']);
        if !inside || path.len() > MAX_PATH {
            return Err(CodeError::Path(path).into());
        }
        if !seen.insert(path.clone()) {
            return Err(CodeError::Duplicate(path).into());
        }
        // Does not trust the size in the zip file's directory.
        let mut limited = (&mut entry).take(left + 1);
        let contents = load(&mut limited)
            .map_err(|source| CodeError::Unreadable { path: path.clone(), source })?;
        left = limited.limit().checked_sub(1).ok_or(CodeError::TooLarge)?;
        each(path, mode & 0o111 != 0, contents)?;
    }
    if seen.is_empty() {
        return Err(CodeError::Empty.into());
    }
    Ok(())
}

#[cfg(test)]
#[path = "code_tests.rs"]
mod tests;
