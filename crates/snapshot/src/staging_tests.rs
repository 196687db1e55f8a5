use std::fs;

use super::{Staging, is_staging};

/// The directory of a killed freeze: it has the name of a staging directory, and no lock.
const STALE: &str = ".firn-0d9e61b9-ae6f-4d2a-9d0c-1f8a0b6d3f1e.partial";

fn names_in(dir: &std::path::Path) -> Vec<String> {
    crate::tests::support::names_in(dir)
}

#[test]
fn files_of_a_killed_freeze_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join(STALE)).unwrap();
    fs::write(dir.path().join(STALE).join("memory.img"), b"half").unwrap();
    let staging = Staging::create(&dir.path().join("snapshot")).unwrap();
    assert_eq!(names_in(dir.path()).len(), 1);
    drop(staging);
    assert!(names_in(dir.path()).is_empty());
}

#[test]
fn a_locked_directory_is_not_swept() {
    let dir = tempfile::tempdir().unwrap();
    let first = Staging::create(&dir.path().join("first")).unwrap();
    let second = Staging::create(&dir.path().join("second")).unwrap();
    assert_eq!(names_in(dir.path()).len(), 2);
    drop(first);
    drop(second);
    assert!(names_in(dir.path()).is_empty());
}

#[test]
fn only_files_of_a_freeze_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let stale = dir.path().join(STALE);
    fs::create_dir(&stale).unwrap();
    fs::write(stale.join("notes"), b"mine").unwrap();
    fs::create_dir(dir.path().join(".firn-cache.partial")).unwrap();
    fs::create_dir(dir.path().join("elsewhere")).unwrap();
    fs::write(dir.path().join("elsewhere/memory.img"), b"mine").unwrap();
    let link = ".firn-2d9e61b9-ae6f-4d2a-9d0c-1f8a0b6d3f1e.partial";
    std::os::unix::fs::symlink("elsewhere", dir.path().join(link)).unwrap();
    drop(Staging::create(&dir.path().join("snapshot")).unwrap());
    assert_eq!(names_in(&stale), ["notes"]);
    assert_eq!(names_in(dir.path()), [STALE, link, ".firn-cache.partial", "elsewhere"]);
    assert_eq!(names_in(&dir.path().join("elsewhere")), ["memory.img"]);
}

#[test]
fn a_directory_that_was_removed_before_its_lock_is_detected() {
    let dir = tempfile::tempdir().unwrap();
    let parent = rustix::fs::openat(
        rustix::fs::CWD,
        dir.path(),
        super::DIR_FLAGS,
        rustix::fs::Mode::empty(),
    )
    .unwrap();
    assert!(super::lock(&parent, STALE).unwrap().is_none());
    fs::create_dir(dir.path().join(STALE)).unwrap();
    let lock = super::lock(&parent, STALE).unwrap();
    assert!(lock.is_some());
    assert!(super::lock(&parent, STALE).unwrap().is_none());
}

#[test]
fn staging_directories_are_recognised_by_their_names() {
    assert!(is_staging(STALE));
    for other in [".firn-.partial", ".firn-x.partial", "snapshot", ".firn", &STALE[1..]] {
        assert!(!is_staging(other), "{other}");
    }
}
