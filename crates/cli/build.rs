//! Has the linker pack the relocations of the programs (`DT_RELR`): a monitor, whose process begins
//! with each microVM, then reads 3 KiB of them in place of 220.
//!
//! A static program applies them itself, by code of the C library since glibc 2.36.

use std::env;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let target = |name: &str| env::var(name).unwrap_or_default();
    let is_own = target("TARGET") == target("HOST") && target("CARGO_CFG_TARGET_ENV") == "gnu";
    let is_static = target("CARGO_CFG_TARGET_FEATURE").split(',').any(|name| name == "crt-static");
    if is_own && is_static && applies_packed() {
        println!("cargo::rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    }
}

/// Whether the C library of this host is glibc 2.36 or newer.
fn applies_packed() -> bool {
    let asked = Command::new("getconf").arg("GNU_LIBC_VERSION").output();
    let version = asked.ok().and_then(|output| String::from_utf8(output.stdout).ok());
    let minor = |text: &str| text.trim().strip_prefix("glibc 2.")?.parse::<u32>().ok();
    version.as_deref().and_then(minor).is_some_and(|minor| minor >= 36)
}
