//! Files of results: checked to be writable before a measurement begins, and written when it is
//! done.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use tempfile::NamedTempFile;
use thiserror::Error;

/// Why a result was not written.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ResultFileError {
    /// The file cannot be written.
    #[error("cannot write {path}")]
    Write {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The results cannot be encoded.
    #[error("cannot encode the results as JSON")]
    Json(#[from] serde_json::Error),
}

/// A file that will hold a result. A file that exists stays unchanged until then.
#[derive(Debug)]
pub struct ResultFile {
    path: PathBuf,
    temporary: NamedTempFile,
}

impl ResultFile {
    /// Prepares a file in an existing folder.
    ///
    /// # Errors
    ///
    /// [`ResultFileError::Write`] if no file can be created there.
    pub fn prepare(path: &Path) -> Result<Self, ResultFileError> {
        let folder = match path.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        let path = path.to_owned();
        match tempfile::Builder::new().permissions(permissions()).tempfile_in(folder) {
            Ok(temporary) => Ok(Self { path, temporary }),
            Err(source) => Err(ResultFileError::Write { path, source }),
        }
    }

    /// Writes the result atomically: the file then has all of it, or stays as it was.
    ///
    /// # Errors
    ///
    /// [`ResultFileError::Write`].
    pub fn write(self, text: &str) -> Result<(), ResultFileError> {
        let Self { path, mut temporary } = self;
        let written = temporary.write_all(text.as_bytes());
        match written.and_then(|()| Ok(temporary.persist(&path)?)) {
            Ok(_) => Ok(()),
            Err(source) => Err(ResultFileError::Write { path, source }),
        }
    }

    /// Writes the result as indented JSON, atomically.
    ///
    /// # Errors
    ///
    /// [`ResultFileError`].
    pub fn write_json(self, result: &impl Serialize) -> Result<(), ResultFileError> {
        self.write(&(serde_json::to_string_pretty(result)? + "\n"))
    }
}

/// The permissions of any new file, less the umask. By default only the owner could read a
/// temporary file.
fn permissions() -> std::fs::Permissions {
    std::os::unix::fs::PermissionsExt::from_mode(0o666)
}
