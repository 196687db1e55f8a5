//! Plans over the extent of a pool, on the media that this host has.

use std::fs::File;
use std::os::fd::AsRawFd;

use firn_base::{PAGE_SIZE, PageRange};
use firn_snapshot::{CHUNK_PAGES, Copies, CopyTable, MemoryLayout, PageSet};
use rustix::fs::MemfdFlags;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::HostFacts;
use crate::Leaf;
use crate::planners::{ExtentFacts, ImageFacts, PlanInput, PlannerError, firn_plan, parse};
use crate::testing::{assert_counted, frozen_chunk};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 8 * MIB;
/// The offset of the extent in its medium.
const OFFSET: u64 = 4 * MIB;

fn byte(page: u64) -> u8 {
    u8::try_from(page % 251).unwrap() + 1
}

/// A medium in memory, with an extent whose pages have different bytes, and other data around it.
fn medium(flags: MemfdFlags) -> Option<File> {
    let medium = File::from(rustix::fs::memfd_create("medium", flags).ok()?);
    medium.set_len(OFFSET + SIZE + 2 * MIB).unwrap();
    // A file of huge pages can only be mapped.
    let layout = MemoryLayout::for_size(OFFSET + SIZE + 2 * MIB).unwrap();
    let reservation = Reservation::new(layout.clone(), Leaf::Size2M).unwrap();
    let host = reservation.host_addr(0).unwrap();
    reservation.mapping.map_shared(host, layout.total_bytes(), &medium, 0).unwrap();
    // Without reserved huge pages an access would kill this process; populating returns an error.
    reservation.mapping.populate_read(host, layout.total_bytes()).ok()?;
    let memory = reservation.finish(Backing::Extent, Default::default()).unwrap();
    let view = memory.vm_memory();
    for page in 0..(OFFSET + SIZE + 2 * MIB) / PAGE_SIZE {
        let at = page * PAGE_SIZE;
        let byte = at.checked_sub(OFFSET).map_or(0xee, |at| byte(at / PAGE_SIZE));
        view.write_slice(&[byte; 4096], GuestAddress(at)).unwrap();
    }
    Some(medium)
}

fn restore(planner: &str, medium: &File, leaf: Leaf) -> Executed {
    execute_with(planner, medium, leaf, true).unwrap()
}

/// A read-only descriptor of a medium.
fn for_reading(medium: &File) -> File {
    File::open(format!("/proc/self/fd/{}", medium.as_raw_fd())).unwrap()
}

/// Shares the extent as on devdax, which the kernel cannot map privately.
fn share(medium: &File, leaf: Leaf) -> GuestMemory {
    execute_with("pass_shared", &for_reading(medium), leaf, false).unwrap().memory
}

fn execute_with(
    planner: &str,
    medium: &File,
    leaf: Leaf,
    private: bool,
) -> Result<Executed, ExecuteError> {
    let facts = ExtentFacts { offset: OFFSET, leaf, private, replica: true, checked: true };
    let plan = of_extent(facts, |input| parse(planner).unwrap().plan(input));
    execute(&plan, &Sources::medium(medium))
}

