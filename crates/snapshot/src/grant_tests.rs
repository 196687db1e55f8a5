use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use firn_pool::Window;

use super::{Grant, OpenPooledError, Verify, open_pooled, open_replica};
use crate::extent::{ExtentPlan, ExtentTarget};
use crate::in_pool::GrantedExtent;
use crate::tests::support::{
    Managed, Memory, description, file_with, freeze_to, machine, pass_extent,
};
use crate::transfer::Part;
use crate::{
    CheckExtentError, Contents, Destination, FreezeError, ImageKind, NotFrozen, ReadAt, Snapshot,
    check_extent,
};

impl Managed {
    fn freeze(&self, name: &str, memory: &mut Memory, state: u8) -> Result<(), FreezeError> {
        let machine = machine(description(), &[state; 64]);
        self.freeze_contents(name, &mut Contents::new(memory, machine))
    }

    fn freeze_contents(&self, name: &str, contents: &mut Contents<'_>) -> Result<(), FreezeError> {
        let destination = Destination::Pool { socket: self.socket(), name: name.to_owned() };
        match freeze_to(contents, destination, ImageKind::Dense) {
            Err(NotFrozen::Supervisor(error) | NotFrozen::Machine(error)) => Err(error),
            Ok(_) => Ok(()),
        }
    }

    fn open(&self, name: &str) -> Result<(Snapshot, Grant), OpenPooledError> {
        open_pooled(&self.socket(), name, Verify::Once)
    }
}

/// The sealed image, and the bytes of the grant's extent.
fn images((snapshot, grant): &(Snapshot, Grant), medium: &File) -> [Vec<u8>; 2] {
    let layout = &snapshot.manifest().layout;
    let mut image = vec![0; usize::try_from(layout.total_bytes()).unwrap()];
    let mut granted = image.clone();
    ReadAt::read_exact_at(snapshot.image(), &mut image, 0).unwrap();
    FileExt::read_exact_at(medium, &mut granted, grant.extent().offset).unwrap();
    [image, granted]
}

/// The image of a sealed extent.
fn image(opened: &(Snapshot, Grant)) -> Vec<u8> {
    let [image, granted] = images(opened, &opened.1.take_medium().unwrap());
    assert!(image == granted);
    image
}

#[test]
fn pooled_snapshots_are_replaced_in_one_step_and_keep_their_bytes() {
    let pool = Managed::new(64 << 20);
    let mut first = Memory::zeroed(1500);
    first.bytes.fill(1);
    pool.freeze("hello", &mut first, 1).unwrap();
    let old = pool.open("hello").unwrap();
    // The next snapshot is zero except for one page; its extent may contain old bytes.
    let mut second = Memory::zeroed(1500);
    second.fill(7, 2);
    pool.freeze("hello", &mut second, 2).unwrap();

    let opened = pool.open("hello").unwrap();
    let new = &opened.0;
    assert_eq!(new.machine_state(), (3, &[2; 64][..]));
    let bytes = image(&opened);
    assert!(bytes == second.bytes);
    new.digests().check(0, &bytes).unwrap();
    assert_eq!(new.zero_map().count(), 1499);
    // A reader of the old snapshot still reads the old bytes.
    assert_eq!(old.0.machine_state(), (3, &[1; 64][..]));
    assert!(image(&old) == first.bytes);
}

#[test]
fn a_replica_equals_its_snapshot_and_may_be_written() {
    let pool = Managed::new(64 << 20);
    let mut memory = Memory::zeroed(700);
    memory.fill(7, 2);
    pool.freeze("hello", &mut memory, 1).unwrap();
    assert!(!pool.open("hello").unwrap().1.extent().replica);
    for _ in 0..3 {
        let replica = open_replica(&pool.socket(), "hello", Verify::Once).unwrap();
        assert!(replica.1.replica().is_some());
        let medium = replica.1.take_medium().unwrap();
        assert!(replica.1.take_medium().is_none());
        assert!(images(&replica, &medium) == [memory.bytes.clone(), memory.bytes.clone()]);
        let place = replica.1.extent();
        assert!(place.replica);
        medium.write_all_at(&[9; 8192], place.offset).unwrap();
        assert!(images(&replica, &medium)[0] == memory.bytes);
    }
    assert!(image(&pool.open("hello").unwrap()) == memory.bytes);
}

