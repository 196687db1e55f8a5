use std::fs::File;
use std::os::unix::fs::FileExt;

use firn_pool::{Access, CreateOptions, MappedMedium, Medium, MemfdOptions, Pool};
use std::sync::Arc;

use super::{PoolTarget, tail_of};
use crate::tests::support::{Memory, description};
use crate::{ExtentContents, ExtentPlace, FreezeError, Snapshot, write_extent};

fn pool(size: u64) -> (Arc<MappedMedium>, Pool) {
    let options = MemfdOptions { size, huge: false, node: None };
    let medium = Arc::new(MappedMedium::memfd(options).unwrap());
    let pool = Pool::create(medium.clone(), &CreateOptions::default()).unwrap();
    (medium, pool)
}

fn freeze(pool: &Pool, name: &str, memory: &mut Memory, state: u8) -> Result<(), FreezeError> {
    let contents = ExtentContents {
        memory,
        description: description(),
        machine_state_version: 1,
        machine_state: &[state; 64],
    };
    write_extent(contents, None, &mut PoolTarget::new(pool, name)).map(drop)
}

fn open(medium: &MappedMedium, pool: &Pool, name: &str) -> Snapshot {
    let pin = pool.pin(name).unwrap();
    let file = File::from(medium.descriptor(Access::Read).unwrap());
    let tail = tail_of(pin.map().unwrap());
    let offset = pin.extent().offset;
    let place = ExtentPlace { offset, leaf: 4096, private: true, replica: false };
    Snapshot::open_extent(name, file, place, &tail).unwrap()
}

fn image(snapshot: &Snapshot) -> Vec<u8> {
    let layout = &snapshot.manifest().layout;
    let mut image = vec![0; usize::try_from(layout.total_bytes()).unwrap()];
    let offset = snapshot.extent().unwrap().offset;
    FileExt::read_exact_at(snapshot.image(), &mut image, offset).unwrap();
    image
}

#[test]
fn snapshots_of_a_pool_are_replaced_whole_and_hold_their_bytes() {
    let (medium, pool) = pool(64 << 20);
    let mut first = Memory::zeroed(1500);
    first.bytes.fill(1);
    freeze(&pool, "hello", &mut first, 1).unwrap();
    let old = open(&medium, &pool, "hello");
    let old_pin = pool.pin("hello").unwrap();
    // The next one is all zero but for a page; whatever space it gets was full of others.
    let mut second = Memory::zeroed(1500);
    second.fill(7, 2);
    freeze(&pool, "hello", &mut second, 2).unwrap();

    let new = open(&medium, &pool, "hello");
    assert_eq!(new.machine_state(), (1, &[2; 64][..]));
    assert!(image(&new) == second.bytes);
    new.digests().check(0, &image(&new)).unwrap();
    assert_eq!(new.zero_map().count(), 1499);
    // Who has the old one pinned still reads it.
    assert_eq!(old.machine_state(), (1, &[1; 64][..]));
    assert!(image(&old) == first.bytes);
    drop(old_pin);
}

#[test]
fn a_pool_without_room_says_what_is_missing_and_keeps_what_it_has() {
    let (medium, pool) = pool(32 << 20);
    let mut small = Memory::zeroed(512);
    small.fill(3, 9);
    freeze(&pool, "hello", &mut small, 1).unwrap();
    let error = freeze(&pool, "hello", &mut Memory::zeroed(16384), 2).unwrap_err();
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert!(cause.contains("the pool lacks"), "{cause}");
    assert!(image(&open(&medium, &pool, "hello")) == small.bytes);
}