/// The plan of a guest with only the facts about its extent.
fn of_extent(
    facts: ExtentFacts,
    plan: impl FnOnce(&PlanInput<'_>) -> Result<Plan, PlannerError>,
) -> Plan {
    let layout = MemoryLayout::for_size(SIZE).unwrap();
    let input = PlanInput {
        layout: &layout,
        image: ImageFacts::in_pool(SIZE, facts),
        zero_map: &PageSet::new(layout.pages()),
        profile: None,
        snapshot: None,
        copies: None,
        host: &HostFacts::read().unwrap(),
    };
    plan(&input).unwrap()
}

/// As [`share`], with a copy of the first chunk.
fn share_with_copy(medium: &File) -> GuestMemory {
    let leaf = Leaf::Size2M;
    let facts = ExtentFacts { offset: OFFSET, leaf, private: false, replica: false, checked: true };
    let first = PageRange { first: 0, pages: CHUNK_PAGES };
    let file = File::from(rustix::fs::memfd_create("copy", MemfdFlags::empty()).unwrap());
    file.set_len(leaf.bytes()).unwrap();
    let copies = Copies {
        expected: vec![first],
        table: CopyTable::new([first]),
        file: Some(file),
        ..Copies::default()
    };
    let plan = of_extent(facts, |input| firn_plan("firn".into(), input, Some(&copies)));
    let sealed = for_reading(medium);
    let sources = Sources { copy: copies.file.as_ref(), ..Sources::medium(&sealed) };
    execute(&plan, &sources).unwrap().memory
}

fn media() -> Vec<(File, Leaf)> {
    let huge = MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    let kinds = [(MemfdFlags::empty(), Leaf::Size4K), (huge, Leaf::Size2M)];
    kinds.into_iter().filter_map(|(flags, leaf)| Some((medium(flags)?, leaf))).collect()
}

fn first_byte(memory: &GuestMemory, page: u64) -> u8 {
    memory.vm_memory().read_obj(GuestAddress(page * PAGE_SIZE)).unwrap()
}

fn check_extent(medium: &File, leaf: Leaf, expected: impl Fn(u64) -> u8) {
    let sealed = restore("pass_shared", medium, leaf);
    for page in 0..SIZE / PAGE_SIZE {
        assert_eq!(first_byte(&sealed.memory, page), expected(page), "page {page}");
    }
}

#[test]
fn a_sealed_extent_is_shared_and_never_written() {
    for (medium, leaf) in media() {
        let [one, other] = [(); 2].map(|()| restore("pass_shared", &medium, leaf).memory);
        assert_eq!(one.usage().unwrap().private, 0);
        one.vm_memory().write_obj(7_u8, GuestAddress(5 * PAGE_SIZE)).unwrap();
        assert_eq!((first_byte(&one, 5), first_byte(&other, 5)), (7, byte(5)));
        assert_eq!(one.usage().unwrap().private, leaf.bytes());
        assert_eq!(other.usage().unwrap().private, 0);
        drop((one, other));
        check_extent(&medium, leaf, byte);
    }
}

#[test]
fn a_replica_is_written_in_place_and_uses_no_dram() {
    for (medium, leaf) in media() {
        assert_counted(&SIZE, || {
            let memory = restore("pass", &medium, leaf).memory;
            memory.vm_memory().write_obj(7_u8, GuestAddress(5 * PAGE_SIZE)).unwrap();
            let usage = memory.usage().unwrap();
            assert_eq!((usage.private, usage.shared), (0, 0));
            usage.pool
        });
        check_extent(&medium, leaf, |page| if page == 5 { 7 } else { byte(page) });
    }
}

#[test]
fn the_index_is_complete_before_the_resume() {
    for (medium, leaf) in media() {
        for planner in ["pass", "pass_shared"] {
            assert_counted(&(SIZE, SIZE), || {
                let executed = restore(planner, &medium, leaf);
                let steps = executed.report.steps.iter();
                assert_eq!(steps.map(|step| step.indexed_bytes).sum::<u64>(), SIZE);
                assert_eq!(executed.memory.indexed(), [GuestRange { start: 0, len: SIZE }]);
                let usage = executed.memory.usage().unwrap();
                (usage.resident, usage.pool)
            });
        }
    }
}

#[test]
fn freezing_memory_in_a_pool_reads_its_current_content() {
    for (medium, leaf) in media() {
        let memory = restore("pass_shared", &medium, leaf).memory;
        memory.vm_memory().write_obj(7_u8, GuestAddress(5 * PAGE_SIZE)).unwrap();
        let pages = memory.pages();
        for chunk in 0..SIZE / (2 * MIB) {
            let bytes = frozen_chunk(&pages, chunk * 2 * MIB, 2 * MIB);
            for (page, bytes) in (chunk * 512..).zip(bytes.chunks(4096)) {
                assert_eq!(bytes[0], if page == 5 { 7 } else { byte(page) });
                assert_eq!(bytes[1], byte(page));
            }
        }
    }
}

#[test]
fn discarded_memory_is_zero_in_a_sealed_extent_and_unchanged_in_a_replica() {
    for (medium, leaf) in media() {
        let (page, len) = (2 * MIB / PAGE_SIZE, 2 * MIB);
        let shared = restore("pass_shared", &medium, leaf).memory;
        shared.vm_memory().write_obj(7_u8, GuestAddress(len)).unwrap();
        shared.discard(len, len).unwrap();
        assert_eq!(first_byte(&shared, page), 0);
        drop(shared);
        assert_counted(&SIZE, || {
            let own = restore("pass", &medium, leaf).memory;
            own.discard(len, len).unwrap();
            own.vm_memory().write_obj(8_u8, GuestAddress(len)).unwrap();
            let usage = own.usage().unwrap();
            assert_eq!(usage.private, 0);
            usage.pool
        });
        check_extent(&medium, leaf, |at| if at == page { 8 } else { byte(at) });
    }
}

#[test]
fn sealed_memory_is_only_written_through_copies_of_its_chunks() {
    for (medium, leaf) in media() {
        // Neither this mapping nor any other of the descriptor can be made writable.
        let reader = for_reading(&medium);
        let access = rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE;
        let (at, shared) = (std::ptr::null_mut(), rustix::mm::MapFlags::SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let refused = unsafe { rustix::mm::mmap(at, 2 << 20, access, shared, &reader, 0) };
        assert_eq!(refused.unwrap_err(), rustix::io::Errno::ACCESS);
        let writable = execute_with("pass_shared", &medium, leaf, false);
        assert!(matches!(writable, Err(ExecuteError::Writable)));

        let [one, other] = [(); 2].map(|()| share(&medium, leaf));
        let written = [5, 513, 1023];
        for page in written {
            // Two bytes, which are in two chunks for the last page of a chunk.
            one.vm_memory()
                .write_obj(0x0707_u16, GuestAddress((page + 1) * PAGE_SIZE - 1))
                .unwrap();
        }
        assert_eq!(
            (first_byte(&one, 6), first_byte(&one, 7), first_byte(&other, 6)),
            (7, byte(7), byte(6))
        );
        assert_eq!(first_byte(&one, 1024), 7);
        let copies = one.vm_memory().chunk_copies();
        assert_eq!((copies.chunks, copies.bytes), (3, 6 * MIB));
        for page in 3 * CHUNK_PAGES..4 * CHUNK_PAGES {
            assert_eq!(first_byte(&one, page), byte(page));
        }
        let usage = one.usage().unwrap();
        assert_eq!((usage.private, usage.pool), (6 * MIB, 2 * MIB));
        assert_eq!(other.vm_memory().chunk_copies(), Default::default());
        assert_eq!(other.usage().unwrap().private, 0);

        let everything = GuestRange { start: 0, len: u64::MAX };
        assert_eq!(one.vm_memory().make_writable(everything).unwrap(), 1);
        assert_eq!(one.vm_memory().make_writable(everything).unwrap(), 0);
        for page in (0..SIZE / PAGE_SIZE).filter(|page| ![6, 514, 1024].contains(page)) {
            assert_eq!(first_byte(&one, page), byte(page), "page {page}");
        }
        drop((one, other));
        check_extent(&medium, leaf, byte);
    }
}

/// A copy also replaces chunks of devdax.
#[test]
fn memory_beside_a_copy_is_sealed() {
    let medium = medium(MemfdFlags::empty()).unwrap();
    let memory = share_with_copy(&medium);
    let view = memory.vm_memory();
    assert!(view.is_sealed());
    view.write_obj(7_u8, GuestAddress(0)).unwrap();
    assert_eq!(view.chunk_copies().chunks, 0, "a write to the copy copies no chunk");
    view.write_obj(7_u8, GuestAddress(SIZE - 1)).unwrap();
    assert_eq!(view.chunk_copies().chunks, 1);
    drop(memory);
    check_extent(&medium, Leaf::Size4K, byte);
}

#[test]
fn readers_see_the_same_bytes_while_a_chunk_is_replaced() {
    let medium = medium(MemfdFlags::empty()).unwrap();
    for _ in 0..50 {
        let memory = share(&medium, Leaf::Size4K);
        let view = memory.vm_memory();
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                for page in (0..SIZE / PAGE_SIZE).rev().cycle().take(20_000) {
                    let seen: u8 = view.read_obj(GuestAddress(page * PAGE_SIZE + 9)).unwrap();
                    assert_eq!(seen, byte(page));
                }
            });
            for chunk in 0..SIZE / (2 * MIB) {
                view.make_writable(GuestRange { start: chunk * 2 * MIB, len: 1 }).unwrap();
            }
            reader.join().unwrap();
        });
    }
}

