//! The tiers of a host, in a file.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::Tier;
use crate::result_file::{ResultFile, ResultFileError};

/// Version of the file.
const VERSION: u32 = 1;

/// The tiers of a host. The file is locked until the value is dropped, so changes of several
/// processes follow each other.
#[derive(Debug)]
pub struct TierList {
    path: PathBuf,
    tiers: Vec<Tier>,
    _lock: Option<File>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Content {
    version: u32,
    tiers: Vec<Tier>,
}

/// Why the list of tiers cannot be read or changed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TierListError {
    /// The file or its folder cannot be read, created or locked.
    #[error("cannot open the list of tiers {path}")]
    Open {
        /// The file or folder.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The file is not a list of tiers.
    #[error("{path} is not a list of tiers: correct it, or remove it and add the tiers again")]
    Parse {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: serde_json::Error,
    },
    /// The file is of another version.
    #[error("{path} has version {found}, but this firn reads version {VERSION}: use a newer firn")]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
    /// The name is in use.
    #[error(
        "there is a tier {0:?} already: choose another name, or remove it with `firn tier rm {0}`"
    )]
    Exists(String),
    /// No tier has the name.
    #[error("there is no tier {name:?}: the tiers are {known}; `firn tier add` adds one")]
    Unknown {
        /// The name.
        name: String,
        /// The known names.
        known: String,
    },
    /// The file cannot be written.
    #[error(transparent)]
    Write(#[from] ResultFileError),
}

impl TierList {
    /// Reads the list. A file that does not exist is an empty list.
    ///
    /// # Errors
    ///
    /// [`TierListError`].
    pub fn read(path: &Path) -> Result<Self, TierListError> {
        Self::load(path, None)
    }

    /// Reads the list to change it, and locks it. The folder is created if it does not exist.
    ///
    /// # Errors
    ///
    /// [`TierListError`].
    pub fn lock(path: &Path) -> Result<Self, TierListError> {
        let folder = path.parent().filter(|folder| *folder != Path::new(""));
        let folder = folder.unwrap_or(Path::new("."));
        let failed = |source| TierListError::Open { path: folder.to_owned(), source };
        fs::create_dir_all(folder).map_err(failed)?;
        let lock = File::open(folder).map_err(failed)?;
        flock(&lock, FlockOperation::LockExclusive).map_err(|errno| failed(errno.into()))?;
        Self::load(path, Some(lock))
    }

    fn load(path: &Path, lock: Option<File>) -> Result<Self, TierListError> {
        let path = path.to_owned();
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(Self { path, tiers: Vec::new(), _lock: lock });
            }
            Err(source) => return Err(TierListError::Open { path, source }),
        };
        match serde_json::from_str::<Content>(&text) {
            Ok(Content { version: VERSION, tiers }) => Ok(Self { path, tiers, _lock: lock }),
            Ok(Content { version: found, .. }) => Err(TierListError::Version { path, found }),
            Err(source) => Err(TierListError::Parse { path, source }),
        }
    }

    /// All tiers, in the order in which they were added.
    #[must_use]
    pub fn tiers(&self) -> &[Tier] {
        &self.tiers
    }

    /// The tier of a name.
    ///
    /// # Errors
    ///
    /// [`TierListError::Unknown`].
    pub fn get(&self, name: &str) -> Result<&Tier, TierListError> {
        let found = self.tiers.iter().find(|tier| tier.name == name);
        found.ok_or_else(|| self.unknown(name))
    }

    fn unknown(&self, name: &str) -> TierListError {
        let known: Vec<&str> = self.tiers.iter().map(|tier| tier.name.as_str()).collect();
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        TierListError::Unknown { name: name.to_owned(), known }
    }

    /// Adds a tier, and writes the list.
    ///
    /// # Errors
    ///
    /// [`TierListError`]; the file then stays as it was.
    pub fn add(&mut self, tier: Tier) -> Result<(), TierListError> {
        if self.tiers.iter().any(|known| known.name == tier.name) {
            return Err(TierListError::Exists(tier.name));
        }
        self.tiers.push(tier);
        self.write()
    }

    /// Removes a tier, and writes the list. The medium stays as it is.
    ///
    /// # Errors
    ///
    /// [`TierListError`]; the file then stays as it was.
    pub fn remove(&mut self, name: &str) -> Result<Tier, TierListError> {
        let at = self.tiers.iter().position(|tier| tier.name == name);
        let removed = self.tiers.remove(at.ok_or_else(|| self.unknown(name))?);
        self.write()?;
        Ok(removed)
    }

    fn write(&self) -> Result<(), TierListError> {
        let content = Content { version: VERSION, tiers: self.tiers.clone() };
        Ok(ResultFile::prepare(&self.path)?.write_json(&content)?)
    }
}
