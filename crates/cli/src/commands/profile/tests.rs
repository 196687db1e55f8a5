//! `firn profile` as it is called, on players under this host's KVM.

use std::path::Path;
use std::sync::Arc;

use clap::{Args, FromArgMatches};
use firn_base::{PageRange, error_chain};

use super::pack::{self, PackArgs};
use super::record::{self, RecordArgs};
use super::show::{self, ShowArgs};
use crate::commands::player::{self, PlayerArgs};
use firn_pool::{CreateOptions, MappedMedium, MemfdOptions, Pool, Server};
use firn_snapshot::{PageSet, Profile, Snapshot, Verify, open_pooled, set_profile};

fn arguments<T: Args + FromArgMatches>(words: &[&str]) -> T {
    let command = T::augment_args(clap::Command::new("firn").no_binary_name(true));
    T::from_arg_matches(&command.try_get_matches_from(words).unwrap()).unwrap()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn make(words: &[&str]) {
    player::run(&arguments::<PlayerArgs>(words)).unwrap();
}

fn record(words: &[&str]) -> anyhow::Result<()> {
    record::run(&arguments::<RecordArgs>(words)).map(drop)
}

fn show(words: &[&str]) -> anyhow::Result<()> {
    show::run(&arguments::<ShowArgs>(words)).map(drop)
}

fn profile(path: &Path) -> Profile {
    Snapshot::open(path).unwrap().profile().unwrap().unwrap()
}

#[test]
fn parts_are_recorded_kept_and_shown() {
    let dir = tempfile::tempdir().unwrap();
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

#[test]
fn a_part_that_cannot_be_recorded_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("snapshot");
    make(&["--trace", "sequential-read:4M", "--out", text(&path)]);
    let refused = |words: &[&str]| {
        let words = [&[text(&path)], words].concat();
        error_chain(&*record(&words).unwrap_err())
    };
    assert!(refused(&["--part", "order"]).contains("use faults, writes, groups"));
    assert!(refused(&["--invoke", "{}"]).contains("leave --invoke out"));
    assert!(refused(&["--input", "json-a"]).contains("does not replay json-a"));
    assert!(Snapshot::open(&path).unwrap().profile().unwrap().is_none());
    let error = show(&[text(&path)]).unwrap_err().to_string();
    assert!(error.contains("has no profile") && error.contains("firn profile record"), "{error}");
    assert!(record(&[text(&dir.path().join("none"))]).is_err());
}

#[test]
fn a_profile_that_is_not_the_snapshots_or_empty_is_refused() {
    let dir = tempfile::tempdir().unwrap();
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
    let error = show(&[text(&path)]).unwrap_err().to_string();
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
    let dir = tempfile::tempdir().unwrap();
    let _manager = pool(dir.path(), 64);
    let socket = dir.path().join("pool.sock");
    let place = ["--pool", text(&socket)];
    make(&[&["--trace", "sequential-write:8M", "--out", "player"], &place[..]].concat());
    let of = |command: &[&'static str]| [&["player"], &place[..], command].concat();
    let error = error_chain(&*record(&of(&["--part", "groups"])).unwrap_err());
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
    let dir = tempfile::tempdir().unwrap();
    let _manager = pool(dir.path(), 24);
    let socket = dir.path().join("pool.sock");
    let place = ["--pool", text(&socket)];
    make(&[&["--trace", "sequential-write:8M", "--out", "player"], &place[..]].concat());
    let error = record(&[&["player"], &place[..]].concat()).unwrap_err();
    assert!(error_chain(&*error).contains("the pool lacks"), "{}", error_chain(&*error));
    let (snapshot, _grant) = open_pooled(&socket, "player", Verify::Always).unwrap();
    assert_eq!(snapshot.profile().unwrap(), None);
}

#[test]
fn a_loading_set_is_packed_once_and_anew_for_other_options() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("snapshot");
    make(&["--trace", "sequential-read:4M", "--out", text(&path)]);
    let pack =
        |planner: &str| pack::run(&arguments::<PackArgs>(&[text(&path), "--planner", planner]));
    let refused = pack("faasnap").unwrap_err();
    assert!(refused.to_string().contains("firn profile record --part groups"), "{refused}");
    let error = pack("firecracker").unwrap_err().to_string();
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
