//! The folder that holds firn's downloads and built files.

use std::path::PathBuf;

use crate::machine::Lab;

/// firn's cache: `$FIRN_CACHE`, else `firn` in `$XDG_CACHE_HOME`, else `firn` in `$HOME/.cache`.
/// `None` if none of the three variables is set. The folder may not exist.
#[must_use]
pub fn cache_dir() -> Option<PathBuf> {
    let variable =
        |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable("FIRN_CACHE")
        .or_else(|| Some(variable("XDG_CACHE_HOME")?.join("firn")))
        .or_else(|| Some(variable("HOME")?.join(".cache/firn")))
}

/// The path of a guest's file in the cache, such as `vmlinux`. A relative path if there is no
/// cache.
#[must_use]
pub fn guest_file(name: &str) -> PathBuf {
    cache_dir().unwrap_or_default().join("guest").join(name)
}

/// Whether the lab is built.
#[must_use]
pub fn is_built() -> bool {
    cache_dir().is_some_and(|cache| Lab::open(cache).is_ok())
}
