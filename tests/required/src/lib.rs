//! The parts of this host that tests require.
//!
//! Some tests require a part that not every host has: `kvm`; `disk`, a folder for temporary files
//! on a disk; `root`; `cgroup2`, control groups of version 2; `cpu_limits`, control groups of
//! either version for monitors, which limit CPU time among others; `dax`, the lab's `/dev/pmem1`;
//! `tun`, tap devices, which the user may make; `clients`, boto3 in firn's cache (`make clients`).
//! Without it they pass.
//! `FIRN_REQUIRE` names the parts of this host, separated by commas (`xtask/src/host.rs` sets it).
//! A test that does not find one of those fails.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod tap;

use std::os::fd::AsFd;

pub use tap::{TapDevice, add_loopback_address, in_own_network};

/// Whether a test's file is on a disk, so that its pages can leave the page cache: the part
/// `disk`.
///
/// # Panics
/// `FIRN_REQUIRE` names `disk`, and the file is on a tmpfs or ramfs.
#[track_caller]
#[must_use]
pub fn is_on_disk(file: impl AsFd) -> bool {
    const TMPFS: i64 = 0x0102_1994;
    const RAMFS: i64 = 0x8584_58f6;
    let file_system = rustix::fs::fstatfs(file);
    has("disk", file_system.is_ok_and(|file_system| ![TMPFS, RAMFS].contains(&file_system.f_type)))
}

/// Whether a test finds a part of the host.
///
/// # Panics
/// `FIRN_REQUIRE` names the part, and it is not found.
#[track_caller]
#[must_use]
pub fn has(part: &str, found: bool) -> bool {
    let required = std::env::var("FIRN_REQUIRE").unwrap_or_default();
    assert!(found || !names(&required, part), "no {part} is found, and FIRN_REQUIRE={required}");
    found
}

fn names(required: &str, part: &str) -> bool {
    required.split(',').any(|name| name == part)
}

#[cfg(test)]
mod tests;
