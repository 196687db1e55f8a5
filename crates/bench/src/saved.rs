//! Results that an earlier command wrote as JSON.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

use crate::capacity::Capacities;
use crate::thaw::{RESULTS_VERSION, Results};

/// Why a file of results cannot be read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ReadResultsError {
    /// The file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The file contains something else.
    #[error("{path} contains no results: pass a file that `firn bench thaw --json` wrote")]
    Results {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: serde_json::Error,
    },
    /// The file is of a later version.
    #[error(
        "{path} has results of version {found}, and this firn reads versions up to {RESULTS_VERSION}: use a newer firn"
    )]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
    /// The file contains something else.
    #[error("{path} contains no capacities: pass a file that `firn bench capacity --json` wrote")]
    Capacities {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: serde_json::Error,
    },
}

/// What every version of the results has.
#[derive(Deserialize)]
struct Versioned {
    #[serde(default)]
    version: u32,
}

impl Results {
    /// Reads the JSON that `firn bench thaw` wrote.
    ///
    /// # Errors
    ///
    /// [`ReadResultsError`].
    pub fn read(path: &Path) -> Result<Self, ReadResultsError> {
        read_results(path)
    }
}

/// Reads results of a version that this build knows.
pub(crate) fn read_results<T: DeserializeOwned>(path: &Path) -> Result<T, ReadResultsError> {
    let bytes = read(path)?;
    let other = |source| ReadResultsError::Results { path: path.to_owned(), source };
    let Versioned { version: found } = serde_json::from_slice(&bytes).map_err(other)?;
    if found > RESULTS_VERSION {
        return Err(ReadResultsError::Version { path: path.to_owned(), found });
    }
    serde_json::from_slice(&bytes).map_err(other)
}

impl Capacities {
    /// Reads the JSON that `firn bench capacity` wrote.
    ///
    /// # Errors
    ///
    /// [`ReadResultsError`].
    pub fn read(path: &Path) -> Result<Self, ReadResultsError> {
        serde_json::from_slice(&read(path)?)
            .map_err(|source| ReadResultsError::Capacities { path: path.to_owned(), source })
    }
}

fn read(path: &Path) -> Result<Vec<u8>, ReadResultsError> {
    fs::read(path).map_err(|source| ReadResultsError::Read { path: path.to_owned(), source })
}
