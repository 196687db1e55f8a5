//! The daemon's directory: its lock, the marker that makes it firn's own, and a reserve of space.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use uuid::Uuid;

use super::StoreError;

/// The marker: it has the database's id, and the daemon that uses the directory locks it.
const MARKER: &str = ".firn-serve";

/// The file with the reserve.
const RESERVE: &str = "reserve";

/// Space that a full disk leaves for the database, bytes: enough to open it again and to delete
/// functions.
const RESERVE_BYTES: usize = 4 << 20;

/// How long a process may hold the lock that a daemon forked before it ended: it has the daemon's
/// files until it executes its own program.
const FORKED: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(5);

/// The daemon's directory, which only its user can read. Locked until this is dropped.
#[derive(Debug)]
pub(super) struct Directory {
    path: PathBuf,
    marker: Mutex<File>,
    /// Whether the reserve is there.
    reserved: Mutex<bool>,
}

impl Directory {
    /// Makes the directory where needed, and locks it.
    pub(super) fn open(path: &Path) -> Result<Self, StoreError> {
        let failed = |source| StoreError::Directory { path: path.to_owned(), source };
        DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(failed)?;
        // Environment variables of functions are secrets; earlier versions let all users read them.
        fs::set_permissions(path, Permissions::from_mode(0o700)).map_err(failed)?;
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let marker = options.open(path.join(MARKER)).map_err(failed)?;
        let begin = Instant::now();
        loop {
            match marker.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if begin.elapsed() < FORKED => {
                    std::thread::sleep(PAUSE);
                }
                Err(TryLockError::WouldBlock) => {
                    return Err(StoreError::InUse { path: path.to_owned() });
                }
                Err(TryLockError::Error(source)) => return Err(failed(source)),
            }
        }
        Ok(Self { path: path.to_owned(), marker: Mutex::new(marker), reserved: Mutex::default() })
    }

    /// The path of a file in the directory.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// The id of the directory's database, if it has had one.
    pub(super) fn id(&self) -> Result<Option<Uuid>, StoreError> {
        let mut text = String::new();
        let mut marker = self.marker.lock();
        let read = marker.rewind().and_then(|()| marker.read_to_string(&mut text));
        read.map_err(|source| self.failed(source))?;
        match text.trim() {
            "" => Ok(None),
            id => id.parse().map(Some).map_err(|_| {
                self.failed(io::Error::other(format!("its marker {MARKER} is damaged")))
            }),
        }
    }

    /// Marks the directory as that of a database.
    pub(super) fn mark(&self, id: Uuid) -> Result<(), StoreError> {
        let mut marker = self.marker.lock();
        let marked = marker.rewind().and_then(|()| {
            marker.set_len(0)?;
            writeln!(marker, "{id}")?;
            marker.sync_all()
        });
        marked.map_err(|source| self.failed(source))
    }

    /// Makes names in the directory last.
    pub(super) fn sync(&self) -> Result<(), StoreError> {
        let synced = File::open(&self.path).and_then(|directory| directory.sync_all());
        synced.map_err(|source| self.failed(source))
    }

    /// Makes sure that the reserve is there. Fails on a full disk.
    pub(super) fn reserve(&self) -> io::Result<()> {
        let mut reserved = self.reserved.lock();
        if *reserved {
            return Ok(());
        }
        let path = self.file(RESERVE);
        let made = create_private(&path).and_then(|mut file| {
            // Written, because not every file system can allocate without writing.
            file.write_all(&vec![0; RESERVE_BYTES])?;
            file.sync_all()
        });
        if made.is_err() {
            // What there is of it is of no use.
            let _ = fs::remove_file(path);
        }
        *reserved = made.is_ok();
        made
    }

    /// Gives the reserve up.
    pub(super) fn release(&self) {
        *self.reserved.lock() = false;
        // Absent if it was given up before.
        let _ = fs::remove_file(self.file(RESERVE));
    }

    fn failed(&self, source: io::Error) -> StoreError {
        StoreError::Directory { path: self.path.clone(), source }
    }
}

/// Makes an empty file that only its user can read, in place of an earlier one.
pub(super) fn create_private(path: &Path) -> io::Result<File> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)
}
