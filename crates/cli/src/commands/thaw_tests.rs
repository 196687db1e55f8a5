//! `firn player` and `firn thaw` from their parsed arguments, on this host's KVM.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;

use clap::{Args, FromArgMatches};

use crate::commands::player::{self, PlayerArgs};
use crate::commands::thaw::{self, ThawArgs};

fn arguments<T: Args + FromArgMatches>(words: &[&str]) -> T {
    let command = T::augment_args(clap::Command::new("firn").no_binary_name(true));
    T::from_arg_matches(&command.try_get_matches_from(words).unwrap()).unwrap()
}

fn make(words: &[&str], out: &Path) -> anyhow::Result<()> {
    let words = [words, &["--out", out.to_str().unwrap()]].concat();
    player::run(&arguments::<PlayerArgs>(&words)).map(drop)
}

fn thaw(words: &[&str], snapshot: &Path) -> anyhow::Result<()> {
    let words = [words, &[snapshot.to_str().unwrap()]].concat();
    thaw::run(&arguments::<ThawArgs>(&words)).map(drop)
}

#[test]
fn a_player_is_made_and_thawed_and_wrong_memory_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("snapshot");
    make(&["--trace", "sequential-read:4M", "--leaves", "2m", "--dense"], &path).unwrap();
    thaw(&[], &path).unwrap();
    thaw(&["--planner", "dram_cached", "--json"], &path).unwrap();
    let image = OpenOptions::new().write(true).open(path.join("memory.img")).unwrap();
    image.write_all_at(&[1], 0x2a_0000).unwrap();
    let error = thaw(&["--json"], &path).unwrap_err();
    assert_eq!(
        error.to_string(),
        "firecracker:readahead=on restored wrong memory: guest pages in the second pass: 1 (0x2a0)"
    );
}

#[test]
fn an_elf_is_made() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("player.elf");
    make(&["--elf", "--json", "--trace", "sequential-write:4M"], &path).unwrap();
    assert!(std::fs::read(&path).unwrap().starts_with(b"\x7fELF"));
    let error = make(&["--trace", "none"], &path).unwrap_err();
    assert!(error.to_string().contains("sequential-read:SIZE"), "{error}");
}

#[test]
fn a_player_with_two_traces_replays_the_named_trace() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("snapshot");
    make(&["--trace", "json-a,json-b", "--json"], &path).unwrap();
    thaw(&[], &path).unwrap();
    thaw(&["--input", "json-b", "--json"], &path).unwrap();
    let error = thaw(&["--input", "json-c"], &path).unwrap_err().to_string();
    assert!(error.contains("json-a, json-b"), "{error}");
    let error = make(&["--trace", "json-a,hello-a"], &dir.path().join("other")).unwrap_err();
    assert!(error.to_string().contains("another guest memory"), "{error}");
}
