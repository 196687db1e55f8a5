use firn_base::PageRange;

use super::*;

fn run(first: u64, pages: u64) -> PageRange {
    PageRange { first, pages }
}

const ID: Uuid = Uuid::from_u128(5);

fn check(edit: impl FnOnce(&mut Profile)) -> Result<(), ProfileError> {
    let mut profile = Profile::of(ID);
    edit(&mut profile);
    profile.check(ID, 16)
}

/// For each part, its name and a profile with these runs in that part.
fn parts(runs: &[PageRange]) -> [(&'static str, Profile); 7] {
    let own = || Profile::of(ID);
    let some = || Some(runs.to_vec());
    let groups = runs.iter().map(|run| vec![*run]).collect();
    let cached = runs.iter().map(|run| CachedRun { run: *run, at_ns: 0 }).collect();
    [
        ("the fault order", Profile { faults: some(), ..own() }),
        ("the write set", Profile { written: some(), ..own() }),
        ("the free set", Profile { free: some(), ..own() }),
        ("the reported set", Profile { reported: some(), ..own() }),
        ("the set of small leaves", Profile { small_leaves: some(), ..own() }),
        ("the working-set groups", Profile { groups: Some(groups), ..own() }),
        ("the order of the page cache", Profile { cached: Some(cached), ..own() }),
    ]
}

#[test]
fn pages_beyond_guest_memory_are_refused_in_every_part() {
    for (runs, page) in [
        (&[run(14, 3)][..], 16),
        (&[run(0, 2), run(14, 3)], 16),
        (&[run(16, 1)], 16),
        (&[run(u64::MAX, 2)], u64::MAX - 1),
    ] {
        for (part, profile) in parts(runs) {
            assert_eq!(profile.check(ID, 16), Err(ProfileError::Beyond { part, page, pages: 16 }));
        }
    }
    for (part, profile) in parts(&[run(0, 2), run(14, 2)]) {
        assert_eq!(profile.check(ID, 16), Ok(()), "{part}");
    }
}

#[test]
fn repeated_pages_empty_runs_and_descending_sets_are_refused() {
    let part = "the fault order";
    assert_eq!(check(|p| p.faults = Some(vec![run(9, 1), run(3, 2)])), Ok(()));
    let twice = Some(vec![run(3, 2), run(0, 4)]);
    assert_eq!(check(|p| p.faults = twice), Err(ProfileError::Repeated { part, page: 3 }));
    let empty = Some(vec![run(3, 0)]);
    assert_eq!(check(|p| p.faults = empty), Err(ProfileError::EmptyRun { part, page: 3 }));
    let descending = Some(vec![run(9, 1), run(3, 2)]);
    let repeated = ProfileError::Repeated { part: "the write set", page: 3 };
    assert_eq!(check(|p| p.written = descending), Err(repeated));
    let groups = Some(vec![vec![run(3, 1)], vec![run(3, 1)]]);
    assert!(matches!(check(|p| p.groups = groups), Err(ProfileError::Repeated { page: 3, .. })));
}

#[test]
fn a_profile_of_another_snapshot_is_refused() {
    let found = Uuid::from_u128(6);
    let error = Profile::of(found).check(ID, 16).unwrap_err();
    assert_eq!(error, ProfileError::OtherSnapshot { found, expected: ID });
}

#[test]
fn a_set_of_runs_contains_their_pages() {
    let runs = [run(2, 3), run(7, 1), run(14, 9)];
    let set = PageSet::of(&runs, 16);
    assert_eq!(set.to_ranges(), [run(2, 3), run(7, 1), run(14, 2)]);
}
