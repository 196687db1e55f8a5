//! A pool as commands name it: the socket of its manager, or its medium, whose manager is started where none runs.
//!
//! The process that holds the lock on the medium manages it. It publishes its socket, or a link to it, at a path that follows
//! from the medium, and only while it holds the lock, so that no process removes the socket of another.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use firn_pool::Client;
use firn_run::Instances;

use crate::detach::IN_USE;

/// Limit for another process to open the medium, or to end.
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(10);

/// A connection to a pool's manager, which does not end while it has a client.
pub(crate) struct PoolAt {
    socket: PathBuf,
    _manager: Client,
}

impl PoolAt {
    /// Finds the manager of a pool, or starts one.
    pub(crate) fn open(path: &Path) -> anyhow::Result<Self> {
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
                // Another client starts a manager, or a manager is ending.
                if begin.elapsed() > PATIENCE {
                    bail!("a manager for the pool on {} did not start: {said}", path.display());
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

/// Starts a manager. Returns `Ok(Err)` if another process has the medium.
fn start(medium: &Path, socket: &Path) -> anyhow::Result<Result<(), String>> {
    let failed = || format!("cannot start a manager for the pool on {}", medium.display());
    let output = Command::new(std::env::current_exe().with_context(failed)?)
        .args(["pool", "serve", "--detach", "--on-demand", "--medium"])
        .arg(medium)
        .arg("--socket")
        .arg(socket)
        .stdin(Stdio::null())
        .output()
        .with_context(failed)?;
    if output.status.success() {
        return Ok(Ok(()));
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let said = said.trim().trim_start_matches("firn: error: ").to_owned();
    if output.status.code() == Some(i32::from(IN_USE)) {
        return Ok(Err(said));
    }
    bail!("a manager for the pool on {} did not start: {said}", medium.display())
}
