//! Listening unix sockets, and their files.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, fchmod, flock};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};

use super::{PublishError, PublishedAddress};

/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;
/// How long a lock that another process has is left alone.
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// The file of a listening socket of this process; removed when dropped.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    /// Device and inode.
    id: (u64, u64),
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Another program may have replaced it.
        if file_id(&self.path).is_ok_and(|id| id == self.id) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Listens on a socket that this user alone can connect to. A file that a killed process has left
/// is replaced. Another process may keep the folder locked for `limit`.
pub(super) fn listen_unix(
    path: &Path,
    limit: Duration,
) -> Result<(OwnedFd, SocketFile), PublishError> {
    let address = || PublishedAddress::Unix(path.to_owned());
    let failed = |source| PublishError::Listen { address: address(), source };
    // Two processes that find the same old file do not remove each other's.
    let parent = path.parent().unwrap_or(path);
    let folder = File::open(parent).map_err(failed)?;
    lock(&folder, limit).map_err(|errno| match errno {
        Errno::AGAIN => PublishError::Locked { address: address(), folder: parent.to_owned() },
        errno => failed(errno.into()),
    })?;
    match fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => {
            return Err(PublishError::NotSocket(address()));
        }
        Ok(_) if is_in_use(path).map_err(failed)? => return Err(PublishError::InUse(address())),
        Ok(_) => fs::remove_file(path).map_err(failed)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed(error)),
    }
    let socket = new_socket(path).map_err(|errno| failed(errno.into()))?;
    let id = file_id(path).map_err(failed)?;
    let file = SocketFile { path: path.to_owned(), id };
    listen(&socket, BACKLOG).map_err(|errno| failed(errno.into()))?;
    Ok((socket, file))
}

/// [`Errno::AGAIN`] if another process has the lock until the end.
fn lock(folder: &File, limit: Duration) -> Result<(), Errno> {
    let started = Instant::now();
    loop {
        match flock(folder, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::AGAIN) if started.elapsed() < limit => thread::sleep(LOCK_PAUSE),
            locked => return locked,
        }
    }
}

fn new_socket(path: &Path) -> Result<OwnedFd, Errno> {
    let socket = unix_socket()?;
    // The file gets the mode of the socket.
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Whether a process has the socket.
fn is_in_use(path: &Path) -> io::Result<bool> {
    match connect(&unix_socket()?, &SocketAddrUnix::new(path)?) {
        Err(Errno::CONNREFUSED) => Ok(false),
        // Its queue is full, or it is of another kind.
        Ok(()) | Err(Errno::AGAIN | Errno::PROTOTYPE) => Ok(true),
        Err(errno) => Err(errno.into()),
    }
}

fn unix_socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

fn file_id(path: &Path) -> io::Result<(u64, u64)> {
    let found = fs::symlink_metadata(path)?;
    Ok((found.dev(), found.ino()))
}
