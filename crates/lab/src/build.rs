//! Builds the lab.

use std::path::Path;

use crate::LabError;
use crate::scripts::Scripts;

/// Builds the guest's files, the guest's initramfs and the lab into firn's cache. What is up to date is kept.
///
/// `agent` is the static program `firn-agent` for the initramfs.
///
/// # Errors
///
/// `agent` does not exist, or a build script fails or is stopped by a signal.
pub fn build(agent: &Path) -> Result<(), LabError> {
    if !agent.is_file() {
        return Err(LabError::NoAgent { path: agent.to_owned() });
    }
    let scripts = Scripts::unpack()?;
    scripts.run("guest/build.sh", [] as [&str; 0])?;
    scripts.run("guest/image.sh", ["base"])?;
    scripts.run("guest/initramfs.sh", [agent])?;
    Ok(scripts.run("lab/build.sh", [] as [&str; 0])?)
}
