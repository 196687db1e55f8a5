//! The annex of a snapshot: after a loss of power at every moment it has its old or its new
//! content, the snapshot is whole, and damage loses the content alone.

use std::sync::Arc;

use proptest::prelude::{any, prop_assert, proptest};
use proptest::test_runner::Config;

use super::support::{pool, publish, version};
use crate::layout::{ANNEX_COPY_BYTES, ANNEX_ROOM, GRANULE, Record, annex_at};
use crate::media::Medium;
use crate::pool::scan::read_record;
use crate::simulated::{Fault, Search, SimulatedMedium, Tried};
use crate::{Pool, PoolReader};

const GRANULES: u64 = 8;
const SEARCH: Search = Search { states: 1 << 14, lines: 12, samples: 4000, seed: 0x616e_6e65 };

/// Content of this length that differs by version.
fn content(version: u8, len: usize) -> Vec<u8> {
    (0..len).map(|at| version.wrapping_mul(31).wrapping_add(at.to_le_bytes()[0])).collect()
}

/// What a pool that is opened after a loss of power has in the annex of `name`.
fn stored(medium: SimulatedMedium, name: &str, snapshot: u64) -> Result<Option<Vec<u8>>, String> {
    let medium: Arc<dyn Medium> = Arc::new(medium);
    let pool = Pool::open(Arc::clone(&medium)).map_err(|error| error.to_string())?;
    let pin = pool.pin(name).map_err(|error| error.to_string())?;
    if version(&*medium, &pin.extent(), name) != Some(snapshot) {
        return Err("the snapshot is not whole".to_owned());
    }
    Ok(pin.annex())
}

/// Simulates a loss of power at all moments of a store. Fails unless all states have the old or the
/// new content, and after the store the new content.
fn cut(
    medium: &SimulatedMedium,
    pool: &Pool,
    old: Option<&Vec<u8>>,
    new: &Vec<u8>,
) -> Result<Tried, String> {
    let pin = pool.pin("name").unwrap();
    assert_eq!(pin.annex().as_ref(), old);
    medium.record();
    pin.set_annex(new).unwrap();
    assert_eq!(pin.annex().as_ref(), Some(new));
    let epochs = medium.epochs();
    let mut tried = Tried::default();
    let mut result = Ok(());
    for (number, epoch) in epochs.iter().enumerate() {
        let done = number + 1 == epochs.len();
        tried.add(epoch.try_states(&SEARCH, &mut |state| {
            if result.is_ok() {
                result = stored(state, "name", 1).and_then(|found| {
                    let valid = found.as_ref() == Some(new) || (!done && found.as_ref() == old);
                    valid.then_some(()).ok_or_else(|| format!("epoch {number}: {found:?}"))
                });
            }
        }));
    }
    result.map(|()| tried)
}

#[test]
fn store_leaves_the_old_or_the_new_content_at_every_moment() {
    for len in [0, 1, 40, 64, 100, 700] {
        let (medium, pool) = pool(GRANULES);
        publish(&pool, "name", 1);
        let (mut tried, mut old) = (Tried::default(), None);
        for version in 0..4 {
            let new = content(version, len + usize::from(version));
            tried.add(cut(&medium, &pool, old.as_ref(), &new).unwrap());
            old = Some(new);
        }
        println!(
            "annex of {len} bytes: {} epochs of up to {} unfenced lines, {} exhausted; {} states",
            tried.epochs, tried.most_lines, tried.exhausted, tried.states
        );
        assert!(tried.states > tried.epochs);
    }
}

/// The place of a removed snapshot is used again: the next snapshot there has an empty annex, at
/// every moment of its first store, too.
#[test]
fn content_goes_with_its_snapshot() {
    let (medium, pool) = pool(GRANULES);
    publish(&pool, "name", 7);
    pool.pin("name").unwrap().set_annex(&content(1, 300)).unwrap();
    pool.pin("name").unwrap().set_annex(&content(2, 300)).unwrap();
    let before = pool.lookup("name").unwrap();
    pool.reclaim("name").unwrap();
    publish(&pool, "name", 1);
    assert_eq!(pool.lookup("name").unwrap().offset, before.offset, "the same place");
    cut(&medium, &pool, None, &content(3, 100)).unwrap();
    // An update is another snapshot.
    publish(&pool, "name", 2);
    assert_eq!(pool.pin("name").unwrap().annex(), None);
}

/// A pinned snapshot whose name was removed keeps its annex.
#[test]
fn pinned_snapshot_keeps_its_content() {
    let (_, pool) = pool(GRANULES);
    publish(&pool, "name", 1);
    let pin = pool.pin("name").unwrap();
    pin.set_annex(b"snow").unwrap();
    publish(&pool, "name", 2);
    assert_eq!(pin.annex().as_deref(), Some(&b"snow"[..]));
    pin.set_annex(b"ice").unwrap();
    assert_eq!(pin.annex().as_deref(), Some(&b"ice"[..]));
    assert_eq!(pool.pin("name").unwrap().annex(), None);
}

