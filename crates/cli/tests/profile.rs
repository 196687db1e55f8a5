//! `firn profile` as it is called, on players under this host's KVM.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use firn_base::{PageRange, error_chain};
use firn_memory::page_cache::evict;
use firn_pool::{CreateOptions, MappedMedium, MemfdOptions, Pool, Server};
use firn_snapshot::{PageSet, Profile, Snapshot, Verify, open_pooled, set_profile};
use firn_vmm::{KVM_DEVICE, open_kvm};
use tempfile::TempDir;

/// A directory for a test on a host with KVM.
fn folder() -> Option<TempDir> {
    let able = open_kvm(KVM_DEVICE.as_ref()).is_ok();
    firn_required::has("kvm", able).then(|| tempfile::tempdir().unwrap())
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Runs a command of firn. Its error is what it writes for people.
fn firn(command: &[&str], words: &[&str]) -> Result<(), String> {
    let mut firn = Command::new(env!("CARGO_BIN_EXE_firn"));
    let output = firn.args(command).args(words).stdin(Stdio::null()).output().unwrap();
    if output.status.success() {
        return Ok(());
    }
    Err(String::from_utf8_lossy(&output.stderr).into_owned())
}

fn make(words: &[&str]) {
    firn(&["player"], words).unwrap();
}

fn record(words: &[&str]) -> Result<(), String> {
    firn(&["profile", "record"], words)
}

fn show(words: &[&str]) -> Result<(), String> {
    firn(&["profile", "show"], words)
}

fn profile(path: &Path) -> Profile {
    Snapshot::open(path).unwrap().profile().unwrap().unwrap()
}

#[test]
fn parts_are_recorded_kept_and_shown() {
    let Some(dir) = folder() else { return };
    let path = dir.path().join("snapshot");
    make(&["--trace", "json-a,json-b", "--out", text(&path)]);
    record(&[text(&path), "--input", "json-b", "--part", "writes"]).unwrap();
    let first = profile(&path);
    assert_eq!((&first.faults, &first.groups), (&None, &None));
    assert_eq!(first.inputs, ["json-b"]);
    let written = first.written.unwrap();
    record(&[text(&path), "--input", "json-a", "--part", "faults", "--json"]).unwrap();
    let second = profile(&path);
    assert_eq!(second.written.as_ref(), Some(&written));
    assert_eq!(second.inputs, ["json-b", "json-a"]);
    assert!(second.faults.is_some());

    let plot = dir.path().join("memory.svg");
    show(&[text(&path), "--plot", text(&plot)]).unwrap();
    show(&[text(&path), "--json"]).unwrap();
    let picture = std::fs::read_to_string(plot).unwrap();
    assert!(picture.starts_with("<svg") && picture.trim_end().ends_with("</svg>"));
    // Written pages, and the legend.
    assert!(picture.matches("fill=\"#b4441f\"").count() > 1);
    assert!(picture.contains("recorded on json-b, json-a"));
    // Image and machine state are as they were: it still replays, and checks all its memory.
    record(&[text(&path), "--part", "faults,writes"]).unwrap();
    let third = profile(&path);
    assert_eq!(third.faults, second.faults);
    assert_ne!(third.written, second.written);
}

/// Each part by a recorder of its own, with all walls around the guest.
#[test]
fn every_part_is_recorded_of_a_jailed_guest() {
    let Some(dir) = folder() else { return };
    let path = dir.path().join("snapshot");
    make(&["--trace", "json-a,json-b", "--out", text(&path)]);
    if !firn_required::has("root", rustix::process::geteuid().is_root()) {
        return;
    }
    let words = [text(&path), "--input", "json-b", "--jail", "require"];
    record(&[&words[..], &["--part", "faults,writes"]].concat()).unwrap();
    let touched = profile(&path);
    let pages = |runs: &Option<Vec<PageRange>>| {
        let runs = runs.iter().flatten();
        PageSet::of(runs, Snapshot::open(&path).unwrap().manifest().layout.pages())
    };
    let (faults, written) = (pages(&touched.faults), pages(&touched.written));
    assert!(faults.count() > 1000 && written.count() > 100);
    assert!(written.iter().all(|page| faults.get(page)));
    let image = std::fs::File::open(path.join("memory.img")).unwrap();
    if !firn_required::has("disk", evict(&image).unwrap().is_cold()) {
        return;
    }
    record(&[&words[..], &["--part", "groups,cache"]].concat()).unwrap();
    let both = profile(&path);
    assert_eq!((&both.faults, &both.written), (&touched.faults, &touched.written));
    let zero = Snapshot::open(&path).unwrap().zero_map().clone();
    let grouped = PageSet::of(both.groups.iter().flatten().flatten(), faults.pages());
    let cached =
        PageSet::of(both.cached.iter().flatten().map(|cached| &cached.run), faults.pages());
    for page in faults.iter().filter(|page| !zero.get(*page)) {
        assert!(grouped.get(page) && cached.get(page), "page {page:#x}");
    }
}

#[test]
fn a_part_that_cannot_be_recorded_is_an_error() {
    let Some(dir) = folder() else { return };
    let path = dir.path().join("snapshot");
    make(&["--trace", "sequential-read:4M", "--out", text(&path)]);
    let refused = |words: &[&str]| {
        let words = [&[text(&path)], words].concat();
        record(&words).unwrap_err()
    };
    assert!(refused(&["--part", "order"]).contains("use faults, writes, groups"));
    assert!(refused(&["--invoke", "{}"]).contains("leave --invoke out"));
    assert!(refused(&["--input", "json-a"]).contains("does not replay json-a"));
    assert!(Snapshot::open(&path).unwrap().profile().unwrap().is_none());
    let error = show(&[text(&path)]).unwrap_err();
    assert!(error.contains("has no profile") && error.contains("firn profile record"), "{error}");
    assert!(record(&[text(&dir.path().join("none"))]).is_err());
}

#[test]
fn a_profile_that_is_not_the_snapshots_or_empty_is_refused() {
    let Some(dir) = folder() else { return };
    let path = dir.path().join("snapshot");
    make(&["--trace", "sequential-read:4M", "--out", text(&path)]);
    let id = Snapshot::open(&path).unwrap().manifest().description.id;
    let refused = |profile: &Profile| error_chain(&set_profile(&path, profile).unwrap_err());
    let other = refused(&Profile::of(uuid::Uuid::from_u128(7)));
    assert!(
        other.contains("was recorded of snapshot") && other.contains("record it again"),
        "{other}"
    );
    let with = |first, pages| Profile {
        faults: Some(vec![PageRange { first, pages }]),
        ..Profile::of(id)
    };
    assert!(refused(&with(1 << 30, 1)).contains("guest memory has"));
    assert!(refused(&with(3, 0)).contains("empty run"));
    set_profile(&path, &Profile::of(id)).unwrap();
    let error = show(&[text(&path)]).unwrap_err();
    assert!(error.contains("is empty"), "{error}");
}

/// A pool in memory with room for so many MiB, and its manager.
fn pool(dir: &Path, mebibytes: u64) -> Server {
    let options = MemfdOptions { size: mebibytes << 20, huge: None, node: None };
    let medium = Arc::new(MappedMedium::memfd(options).unwrap());
    let pool = Pool::create(medium, &CreateOptions::default()).unwrap();
    Server::start(&dir.join("pool.sock"), pool).unwrap()
}

#[test]
fn a_snapshot_in_a_pool_gets_a_profile_by_one_commit() {
    let Some(dir) = folder() else { return };
    let _manager = pool(dir.path(), 64);
    let socket = dir.path().join("pool.sock");
    let place = ["--pool", text(&socket)];
    make(&[&["--trace", "sequential-write:8M", "--out", "player"], &place[..]].concat());
    let of = |command: &[&'static str]| [&["player"], &place[..], command].concat();
    let error = record(&of(&["--part", "groups"])).unwrap_err();
    assert!(error.contains("groups") && error.contains("freeze it into a directory"), "{error}");
    record(&of(&[])).unwrap();
    show(&of(&["--json"])).unwrap();
    let (snapshot, _grant) = open_pooled(&socket, "player", Verify::Always).unwrap();
    let profile = snapshot.profile().unwrap().unwrap();
    assert!(profile.groups.is_none() && profile.faults.is_some());
    let pages = snapshot.manifest().layout.pages();
    let written = PageSet::of(profile.written.iter().flatten(), pages);
    assert_eq!(written.ranges_in(0..2048).count(), 1);
    drop((snapshot, _grant));
    // Its bytes are right in the new extent, too.
    record(&of(&["--part", "faults"])).unwrap();
}

#[test]
fn a_pool_without_room_for_both_reports_how_much_is_missing() {
    let Some(dir) = folder() else { return };
    let _manager = pool(dir.path(), 24);
    let socket = dir.path().join("pool.sock");
    let place = ["--pool", text(&socket)];
    make(&[&["--trace", "sequential-write:8M", "--out", "player"], &place[..]].concat());
    let error = record(&[&["player"], &place[..]].concat()).unwrap_err();
    assert!(error.contains("the pool lacks"), "{error}");
    let (snapshot, _grant) = open_pooled(&socket, "player", Verify::Always).unwrap();
    assert_eq!(snapshot.profile().unwrap(), None);
}

#[test]
fn a_loading_set_is_packed_once_and_anew_for_other_options() {
    let Some(dir) = folder() else { return };
    let path = dir.path().join("snapshot");
    make(&["--trace", "sequential-read:4M", "--out", text(&path)]);
    let pack = |planner: &str| firn(&["profile", "pack"], &[text(&path), "--planner", planner]);
    let refused = pack("faasnap").unwrap_err();
    assert!(refused.contains("firn profile record --part groups"), "{refused}");
    let error = pack("firecracker").unwrap_err();
    assert!(error.contains("nothing to pack"), "{error}");
    let id = Snapshot::open(&path).unwrap().manifest().description.id;
    let groups =
        Some(vec![vec![PageRange { first: 0, pages: 2 }, PageRange { first: 9, pages: 1 }]]);
    set_profile(&path, &Profile { groups, ..Profile::of(id) }).unwrap();
    let file = || std::fs::read(path.join("loading-set.img")).unwrap();
    pack("faasnap").unwrap();
    let merged = file();
    pack("faasnap").unwrap();
    assert!(file() == merged);
    pack("faasnap:merge=0").unwrap();
    assert!(file().len() < merged.len());
}
