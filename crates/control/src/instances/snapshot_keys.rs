//! The keys that sign the snapshots of tenants, a file for each.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use firn_snapshot::{KeyError, Signer, Verifier};
use parking_lot::Mutex;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

/// The tenant of functions without an owner.
const NO_OWNER: &str = "default";

/// The keys in a directory. A tenant's key is made when its first snapshot is frozen.
#[derive(Debug)]
pub(crate) struct SnapshotKeys {
    directory: PathBuf,
    /// Held while a key is made.
    making: Mutex<()>,
}

impl SnapshotKeys {
    /// The keys in a directory, which is made where there is none, for this user alone.
    pub(crate) fn open(directory: &Path) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        Ok(Self { directory: directory.canonicalize()?, making: Mutex::new(()) })
    }

    /// Signs the snapshots of the functions of `owner`.
    pub(crate) fn signer(&self, owner: Option<&str>) -> Result<Signer, KeyError> {
        let _making = self.making.lock();
        Signer::read_or_make(&self.path(owner), owner.unwrap_or(NO_OWNER))
    }

    /// Checks the snapshots of the functions of `owner`.
    pub(crate) fn verifier(&self, owner: Option<&str>) -> Result<Verifier, KeyError> {
        Ok(Signer::read(&self.path(owner), owner.unwrap_or(NO_OWNER))?.verifier())
    }

    /// The file of a key. Any name of a tenant is one of a file.
    fn path(&self, owner: Option<&str>) -> PathBuf {
        let name = utf8_percent_encode(owner.unwrap_or(NO_OWNER), NON_ALPHANUMERIC);
        self.directory.join(format!("{name}.pem"))
    }
}

#[cfg(test)]
#[path = "snapshot_keys_tests.rs"]
mod tests;
