//! Files that the caller opened.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// A file that is open for reading, and its path for error messages and manifests.
///
/// Its open file description must not be shared with another process: loading a kernel moves the
/// position in the file.
#[derive(Debug)]
pub struct OpenFile {
    /// The file.
    pub file: File,
    /// The path of the file. A manifest requires an absolute path without links.
    pub path: PathBuf,
}

/// A file cannot be opened.
#[derive(Debug, Error)]
#[error("cannot open {path}")]
pub struct OpenFileError {
    path: PathBuf,
    source: io::Error,
}

impl OpenFile {
    /// Its size, bytes. Moves the position in the file: a block device has no size in its metadata.
    pub(crate) fn size(&self) -> io::Result<u64> {
        Ok(rustix::fs::seek(&self.file, rustix::fs::SeekFrom::End(0))?)
    }

    /// Opens the file at `path` for reading, and resolves the links in the path.
    ///
    /// # Errors
    /// The file does not exist, or this process has no permission to read it.
    pub fn open(path: &Path) -> Result<Self, OpenFileError> {
        let opened = path.canonicalize().and_then(|path| {
            // Without O_NONBLOCK, opening a FIFO blocks until a writer opens it.
            let mut options = OpenOptions::new();
            let file = options.read(true).custom_flags(libc::O_NONBLOCK).open(&path)?;
            Ok(Self { file, path })
        });
        opened.map_err(|source| OpenFileError { path: path.to_owned(), source })
    }
}

#[cfg(test)]
#[path = "open_file_tests.rs"]
mod tests;
