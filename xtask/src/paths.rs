//! Where programs and built files are.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::Result;

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Absolute paths.
#[derive(Debug, Clone)]
pub(crate) struct Paths {
    /// The repository's root, the working folder.
    pub(crate) root: PathBuf,
    /// Cargo's folder for the target.
    pub(crate) target: PathBuf,
    /// firn's cache.
    pub(crate) cache: PathBuf,
}

impl Paths {
    pub(crate) fn of_environment() -> Result<Self> {
        let root = std::env::current_dir()?;
        if !root.join("xtask/Cargo.toml").is_file() {
            return Err("run xtask in the root folder of the repository".into());
        }
        let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let cache = cache(variable).ok_or("set FIRN_CACHE, XDG_CACHE_HOME or HOME")?;
        let target = variable("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
        Ok(Self { target: root.join(target).join(TARGET), root, cache })
    }

    /// The release build of firn.
    pub(crate) fn firn(&self) -> PathBuf {
        self.target.join("release/firn")
    }

    /// The folder of debug builds.
    pub(crate) fn debug(&self) -> PathBuf {
        self.target.join("debug")
    }
}

/// The same rule as firn's own (`crates/lab/src/cache.rs`).
fn cache(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let folder = |name: &str| variable(name).map(PathBuf::from);
    folder("FIRN_CACHE")
        .or_else(|| Some(folder("XDG_CACHE_HOME")?.join("firn")))
        .or_else(|| Some(folder("HOME")?.join(".cache/firn")))
}

#[cfg(test)]
impl Paths {
    /// Paths with a target folder that a test has made.
    pub(crate) fn with_target(target: PathBuf) -> Self {
        Self { target, ..Self::example() }
    }

    /// Short paths for tests.
    pub(crate) fn example() -> Self {
        Self { root: "/r".into(), target: "/t".into(), cache: "/c".into() }
    }
}
