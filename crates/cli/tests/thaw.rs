//! `firn player` and `firn thaw`, on any kind of KVM.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use firn_vmm::{KVM_DEVICE, open_kvm};

/// The standard output of a command that succeeds, or the error of one that fails.
fn firn(words: &[&str], path: &Path) -> Result<String, String> {
    let output = Command::new(env!("CARGO_BIN_EXE_firn")).args(words).arg(path).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    if output.status.success() {
        return Ok(text(output.stdout));
    }
    assert_eq!(output.status.code(), Some(1));
    Err(text(output.stderr))
}

fn make(words: &[&str], out: &Path) -> Result<String, String> {
    firn(&[&["player"], words, &["--out"]].concat(), out)
}

fn thaw(words: &[&str], snapshot: &Path) -> Result<String, String> {
    firn(&[&["thaw"], words].concat(), snapshot)
}

fn has_kvm() -> bool {
    firn_required::has("kvm", open_kvm(KVM_DEVICE.as_ref()).is_ok())
}

#[test]
fn a_player_is_made_and_thawed_and_wrong_memory_is_refused() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("snapshot");
    make(&["--trace", "sequential-read:4M", "--leaves", "2m", "--dense"], &path).unwrap();
    let text = thaw(&[], &path).unwrap();
    assert!(text.contains(" thawed by firecracker:readahead=on in "), "{text}");
    thaw(&["--planner", "dram_cached", "--json"], &path).unwrap();
    let image = OpenOptions::new().write(true).open(path.join("memory.img")).unwrap();
    image.write_all_at(&[1], 0x2a_0000).unwrap();
    let error = thaw(&["--json"], &path).unwrap_err();
    let wrong = "restored wrong memory: guest pages in the second pass: 1 (0x2a0)";
    assert_eq!(error, format!("firn: error: firecracker:readahead=on {wrong}\n"));
}

#[test]
fn an_elf_is_made() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("player.elf");
    make(&["--elf", "--json", "--trace", "sequential-write:4M"], &path).unwrap();
    assert!(std::fs::read(&path).unwrap().starts_with(b"\x7fELF"));
    let error = make(&["--trace", "none"], &path).unwrap_err();
    assert!(error.contains("sequential-read:SIZE"), "{error}");
}

#[test]
fn a_player_with_two_traces_replays_the_named_trace() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("snapshot");
    make(&["--trace", "json-a,json-b", "--json"], &path).unwrap();
    thaw(&[], &path).unwrap();
    thaw(&["--input", "json-b", "--json"], &path).unwrap();
    let error = thaw(&["--input", "json-c"], &path).unwrap_err();
    assert!(error.contains("json-a, json-b"), "{error}");
    let error = make(&["--trace", "json-a,hello-a"], &dir.path().join("other")).unwrap_err();
    assert!(error.contains("another guest memory"), "{error}");
}

#[test]
fn devices_that_are_no_kvm_are_refused() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("snapshot");
    make(&["--trace", "sequential-read:4M"], &path).unwrap();
    let error = thaw(&["--kvm", "/dev/nonesuch"], &path).unwrap_err();
    assert!(error.starts_with("firn: error: ") && error.contains("/dev/nonesuch does not exist"));
    let error = thaw(&["--kvm", "/dev/null"], &path).unwrap_err();
    assert!(error.contains("/dev/null cannot be used as KVM"), "{error}");
}
