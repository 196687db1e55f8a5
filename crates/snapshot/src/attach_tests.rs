use std::fs;

use firn_base::PageRange;
use uuid::Uuid;

use super::*;
use crate::profile::CachedRun;
use crate::tests::support::{destination, freeze_generation, names_in, open_generation};
use crate::{Snapshot, verify};

fn profile() -> Profile {
    let run = |first, pages| PageRange { first, pages };
    Profile {
        inputs: vec!["a".into()],
        faults: Some(vec![run(7, 2), run(1, 1)]),
        groups: Some(vec![vec![run(7, 2)], vec![run(1, 1)]]),
        written: Some(vec![run(7, 1)]),
        cached: Some(vec![CachedRun { run: run(0, 16), at_ns: 1_000 }]),
        free: Some(vec![]),
        small_leaves: Some(vec![run(1, 1)]),
        ..Profile::of(Uuid::from_u128(3))
    }
}

#[test]
fn a_profile_is_attached_and_other_sections_are_unchanged() {
    let (dir, path) = destination();
    freeze_generation(&path, 3);
    let before = Snapshot::open(&path).unwrap();
    for profile in [profile(), Profile::of(Uuid::from_u128(3))] {
        set_profile(&path, &profile).unwrap();
        assert_eq!(open_generation(&path), 3);
        assert_eq!(Snapshot::open(&path).unwrap().profile().unwrap(), Some(profile));
        verify(&path, &mut |_, _| ()).unwrap();
    }
    assert_eq!(before.profile().unwrap(), None);
    assert_eq!(names_in(dir.path()), ["snapshot"]);
}

/// The profile section of [`profile`] in version 2, which has no set of small leaves.
#[rustfmt::skip]
const VERSION_2: [u8; 47] = [
    16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3,
    1, 1, b'a',
    1, 2, 7, 2, 1, 1,
    1, 2, 1, 7, 2, 1, 1, 1,
    1, 1, 7, 1,
    1, 1, 0, 16, 0xe8, 7,
    1, 0,
    0,
];

#[test]
fn a_profile_of_version_2_has_all_parts_but_the_last() {
    let (_dir, path) = destination();
    freeze_generation(&path, 3);
    let file = path.join("snapshot.firn");
    let mut bytes = fs::read(&file).unwrap();
    let mut header = Header::read(&File::open(&file).unwrap(), &file).unwrap();
    let range = header.range(Section::Profile);
    let [start, end] = [range.start, range.end].map(|at| usize::try_from(at).unwrap());
    header.set(Entry::of(Section::Profile, 2, &VERSION_2)).unwrap();
    bytes.splice(start..end, VERSION_2);
    let header = header.encode();
    bytes[..header.len()].copy_from_slice(&header);
    fs::write(&file, bytes).unwrap();
    let expected = Profile { small_leaves: None, ..profile() };
    assert_eq!(Snapshot::open(&path).unwrap().profile().unwrap(), Some(expected));
    verify(&path, &mut |_, _| ()).unwrap();
}

#[test]
fn a_profile_of_another_snapshot_changes_nothing() {
    let (_dir, path) = destination();
    freeze_generation(&path, 3);
    let bytes = fs::read(path.join("snapshot.firn")).unwrap();
    let other = Profile::of(Uuid::from_u128(4));
    assert!(matches!(set_profile(&path, &other), Err(AttachError::Profile { .. })));
    assert_eq!(fs::read(path.join("snapshot.firn")).unwrap(), bytes);
}

#[test]
fn a_damaged_profile_is_found_when_it_is_read() {
    let (_dir, path) = destination();
    freeze_generation(&path, 3);
    set_profile(&path, &profile()).unwrap();
    let file = path.join("snapshot.firn");
    let mut bytes = fs::read(&file).unwrap();
    let range = Header::read(&File::open(&file).unwrap(), &file).unwrap().range(Section::Profile);
    bytes[usize::try_from(range.start).unwrap()] ^= 1;
    fs::write(&file, bytes).unwrap();
    let error = Snapshot::open(&path).unwrap().profile().unwrap_err();
    assert!(matches!(error, OpenError::Damaged { section: Section::Profile, .. }), "{error}");
    verify(&path, &mut |_, _| ()).unwrap_err();
}
