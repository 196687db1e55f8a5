//! Pools that scrub: free space is zeros, at every moment at which power may be lost.

use std::ops::Range;
use std::sync::Arc;

use super::support::{options, publish, version, write};
use crate::layout::GRANULE;
use crate::media::{Access, MappedMedium, Medium};
use crate::pool::scan::{Scan, extent_range, superblock};
use crate::simulated::{Search, SimulatedMedium, Tried};
use crate::{CreateOptions, Pool};

const GRANULES: u64 = 12;
const SEARCH: Search = Search { states: 1 << 12, lines: 10, samples: 500, seed: 0x7363_7275 };
/// In the recovery from each of these states.
const RECOVERY: Search = Search { states: 1 << 6, lines: 4, samples: 10, seed: 0x6263 };

fn scrubbing() -> CreateOptions {
    CreateOptions { scrub: true, ..options() }
}

fn pool() -> (Arc<SimulatedMedium>, Pool) {
    let medium = Arc::new(SimulatedMedium::new((GRANULES + 2) * GRANULE));
    let pool = Pool::create(Arc::clone(&medium) as Arc<dyn Medium>, &scrubbing()).unwrap();
    (medium, pool)
}

/// The free space by the words of the extent map, bytes.
fn free(medium: &SimulatedMedium) -> Vec<Range<u64>> {
    let (superblock, _) = superblock(medium).unwrap();
    let scan = Scan::read(medium, &superblock);
    let used: Vec<Range<u64>> = scan
        .records
        .iter()
        .filter_map(|(granule, record)| extent_range(&superblock, *granule, record.as_ref()?))
        .collect();
    let data = superblock.data().unwrap();
    let free = data.filter(|granule| !used.iter().any(|used| used.contains(granule)));
    free.map(|granule| granule * GRANULE..(granule + 1) * GRANULE).collect()
}

/// Checks a medium as a loss of power leaves it, and opens it.
fn check(medium: SimulatedMedium, what: &str) -> Arc<SimulatedMedium> {
    for range in free(&medium) {
        assert!(medium.is_zero(&range), "{what}: free space at {range:x?} has bytes of a snapshot");
    }
    let medium = Arc::new(medium);
    medium.record();
    let pool = Pool::open(Arc::clone(&medium) as Arc<dyn Medium>).unwrap();
    for piece in pool.list().free {
        let range = piece.offset..piece.offset + piece.len;
        assert!(medium.is_zero(&range), "{what}: recovery freed {range:x?} with its bytes");
    }
    for name in pool.names() {
        let extent = pool.lookup(&name).unwrap();
        assert!(version(&*medium, &extent, &name).is_some(), "{what}: {name} is damaged");
    }
    medium
}

/// Simulates a loss of power at all moments of `work` and of each recovery.
fn cut(medium: &SimulatedMedium, what: &str, work: impl FnOnce()) {
    medium.record();
    work();
    let (mut first, mut second) = (Tried::default(), Tried::default());
    for epoch in medium.epochs() {
        first.add(epoch.try_states(&SEARCH, &mut |state| {
            let state = check(state, what);
            for epoch in state.epochs() {
                second.add(epoch.try_states(&RECOVERY, &mut |state| {
                    check(state, "recovery");
                }));
            }
        }));
    }
    println!("{what}: {} states, {} more of recovery", first.states, second.states);
    assert!(first.states > first.epochs && second.states > 0);
}

#[test]
fn free_space_has_no_byte_of_a_snapshot_after_a_loss_of_power() {
    let (medium, pool) = pool();
    publish(&pool, "bystander", 1);
    publish(&pool, "gone", 1);
    cut(&medium, "reclaim", || assert!(pool.reclaim("gone").unwrap() > 0));
    publish(&pool, "updated", 1);
    cut(&medium, "update", || publish(&pool, "updated", 2));
    cut(&medium, "abandon", || write(&pool.allocate("never", GRANULE, 100).unwrap(), "never", 1));
    cut(&medium, "replica", || {
        let replica = pool.replica("updated").unwrap();
        replica.image_until(|| false).unwrap();
    });
    publish(&pool, "pinned", 1);
    let pin = pool.pin("pinned").unwrap();
    cut(&medium, "unpin", || {
        pool.reclaim("pinned").unwrap();
        drop(pin);
    });
    assert_eq!(pool.names().len(), 2);
}

#[test]
fn a_pool_over_an_old_one_has_no_byte_of_it() {
    let medium = Arc::new(SimulatedMedium::new((GRANULES + 2) * GRANULE));
    let old = Pool::create(Arc::clone(&medium) as Arc<dyn Medium>, &options()).unwrap();
    publish(&old, "old", 1);
    drop(old);
    let over = CreateOptions { overwrite: true, ..scrubbing() };
    let pool = Pool::create(Arc::clone(&medium) as Arc<dyn Medium>, &over).unwrap();
    assert!(pool.facts().scrub);
    assert!(free(&medium).iter().all(|range| medium.is_zero(range)));
    assert_eq!(u64::try_from(free(&medium).len()).unwrap(), GRANULES);
}

/// What was scrubbed is known to be zero, so a freeze writes no zero pages there.
#[test]
fn a_scrubbed_extent_is_known_to_be_zero() {
    let (_medium, pool) = pool();
    publish(&pool, "gone", 1);
    let extent = pool.lookup("gone").unwrap();
    pool.reclaim("gone").unwrap();
    assert_eq!(pool.list().zeroed_bytes, extent.len);
    let staging = pool.allocate("next", GRANULE, 100).unwrap();
    assert_eq!(staging.extent().offset, extent.offset);
    assert_eq!(staging.zeroed(), std::slice::from_ref(&(0..extent.len)));
    assert_eq!(pool.list().zeroed_bytes, 0, "its holder may write any of it");
}

#[test]
fn files_are_scrubbed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pool");
    let file = MappedMedium::create_file(&path, 8 * GRANULE).unwrap();
    let pool = Pool::create(Arc::new(file), &scrubbing()).unwrap();
    publish(&pool, "gone", 7);
    let extent = pool.lookup("gone").unwrap();
    drop(pool);
    // The property is the pool's, not the opener's.
    let pool = Pool::open(Arc::new(MappedMedium::open(&path, Access::Write).unwrap())).unwrap();
    pool.reclaim("gone").unwrap();
    drop(pool);
    let bytes = std::fs::read(&path).unwrap();
    let range = usize::try_from(extent.offset).unwrap();
    let range = range..range + usize::try_from(extent.len).unwrap();
    assert!(bytes[range].iter().all(|byte| *byte == 0));
}
