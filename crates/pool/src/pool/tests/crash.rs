//! Simulates a loss of power at every moment of each transition and of recovery, and checks the
//! resulting state.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::support::{options, pool, publish, version, write};
use crate::layout::GRANULE;
use crate::media::Medium;
use crate::simulated::{Fault, Search, SimulatedMedium, Tried};
use crate::{OpenError, Pool, PoolReader};

const GRANULES: u64 = 12;
const SEARCH: Search = Search { states: 1 << 14, lines: 12, samples: 4000, seed: 0x6669_726e };
/// Recovery clears words, each of which may be lost independently.
const RECOVERY: Search = Search { states: 1 << 10, lines: 10, samples: 100, seed: 0x0069_6365 };

/// The allowed versions of each name; `None` for no snapshot.
type Allowed<'a> = BTreeMap<&'a str, Vec<Option<u64>>>;

/// Opens a pool after a loss of power. Returns a description of an error.
fn check(medium: Arc<SimulatedMedium>, allowed: &Allowed<'_>) -> Result<(), String> {
    let medium: Arc<dyn Medium> = medium;
    let pool = Pool::open(Arc::clone(&medium))
        .map_err(|error| format!("cannot open the pool: {error}"))?;
    let reader = PoolReader::open(Arc::clone(&medium)).map_err(|error| error.to_string())?;
    for (name, allowed) in allowed {
        let found = match pool.lookup(name) {
            Ok(extent) => match version(&*medium, &extent, name) {
                None => return Err(format!("{name} is visible but incomplete or mixed")),
                version => version,
            },
            Err(_) => None,
        };
        if !allowed.contains(&found) {
            return Err(format!("{name} has {found:?}, not one of {allowed:?}"));
        }
        if reader.lookup(name).ok() != pool.lookup(name).ok() {
            return Err(format!("a search does not find {name}"));
        }
    }
    let listing = pool.list();
    if listing.extents.len() != pool.names().len() {
        return Err("an extent without a name is left".to_owned());
    }
    let used: u64 = listing.extents.iter().map(|listed| listed.extent.len).sum();
    if used + listing.free_bytes() != GRANULES * GRANULE {
        return Err("space leaks".to_owned());
    }
    Ok(())
}

/// Simulates a loss of power at all moments of `work`, and then at all moments of each recovery.
/// Fails unless every state is allowed.
fn cut(
    medium: &SimulatedMedium,
    allowed: &Allowed<'_>,
    work: impl FnOnce(),
) -> Result<[Tried; 2], String> {
    cut_with(medium, &SEARCH, allowed, work)
}

fn cut_with(
    medium: &SimulatedMedium,
    search: &Search,
    allowed: &Allowed<'_>,
    work: impl FnOnce(),
) -> Result<[Tried; 2], String> {
    medium.record();
    work();
    let mut result = Ok(());
    let mut tried = [Tried::default(); 2];
    for epoch in medium.epochs() {
        let [first, second] = &mut tried;
        first.add(epoch.try_states(search, &mut |state| {
            if result.is_err() {
                return;
            }
            let state = Arc::new(state);
            state.record();
            result = check(Arc::clone(&state), allowed);
            for epoch in state.epochs() {
                second.add(epoch.try_states(&RECOVERY, &mut |state| {
                    if result.is_ok() {
                        result = check(Arc::new(state), allowed)
                            .map_err(|what| format!("after a second loss of power: {what}"));
                    }
                }));
            }
        }));
    }
    result.map(|()| tried)
}

fn report(what: &str, tried: &[Tried; 2]) {
    let [first, second] = tried;
    println!(
        "{what}: {} epochs of up to {} unfenced lines, {} exhausted; {} states, {} more of recovery",
        first.epochs, first.most_lines, first.exhausted, first.states, second.states
    );
    assert!(first.states > first.epochs);
}