#[test]
fn a_full_pool_reports_the_missing_space_and_keeps_its_snapshots() {
    let pool = Managed::new(32 << 20);
    let mut small = Memory::zeroed(512);
    small.fill(3, 9);
    pool.freeze("hello", &mut small, 1).unwrap();
    let error = pool.freeze("hello", &mut Memory::zeroed(16384), 2).unwrap_err();
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert!(cause.contains("the pool lacks"), "{cause}");
    assert!(image(&pool.open("hello").unwrap()) == small.bytes);
}

#[test]
fn unknown_names_and_sockets_without_a_manager_are_reported() {
    let pool = Managed::new(32 << 20);
    let error = pool.open("unknown").unwrap_err().to_string();
    assert!(error.contains("unknown"), "{error}");
    let nowhere = pool.dir.path().join("nowhere");
    let error = open_pooled(&nowhere, "hello", Verify::Once).unwrap_err().to_string();
    assert!(error.contains("firn pool serve"), "{error}");
}

/// Stores only the first page of guest memory.
struct FirstPage(GrantedExtent);

impl ExtentTarget for FirstPage {
    fn write(&self, part: Part, offset: u64, bytes: &[u8]) -> io::Result<()> {
        match (part, offset) {
            (Part::Tail, _) => self.0.write(part, offset, bytes),
            (Part::Guest, 0) => self.0.write(part, 0, &bytes[..4096]),
            (Part::Guest, _) => Ok(()),
        }
    }

    fn write_from(
        &self,
        part: Part,
        offset: u64,
        window: &Window,
        start: u64,
        len: u64,
    ) -> io::Result<()> {
        assert_eq!(part, Part::Tail, "guest memory is zero");
        self.0.write_from(part, offset, window, start, len)
    }

    fn is_zeroed(&self, _: Part, _: u64, _: u64) -> bool {
        false
    }

    fn flush(&self) -> io::Result<()> {
        self.0.flush()
    }
}

#[test]
fn a_tail_that_declares_more_memory_than_its_extent_has_is_refused() {
    let pool = Managed::new(32 << 20);
    let (memory, machine) = (Memory::zeroed(700), machine(description(), &[1; 64]));
    let plan = ExtentPlan::new(&machine, &memory.layout, None).unwrap();
    let mut client = firn_pool::Client::connect(&pool.socket()).unwrap();
    let grant = client.begin("hello", 4096, plan.tail_bytes()).unwrap();
    let generation = grant.extent().generation;
    let target = FirstPage(GrantedExtent::map(grant).unwrap());
    pass_extent(plan, &machine, &memory, None, &target);
    client.commit(generation).unwrap();
    for verify in [Verify::Once, Verify::Always, Verify::Never] {
        for open in [open_pooled, open_replica] {
            let error = open(&pool.socket(), "hello", verify).unwrap_err().to_string();
            assert!(error.contains("not as large as that of its extent"), "{error}");
        }
    }
}

/// Changes a byte of the sealed snapshot, like a failing medium.
fn damage(pool: &Managed, page: u64) {
    let mut client = firn_pool::Client::connect(&pool.socket()).unwrap();
    let offset = client.snapshot("hello").unwrap().extent().offset;
    // The descriptor of a staging extent covers the whole medium.
    let staging = client.begin("other", 4096, 0).unwrap();
    let medium = File::from(staging.descriptor().try_clone_to_owned().unwrap());
    medium.write_all_at(&[0x5a], offset + page * 4096 + 7).unwrap();
}

