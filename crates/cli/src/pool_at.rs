//! A pool as commands name it: the socket of its manager, or its medium, whose manager is started where none runs.
//!
//! The lock on the medium says who manages it. A manager leaves its socket, or a link to it, where everybody looks who knows the medium:
//! only while it has the lock, so nobody removes another's.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use thiserror::Error;

use firn_pool::{Client, ClientError, FindManagerError};
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
    #[error(transparent)]
    Find(#[from] FindManagerError),
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
        let managers = Instances::of_user().managers();
        let Some(socket) = managers.socket_of(path)? else {
            return Ok(Self { socket: path.to_owned(), _manager: Client::connect(path)? });
        };
        let begin = Instant::now();
        loop {
            if let Some(manager) = managers.connect(path)? {
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