#[test]
fn create() {
    let medium = Arc::new(SimulatedMedium::new((GRANULES + 2) * GRANULE));
    medium.record();
    drop(Pool::create(Arc::clone(&medium) as Arc<dyn Medium>, &options()).unwrap());
    let (mut tried, mut none, mut unmarked, mut made) = (Tried::default(), 0, 0, 0);
    for epoch in medium.epochs() {
        tried.add(epoch.try_states(&SEARCH, &mut |state| {
            let state: Arc<dyn Medium> = Arc::new(state);
            match Pool::open(Arc::clone(&state)) {
                Ok(pool) => {
                    assert_eq!(pool.list().free_bytes(), GRANULES * GRANULE);
                    made += 1;
                }
                Err(OpenError::Superblock(_)) => {
                    let (pool, report) = Pool::repair(state).unwrap();
                    assert_eq!((pool.list().extents.len(), report.problems.len()), (0, 0));
                    unmarked += 1;
                }
                Err(OpenError::NoPool(_)) => {
                    Pool::create(state, &options())
                        .expect("an interrupted creation can be repeated");
                    none += 1;
                }
                Err(error) => panic!("{error}"),
            }
        }));
    }
    report("create", &[tried, Tried::default()]);
    assert!(none > 0 && unmarked > 0 && made > 0, "{none} {unmarked} {made}");
}

/// Creating a pool over an old one never shows the old snapshot in the new pool.
#[test]
fn create_over_another() {
    let (medium, pool) = pool(GRANULES);
    publish(&pool, "old", 1);
    let old = pool.facts().uuid;
    drop(pool);
    medium.record();
    let overwrite = crate::CreateOptions { overwrite: true, ..options() };
    drop(Pool::create(Arc::clone(&medium) as Arc<dyn Medium>, &overwrite).unwrap());
    let mut tried = Tried::default();
    for epoch in medium.epochs() {
        tried.add(epoch.try_states(&SEARCH, &mut |state| {
            let state: Arc<dyn Medium> = Arc::new(state);
            let opened = match Pool::open(Arc::clone(&state)) {
                Err(OpenError::Superblock(_)) => Pool::repair(Arc::clone(&state)).unwrap().0,
                Err(OpenError::NoPool(_)) => return,
                opened => opened.unwrap(),
            };
            match opened.lookup("old") {
                Ok(extent) => {
                    assert_eq!(opened.facts().uuid, old);
                    assert_eq!(version(&*state, &extent, "old"), Some(1));
                }
                Err(_) => assert_ne!(opened.facts().uuid, old),
            }
        }));
    }
    report("create over another", &[tried, Tried::default()]);
}

#[test]
fn allocate_and_publish() {
    let (medium, pool) = pool(GRANULES);
    publish(&pool, "bystander", 1);
    let allowed = BTreeMap::from([("bystander", vec![Some(1)]), ("new", vec![None, Some(2)])]);
    let tried = cut(&medium, &allowed, || publish(&pool, "new", 2)).unwrap();
    report("allocate and publish", &tried);
}

#[test]
fn allocate_and_abandon() {
    let (medium, pool) = pool(GRANULES);
    publish(&pool, "bystander", 1);
    let allowed = BTreeMap::from([("bystander", vec![Some(1)]), ("new", vec![None])]);
    let work = || write(&pool.allocate("new", GRANULE, 100).unwrap(), "new", 2);
    report("allocate and abandon", &cut(&medium, &allowed, work).unwrap());
}

#[test]
fn update() {
    let (medium, pool) = pool(GRANULES);
    publish(&pool, "bystander", 1);
    publish(&pool, "name", 1);
    let allowed = BTreeMap::from([("bystander", vec![Some(1)]), ("name", vec![Some(1), Some(2)])]);
    report("update", &cut(&medium, &allowed, || publish(&pool, "name", 2)).unwrap());
}

/// The space of the old generation is reused immediately for another name: neither name may show
/// the other's bytes.
#[test]
fn update_and_reuse() {
    let (medium, pool) = pool(GRANULES);
    publish(&pool, "name", 1);
    let first = pool.lookup("name").unwrap();
    let allowed = BTreeMap::from([("name", vec![Some(1), Some(2)]), ("next", vec![None, Some(3)])]);
    let work = || {
        publish(&pool, "name", 2);
        publish(&pool, "next", 3);
        assert_eq!(pool.lookup("next").unwrap().offset, first.offset);
    };
    report("update, the old space used again", &cut(&medium, &allowed, work).unwrap());
}

