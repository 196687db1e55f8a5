//! The repository's build scripts, which are carried in the program so that it works from any folder.

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

/// A build script did not do its work.
#[derive(Debug, Error)]
pub(crate) enum ScriptError {
    /// It cannot be started.
    #[error("the build scripts cannot be run; they need bash and a writable temporary folder")]
    Start(#[source] io::Error),
    /// It failed.
    #[error("{script} failed ({status}): its messages are above; what was already built is kept")]
    Failed {
        /// The script.
        script: String,
        /// How it ended.
        status: ExitStatus,
    },
    /// A signal asked this process to end.
    #[error("{script} was stopped by signal {signal}; what was already built is kept")]
    Interrupted {
        /// The script.
        script: String,
        /// The signal's number.
        signal: i32,
    },
}

/// The scripts in a temporary folder of their own.
pub(crate) struct Scripts {
    folder: TempDir,
}

impl Scripts {
    pub(crate) fn unpack() -> Result<Self, ScriptError> {
        let folder = tempfile::tempdir().map_err(ScriptError::Start)?;
        for (name, text) in SCRIPTS {
            let path = folder.path().join(name);
            fs::create_dir_all(path.with_file_name("")).map_err(ScriptError::Start)?;
            fs::write(path, text).map_err(ScriptError::Start)?;
        }
        Ok(Self { folder })
    }

    /// Runs a script to its end, or until this process is asked to end. Then what the script started is ended first, so that
    /// nothing goes on alone and no temporary file is left.
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
                // An error means that it has ended already.
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
        Err(ScriptError::Start(io::Error::other("its end was missed")))
    }
}
