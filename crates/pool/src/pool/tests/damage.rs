//! Damage that a loss of power does not cause is detected, reported and repaired without affecting
//! intact snapshots.

use std::sync::Arc;

use super::support::{options, pool, publish, version};
use crate::layout::{COUNTER_AT, GRANULE};
use crate::media::Medium;
use crate::simulated::SimulatedMedium;
use crate::{AllocateError, RepairError};
use crate::{CreateError, CreateOptions, MediumFailure, OpenError, Pool, PoolReader, Problem};

/// A pool with two snapshots, closed.
fn two() -> (Arc<dyn Medium>, Pool) {
    let (medium, pool) = pool(12);
    publish(&pool, "lost", 1);
    publish(&pool, "kept", 1);
    (medium, pool)
}

fn slot_of(pool: &Pool, name: &str) -> u64 {
    let slots = 0..pool.inner.superblock().slots();
    let at = slots.map(|slot| pool.inner.superblock().slot_at(slot));
    let mut at = at.filter(|at| {
        let mut bytes = vec![0; name.len()];
        pool.inner.medium().load(at + 16, &mut bytes);
        bytes == name.as_bytes()
    });
    at.next().unwrap()
}

/// Damages a word and checks that opening fails and that repair keeps the other snapshot.
fn damaged(
    medium: &Arc<dyn Medium>,
    at: u64,
    word: u64,
    expected: impl Fn(&Problem) -> bool,
) -> Pool {
    medium.store_word(at, word);
    let reader = PoolReader::open(Arc::clone(medium)).unwrap();
    let report = reader.verify(&mut |_, _| Ok(()));
    assert!(report.problems.iter().any(&expected), "{report:?}");
    let error = Pool::open(Arc::clone(medium)).unwrap_err();
    assert!(matches!(&error, OpenError::Damaged { problem, .. } if expected(problem)), "{error}");
    let (pool, report) = Pool::repair(Arc::clone(medium)).unwrap();
    assert!(!report.superblock && report.problems.iter().any(expected), "{report:?}");
    let extent = pool.lookup("kept").unwrap();
    assert_eq!(version(&**medium, &extent, "kept"), Some(1));
    assert_eq!(pool.list().extents.len(), pool.names().len());
    pool
}

#[test]
fn damaged_slot_is_removed() {
    let (medium, pool) = two();
    let at = slot_of(&pool, "lost");
    drop(pool);
    let pool =
        damaged(&medium, at, 0xdead << 32, |problem| matches!(problem, Problem::Slot { .. }));
    assert_eq!(pool.names(), ["kept"]);
}

#[test]
fn damaged_name_is_removed() {
    let (medium, pool) = two();
    let at = slot_of(&pool, "lost");
    drop(pool);
    let pool = damaged(&medium, at + 16, 0, |problem| matches!(problem, Problem::Name { .. }));
    assert_eq!(pool.names(), ["kept"]);
}

#[test]
fn damaged_record_loses_only_its_snapshot() {
    let (medium, pool) = two();
    let granule = pool.lookup("lost").unwrap().offset / GRANULE;
    let at = pool.inner.superblock().record_at(u32::try_from(granule).unwrap());
    drop(pool);
    let lost =
        |problem: &Problem| matches!(problem, Problem::Extent { name, .. } if name == "lost");
    // First an invalid size, then an erased record.
    let pool = damaged(&medium, at + 8, 7 * GRANULE, lost);
    assert_eq!(pool.names(), ["kept"]);
    publish(&pool, "lost", 2);
    drop(pool);
    damaged(&medium, at, 0, lost);
}

#[test]
fn slot_with_the_word_of_another_extent_is_removed() {
    let (medium, pool) = two();
    let at = slot_of(&pool, "lost");
    let word = medium.load_word(slot_of(&pool, "kept"));
    drop(pool);
    damaged(
        &medium,
        at,
        word,
        |problem| matches!(problem, Problem::Extent { name, .. } if name == "lost"),
    );
}

#[test]
fn interrupted_search_path_is_repaired_without_loss() {
    let (medium, pool) = pool(12);
    let medium: Arc<dyn Medium> = medium;
    // With three names in five slots, some name does not get its home slot.
    let mut names = (0..1000).map(|number| format!("name {number}"));
    let home = |name: &str| crate::pool::scan::home_slot(pool.inner.superblock(), name);
    let first = names.next().unwrap();
    let second = names.find(|name| home(name) == home(&first)).unwrap();
    publish(&pool, &first, 1);
    publish(&pool, &second, 1);
    publish(&pool, "kept", 1);
    pool.reclaim(&first).unwrap();
    let at = pool.inner.superblock().slot_at(home(&first));
    drop(pool);
    let pool = damaged(
        &medium,
        at,
        0,
        |problem| matches!(problem, Problem::Unreachable { name, .. } if *name == second),
    );
    assert_eq!(version(&*medium, &pool.lookup(&second).unwrap(), &second), Some(1));
}

#[test]
fn stale_counter_is_advanced() {
    let (medium, pool) = two();
    let before = pool.lookup("kept").unwrap().generation;
    drop(pool);
    let pool =
        damaged(&medium, COUNTER_AT, 1, |problem| matches!(problem, Problem::Counter { .. }));
    publish(&pool, "next", 1);
    assert!(pool.lookup("next").unwrap().generation > before + 1_000_000);
}

