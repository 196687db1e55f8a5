//! Compares a pool with a model: a map of names, and the held extents.

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::{Just, Strategy, any, prop_oneof, proptest};
use proptest::test_runner::Config;

use super::support::{pool, version, write};
use crate::layout::GRANULE;
use crate::media::Medium;
use crate::pool::scan::Scan;
use crate::{AllocateError, LookupError, Pin, Pool, PoolReader, Replica, Role, Staging};

const GRANULES: u64 = 12;
const NAMES: [&str; 5] = ["a", "b", "snow", "ice", "firn"];

#[derive(Clone, Debug)]
enum Step {
    Allocate { name: usize, granules: u64 },
    Publish(usize),
    Abandon(usize),
    Reclaim { name: usize },
    Pin { name: usize },
    Unpin(usize),
    Replicate { name: usize },
    EndReplica(usize),
    Collect,
    Reopen,
}

fn step() -> impl Strategy<Value = Step> {
    let name = 0..NAMES.len();
    prop_oneof![
        4 => (name.clone(), 1..4_u64).prop_map(|(name, granules)| Step::Allocate { name, granules }),
        4 => any::<usize>().prop_map(Step::Publish),
        1 => any::<usize>().prop_map(Step::Abandon),
        2 => name.clone().prop_map(|name| Step::Reclaim { name }),
        2 => name.clone().prop_map(|name| Step::Pin { name }),
        1 => any::<usize>().prop_map(Step::Unpin),
        1 => name.prop_map(|name| Step::Replicate { name }),
        1 => any::<usize>().prop_map(Step::EndReplica),
        1 => Just(Step::Collect),
        1 => Just(Step::Reopen),
    ]
}

/// The expected state: the version of each name and of each handle.
#[derive(Default)]
struct Model {
    published: BTreeMap<&'static str, u64>,
    staged: Vec<(&'static str, u64, Staging)>,
    pinned: Vec<(&'static str, u64, Pin)>,
    replicas: Vec<Replica>,
    versions: u64,
}

fn take<T>(items: &mut Vec<T>, number: usize) -> Option<T> {
    (!items.is_empty()).then(|| items.swap_remove(number % items.len()))
}

impl Model {
    fn apply(&mut self, pool: &mut Pool, medium: &Arc<dyn Medium>, step: &Step) {
        match *step {
            Step::Allocate { name, granules } => self.allocate(pool, NAMES[name], granules),
            Step::Publish(number) => {
                if let Some((name, version, staging)) = take(&mut self.staged, number) {
                    staging.publish().unwrap();
                    self.published.insert(name, version);
                }
            }
            Step::Abandon(number) => drop(take(&mut self.staged, number)),
            Step::Reclaim { name } => {
                let known = self.published.remove(NAMES[name]).is_some();
                assert_eq!(pool.reclaim(NAMES[name]).is_ok(), known);
            }
            Step::Pin { name } => {
                let name = NAMES[name];
                match pool.pin(name) {
                    Ok(pin) => self.pinned.push((name, self.published[name], pin)),
                    Err(error) => {
                        assert!(!self.published.contains_key(name));
                        let staged = self.staged.iter().any(|(staged, _, _)| *staged == name);
                        assert_eq!(matches!(error, LookupError::BeingWritten(_)), staged);
                    }
                }
            }
            Step::Unpin(number) => drop(take(&mut self.pinned, number)),
            Step::Replicate { name } => {
                if let Ok(replica) = pool.replica(NAMES[name]) {
                    assert!(self.published.contains_key(NAMES[name]));
                    self.replicas.push(replica);
                }
            }
            Step::EndReplica(number) => drop(take(&mut self.replicas, number)),
            Step::Collect => drop(pool.gc().unwrap()),
            Step::Reopen => {
                self.staged.clear();
                self.pinned.clear();
                self.replicas.clear();
                *pool = Pool::open(Arc::clone(medium)).unwrap();
                assert_eq!(
                    pool.recovery().freed_extents,
                    0,
                    "no extent is left after all handles are dropped"
                );
            }
        }
        self.check(pool, medium);
    }

    fn allocate(&mut self, pool: &Pool, name: &'static str, granules: u64) {
        let before = pool.list();
        self.versions += 1;
        match pool.allocate(name, granules * GRANULE, 80) {
            Ok(staging) => {
                write(&staging, name, self.versions);
                self.staged.push((name, self.versions, staging));
            }
            Err(AllocateError::BeingWritten(_)) => {
                assert!(self.staged.iter().any(|(staged, _, _)| *staged == name));
            }
            Err(AllocateError::Full { needed, missing, free }) => {
                assert_eq!(needed, (granules + 1) * GRANULE);
                let largest = before.free.iter().map(|piece| piece.len).max().unwrap_or(0);
                assert_eq!((missing, free), (needed - largest, before.free_bytes()));
                assert_eq!(pool.list(), before, "a refusal changes nothing");
            }
            Err(AllocateError::TableFull { names }) => {
                let new =
                    self.staged.iter().filter(|(name, _, _)| !self.published.contains_key(name));
                assert_eq!(self.published.len() + new.count(), names as usize);
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn check(&self, pool: &Pool, medium: &Arc<dyn Medium>) {
        let reader = PoolReader::open(Arc::clone(medium)).unwrap();
        for name in NAMES {
            let expected = self.published.get(name).copied();
            let found = pool.lookup(name).ok();
            let read = reader.lookup(name).ok();
            assert_eq!(found, read, "a concurrent reader sees the same extents as the writer");
            let found = found.map(|extent| version(&**medium, &extent, name).unwrap());
            assert_eq!(found, expected, "{name}");
        }
        for (name, expected, pin) in &self.pinned {
            assert_eq!(version(&**medium, &pin.extent(), name), Some(*expected));
        }
        let listing = pool.list();
        let mut end = listing.pool.data_begin;
        for listed in &listing.extents {
            assert!(listed.extent.offset >= end, "extents do not overlap");
            end = listed.extent.offset + listed.extent.len;
        }
        assert!(end <= listing.pool.data_end);
        let used: u64 = listing.extents.iter().map(|listed| listed.extent.len).sum();
        assert_eq!(used + listing.free_bytes(), GRANULES * GRANULE);
        let count = |role| listing.extents.iter().filter(|listed| listed.role == role).count();
        assert_eq!(count(Role::Snapshot), self.published.len());
        assert_eq!(count(Role::Staging), self.staged.len());
        assert_eq!(count(Role::Replica), self.replicas.len());
        let scan = Scan::read(&**medium, pool.inner.superblock());
        assert_eq!(scan.problems(pool.inner.superblock()), []);
    }
}

proptest! {
    #![proptest_config(Config::with_cases(200))]

    #[test]
    fn pool_behaves_as_a_map_of_names(steps in proptest::collection::vec(step(), 1..60)) {
        let (medium, mut pool) = pool(GRANULES);
        let medium: Arc<dyn Medium> = medium;
        let mut model = Model::default();
        for step in &steps {
            model.apply(&mut pool, &medium, step);
        }
    }
}
