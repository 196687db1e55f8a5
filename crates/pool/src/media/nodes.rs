//! The NUMA nodes on which the bytes of a mapping are.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The bytes of a medium that are on one NUMA node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeBytes {
    /// Number of the node.
    pub node: u32,
    /// Bytes.
    pub bytes: u64,
}

/// The nodes of the populated pages of the mapping at `start`; empty if the kernel does not report
/// them (a kernel without NUMA).
pub(super) fn of_mapping(start: usize) -> Vec<NodeBytes> {
    // The names of files may have bytes that are not UTF-8.
    let maps = std::fs::read("/proc/self/numa_maps").unwrap_or_default();
    parse(&String::from_utf8_lossy(&maps), start)
}

/// Reads the line of one mapping (proc_pid_numa_maps(5)): pages by node, and their size.
fn parse(maps: &str, start: usize) -> Vec<NodeBytes> {
    let head = format!("{start:x} ");
    let Some(line) = maps.lines().find(|line| line.starts_with(&head)) else { return Vec::new() };
    let number = |prefix: &str, word: &str| word.strip_prefix(prefix)?.parse::<u64>().ok();
    let page =
        line.split(' ').find_map(|word| number("kernelpagesize_kB=", word)).unwrap_or(4) << 10;
    let nodes: BTreeMap<u32, u64> = line
        .split(' ')
        .filter_map(|word| {
            let (node, pages) = word.strip_prefix('N')?.split_once('=')?;
            Some((node.parse().ok()?, pages.parse().ok()?))
        })
        .collect();
    nodes
        .into_iter()
        .map(|(node, pages)| NodeBytes { node, bytes: pages.saturating_mul(page) })
        .collect()
}

#[cfg(test)]
#[path = "nodes_tests.rs"]
mod tests;