#[test]
fn superblock_and_twin_are_restored_from_each_other() {
    let (medium, pool) = two();
    let twin = pool.inner.superblock().twin_at();
    let facts = pool.facts();
    drop(pool);
    medium.store_word(32, 0);
    assert!(matches!(Pool::open(Arc::clone(&medium)).unwrap_err(), OpenError::Superblock(_)));
    assert!(matches!(PoolReader::open(Arc::clone(&medium)).unwrap_err(), OpenError::Superblock(_)));
    let (pool, report) = Pool::repair(Arc::clone(&medium)).unwrap();
    assert!(report.superblock && report.problems.is_empty());
    assert_eq!((pool.facts(), pool.names().len()), (facts, 2));
    drop(pool);

    medium.store_word(twin, 0);
    let verify = || PoolReader::open(Arc::clone(&medium)).unwrap().verify(&mut |_, _| Ok(()));
    assert_eq!(verify().problems, [Problem::Twin]);
    drop(Pool::open(Arc::clone(&medium)).unwrap());
    assert_eq!(verify().problems, []);

    medium.store_word(0, 0);
    medium.store_word(twin, 0);
    let error = Pool::repair(medium).unwrap_err();
    assert!(matches!(error, RepairError::Open(OpenError::NoPool(_))), "{error}");
}

#[test]
fn content_is_checked_by_the_caller() {
    let (medium, pool) = two();
    let lost = pool.lookup("lost").unwrap();
    medium.store(lost.tail_offset + 56, b"damage");
    let reader = PoolReader::open(Arc::clone(&medium)).unwrap();
    let report = reader.verify(&mut |name, content| {
        let (mut guest, mut tail) = ([0; 16], [0; 16]);
        content.read_guest(0, &mut guest);
        content.read_tail(56, &mut tail);
        if guest == tail { Ok(()) } else { Err(format!("the tail of {name} differs")) }
    });
    let what = "the tail of lost differs".to_owned();
    assert_eq!(report.problems, [Problem::Content { name: "lost".to_owned(), what }]);
    assert_eq!((report.snapshots, report.unreferenced), (2, 0));
}

#[test]
fn changed_medium_is_not_written() {
    let (medium, pool) = two();
    medium.store_word(16, 0);
    let error = pool.allocate("new", GRANULE, 0).unwrap_err();
    let overwritten = AllocateError::Medium(MediumFailure::Overwritten {
        name: "simulated".to_owned(),
        uuid: pool.facts().uuid,
    });
    assert_eq!(error.to_string(), overwritten.to_string());
    assert!(matches!(pool.gc().unwrap_err(), MediumFailure::Earlier(_)));
    let medium: Arc<dyn Medium> = Arc::new(SimulatedMedium::new(8 * GRANULE));
    assert!(matches!(Pool::open(medium).unwrap_err(), OpenError::NoPool(_)));
}

#[test]
fn dropping_a_handle_does_not_write_to_a_changed_medium() {
    let (medium, pool) = two();
    let staging = pool.allocate("new", GRANULE, 0).unwrap();
    let metadata = || {
        let mut bytes = vec![0; usize::try_from(GRANULE).unwrap()];
        medium.load(0, &mut bytes);
        bytes
    };
    medium.store_word(16, 0);
    let before = metadata();
    drop(staging);
    assert!(metadata() == before, "something was written");
}

#[test]
fn invalid_pool_options_are_refused() {
    let create = |size: u64, options: CreateOptions| {
        let medium: Arc<dyn Medium> = Arc::new(SimulatedMedium::new(size));
        Pool::create(medium, &options).map(drop)
    };
    let small = create(2 * GRANULE, options());
    assert!(
        matches!(small.unwrap_err(), CreateError::TooSmall { least, .. } if least == 3 * GRANULE)
    );
    create(3 * GRANULE, options()).unwrap();
    let many = create(3 * GRANULE, CreateOptions { names: 100_000, ..CreateOptions::default() });
    let least = match many.unwrap_err() {
        CreateError::TooSmall { least, .. } => least,
        error => panic!("{error}"),
    };
    create(least, CreateOptions { names: 100_000, ..CreateOptions::default() }).unwrap();
    for wrong in [
        CreateOptions { names: 0, ..options() },
        CreateOptions { longest_name: 2000, ..options() },
        CreateOptions { classes: vec![GRANULE, GRANULE], ..options() },
        CreateOptions { classes: vec![4096], ..options() },
    ] {
        assert!(matches!(create(1 << 30, wrong).unwrap_err(), CreateError::Options { .. }));
    }
}

#[test]
fn medium_with_content_is_not_overwritten_by_default() {
    let (medium, pool) = two();
    drop(pool);
    let again = || Pool::create(Arc::clone(&medium), &options());
    let error = again().unwrap_err();
    assert!(
        matches!(&error, CreateError::NotEmpty { what, .. } if what.starts_with("the pool")),
        "{error}"
    );
    medium.store_word(0, 7);
    medium.store_word(pool_end(&medium), 0);
    let error = again().unwrap_err();
    assert!(matches!(&error, CreateError::NotEmpty { what, .. } if what == "data"), "{error}");
    let options = CreateOptions { overwrite: true, ..options() };
    assert!(Pool::create(Arc::clone(&medium), &options).unwrap().names().is_empty());
}

fn pool_end(medium: &Arc<dyn Medium>) -> u64 {
    medium.facts().size - 4096
}

#[test]
fn newer_version_is_reported() {
    let (medium, pool) = two();
    drop(pool);
    let mut block = [0; 256];
    medium.load(0, &mut block);
    block[8] = 9;
    let crc = crc32fast::hash(&block[..252]);
    block[252..].copy_from_slice(&crc.to_le_bytes());
    medium.store(0, &block);
    assert!(matches!(
        Pool::open(Arc::clone(&medium)).unwrap_err(),
        OpenError::Version { found: 9, .. }
    ));
    let error = Pool::create(medium, &options()).unwrap_err();
    assert!(
        matches!(&error, CreateError::NotEmpty { what, .. } if what == "a pool of version 9"),
        "{error}"
    );
}
