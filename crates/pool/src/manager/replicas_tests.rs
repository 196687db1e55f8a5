use std::cell::{Cell, RefCell};
use std::sync::Arc;

use super::{LOOKS, Replicas};
use crate::manager::pace::Pace;
use crate::manager::tests::{World, freeze};
use crate::{Access, Pool, Replica};

/// A pool that has room for a snapshot and one replica.
fn world() -> (World, Pool) {
    let world = World::new(3);
    freeze(&mut world.client(), "hello", b"snow");
    let pool = world.server.pool().clone();
    (world, pool)
}

/// Gives a replica back that a process can write to until its `look`th look, counted from 1.
fn take_while_held(pool: &Pool, look: u32) -> (bool, u32) {
    let replicas = Replicas::new(pool.clone(), Arc::new(Pace::new())).unwrap();
    let used = pool.replica("hello").unwrap();
    let descriptor = pool.shared_medium().grant(Access::Write, used.extent().offset).unwrap();
    replicas.take_back([used]);
    let (held, looks) = (RefCell::new(Some(descriptor)), Cell::new(0));
    let replica: Result<Replica, _> = replicas.with_room(|| {
        looks.set(looks.get() + 1);
        let answer = pool.replica("hello");
        if looks.get() == look {
            held.take();
        }
        answer
    });
    (replica.is_ok(), looks.get())
}

#[test]
fn a_request_waits_for_space_that_a_process_is_about_to_let_go() {
    let (_world, pool) = world();
    assert_eq!(take_while_held(&pool, 1), (true, 2));
    assert_eq!(take_while_held(&pool, 3), (true, 4));
}

#[test]
fn a_request_fails_where_a_process_keeps_its_space() {
    let (_world, pool) = world();
    assert_eq!(take_while_held(&pool, u32::MAX), (false, LOOKS + 1));
}

#[test]
fn a_request_waits_for_a_replica_whose_microvm_has_ended_unseen() {
    let (_world, pool) = world();
    let replicas = Replicas::new(pool.clone(), Arc::new(Pace::new())).unwrap();
    let (used, looks) = (RefCell::new(Some(pool.replica("hello").unwrap())), Cell::new(0));
    let replica = replicas.with_room(|| {
        looks.set(looks.get() + 1);
        let answer = pool.replica("hello");
        if looks.get() == LOOKS {
            replicas.take_back(used.take());
        }
        answer
    });
    assert!(replica.is_ok());
    assert_eq!(looks.get(), LOOKS + 1);
}
