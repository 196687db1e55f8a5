//! Files of results: known to be writable before a measurement begins, and written when it is done.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;
use thiserror::Error;

/// Why a result was not written.
#[derive(Debug, Error)]
#[error("writing {path}")]
pub(crate) struct SaveError {
    path: PathBuf,
    source: io::Error,
}

/// A file that will hold a result. Until then nothing is changed of what is there.
#[derive(Debug)]
pub(crate) struct Output {
    path: PathBuf,
    aside: NamedTempFile,
}

impl Output {
    /// Prepares a file, if one is asked for.
    pub(crate) fn prepare(path: Option<&Path>) -> Result<Option<Self>, SaveError> {
        let Some(path) = path else { return Ok(None) };
        let folder = match path.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        let path = path.to_owned();
        match tempfile::Builder::new().permissions(permissions()).tempfile_in(folder) {
            Ok(aside) => Ok(Some(Self { path, aside })),
            Err(source) => Err(SaveError { path, source }),
        }
    }

    /// Writes the result, whole or not at all.
    pub(crate) fn write(self, text: &str) -> Result<(), SaveError> {
        let Self { path, mut aside } = self;
        let written = aside.write_all(text.as_bytes());
        match written.and_then(|()| Ok(aside.persist(&path)?)) {
            Ok(_) => Ok(()),
            Err(source) => Err(SaveError { path, source }),
        }
    }
}

/// Those of any new file, less the umask: a temporary file would be its owner's alone.
fn permissions() -> std::fs::Permissions {
    std::os::unix::fs::PermissionsExt::from_mode(0o666)
}
