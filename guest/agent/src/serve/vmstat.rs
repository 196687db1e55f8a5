//! The kernel's counters.

use std::fs;
use std::path::Path;

/// The counters of `/proc/vmstat`, one on each line.
pub(super) struct Vmstat(String);

impl Vmstat {
    /// Those of a file, none if it cannot be read.
    pub(super) fn read(path: &Path) -> Self {
        Self(fs::read_to_string(path).unwrap_or_default())
    }

    /// A counter; 0 if there is none of this name.
    pub(super) fn count(&self, name: &str) -> u64 {
        let mut values = self.0.lines().filter_map(|line| line.strip_prefix(name));
        values.find_map(|value| value.strip_prefix(' ')?.parse().ok()).unwrap_or_default()
    }
}
