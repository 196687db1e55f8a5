//! A pool as commands name it: the socket of its manager, or its medium, whose manager is started where none runs.
//!
//! The lock on the medium says who manages it. A manager leaves its socket, or a link to it, where everybody looks who knows the medium:
//! only while it has the lock, so nobody removes another's.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use thiserror::Error;

use firn_pool::{Client, ClientError};
use firn_run::Instances;

use crate::detach::IN_USE;

/// How long another may take to open the medium, or to end.
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(10);

/// Why a pool's manager is not reached.
#[derive(Debug, Error)]
pub(crate) enum PoolAtError {
    #[error(transparent)]
    Manager(#[from] ClientError),
    #[error("finding out what {medium} is, and where its manager listens")]
    Medium { medium: PathBuf, source: io::Error },
    #[error("starting a manager for the pool on {medium}")]
    Spawn { medium: PathBuf, source: io::Error },
    #[error("a manager for the pool on {medium} did not start: {said}")]
    Start { medium: PathBuf, said: String },
}

/// A pool's manager, which does not end for want of clients while this lives.
pub(crate) struct PoolAt {
    socket: PathBuf,
    _manager: Client,
}

impl PoolAt {
    /// Finds the manager of a pool, or starts one.
    pub(crate) fn open(path: &Path) -> Result<Self, PoolAtError> {
        let Some(socket) = socket_of(path)? else {
            return Ok(Self { socket: path.to_owned(), _manager: Client::connect(path)? });
        };
        let begin = Instant::now();
        loop {
            if let Some(manager) = connect(&socket)? {
                return Ok(Self { socket, _manager: manager });
            }
            if let Err(said) = start(path, &socket)? {
                // Another client starts one, or one is just ending.
                if begin.elapsed() > PATIENCE {
                    return Err(PoolAtError::Start { medium: path.to_owned(), said });
                }
                std::thread::sleep(PAUSE);
            }
        }
    }

    /// Where it listens.
    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }
}

/// The manager of a pool, if one runs; nothing is started.
pub(crate) fn running(path: &Path) -> Result<Option<Client>, PoolAtError> {
    match socket_of(path) {
        Ok(Some(socket)) => connect(&socket),
        Ok(None) => Ok(Some(Client::connect(path)?)),
        // Without the directory of sockets there is no manager that could be found there.
        Err(_) => Ok(None),
    }
}

/// Where the manager of a medium is looked for; `None` for what is a manager's socket itself, or nothing.
pub(crate) fn socket_of(path: &Path) -> Result<Option<PathBuf>, PoolAtError> {
    let failed = |source| PoolAtError::Medium { medium: path.to_owned(), source };
    let found = match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        found => found.map_err(failed)?,
    };
    let kind = found.file_type();
    if kind.is_socket() {
        return Ok(None);
    }
    let medium = if kind.is_char_device() {
        format!("device-{:x}", found.rdev())
    } else {
        format!("{:x}-{:x}", found.dev(), found.ino())
    };
    Instances::of_user().manager_socket(&medium).map(Some).map_err(failed)
}

/// A manager that answers.
fn connect(socket: &Path) -> Result<Option<Client>, PoolAtError> {
    let connected = Client::connect(socket).and_then(|mut client| {
        // One that is just ending closes the connection instead.
        client.describe()?;
        Ok(client)
    });
    match connected {
        Err(ClientError::Gone(_) | ClientError::Ended(_)) => Ok(None),
        connected => Ok(Some(connected?)),
    }
}

/// Starts a manager. `Ok(Err)` where somebody else has the medium.
fn start(medium: &Path, socket: &Path) -> Result<Result<(), String>, PoolAtError> {
    let failed = |source| PoolAtError::Spawn { medium: medium.to_owned(), source };
    let output = Command::new(std::env::current_exe().map_err(failed)?)
        .args(["pool", "serve", "--detach", "--on-demand", "--medium"])
        .arg(medium)
        .arg("--socket")
        .arg(socket)
        .stdin(Stdio::null())
        .output()
        .map_err(failed)?;
    if output.status.success() {
        return Ok(Ok(()));
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let said = said.trim().trim_start_matches("firn: error: ").to_owned();
    if output.status.code() == Some(i32::from(IN_USE)) {
        return Ok(Err(said));
    }
    Err(PoolAtError::Start { medium: medium.to_owned(), said })
}