#[test]
fn a_damaged_page_is_found_before_a_start() {
    let pool = Managed::new(64 << 20);
    let mut memory = Memory::zeroed(700);
    memory.fill(7, 2);
    pool.freeze("hello", &mut memory, 1).unwrap();
    // A zero page in the second chunk.
    damage(&pool, 600);
    for verify in [Verify::Once, Verify::Always] {
        for open in [open_pooled, open_replica] {
            let error = open(&pool.socket(), "hello", verify).unwrap_err();
            let cause = std::error::Error::source(&error).unwrap().to_string();
            assert!(cause.contains("page 600"), "{error}: {cause}");
        }
    }
    let (_, unchecked) = open_pooled(&pool.socket(), "hello", Verify::Never).unwrap();
    assert!(!unchecked.extent().checked);
    assert!(unchecked.check_time().is_none());
}

#[test]
fn the_check_of_an_extent_finds_a_damaged_disk() {
    let pool = Managed::new(64 << 20);
    let disk = file_with(&[&[0; 8192][..], &[3; 4096]].concat());
    let memory = Memory::zeroed(700);
    let (mut disk, machine) = (&disk, machine(description(), &[1; 64]));
    let mut contents = Contents::new(&memory, machine).with_disk(&mut disk);
    pool.freeze_contents("hello", &mut contents).unwrap();
    let mut client = firn_pool::Client::connect(&pool.socket()).unwrap();
    let sealed = client.snapshot("hello").unwrap();
    let check = || check_extent("hello", sealed.map().unwrap());
    check().unwrap();
    // The disk's bytes are at the end of the tail.
    let extent = sealed.extent();
    let staging = client.begin("other", 4096, 0).unwrap();
    let medium = File::from(staging.descriptor().try_clone_to_owned().unwrap());
    medium.write_all_at(&[4], extent.tail_offset + extent.tail_bytes - 1).unwrap();
    let error = check().unwrap_err();
    assert!(matches!(error, CheckExtentError::Overlay), "{error}");
    // A start does not read the disk.
    pool.open("hello").unwrap();
}

#[test]
fn a_snapshot_is_checked_once_for_each_opening_of_its_medium() {
    let pool = Managed::new(64 << 20);
    pool.freeze("hello", &mut Memory::zeroed(700), 1).unwrap();
    let open = |verify| open_pooled(&pool.socket(), "hello", verify).unwrap().1;
    assert!(!open(Verify::Never).extent().checked);
    assert!(open(Verify::Once).check_time().is_some());
    for verify in [Verify::Once, Verify::Never] {
        let opened = open(verify);
        assert!(opened.check_time().is_none() && opened.extent().checked);
    }
    assert!(open(Verify::Always).check_time().is_some());
    let (_, replica) = open_replica(&pool.socket(), "hello", Verify::Once).unwrap();
    assert!(replica.check_time().is_none() && replica.extent().checked);
    // A new freeze creates another extent.
    pool.freeze("hello", &mut Memory::zeroed(700), 2).unwrap();
    assert!(open(Verify::Once).check_time().is_some());
}

#[test]
fn a_replica_and_its_tail_are_of_the_same_freeze() {
    let pool = Managed::new(64 << 20);
    let freeze = |byte: u8| {
        let mut memory = Memory::zeroed(64);
        memory.bytes.fill(byte);
        pool.freeze("hello", &mut memory, byte).unwrap();
    };
    freeze(1);
    let ended = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for byte in 2..60 {
                freeze(byte);
            }
            ended.store(true, std::sync::atomic::Ordering::SeqCst);
        });
        while !ended.load(std::sync::atomic::Ordering::SeqCst) {
            let opened = open_replica(&pool.socket(), "hello", Verify::Never);
            // Two freezes at once may temporarily leave no space for a replica.
            let Ok(replica) = opened else { continue };
            let state = replica.0.machine_state().1[0];
            let medium = replica.1.take_medium().unwrap();
            assert!(images(&replica, &medium).concat().iter().all(|byte| *byte == state));
        }
    });
}
