//! Guarantees of handles while they exist.

use std::sync::Arc;

use super::support::{options, pool, publish, version};
use crate::layout::GRANULE;
use crate::media::Medium;
use crate::simulated::{Fault, SimulatedMedium};
use crate::{AllocateError, ExtentState, LookupError, Pool, ReclaimError, ReplicaError, Role};

#[test]
fn pinned_generation_survives_an_update() {
    let (medium, pool) = pool(12);
    publish(&pool, "name", 1);
    let pins = [pool.pin("name").unwrap(), pool.pin("name").unwrap()];
    publish(&pool, "name", 2);
    let old = pins[0].extent();
    let [first, second] = pins;
    drop(first);
    assert_eq!(version(&*medium, &old, "name"), Some(1));
    let listing = pool.list();
    let listed = listing.extents.iter().find(|listed| listed.extent == old).unwrap();
    assert_eq!((listed.role, listed.pins), (Role::Superseded, Some(1)));
    assert_eq!(listed.state, ExtentState::SnapshottedUnavailable);
    drop(second);
    assert_eq!(pool.list().extents.len(), 1);
    assert!(pool.lookup("name").unwrap().generation > old.generation);
}

#[test]
fn pinned_snapshot_survives_its_removal() {
    let (medium, pool) = pool(12);
    publish(&pool, "name", 1);
    let pin = pool.pin("name").unwrap();
    assert_eq!(pool.reclaim("name").unwrap(), 0);
    assert!(matches!(pool.pin("name").unwrap_err(), LookupError::Unknown(_)));
    publish(&pool, "other", 1);
    publish(&pool, "name", 2);
    assert_eq!(version(&*medium, &pin.extent(), "name"), Some(1));
    drop(pin);
    assert_eq!(pool.reclaim("name").unwrap(), 2 * GRANULE);
    assert_eq!(pool.names(), ["other"]);
}

#[test]
fn concurrent_removal_and_update_leave_no_extent() {
    let (_, pool) = pool(12);
    std::thread::scope(|scope| {
        let freezing =
            scope.spawn(|| (0..50_000).for_each(|version| publish(&pool, "name", version)));
        while !freezing.is_finished() {
            match pool.reclaim("name") {
                Ok(_) | Err(ReclaimError::Lookup(_)) => {}
                Err(error) => panic!("{error}"),
            }
        }
    });
    let _ = pool.reclaim("name");
    assert!(pool.list().extents.is_empty());
}

#[test]
fn name_that_is_being_written_is_reported() {
    let (_, pool) = pool(12);
    let staging = pool.allocate("name", GRANULE, 0).unwrap();
    assert!(matches!(pool.lookup("name").unwrap_err(), LookupError::BeingWritten(_)));
    let second = pool.allocate("name", GRANULE, 0).unwrap_err();
    assert!(matches!(second, AllocateError::BeingWritten(_)), "{second}");
    assert_eq!(pool.list().extents[0].state, ExtentState::SnapshottedUnavailable);
    drop(staging);
    assert!(matches!(pool.lookup("name").unwrap_err(), LookupError::Unknown(_)));
    assert!(pool.list().extents.is_empty());
}

#[test]
fn replica_has_its_own_extent_and_pins_its_snapshot() {
    let (medium, pool) = pool(12);
    publish(&pool, "name", 1);
    let source = pool.lookup("name").unwrap();
    let replica = pool.replica("name").unwrap();
    assert_eq!(replica.source().extent(), source);
    let extent = replica.extent();
    assert_ne!(extent.offset, source.offset);
    assert_eq!((extent.guest_bytes, extent.tail_bytes), (source.guest_bytes, 0));
    publish(&pool, "name", 2);
    assert_eq!(pool.list().extents.len(), 3);
    let mark = |at: u64| medium.load_word(at);
    assert_ne!(mark(extent.offset), mark(source.offset));
    let first = replica.image_until(|| false).unwrap();
    assert_eq!((first.compared, first.copied), (GRANULE, 2 * 65536));
    assert_eq!(mark(extent.offset + 8), 1, "the generation of its snapshot");
    assert_eq!(replica.image_until(|| false).unwrap().copied, 0);
    medium.store_word(extent.offset + 70_000, 7);
    assert_eq!(replica.image_until(|| false).unwrap().copied, 65536);
    assert_eq!(mark(extent.offset + 70_000), 0);
    let listed = pool.list();
    let listed = listed.extents.iter().find(|listed| listed.role == Role::Replica).unwrap();
    assert_eq!(listed.source, Some(source.generation));
    drop(replica);
    assert_eq!(pool.list().extents.len(), 1);
}

#[test]
fn a_replica_without_memory_of_its_own_leaves_the_pool_as_it_was() {
    let medium = SimulatedMedium::faulty(14 * GRANULE, Fault::NoMemory);
    let pool = Pool::create(Arc::new(medium), &options()).unwrap();
    publish(&pool, "name", 1);
    let error = pool.replica("name").unwrap_err();
    let is_expected = |error: &_| {
        matches!(error, ReplicaError::Allocate(AllocateError::NoMemory { bytes: GRANULE, .. }))
    };
    assert!(is_expected(&error), "{error}");
    assert_eq!(pool.list().extents.len(), 1);
    publish(&pool, "name", 2);
}

#[test]
fn invalid_names_and_sizes_are_refused() {
    let (_, pool) = pool(12);
    for name in ["", "with\nline", &"x".repeat(41)] {
        let error = pool.allocate(name, GRANULE, 0).unwrap_err();
        assert!(matches!(error, AllocateError::Name { longest: 40, .. }), "{error}");
    }
    for size in [0, 5000] {
        let error = pool.allocate("name", size, 0).unwrap_err();
        assert!(matches!(error, AllocateError::GuestBytes(bytes) if bytes == size), "{error}");
    }
    for (guest, tail) in [(u64::MAX - 4095, u64::MAX), (4096, u64::MAX), (1 << 40, 0)] {
        let error = pool.allocate("name", guest, tail).unwrap_err();
        assert!(
            matches!(error, AllocateError::Full { free, .. } if free == 12 * GRANULE),
            "{error}"
        );
    }
    pool.allocate(&"x".repeat(40), 4096, 0).unwrap().publish().unwrap();
}