#[test]
fn update_pinned_snapshot() {
    let (medium, pool) = pool(GRANULES);
    publish(&pool, "name", 1);
    let pin = pool.pin("name").unwrap();
    let allowed = BTreeMap::from([("name", vec![Some(1), Some(2)])]);
    let work = || {
        publish(&pool, "name", 2);
        assert_eq!(version(&*medium, &pin.extent(), "name"), Some(1));
        drop(pin);
    };
    report("update of a pinned snapshot", &cut(&medium, &allowed, work).unwrap());
}

#[test]
fn reclaim() {
    let (medium, pool) = pool(GRANULES);
    publish(&pool, "bystander", 1);
    publish(&pool, "name", 1);
    let allowed = BTreeMap::from([("bystander", vec![Some(1)]), ("name", vec![Some(1), None])]);
    let work = || {
        pool.reclaim("name").unwrap();
        pool.gc().unwrap();
    };
    report("reclaim and gc", &cut(&medium, &allowed, work).unwrap());
}

#[test]
fn reclaim_and_reuse() {
    let (medium, pool) = pool(GRANULES);
    publish(&pool, "bystander", 1);
    publish(&pool, "name", 1);
    let allowed = BTreeMap::from([
        ("bystander", vec![Some(1)]),
        ("name", vec![Some(1), None]),
        ("next", vec![None, Some(2)]),
    ]);
    let work = || {
        pool.reclaim("name").unwrap();
        publish(&pool, "next", 2);
    };
    report("reclaim, another name in its place", &cut(&medium, &allowed, work).unwrap());
}

#[test]
fn replicas() {
    let (medium, pool) = pool(GRANULES);
    publish(&pool, "name", 1);
    let allowed = BTreeMap::from([("name", vec![Some(1)])]);
    let work = || {
        let replica = pool.replica("name").unwrap();
        medium.store(replica.extent().offset, &[7; 16]);
        medium.flush(replica.extent().offset, 16);
        drop(replica);
    };
    report("a replica, run in and freed", &cut(&medium, &allowed, work).unwrap());
}

/// Recovery of a pool with a pin, a staging extent and a replica.
#[test]
fn recovery() {
    let (medium, pool) = pool(GRANULES);
    publish(&pool, "name", 1);
    let pin = pool.pin("name").unwrap();
    publish(&pool, "name", 2);
    let staging = pool.allocate("new", GRANULE, 100).unwrap();
    write(&staging, "new", 1);
    let replica = pool.replica("name").unwrap();
    let left = Arc::new(medium.clone_now());
    drop((pin, staging, replica));
    let allowed = BTreeMap::from([("name", vec![Some(2)]), ("new", vec![None])]);
    let open = || {
        let pool = Pool::open(Arc::clone(&left) as Arc<dyn Medium>).unwrap();
        assert_eq!(pool.recovery().freed_extents, 3);
    };
    report("recovery", &cut(&left, &allowed, open).unwrap());
}

/// An interrupted repair can be repeated and loses nothing more.
#[test]
fn repair() {
    let (medium, pool) = pool(GRANULES);
    publish(&pool, "kept", 1);
    publish(&pool, "lost", 1);
    let lost = pool.lookup("lost").unwrap().offset / GRANULE;
    let record = pool.inner.superblock().record_at(u32::try_from(lost).unwrap());
    drop(pool);
    for at in [32, record + 8] {
        medium.store_word(at, 7);
        medium.flush(at, 8);
        medium.fence().unwrap();
    }
    medium.record();
    let (pool, report) = Pool::repair(Arc::clone(&medium) as Arc<dyn Medium>).unwrap();
    assert!(report.superblock && report.problems.len() == 1);
    drop(pool);
    let mut tried = Tried::default();
    for epoch in medium.epochs() {
        tried.add(epoch.try_states(&SEARCH, &mut |state| {
            let state: Arc<dyn Medium> = Arc::new(state);
            let (pool, _) = Pool::repair(Arc::clone(&state)).unwrap();
            assert_eq!(pool.names(), ["kept"]);
            let extent = pool.lookup("kept").unwrap();
            assert_eq!(version(&*state, &extent, "kept"), Some(1));
        }));
    }
    self::report("repair", &[tried, Tried::default()]);
}

