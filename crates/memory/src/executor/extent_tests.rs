//! Plans over the extent of a pool, on the media that this host has.

use firn_snapshot::{MemoryLayout, PAGE_SIZE, PageSet};
use rustix::fs::MemfdFlags;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::HostFacts;
use crate::planners::{ExtentFacts, ImageFacts, PlanInput, parse};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 8 * MIB;
/// Where the extent begins in its medium.
const OFFSET: u64 = 4 * MIB;

fn byte(page: u64) -> u8 {
    u8::try_from(page % 251).unwrap() + 1
}

/// A medium of memory with an extent whose pages are told apart by their bytes, and dirt around it.
fn medium(flags: MemfdFlags) -> Option<File> {
    let medium = File::from(rustix::fs::memfd_create("medium", flags).ok()?);
    medium.set_len(OFFSET + SIZE + 2 * MIB).unwrap();
    // A file of huge pages can only be mapped.
    let layout = MemoryLayout::for_size(OFFSET + SIZE + 2 * MIB).unwrap();
    let reservation = Reservation::new(&layout, Leaf::Size2M).unwrap();
    let host = reservation.host_addr(0).unwrap();
    reservation.mapping.map_shared(host, layout.total_bytes(), &medium, 0).unwrap();
    // Without a reserve of huge pages, touching one would kill this process; populating says so.
    reservation.mapping.populate_read(host, layout.total_bytes()).ok()?;
    let memory = reservation.finish(layout, Backing::Extent, Default::default()).unwrap();
    let view = memory.vm_memory();
    for page in 0..(OFFSET + SIZE + 2 * MIB) / PAGE_SIZE {
        let at = page * PAGE_SIZE;
        let byte = at.checked_sub(OFFSET).map_or(0xee, |at| byte(at / PAGE_SIZE));
        view.write_slice(&[byte; 4096], GuestAddress(at)).unwrap();
    }
    Some(medium)
}

fn restore(planner: &str, medium: &File, leaf: Leaf) -> Executed {
    let layout = MemoryLayout::for_size(SIZE).unwrap();
    let facts = ExtentFacts { offset: OFFSET, leaf, private: true, replica: true, checked: true };
    let input = PlanInput {
        layout: &layout,
        image: ImageFacts::in_pool(SIZE, facts),
        zero_map: &PageSet::new(layout.pages()),
        profile: None,
        host: &HostFacts::read().unwrap(),
    };
    let plan = parse(planner).unwrap().plan(&input).unwrap();
    execute(&plan, &Sources { image: medium }).unwrap()
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
        assert_eq!(one.usage().unwrap().pool, SIZE);
        one.vm_memory().write_obj(7_u8, GuestAddress(5 * PAGE_SIZE)).unwrap();
        assert_eq!((first_byte(&one, 5), first_byte(&other, 5)), (7, byte(5)));
        assert_eq!(one.usage().unwrap().private, leaf.bytes());
        assert_eq!(other.usage().unwrap().private, 0);
        drop((one, other));
        check_extent(&medium, leaf, byte);
    }
}

#[test]
fn a_replica_is_written_in_place_and_costs_no_dram() {
    for (medium, leaf) in media() {
        let memory = restore("pass", &medium, leaf).memory;
        memory.vm_memory().write_obj(7_u8, GuestAddress(5 * PAGE_SIZE)).unwrap();
        let usage = memory.usage().unwrap();
        assert_eq!((usage.private, usage.shared, usage.pool), (0, 0, SIZE));
        drop(memory);
        check_extent(&medium, leaf, |page| if page == 5 { 7 } else { byte(page) });
    }
}

#[test]
fn the_index_is_complete_before_the_resume() {
    for (medium, leaf) in media() {
        for planner in ["pass", "pass_shared"] {
            let executed = restore(planner, &medium, leaf);
            let indexed: u64 = executed.report.steps.iter().map(|step| step.indexed_bytes).sum();
            assert_eq!((indexed, executed.memory.usage().unwrap().resident), (SIZE, SIZE));
            assert_eq!(executed.memory.indexed(), [GuestRange { start: 0, len: SIZE }]);
        }
    }
}

#[test]
fn memory_in_a_pool_is_frozen_as_it_is() {
    use firn_snapshot::{Chunk, PageSource};
    for (medium, leaf) in media() {
        let memory = restore("pass_shared", &medium, leaf).memory;
        memory.vm_memory().write_obj(7_u8, GuestAddress(5 * PAGE_SIZE)).unwrap();
        let mut pages = memory.pages().unwrap();
        let mut buf = vec![0; 2 << 20];
        for chunk in 0..SIZE / (2 * MIB) {
            let Chunk::Bytes(bytes) = pages.chunk(chunk * 2 * MIB, &mut buf).unwrap() else {
                panic!("chunk {chunk} is said to be zero");
            };
            for (page, bytes) in (chunk * 512..).zip(bytes.chunks(4096)) {
                assert_eq!(bytes[0], if page == 5 { 7 } else { byte(page) });
                assert_eq!(bytes[1], byte(page));
            }
        }
    }
}

#[test]
fn what_a_guest_gives_back_of_a_sealed_extent_is_zero_and_of_a_replica_stays_the_pools() {
    for (medium, leaf) in media() {
        let (page, len) = (2 * MIB / PAGE_SIZE, 2 * MIB);
        let shared = restore("pass_shared", &medium, leaf).memory;
        shared.vm_memory().write_obj(7_u8, GuestAddress(len)).unwrap();
        shared.discard(len, len).unwrap();
        assert_eq!(first_byte(&shared, page), 0);
        let own = restore("pass", &medium, leaf).memory;
        own.discard(len, len).unwrap();
        own.vm_memory().write_obj(8_u8, GuestAddress(len)).unwrap();
        let usage = own.usage().unwrap();
        assert_eq!((usage.private, usage.pool), (0, SIZE));
        drop((shared, own));
        check_extent(&medium, leaf, |at| if at == page { 8 } else { byte(at) });
    }
}
