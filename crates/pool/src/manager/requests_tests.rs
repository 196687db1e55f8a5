use std::sync::Arc;

use super::*;
use crate::{CreateOptions, GRANULE, MappedMedium, MemfdOptions};

/// A manager with a snapshot, and its generation.
fn manager() -> (Manager, u64) {
    let options = MemfdOptions { size: 8 * GRANULE, huge: None, node: None };
    let medium = Arc::new(MappedMedium::memfd(options).unwrap());
    let pool = Pool::create(medium, &CreateOptions::default()).unwrap();
    pool.allocate("hello", GRANULE, 0).unwrap().publish().unwrap();
    let generation = pool.lookup("hello").unwrap().generation;
    (Manager::new(pool).unwrap(), generation)
}

/// The same, and a confined connection that has pinned it and stored a copy set.
fn confined() -> (Manager, Grants, u64) {
    let ((manager, generation), mut grants) = (manager(), Grants::default());
    manager.answer(Request::Snapshot { name: "hello".into() }, &mut grants).unwrap();
    manager.answer(store(generation, None, 1, 1), &mut grants).unwrap();
    manager.answer(Request::Confine, &mut grants).unwrap();
    (manager, grants, generation)
}

fn store(generation: u64, revision: Option<u64>, runs: u32, state: usize) -> Request {
    let runs = (0..runs).map(|run| (2 * run, 1)).collect();
    Request::StoreCopySet { generation, key: "key".into(), revision, runs, state: vec![7; state] }
}

/// The stored set's revision and the number of its runs.
fn stored(manager: &Manager, grants: &mut Grants, generation: u64) -> (u64, usize) {
    match manager.answer(Request::CopySet { generation, key: "key".into() }, grants).unwrap().0 {
        Response::CopySet { revision, runs, .. } => (revision, runs.len()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_confined_connection_stores_one_copy_set_of_limited_size() {
    let (manager, mut grants, generation) = confined();
    let (revision, _) = stored(&manager, &mut grants, generation);
    let limit = u32::try_from(MAX_SET / 8).unwrap();
    for (runs, state) in [(limit + 1, 0), (0, MAX_SET + 1), (limit, 1)] {
        let request = store(generation, Some(revision), runs, state);
        let refused = manager.answer(request, &mut grants).unwrap_err();
        assert_eq!(refused.0, Refusal::Invalid);
    }
    // What another run was faster to replace does not count.
    let late = manager.answer(store(generation, Some(revision + 9), 2, 0), &mut grants);
    assert_eq!(late.unwrap().0, Response::OtherRevision);
    let request = store(generation, Some(revision), 2, MAX_SET - 16);
    assert_eq!(manager.answer(request, &mut grants).unwrap().0, Response::Noted);
    let (revision, runs) = stored(&manager, &mut grants, generation);
    assert_eq!(runs, 2);
    let refused = manager.answer(store(generation, Some(revision), 1, 0), &mut grants).unwrap_err();
    assert_eq!(refused.0, Refusal::Confined);
    assert_eq!(stored(&manager, &mut grants, generation), (revision, 2));
}

#[test]
fn the_largest_copy_set_fits_into_a_confined_request() {
    let runs = (0..u32::try_from(MAX_SET / 8).unwrap()).map(|_| (u32::MAX, u32::MAX)).collect();
    let (key, revision) = ("x".repeat(MAX_KEY), Some(u64::MAX));
    let state = Vec::new();
    let large = Request::StoreCopySet { generation: u64::MAX, key, revision, runs, state };
    assert!(
        serde_json::to_vec(&large).unwrap().len() < usize::try_from(MAX_CONFINED_BYTES).unwrap()
    );
    let large = store(u64::MAX, Some(u64::MAX), 0, MAX_SET);
    assert!(
        serde_json::to_vec(&large).unwrap().len() < usize::try_from(MAX_CONFINED_BYTES).unwrap()
    );
}

#[test]
fn a_confined_connection_pauses_background_work_once() {
    let (manager, mut grants, generation) = confined();
    let mut paused = |request: Request| {
        let before = manager.pace.last_start();
        manager.answer(request, &mut grants).unwrap();
        manager.pace.last_start() != before
    };
    assert!(paused(Request::IsCurrent { generation }));
    for _ in 0..3 {
        assert!(!paused(Request::IsCurrent { generation }));
    }
}

#[test]
fn a_confined_connection_has_a_limited_number_of_requests() {
    let (manager, mut grants, generation) = confined();
    assert_eq!(grants.max_request(), Some(MAX_CONFINED_BYTES));
    for _ in 0..MAX_CONFINED {
        manager.answer(Request::IsCurrent { generation }, &mut grants).unwrap();
        assert!(grants.max_request().is_some());
    }
    let refused = manager.answer(Request::IsCurrent { generation }, &mut grants).unwrap_err();
    assert_eq!((refused.0, grants.max_request()), (Refusal::Confined, None));
    assert_eq!(Grants::default().max_request(), Some(MAX_REQUEST));
}

#[test]
fn a_start_that_was_granted_unverified_bytes_can_report_its_check() {
    let (manager, generation) = manager();
    let start = |wanted: Option<Request>| {
        let mut grants = Grants::default();
        manager.answer(Request::Snapshot { name: "hello".into() }, &mut grants).unwrap();
        wanted.map(|request| manager.answer(request, &mut grants).unwrap());
        grants
    };
    let is_confined =
        |grants: &mut Grants| match manager.answer(Request::ConfineForStart, grants).unwrap().0 {
            Response::Confined(confined) => confined,
            other => panic!("{other:?}"),
        };
    let replica = || Some(Request::Replica { name: "hello".into() });
    let late = [start(None), start(replica())];
    manager.answer(Request::Verified { generation }, &mut start(None)).unwrap();
    for mut grants in late {
        assert!(!is_confined(&mut grants), "it will check the bytes, too");
        manager.answer(Request::Verified { generation }, &mut grants).unwrap();
    }
    assert!(is_confined(&mut start(None)) && is_confined(&mut start(replica())));
}
