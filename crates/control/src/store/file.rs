//! The file of the database, opened so that damage is an error, and watched for failures of the
//! disk.

use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use redb::{Builder, Database, DatabaseError, StorageBackend, StorageError};

use super::StoreError;

/// An open database.
#[derive(Debug)]
pub(super) struct OpenFile {
    pub(super) database: Database,
    failure: Arc<OnceLock<io::ErrorKind>>,
}

impl OpenFile {
    /// Opens the database in a file that exists, or in an empty one. Verifies the checksum of every
    /// page: redb panics later on pages that it trusts.
    pub(super) fn open(path: &Path) -> Result<Self, StoreError> {
        let failed = |source: redb::Error| StoreError::Open {
            path: path.to_owned(),
            source: Box::new(source),
        };
        let file = OpenOptions::new().read(true).write(true).open(path);
        let file = file.and_then(|file| {
            file.set_permissions(Permissions::from_mode(0o600))?;
            Ok(file)
        });
        let file = file.map_err(|error| failed(redb::Error::Io(error)))?;
        let failure = Arc::new(OnceLock::new());
        let watched = Watched { file, failure: Arc::clone(&failure) };
        let opened = Builder::new().set_check_integrity_on_open(true).create_with_backend(watched);
        match opened {
            Ok(database) => Ok(Self { database, failure }),
            Err(error) if failure.get().is_some() => Err(failed(error.into())),
            Err(
                error @ (DatabaseError::UpgradeRequired(_)
                | DatabaseError::Storage(StorageError::Unsupported)),
            ) => Err(failed(error.into())),
            Err(error) => {
                Err(StoreError::Damaged { path: path.to_owned(), source: Box::new(error.into()) })
            }
        }
    }

    /// How the disk failed. From then on every access to the database fails.
    pub(super) fn failure(&self) -> Option<io::ErrorKind> {
        self.failure.get().copied()
    }
}

/// A file that records its first failure.
#[derive(Debug)]
struct Watched {
    file: File,
    failure: Arc<OnceLock<io::ErrorKind>>,
}

impl Watched {
    fn watch<T>(&self, result: io::Result<T>) -> io::Result<T> {
        if let Err(error) = &result
            // Pages that a damaged database has beyond its end.
            && error.kind() != io::ErrorKind::UnexpectedEof
        {
            // Later failures follow from the first.
            let _ = self.failure.set(error.kind());
        }
        result
    }
}

impl StorageBackend for Watched {
    fn len(&self) -> io::Result<u64> {
        self.watch(self.file.metadata().map(|metadata| metadata.len()))
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.watch(self.file.read_exact_at(out, offset))
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.watch(self.file.set_len(len))
    }

    fn sync_data(&self) -> io::Result<()> {
        self.watch(self.file.sync_data())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.watch(self.file.write_all_at(data, offset))
    }
}