#[test]
fn discarded_sealed_memory_is_zero_for_whole_chunks() {
    for (medium, leaf) in media() {
        let memory = share(&medium, leaf);
        // A part of a chunk; one chunk and a part; a whole copied chunk.
        memory.discard(0, PAGE_SIZE).unwrap();
        memory.discard(2 * MIB, 3 * MIB).unwrap();
        memory.vm_memory().write_obj(7_u8, GuestAddress(6 * MIB)).unwrap();
        memory.discard(6 * MIB, 2 * MIB).unwrap();
        let page = |at| first_byte(&memory, at / PAGE_SIZE);
        assert_eq!((page(0), page(4 * MIB)), (byte(0), byte(4 * MIB / PAGE_SIZE)));
        assert_eq!((page(2 * MIB), page(6 * MIB)), (0, 0));
        memory.vm_memory().write_obj(8_u8, GuestAddress(2 * MIB)).unwrap();
        assert_eq!(memory.vm_memory().chunk_copies().chunks, 1);
        drop(memory);
        check_extent(&medium, leaf, byte);
    }
}

#[test]
fn freezing_sealed_memory_reads_the_guests_copies() {
    for (medium, leaf) in media() {
        let memory = share(&medium, leaf);
        memory.vm_memory().write_obj(7_u8, GuestAddress(5 * PAGE_SIZE)).unwrap();
        let pages = memory.pages();
        for chunk in 0..SIZE / (2 * MIB) {
            let bytes = frozen_chunk(&pages, chunk * 2 * MIB, 2 * MIB);
            for (page, bytes) in (chunk * 512..).zip(bytes.chunks(4096)) {
                assert_eq!(bytes[0], if page == 5 { 7 } else { byte(page) });
            }
        }
    }
}