/// Random sequences of transitions, with a loss of power at all moments of each.
#[test]
fn random_sequences() {
    const SEQUENCES: u64 = 12;
    const STEPS: u64 = 12;
    const SHORT: Search = Search { states: 1 << 8, lines: 7, samples: 60, seed: 0x736e_6f77 };
    let names = ["a", "b", "c"];
    let mut tried = [Tried::default(); 2];
    for sequence in 0..SEQUENCES {
        let (medium, pool) = pool(GRANULES);
        let mut published: BTreeMap<&str, u64> = BTreeMap::new();
        let (mut pins, mut replicas) = (Vec::new(), Vec::new());
        for step in 0..STEPS {
            let draw = xxhash_rust::xxh3::xxh3_64(&(sequence << 32 | step).to_le_bytes());
            let name = names[firn_base::num::usize_of(draw % 3)];
            let mut after = published.clone();
            // The step's own name may have its previous or its new version; the other names keep
            // theirs.
            let mut allowed: Allowed<'_> =
                names.iter().map(|name| (*name, vec![published.get(name).copied()])).collect();
            let known = allowed.entry(name).or_default();
            let work = || match draw / 3 % 8 {
                0..4 => {
                    if let Ok(staging) = pool.allocate(name, GRANULE, 100) {
                        write(&staging, name, step + 1);
                        staging.publish().unwrap();
                        after.insert(name, step + 1);
                    }
                }
                4 => {
                    if pool.reclaim(name).is_ok() {
                        after.remove(name);
                    }
                }
                5 => pins.extend(pool.pin(name).ok()),
                6 => replicas.extend(pool.replica(name).ok()),
                _ => {
                    pins.pop();
                    replicas.pop();
                    pool.gc().unwrap();
                }
            };
            match draw / 3 % 8 {
                0..4 => known.push(Some(step + 1)),
                4 => known.push(None),
                _ => {}
            }
            let [first, second] = cut_with(&medium, &SHORT, &allowed, work).unwrap();
            tried[0].add(first);
            tried[1].add(second);
            published = after;
            for name in names {
                let found = pool.lookup(name).ok();
                let found = found.map(|extent| version(&*medium, &extent, name).unwrap());
                assert_eq!(found, published.get(name).copied());
            }
        }
    }
    report("random sequences", &tried);
}

/// Space with old content is zeroed ahead, and a freeze into it writes no zeros: after a loss of
/// power the snapshot is not there, or has no old content.
#[test]
fn freeze_into_zeroed_space() {
    const AT: u64 = GRANULE / 2;
    let (medium, pool) = pool(GRANULES);
    let old = pool.allocate("old", GRANULE, 100).unwrap();
    old.write_guest(AT, &[0xff; 200]);
    write(&old, "old", 1);
    let place = old.publish().unwrap().offset;
    pool.reclaim("old").unwrap();
    medium.record();
    let mut pieces = 0;
    pool.begin_zeroing();
    pool.zero_free_space(|| {
        pieces += 1;
        if pieces == 2 {
            pool.end_zeroing();
        }
    });
    let staging = pool.allocate("new", GRANULE, 100).unwrap();
    assert_eq!((staging.extent().offset, &staging.zeroed()[0]), (place, &(0..GRANULE)));
    write(&staging, "new", 2);
    staging.publish().unwrap();
    let mut seen = 0;
    for epoch in medium.epochs() {
        epoch.try_states(&SEARCH, &mut |state| {
            let state: Arc<dyn Medium> = Arc::new(state);
            let Ok(extent) = Pool::open(Arc::clone(&state)).unwrap().lookup("new") else { return };
            let mut bytes = [1; 200];
            state.load(extent.offset + AT, &mut bytes);
            assert_eq!((bytes, version(&*state, &extent, "new")), ([0; 200], Some(2)));
            seen += 1;
        });
    }
    assert!(seen > 0);
}

/// Checks the tests themselves: they must detect a medium that ignores flushes or fences.
#[test]
fn injected_faults_are_detected() {
    for fault in [Fault::NoFlush, Fault::NoFence] {
        let medium = Arc::new(SimulatedMedium::faulty((GRANULES + 2) * GRANULE, fault));
        let pool = Pool::create(Arc::clone(&medium) as Arc<dyn Medium>, &options()).unwrap();
        let allowed = BTreeMap::from([("new", vec![None, Some(2)])]);
        let found = cut(&medium, &allowed, || publish(&pool, "new", 2));
        assert!(found.is_err(), "{fault:?} is not detected");
    }
}
