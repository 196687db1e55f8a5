//! Builds the lab by the scripts of the repository, which are carried in the program so that it works from any folder.

use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process_group};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::LabError;

const SCRIPTS: [(&str, &str); 7] = [
    ("lab/apt.sh", include_str!("../../../../lab/apt.sh")),
    ("lab/build.sh", include_str!("../../../../lab/build.sh")),
    ("lab/init", include_str!("../../../../lab/init")),
    ("lab/modules.sh", include_str!("../../../../lab/modules.sh")),
    ("lab/shared.sh", include_str!("../../../../lab/shared.sh")),
    ("guest/build.sh", include_str!("../../../../guest/build.sh")),
    ("guest/initramfs.sh", include_str!("../../../../guest/initramfs.sh")),
];

/// Builds the lab, the guest's files and the guest's initramfs.
pub(crate) fn build() -> Result<(), LabError> {
    let agent = std::env::current_exe().map_err(LabError::Script)?.with_file_name("firn-agent");
    if !agent.is_file() {
        return Err(LabError::NoAgent { path: agent });
    }
    let folder = tempfile::tempdir().map_err(LabError::Script)?;
    for (name, text) in SCRIPTS {
        let path = folder.path().join(name);
        fs::create_dir_all(path.with_file_name("")).map_err(LabError::Script)?;
        fs::write(path, text).map_err(LabError::Script)?;
    }
    script(&folder.path().join("guest/build.sh"), None)?;
    script(&folder.path().join("guest/initramfs.sh"), Some(&agent))?;
    script(&folder.path().join("lab/build.sh"), None)
}

/// Runs a script to its end, or until this process is asked to end. Then what the script started is ended first, so that
/// nothing goes on alone and no temporary file is left.
fn script(path: &Path, argument: Option<&Path>) -> Result<(), LabError> {
    let mut signals = Signals::new([SIGCHLD, SIGHUP, SIGINT, SIGTERM]).map_err(LabError::Script)?;
    let mut script = Command::new("bash")
        .arg(path)
        .args(argument)
        .process_group(0)
        .spawn()
        .map_err(LabError::Script)?;
    for signal in signals.forever() {
        if signal != SIGCHLD {
            // An error means that it has ended already.
            let _ = kill_process_group(Pid::from_child(&script), Signal::TERM);
            script.wait().map_err(LabError::Script)?;
            return Err(LabError::Interrupted { signal });
        }
        match script.try_wait().map_err(LabError::Script)? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(LabError::Build { status }),
            None => {}
        }
    }
    Err(LabError::Script(io::Error::other("its end was missed")))
}
