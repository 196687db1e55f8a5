//! The manager of a pool, started on demand.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use firn_pool::{Client, ClientError, FindManagerError};
use rustix::net::{RecvFlags, recv};
use thiserror::Error;

use crate::instance::Instances;

/// Exit code of a manager that was started on demand while another process has the medium open
/// (`EX_TEMPFAIL`).
pub const MANAGER_IN_USE: u8 = 75;

/// The same while clients of an earlier manager have it open (`EX_UNAVAILABLE`).
pub const MANAGER_HAS_CLIENTS: u8 = 69;

/// How long to wait for another process that opens or closes the medium.
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(10);

/// The manager of a pool cannot be reached.
#[derive(Debug, Error)]
pub enum PoolManagerError {
    /// The manager does not answer.
    #[error(transparent)]
    Manager(#[from] ClientError),
    /// The manager of a medium cannot be found.
    #[error(transparent)]
    Find(#[from] FindManagerError),
    /// The program of the manager cannot be run.
    #[error("cannot start a manager for the pool on {}", medium.display())]
    Spawn {
        /// The medium.
        medium: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The manager failed.
    #[error("a manager for the pool on {} did not start: {reason}", medium.display())]
    Start {
        /// The medium.
        medium: PathBuf,
        /// The manager's error, or how it ended.
        reason: String,
    },
    /// Clients of an earlier manager use the medium.
    #[error("a manager for the pool on {} did not start: {reason}", medium.display())]
    HasClients {
        /// The medium.
        medium: PathBuf,
        /// The manager's error.
        reason: String,
    },
}

/// A connection to the manager of a pool. A manager that was started on demand runs at least as
/// long as the connection.
#[derive(Debug)]
pub struct PoolManager {
    socket: PathBuf,
    connection: UnixStream,
}

impl PoolManager {
    /// Connects to the manager of `pool`, which is a medium or a manager's socket. If no manager of
    /// a medium runs, starts one with the firn program at `program`.
    ///
    /// # Errors
    /// See [`PoolManagerError`].
    pub fn open(program: &Path, pool: &Path) -> Result<Self, PoolManagerError> {
        let managers = Instances::of_user().managers();
        let Some(socket) = managers.socket_of(pool)? else {
            let connection = Client::connect(pool)?.into_stream();
            return Ok(Self { socket: pool.to_owned(), connection });
        };
        let begin = Instant::now();
        loop {
            if let Some(manager) = managers.connect(pool)? {
                return Ok(Self { socket, connection: manager.into_stream() });
            }
            if let Err(reason) = start(program, pool, &socket)? {
                // Another process starts a manager, or a manager is ending.
                if begin.elapsed() > PATIENCE {
                    return Err(PoolManagerError::Start { medium: pool.to_owned(), reason });
                }
                std::thread::sleep(PAUSE);
            }
        }
    }

    /// The same, and waits for clients of an earlier manager that are ending.
    ///
    /// # Errors
    /// See [`PoolManagerError`].
    pub fn open_after_others(program: &Path, pool: &Path) -> Result<Self, PoolManagerError> {
        let begin = Instant::now();
        loop {
            match Self::open(program, pool) {
                Err(PoolManagerError::HasClients { .. }) if begin.elapsed() < PATIENCE => {
                    std::thread::sleep(PAUSE);
                }
                opened => return opened,
            }
        }
    }

    /// The manager's socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Whether the manager has the connection open. Does not wait for the manager.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        let mut byte = [0];
        let received = recv(&self.connection, &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT);
        !matches!(received, Ok((_, 0)) | Err(rustix::io::Errno::CONNRESET))
    }
}

/// Starts a manager. `Ok(Err)` has its error if another process has the medium open.
fn start(
    program: &Path,
    medium: &Path,
    socket: &Path,
) -> Result<Result<(), String>, PoolManagerError> {
    let output = Command::new(program)
        .args(["pool", "serve", "--detach", "--on-demand", "--medium"])
        .arg(medium)
        .arg("--socket")
        .arg(socket)
        .stdin(Stdio::null())
        .output()
        .map_err(|source| PoolManagerError::Spawn { medium: medium.to_owned(), source })?;
    if output.status.success() {
        return Ok(Ok(()));
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let reason = match stderr.trim().trim_start_matches("firn: error: ") {
        "" => format!("{} ended without a message ({})", program.display(), output.status),
        message => message.to_owned(),
    };
    if output.status.code() == Some(i32::from(MANAGER_IN_USE)) {
        return Ok(Err(reason));
    }
    let medium = medium.to_owned();
    Err(if output.status.code() == Some(i32::from(MANAGER_HAS_CLIENTS)) {
        PoolManagerError::HasClients { medium, reason }
    } else {
        PoolManagerError::Start { medium, reason }
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn clients_of_an_earlier_manager_get_time_to_end() {
        let folder = tempfile::tempdir().unwrap();
        let (program, pool) = (folder.path().join("firn"), folder.path().join("pool"));
        std::fs::write(&pool, "").unwrap();
        let script = "#!/bin/sh\ncd ${0%/*}\necho >> starts\n\
                      test $(wc -l < starts) -gt 3 && echo another >&2 && exit 1\nexit 69\n";
        std::fs::write(&program, script).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o700)).unwrap();
        let error = PoolManager::open(&program, &pool).unwrap_err();
        assert!(matches!(error, PoolManagerError::HasClients { .. }), "{error}");
        let error = PoolManager::open_after_others(&program, &pool).unwrap_err().to_string();
        assert!(error.ends_with("did not start: another"), "{error}");
    }

    #[test]
    fn a_manager_that_ends_without_a_message_is_reported_with_its_status() {
        let path = Path::new("/nowhere");
        let error = start(Path::new("/bin/false"), path, path).unwrap_err();
        let text = error.to_string();
        assert!(
            text.ends_with("did not start: /bin/false ended without a message (exit status: 1)"),
            "{text}"
        );
    }
}
