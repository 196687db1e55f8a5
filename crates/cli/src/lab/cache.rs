//! Where firn keeps what it downloads and builds.

use std::path::PathBuf;

/// `$FIRN_CACHE`, or else `firn` in `$XDG_CACHE_HOME`, or else in `$HOME/.cache`. `None` if none of the three is set. The
/// folder may be absent.
pub(crate) fn cache_dir() -> Option<PathBuf> {
    let variable =
        |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable("FIRN_CACHE")
        .or_else(|| Some(variable("XDG_CACHE_HOME")?.join("firn")))
        .or_else(|| Some(variable("HOME")?.join(".cache/firn")))
}
