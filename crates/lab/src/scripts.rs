//! The repository's build scripts. The program contains them, so that it works from any folder.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitStatus};

use rustix::process::{Pid, Signal, kill_process_group};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tempfile::TempDir;
use thiserror::Error;

const SCRIPTS: [(&str, &str); 9] = [
    ("lab/apt.sh", include_str!("../../../lab/apt.sh")),
    ("lab/build.sh", include_str!("../../../lab/build.sh")),
    ("lab/init", include_str!("../../../lab/init")),
    ("lab/modules.sh", include_str!("../../../lab/modules.sh")),
    ("lab/shared.sh", include_str!("../../../lab/shared.sh")),
    ("guest/build.sh", include_str!("../../../guest/build.sh")),
    ("guest/image.sh", include_str!("../../../guest/image.sh")),
    ("guest/images.sh", include_str!("../../../guest/images.sh")),
    ("guest/initramfs.sh", include_str!("../../../guest/initramfs.sh")),
];

/// A build script failed.
#[derive(Debug, Error)]
pub enum ScriptError {
    /// The script cannot be started.
    #[error("cannot run the build scripts: they require bash and a writable temporary folder")]
    Start(#[source] io::Error),
    /// The script exited with an error.
    #[error("{script} failed ({status}); see its messages above. Finished parts stay in the cache")]
    Failed {
        /// The script.
        script: String,
        /// Its exit status.
        status: ExitStatus,
    },
    /// This process received a signal that asks it to stop.
    #[error("{script} was stopped by signal {signal}. Finished parts stay in the cache")]
    Interrupted {
        /// The script.
        script: String,
        /// The signal's number.
        signal: i32,
    },
}

/// The scripts in a temporary folder.
pub(crate) struct Scripts {
    folder: TempDir,
}

impl Scripts {
    /// Writes the scripts into a new temporary folder.
    pub(crate) fn unpack() -> Result<Self, ScriptError> {
        let folder = tempfile::tempdir().map_err(ScriptError::Start)?;
        for (name, text) in SCRIPTS {
            let path = folder.path().join(name);
            fs::create_dir_all(path.with_file_name("")).map_err(ScriptError::Start)?;
            fs::write(path, text).map_err(ScriptError::Start)?;
        }
        Ok(Self { folder })
    }

    /// Runs a script until it exits or this process receives SIGHUP, SIGINT or SIGTERM. On a signal the script's process group
    /// is terminated first, so that no process and no temporary file remains.
    pub(crate) fn run<S: AsRef<OsStr>>(
        &self,
        script: &str,
        arguments: impl IntoIterator<Item = S>,
    ) -> Result<(), ScriptError> {
        let mut signals =
            Signals::new([SIGCHLD, SIGHUP, SIGINT, SIGTERM]).map_err(ScriptError::Start)?;
        let mut child = Command::new("bash")
            .arg(self.folder.path().join(script))
            .args(arguments)
            .process_group(0)
            .spawn()
            .map_err(ScriptError::Start)?;
        for signal in signals.forever() {
            if signal != SIGCHLD {
                // An error means that the group has already exited.
                let _ = kill_process_group(Pid::from_child(&child), Signal::TERM);
                child.wait().map_err(ScriptError::Start)?;
                return Err(ScriptError::Interrupted { script: script.to_owned(), signal });
            }
            match child.try_wait().map_err(ScriptError::Start)? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => {
                    return Err(ScriptError::Failed { script: script.to_owned(), status });
                }
                None => {}
            }
        }
        Err(ScriptError::Start(io::Error::other("the exit of the script was not observed")))
    }
}
