//! How large the pages are that a mapping got (proc_pid_smaps(5)).

use std::fs;

const SMALL: u64 = 4096;
const HUGE: u64 = 2 << 20;

/// Bytes of the smallest leaf of a populated mapping; 4 KiB where the kernel does not tell.
pub(super) fn of_mapping(start: usize, len: u64) -> u64 {
    // Not as text: a path in it may be any bytes.
    let smaps = fs::read("/proc/self/smaps").unwrap_or_default();
    if huge_bytes(&String::from_utf8_lossy(&smaps), start) >= len { HUGE } else { SMALL }
}

/// Bytes that the mapping at `start` has in leaves of 2 MiB.
fn huge_bytes(smaps: &str, start: usize) -> u64 {
    let head = format!("{start:x}-");
    let lines = smaps.lines().skip_while(|line| !line.starts_with(&head)).skip(1);
    // The next mapping's head begins with an address, all else with a capital letter.
    let lines = lines.take_while(|line| line.starts_with(|c: char| c.is_ascii_uppercase()));
    let huge = ["ShmemPmdMapped:", "FilePmdMapped:", "Shared_Hugetlb:", "Private_Hugetlb:"];
    lines
        .filter_map(|line| {
            let value = huge.iter().find_map(|name| line.strip_prefix(name))?;
            value.trim().strip_suffix(" kB")?.parse::<u64>().ok()
        })
        .map(|kib| kib << 10)
        .sum()
}

#[cfg(test)]
#[path = "leaf_tests.rs"]
mod tests;
