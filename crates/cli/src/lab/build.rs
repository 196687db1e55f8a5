//! Builds the lab by the scripts of the repository.

use super::LabError;
use crate::scripts::{ScriptError, Scripts};

/// Builds the lab, the guest's files and the guest's initramfs.
pub(crate) fn build() -> Result<(), LabError> {
    let agent = std::env::current_exe().map_err(ScriptError::Start)?.with_file_name("firn-agent");
    if !agent.is_file() {
        return Err(LabError::NoAgent { path: agent });
    }
    let scripts = Scripts::unpack()?;
    scripts.run("guest/build.sh", [] as [&str; 0])?;
    scripts.run("guest/image.sh", ["base"])?;
    scripts.run("guest/initramfs.sh", [agent])?;
    Ok(scripts.run("lab/build.sh", [] as [&str; 0])?)
}