#[test]
fn annex_holds_its_maximum_and_spares_the_tail() {
    let (medium, pool) = pool(GRANULES);
    // The tail would reach into the annex; it gets another granule.
    let tail = GRANULE - 10;
    let staging = pool.allocate("name", GRANULE, tail).unwrap();
    assert_eq!(staging.extent().len, 3 * GRANULE);
    let bytes = content(9, usize::try_from(tail).unwrap());
    staging.write_tail(0, &bytes);
    let extent = staging.publish().unwrap();
    let pin = pool.pin("name").unwrap();
    for version in 0..3 {
        let new = content(version, ANNEX_ROOM);
        pin.set_annex(&new).unwrap();
        assert_eq!(pin.annex(), Some(new));
    }
    let mut found = vec![0; bytes.len()];
    medium.load(extent.tail_offset, &mut found);
    assert!(found == bytes, "the tail is changed");
    // Without a tail there is no annex, and nothing is written.
    pool.allocate("bare", GRANULE, 0).unwrap().publish().unwrap();
    let bare = pool.pin("bare").unwrap();
    assert_eq!(bare.extent().len, GRANULE);
    bare.set_annex(b"snow").unwrap();
    assert_eq!(bare.annex(), None);
}

/// An earlier firn left no room for the annex behind some tails.
#[test]
fn extent_of_an_earlier_firn_keeps_its_tail() {
    let (medium, pool) = pool(GRANULES);
    publish(&pool, "name", 1);
    let superblock = pool.inner.superblock().clone();
    let granule = u32::try_from(pool.lookup("name").unwrap().offset / GRANULE).unwrap();
    drop(pool);
    let record = read_record(&*medium, &superblock, granule).flatten().unwrap();
    let full = Record { tail_bytes: GRANULE - 10, ..record };
    medium.store(superblock.record_at(granule), &full.encode(superblock.uuid, granule));
    let pool = Pool::open(Arc::clone(&medium) as Arc<dyn Medium>).unwrap();
    let pin = pool.pin("name").unwrap();
    let tail = || {
        let mut bytes = vec![0; usize::try_from(GRANULE).unwrap()];
        medium.load(pin.extent().tail_offset, &mut bytes);
        bytes
    };
    let before = tail();
    pin.set_annex(b"snow").unwrap();
    assert_eq!(pin.annex(), None);
    assert!(tail() == before, "the tail is changed");
}

#[test]
fn changed_medium_is_not_written() {
    let (medium, pool) = pool(GRANULES);
    publish(&pool, "name", 1);
    let pin = pool.pin("name").unwrap();
    pin.set_annex(b"snow").unwrap();
    medium.store_word(16, 0);
    pin.set_annex(b"ice").unwrap_err();
    assert_eq!(pin.annex().as_deref(), Some(&b"snow"[..]));
}

/// Checks the tests themselves: a medium that ignores flushes or fences loses the new content.
#[test]
fn injected_faults_are_detected() {
    for fault in [Fault::NoFlush, Fault::NoFence] {
        let (whole, pool) = pool(GRANULES);
        publish(&pool, "name", 1);
        drop(pool);
        let medium = Arc::new(whole.clone_now().with_fault(fault));
        let pool = Pool::open(Arc::clone(&medium) as Arc<dyn Medium>).unwrap();
        let found = cut(&medium, &pool, None, &content(1, 100));
        assert!(found.is_err(), "{fault:?} is not detected");
    }
}

proptest! {
    #![proptest_config(Config::with_cases(300))]

    /// A damaged word loses the newest content at most; the snapshot and the pool stay valid.
    #[test]
    fn damage_loses_the_content_alone(
        stores in 1..5_u8,
        copy in 0..2_u64,
        word in 0..40_u64,
        damage in any::<u64>(),
    ) {
        let (medium, pool) = pool(GRANULES);
        publish(&pool, "name", 1);
        let all: Vec<Vec<u8>> = (0..stores).map(|store| content(store, 290)).collect();
        for content in &all {
            pool.pin("name").unwrap().set_annex(content).unwrap();
        }
        let annex = annex_at(&pool.lookup("name").unwrap()).unwrap();
        drop(pool);
        medium.store_word(annex + copy * ANNEX_COPY_BYTES + 8 * word, damage);
        let reader = PoolReader::open(Arc::clone(&medium) as Arc<dyn Medium>).unwrap();
        prop_assert!(reader.verify(&mut |_, _| Ok(())).problems.is_empty());
        let found = stored(medium.clone_now(), "name", 1).unwrap();
        let last_two = all.iter().rev().take(2);
        prop_assert!(found.is_none() || last_two.clone().any(|content| Some(content) == found.as_ref()));
        prop_assert!(stores == 1 || found.is_some(), "the other copy is not damaged");
        // The next store repairs it.
        let pool = Pool::open(medium as Arc<dyn Medium>).unwrap();
        let pin = pool.pin("name").unwrap();
        pin.set_annex(b"snow").unwrap();
        prop_assert!(pin.annex().as_deref() == Some(b"snow"));
    }
}
