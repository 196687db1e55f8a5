//! Builds the lab by the scripts of the repository, which are carried in the program so that it works from any folder.

use std::fs;
use std::path::Path;
use std::process::Command;

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

fn script(path: &Path, argument: Option<&Path>) -> Result<(), LabError> {
    let status =
        Command::new("bash").arg(path).args(argument).status().map_err(LabError::Script)?;
    if status.success() { Ok(()) } else { Err(LabError::Build { status }) }
}
