use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use firn_base::ErrorChain;

use super::*;

const MIB: u64 = 1 << 20;

/// Clones that count how many of them there are, and can die.
#[derive(Default)]
struct Maker {
    alive: Arc<AtomicUsize>,
    dead: Arc<AtomicBool>,
    fails: Cell<bool>,
    without_copy: Cell<u32>,
    made: RefCell<Vec<&'static str>>,
}

#[derive(Debug)]
struct Clone_ {
    key: &'static str,
    alive: Arc<AtomicUsize>,
    dead: Arc<AtomicBool>,
    watch: Option<Watch>,
}

/// Records whether the owner of a clone is locked when the clone is dropped.
#[derive(Debug)]
struct Watch {
    owner: Weak<ReadyClones<&'static str, Clone_>>,
    locked: Arc<AtomicBool>,
}

impl Drop for Clone_ {
    fn drop(&mut self) {
        if let Some(Watch { owner, locked }) = &self.watch {
            let owner = owner.upgrade().unwrap();
            locked.store(owner.state.try_lock().is_none(), Ordering::SeqCst);
        }
        self.alive.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Waiting for Clone_ {
    fn is_alive(&mut self) -> bool {
        !self.dead.load(Ordering::SeqCst)
    }
}

impl Make<&'static str, Clone_> for Maker {
    fn make(&self, key: &&'static str) -> Result<(Clone_, Making), StartError> {
        self.made.borrow_mut().push(key);
        if self.fails.get() {
            return Err(StartError::Open(ErrorChain::new("no such snapshot")));
        }
        let no_copy = self.without_copy.get() > 0;
        self.without_copy.set(self.without_copy.get().saturating_sub(1));
        self.alive.fetch_add(1, Ordering::SeqCst);
        let (alive, dead) = (self.alive.clone(), self.dead.clone());
        let clone = Clone_ { key, alive, dead, watch: None };
        let making = Making {
            ns: 1,
            dram_bytes: 10 * MIB,
            copy_bytes: 8 * MIB,
            pool_bytes: 0,
            no_copy: no_copy.then_some(firn_pool::NoCopy::BeingMade),
            planner: "firn".to_owned(),
        };
        Ok((clone, making))
    }
}

impl Maker {
    fn alive(&self) -> usize {
        self.alive.load(Ordering::SeqCst)
    }
}

/// Fills as after a quiet time.
fn fill(ready: &ReadyClones<&'static str, Clone_>, maker: &Maker) {
    ready.state.lock().last_arrival = None;
    ready.fill(maker);
}

fn request(ready: &ReadyClones<&'static str, Clone_>, key: &'static str) -> Option<Clone_> {
    let clone = ready.take(&key);
    assert!(clone.as_ref().is_none_or(|clone| clone.key == key));
    clone
}

#[test]
fn a_burst_finds_as_many_clones_as_the_one_before_it_had_requests() {
    let (ready, maker) = (ReadyClones::new(1024 * MIB), Maker::default());
    fill(&ready, &maker);
    assert_eq!(maker.alive(), 0);
    for (key, count) in [("json", 5), ("hello", 2)] {
        assert!((0..count).all(|_| request(&ready, key).is_none()));
    }
    // Not while requests come.
    ready.fill(&maker);
    assert_eq!(maker.alive(), 0);
    fill(&ready, &maker);
    assert_eq!((maker.alive(), ready.usage()), (7, (7, 70 * MIB)));
    let taken: Vec<_> = (0..5).map(|_| request(&ready, "json").unwrap()).collect();
    assert!(request(&ready, "json").is_none());
    assert_eq!((taken.len(), ready.usage().0), (5, 2));
    drop(taken);
    fill(&ready, &maker);
    // All that came in the window, with the one that found none.
    assert!(maker.alive() >= 7);
    ready.end();
    assert_eq!((maker.alive(), ready.usage()), (0, (0, 0)));
    fill(&ready, &maker);
    assert_eq!(maker.alive(), 0);
}

#[test]
fn clones_stay_within_the_bytes() {
    let (ready, maker) = (ReadyClones::new(35 * MIB), Maker::default());
    assert!((0..8).all(|_| request(&ready, "json").is_none()));
    fill(&ready, &maker);
    assert_eq!((maker.alive(), ready.usage()), (3, (3, 30 * MIB)));
    let none = ReadyClones::new(0);
    assert!(!none.is_on() && none.take(&"json").is_none());
    fill(&none, &maker);
    assert_eq!(maker.alive(), 3);
}

#[test]
fn a_clone_that_ended_is_not_taken_and_is_replaced() {
    let (ready, maker) = (ReadyClones::new(1024 * MIB), Maker::default());
    assert!(request(&ready, "json").is_none());
    fill(&ready, &maker);
    maker.dead.store(true, Ordering::SeqCst);
    assert!(request(&ready, "json").is_none());
    assert_eq!(maker.alive(), 0);
    maker.dead.store(false, Ordering::SeqCst);
    fill(&ready, &maker);
    let before = maker.made.borrow().len();
    let alive = maker.alive();
    // Those that end while they wait are replaced, too.
    ready.state.lock().clones[0].clone.dead = Arc::new(AtomicBool::new(true));
    fill(&ready, &maker);
    assert_eq!((maker.alive(), maker.made.borrow().len()), (alive, before + 1));
    assert!(request(&ready, "json").is_some());
}

#[test]
fn a_clone_that_ended_is_dropped_without_the_lock() {
    let (ready, maker) = (Arc::new(ReadyClones::new(1024 * MIB)), Maker::default());
    assert!(request(&ready, "json").is_none());
    fill(&ready, &maker);
    let locked = Arc::new(AtomicBool::new(true));
    let watch = Watch { owner: Arc::downgrade(&ready), locked: locked.clone() };
    ready.state.lock().clones[0].clone.watch = Some(watch);
    maker.dead.store(true, Ordering::SeqCst);
    assert!(request(&ready, "json").is_none());
    assert_eq!((maker.alive(), locked.load(Ordering::SeqCst)), (0, false));
}

#[test]
fn a_clone_that_is_being_made_at_the_end_is_not_kept() {
    /// The daemon stops while a clone is made.
    struct Last<'a>(&'a ReadyClones<&'static str, Clone_>, Maker);
    impl Make<&'static str, Clone_> for Last<'_> {
        fn make(&self, key: &&'static str) -> Result<(Clone_, Making), StartError> {
            let made = self.1.make(key);
            self.0.end();
            made
        }
    }
    let ready = ReadyClones::new(1024 * MIB);
    assert!(request(&ready, "json").is_none());
    ready.state.lock().last_arrival = None;
    let last = Last(&ready, Maker::default());
    ready.fill(&last);
    assert_eq!((last.1.made.borrow().len(), last.1.alive(), ready.usage().0), (1, 0, 0));
}

#[test]
fn clones_of_a_snapshot_that_is_gone_end_also_those_that_are_being_made() {
    let (ready, maker) = (ReadyClones::new(1024 * MIB), Maker::default());
    assert!(request(&ready, "old").is_none() && request(&ready, "new").is_none());
    fill(&ready, &maker);
    assert_eq!(maker.alive(), 2);
    ready.forget(|key| *key == "old");
    assert_eq!(maker.alive(), 1);
    assert!(request(&ready, "new").is_some());

    /// Its snapshot goes while a clone of it is made.
    struct Late<'a>(&'a ReadyClones<&'static str, Clone_>, Maker);
    impl Make<&'static str, Clone_> for Late<'_> {
        fn make(&self, key: &&'static str) -> Result<(Clone_, Making), StartError> {
            let made = self.1.make(key);
            self.0.forget(|forgotten| forgotten == key);
            made
        }
    }
    ready.forget(|_| true);
    assert!(request(&ready, "old").is_none());
    ready.state.lock().last_arrival = None;
    let late = Late(&ready, Maker::default());
    ready.fill(&late);
    assert_eq!((late.1.made.borrow().len(), late.1.alive(), ready.usage().0), (1, 0, 0));
}

#[test]
fn a_making_that_fails_leaves_the_others_theirs() {
    let (ready, maker) = (ReadyClones::new(1024 * MIB), Maker::default());
    assert!(request(&ready, "json").is_none());
    maker.fails.set(true);
    fill(&ready, &maker);
    fill(&ready, &maker);
    assert_eq!((*maker.made.borrow()).as_slice(), ["json"]);
    maker.fails.set(false);
    assert!(request(&ready, "json").is_none());
    fill(&ready, &maker);
    assert!(request(&ready, "json").is_some());
}

#[test]
fn a_clone_without_a_copy_is_made_again_but_not_for_ever() {
    let (ready, maker) = (ReadyClones::new(1024 * MIB), Maker::default());
    assert!(request(&ready, "json").is_none());
    maker.without_copy.set(1);
    fill(&ready, &maker);
    assert_eq!(ready.usage().0, 0);
    fill(&ready, &maker);
    assert_eq!((ready.usage().0, maker.made.borrow().len()), (1, 2));
    drop(request(&ready, "json"));
    ready.forget(|_| true);
    assert!(request(&ready, "json").is_none());
    maker.without_copy.set(u32::MAX);
    (0..3).for_each(|_| fill(&ready, &maker));
    assert_eq!((ready.usage().0, maker.alive()), (1, 1));
}
