//! What is installed in a root: packages by dpkg's status, and wheels.

use std::fs;
use std::io;
use std::path::Path;

use super::image::RUNTIME;

/// Whether a dpkg status has a package.
pub(super) fn is_in_status(status: &str, package: &str) -> bool {
    status.lines().any(|line| line.strip_prefix("Package: ") == Some(package))
}

/// The descriptions of packages as a dpkg status in which they are installed and held.
pub(super) fn held(descriptions: &str) -> String {
    const KEPT: [&str; 4] = ["Version:", "Architecture:", "Multi-Arch:", "Provides:"];
    let mut status = String::new();
    for line in descriptions.lines() {
        if line.starts_with("Package:") {
            status += &format!("{line}\nStatus: hold ok installed\n");
        } else if line.is_empty() || KEPT.iter().any(|field| line.starts_with(field)) {
            status += &format!("{line}\n");
        }
    }
    status
}

/// Names and versions of a root's packages and wheels, one in a line.
pub(super) fn list_contents(root: &Path) -> io::Result<String> {
    let status = fs::read_to_string(root.join("var/lib/dpkg/status"))?;
    let mut text = String::new();
    for line in status.lines() {
        if let Some(name) = line.strip_prefix("Package: ") {
            text += &format!("{name} ");
        } else if let Some(version) = line.strip_prefix("Version: ") {
            text += &format!("{version}\n");
        }
    }
    let pythons =
        ["python3.11", "python3.13"].map(|python| format!("usr/local/lib/{python}/dist-packages"));
    for folder in [RUNTIME].into_iter().chain(pythons.iter().map(String::as_str)) {
        let Ok(entries) = fs::read_dir(root.join(folder)) else { continue };
        let mut wheels = Vec::new();
        for entry in entries {
            let name = entry?.file_name().to_string_lossy().into_owned();
            wheels
                .extend(name.strip_suffix(".dist-info").map(|name| name.replace('-', " ") + "\n"));
        }
        wheels.sort();
        text += &wheels.concat();
    }
    Ok(text)
}
