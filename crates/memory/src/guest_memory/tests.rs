use std::os::unix::fs::FileExt;

use firn_snapshot::{Chunk, ImageKind, MemoryRegion, PageSource, Snapshot};
use proptest::prelude::{any, prop_assert_eq, proptest};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use vm_memory::Bytes;

use super::*;
use crate::testing::{freeze, frozen_chunk, page_bytes, plans, write_image};
use crate::{Plan, Sources, execute, execute_in};

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;

fn layout(regions: &[(u64, u64)]) -> MemoryLayout {
    let regions = regions.iter().map(|&(guest_addr, len)| MemoryRegion { guest_addr, len });
    MemoryLayout::new(regions.collect()).unwrap()
}

/// Guest memory mapped from the first bytes of a file, as `firecracker` does it.
fn mapped(layout: &MemoryLayout, image: &File) -> GuestMemory {
    execute(&plan_of(layout, image), &Sources::image(image)).unwrap().memory
}

fn plan_of(layout: &MemoryLayout, image: &File) -> Plan {
    let zero_map = PageSet::new(layout.pages());
    let host = crate::HostFacts::read().unwrap();
    let facts = crate::planners::ImageFacts::of(image).unwrap();
    let input = crate::planners::PlanInput {
        layout,
        image: facts,
        zero_map: &zero_map,
        profile: None,
        snapshot: None,
        copies: None,
        host: &host,
    };
    crate::planners::parse("firecracker").unwrap().plan(&input).unwrap()
}

#[test]
fn a_plan_is_executed_at_addresses_that_were_chosen_before() {
    let layout = layout(&[(0, 4 * MIB), (16 * MIB, 2 * MIB)]);
    let mut image = tempfile::tempfile().unwrap();
    image.set_len(layout.total_bytes()).unwrap();
    let plan = plan_of(&layout, &image);
    write_image(&plan, &mut image, 1);
    let chosen = Reservation::in_advance(layout.clone(), Leaf::Size2M).unwrap();
    let slots = chosen.slots().to_vec();
    let sources = Sources::image(&image);
    let memory = execute_in(&plan, &sources, Some(chosen)).unwrap().memory;
    assert_eq!(memory.slots(), slots);
    assert_eq!(frozen(&memory), frozen(&mapped(&layout, &image)));

    // For another layout they are not used.
    let small = self::layout(&[(0, 4 * MIB)]);
    let chosen = Reservation::in_advance(small, Leaf::Size2M).unwrap();
    let slots = chosen.slots().to_vec();
    let memory = execute_in(&plan, &sources, Some(chosen)).unwrap().memory;
    assert_ne!(memory.slots()[..1], slots);
    assert_eq!(frozen(&memory), frozen(&mapped(&layout, &image)));
}

#[test]
fn a_mapping_of_others_at_a_chosen_address_is_an_error_and_stays() {
    let layout = layout(&[(0, 4 * MIB)]);
    let image = tempfile::tempfile().unwrap();
    image.set_len(layout.total_bytes()).unwrap();
    let chosen = Reservation::in_advance(layout.clone(), Leaf::Size2M).unwrap();
    let address = chosen.slots()[0].host_addr + MIB;
    let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let at = std::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap());
    // SAFETY: the new mapping replaces no other.
    let other = unsafe { mmap_anonymous(at, 4096, access, flags) }.unwrap().cast::<u8>();
    // SAFETY: it is one page of memory of this test.
    unsafe { other.write(7) };
    let refused = execute_in(&plan_of(&layout, &image), &Sources::image(&image), Some(chosen));
    assert!(matches!(refused, Err(crate::ExecuteError::Layer { .. })), "{refused:?}");
    // SAFETY: it is still mapped, or this process ends.
    assert_eq!(unsafe { other.read() }, 7);
    // SAFETY: it is the page that was mapped above.
    unsafe { munmap(other.cast(), 4096) }.unwrap();
}

fn private_and_shared(memory: &GuestMemory) -> (u64, u64) {
    let MemoryUsage { resident, private, shared, .. } = memory.usage().unwrap();
    assert_eq!(resident, private + shared);
    (private, shared)
}

/// All guest memory as a freeze reads it.
fn frozen(memory: &GuestMemory) -> Vec<u8> {
    let pages = memory.pages();
    let total = pages.layout().total_bytes();
    let mut bytes = Vec::new();
    for offset in (0..total).step_by(2 << 20) {
        bytes.extend(frozen_chunk(&pages, offset, (total - offset).min(2 * MIB)));
    }
    bytes
}

#[test]
fn memory_for_a_cold_boot_is_zero_and_uses_dram_only_for_touched_pages() {
    // Below 2 MiB, so that no huge page is used.
    let memory = GuestMemory::anonymous(layout(&[(0, MIB), (4096 * MIB, MIB)])).unwrap();
    assert_eq!(memory.usage().unwrap().resident, 0);
    let view = memory.vm_memory();
    assert_eq!(view.read_obj::<u64>(GuestAddress(4096 * MIB + 8)).unwrap(), 0);
    view.write_obj(7u64, GuestAddress(0)).unwrap();
    view.write_obj(8u64, GuestAddress(4097 * MIB - 8)).unwrap();
    let usage = memory.usage().unwrap();
    assert_eq!((usage.private, usage.shared), (2 * PAGE, 0));
    assert!(usage.page_tables > 0);
    assert!(view.write_obj(1u64, GuestAddress(MIB)).is_err(), "between the regions");
}

#[test]
fn slots_are_the_regions_at_congruent_addresses() {
    let layout = layout(&[(PAGE, 3 * PAGE), (5 * MIB, 7 * MIB), (12 * MIB, PAGE)]);
    let memory = GuestMemory::anonymous(layout.clone()).unwrap();
    let slots: Vec<_> = memory.slots().iter().map(|s| (s.guest_addr, s.len)).collect();
    let regions: Vec<_> = layout.regions().map(|r| (r.guest_addr, r.len)).collect();
    assert_eq!(slots, regions);
    assert!(memory.slots().iter().all(|s| s.host_addr % (2 * MIB) == s.guest_addr % (2 * MIB)));
}

#[test]
fn too_much_memory_is_refused() {
    // Layouts of valid size, but together more than 47 bits of addresses.
    let most = MemoryLayout::for_size(firn_snapshot::MAX_MEMORY).unwrap();
    let guests: Vec<_> = (0..40).map(|_| GuestMemory::anonymous(most.clone())).collect();
    let refused = guests.into_iter().find_map(Result::err).unwrap();
    assert!(matches!(refused, AnonymousError::Reserve { .. }), "{refused}");
}

#[test]
fn a_view_outlives_its_memory() {
    let memory = GuestMemory::anonymous(layout(&[(0, MIB)])).unwrap();
    let view = memory.vm_memory();
    view.write_obj(42u32, GuestAddress(4)).unwrap();
    drop(memory);
    assert_eq!(view.read_obj::<u32>(GuestAddress(4)).unwrap(), 42);
}

#[test]
fn memory_is_unmapped_when_it_is_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("memory.img");
    let image = File::create_new(&path).unwrap();
    image.set_len(MIB).unwrap();
    let image = File::open(&path).unwrap();
    let mapped_now = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().any(|line| line.ends_with(path.to_str().unwrap()))
    };
    let memory = mapped(&layout(&[(0, MIB)]), &image);
    let view = memory.vm_memory();
    assert!(mapped_now());
    drop(view);
    drop(memory);
    assert!(!mapped_now());
}

#[test]
fn discarded_memory_is_zero_and_free() {
    let image = tempfile::tempfile().unwrap();
    image.write_all_at(&vec![1; 1 << 20], 0).unwrap();
    let memory = mapped(&layout(&[(0, MIB)]), &image);
    let view = memory.vm_memory();
    view.write_slice(&vec![2; 1 << 19], GuestAddress(0)).unwrap();
    assert_eq!(memory.usage().unwrap().private, MIB / 2);

    memory.discard(0, MIB / 2).unwrap();
    assert_eq!(memory.usage().unwrap().private, 0);
    // Adjacent, overlapping, and repeated: still one range.
    memory.discard(MIB / 2, PAGE).unwrap();
    memory.discard(PAGE, MIB / 2).unwrap();
    assert_eq!(memory.anonymous.lock().len(), 1);
    let mut bytes = vec![9; 1 << 20];
    view.read_slice(&mut bytes, GuestAddress(0)).unwrap();
    let zeros = (1 << 19) + 4096;
    assert!(bytes[..zeros].iter().all(|&b| b == 0), "never the image's bytes again");
    assert!(bytes[zeros..].iter().all(|&b| b == 1));
}

#[test]
fn hostile_discards_are_refused() {
    let memory = GuestMemory::anonymous(layout(&[(0, MIB), (MIB, MIB), (4 * MIB, MIB)])).unwrap();
    memory.vm_memory().write_obj(5u8, GuestAddress(0)).unwrap();
    for (guest_addr, len) in [(0, 0), (1, PAGE), (0, PAGE - 1), (PAGE / 2, PAGE / 2)] {
        let refused = memory.discard(guest_addr, len).unwrap_err();
        assert!(matches!(refused, DiscardError::Misaligned { .. }), "{refused}");
    }
    for (guest_addr, len) in [
        (2 * MIB, PAGE),
        (4 * MIB - PAGE, 2 * PAGE),
        (5 * MIB - PAGE, 2 * PAGE),
        (0, 2 * MIB),
        (0, u64::MAX - PAGE + 1),
        (u64::MAX - PAGE + 1, PAGE),
        (u64::MAX - PAGE + 1, u64::MAX - PAGE + 1),
    ] {
        let refused = memory.discard(guest_addr, len).unwrap_err();
        assert!(matches!(refused, DiscardError::OutsideMemory { .. }), "{refused}");
    }
    assert_eq!(memory.vm_memory().read_obj::<u8>(GuestAddress(0)).unwrap(), 5);
}

#[test]
fn a_guest_cannot_exhaust_the_mappings_of_its_monitor() {
    let image = tempfile::tempfile().unwrap();
    let size = 80 * MIB;
    image.set_len(size).unwrap();
    let memory = mapped(&layout(&[(0, size)]), &image);
    let mut ranges = 0;
    let refused = loop {
        match memory.discard(2 * ranges * PAGE, PAGE) {
            Ok(()) => ranges += 1,
            Err(refused) => break refused,
        }
    };
    assert_eq!(usize::try_from(ranges).unwrap(), discard::MAX_NEW_RANGES);
    assert!(matches!(refused, DiscardError::TooManyRanges { .. }), "{refused}");
    memory.discard(0, PAGE).unwrap();
}

#[test]
fn a_freeze_touches_no_page_that_the_guest_did_not_touch() {
    let image = tempfile::tempfile().unwrap();
    let layout = layout(&[(0, 3 * MIB), (8 * MIB, 5 * MIB)]);
    image.set_len(layout.total_bytes()).unwrap();
    image.write_all_at(&page_bytes(1, 3), PAGE).unwrap();
    image.write_all_at(&page_bytes(2, 3), 5 * MIB).unwrap();
    let mut expected = vec![0; 8 << 20];
    image.read_exact_at(&mut expected, 0).unwrap();
    let memory = mapped(&layout, &image);
    assert_eq!(frozen(&memory), expected);
    assert_eq!(memory.usage().unwrap().resident, 0);

    // The guest reads a page, writes one, and discards one that the image stores.
    let view = memory.vm_memory();
    assert_eq!(view.read_obj::<u64>(GuestAddress(PAGE)).unwrap(), 1);
    view.write_obj(77u8, GuestAddress(12 * MIB)).unwrap();
    expected[7 << 20] = 77;
    memory.discard(10 * MIB, PAGE).unwrap();
    expected[5 << 20..(5 << 20) + 4096].fill(0);
    let before = private_and_shared(&memory);
    assert_eq!(frozen(&memory), expected);
    assert_eq!(private_and_shared(&memory), before);
}

#[test]
fn pages_that_were_reported_free_and_not_touched_since_are_listed() {
    let memory = GuestMemory::anonymous(layout(&[(0, MIB), (4 * MIB, MIB)])).unwrap();
    assert!(memory.reported_free().unwrap().is_empty(), "nothing was reported");
    memory.vm_memory().write_obj(1u8, GuestAddress(0)).unwrap();
    memory.discard(0, 8 * PAGE).unwrap();
    memory.discard(4 * MIB + 2 * PAGE, 2 * PAGE).unwrap();
    memory.vm_memory().write_obj(0u8, GuestAddress(3 * PAGE)).unwrap();
    let run = |first, pages| firn_base::PageRange { first, pages };
    assert_eq!(memory.reported_free().unwrap(), [run(0, 3), run(4, 4), run(258, 2)]);
}

/// A guest whose every other page is reported free. The monitor keeps a bitmap of them.
#[test]
fn the_number_of_reported_ranges_is_limited() {
    let size = 80 * MIB;
    let memory = GuestMemory::anonymous(layout(&[(0, size)])).unwrap();
    for page in (0..size / PAGE).step_by(2) {
        memory.discard(page * PAGE, PAGE).unwrap();
    }
    assert_eq!(memory.reported.lock().count(), size / PAGE / 2);
    // Longer ranges are listed before single pages.
    memory.discard(size - 2 * MIB, 2 * MIB).unwrap();
    let listed = memory.reported_free().unwrap();
    assert_eq!(listed.len(), pages::MAX_REPORTED);
    assert!(listed.is_sorted_by(|a, b| a.range().end <= b.first));
    assert_eq!(listed.last().unwrap().pages, 512);
}

#[test]
fn written_pages_are_not_compared() {
    let dir = tempfile::tempdir().unwrap();
    let booted = GuestMemory::anonymous(layout(&[(0, MIB), (4 * MIB, MIB)])).unwrap();
    booted.vm_memory().write_slice(&page_bytes(9, 9), GuestAddress(9 * PAGE)).unwrap();
    let snapshot = freeze(&booted, &dir.path().join("s"), ImageKind::Dense);
    let mut memory = mapped(&snapshot.manifest().layout, snapshot.image_file().unwrap());
    memory.vm_memory().write_obj(1u8, GuestAddress(0)).unwrap();
    assert_eq!(memory.written(), None);
    memory.track_writes();
    let view = memory.vm_memory();
    view.write_slice(&[7; 5000], GuestAddress(3 * PAGE + 4000)).unwrap();
    view.write_obj(7u8, GuestAddress(5 * MIB - 1)).unwrap();
    let _: u8 = view.read_obj(GuestAddress(7 * PAGE)).unwrap();
    memory.discard(9 * PAGE, PAGE).unwrap();
    let written = memory.written().unwrap();
    assert_eq!(written.iter().collect::<Vec<_>>(), [3, 4, 5, 9, 511]);

    let original = crate::compare::Original::of(&snapshot);
    let compared = original.compare(&memory, &written).unwrap();
    assert_eq!((compared.pages, compared.written), (512, 5));
    // Written before tracking starts.
    assert_eq!((compared.differing, compared.first_differing), (1, vec![0]));
    let none = PageSet::new(512);
    let compared = original.compare(&memory, &none).unwrap();
    assert_eq!((compared.written, compared.differing), (0, 6));
    assert_eq!(compared.zeros, [firn_base::PageRange { first: 9, pages: 1 }]);

    // A snapshot has all of these, the discarded page too.
    memory.forget_writes();
    assert_eq!(memory.written().unwrap().iter().next(), None);
    memory.discard(11 * PAGE, PAGE).unwrap();
    assert_eq!(memory.written().unwrap().iter().collect::<Vec<_>>(), [11]);
}

#[test]
fn a_freeze_refuses_truncated_and_damaged_images() {
    let dir = tempfile::tempdir().unwrap();
    let booted = GuestMemory::anonymous(layout(&[(0, 4 * MIB)])).unwrap();
    for page in [5, 600] {
        let guest_addr = GuestAddress(page * PAGE);
        booted.vm_memory().write_slice(&page_bytes(page, 9), guest_addr).unwrap();
    }
    let planner = crate::planners::parse("firecracker").unwrap();
    for kind in [ImageKind::Sparse, ImageKind::Dense] {
        let snapshot = freeze(&booted, &dir.path().join(format!("{kind:?}")), kind);
        let plan = crate::planners::plan(&snapshot, None, &*planner).unwrap();
        let memory = execute(&plan, &Sources::of(&snapshot, None).unwrap()).unwrap().memory;
        assert_eq!(frozen(&memory), frozen(&booted));
        let refusal = || {
            let mut buf = vec![0; 2 << 20];
            memory.pages().chunk(2 * MIB, &mut buf).unwrap_err().to_string()
        };

        let path = dir.path().join(format!("{kind:?}")).join("memory.img");
        let image = File::options().write(true).open(path).unwrap();
        image.write_all_at(&page_bytes(601, 9), 600 * PAGE).unwrap();
        assert!(refusal().starts_with("page 600 of the image is damaged"), "{}", refusal());
        image.set_len(3 * MIB).unwrap();
        assert!(refusal().starts_with("the image has 3145728 bytes"), "{}", refusal());
    }
}

#[test]
fn untouched_memory_is_not_read_for_a_freeze() {
    let memory = GuestMemory::anonymous(layout(&[(0, 6 * MIB)])).unwrap();
    memory.vm_memory().write_obj(1u8, GuestAddress(3 * MIB)).unwrap();
    let pages = memory.pages();
    let mut buf = vec![0xaa; 2 << 20];
    assert!(matches!(pages.chunk(0, &mut buf).unwrap(), Chunk::Zero));
    assert!(matches!(pages.chunk(4 * MIB, &mut buf).unwrap(), Chunk::Zero));
    // One page has content, and no other is read.
    let Chunk::Pages(_, content) = pages.chunk(2 * MIB, &mut buf).unwrap() else { panic!("zero") };
    assert_eq!((content.len(), &content[0]), (1, &(256..257)));
    assert!(
        buf.iter()
            .enumerate()
            .all(|(at, byte)| (256 << 12..257 << 12).contains(&at) || *byte == 0xaa)
    );
    let bytes = frozen_chunk(&pages, 2 * MIB, 2 * MIB);
    assert_eq!(bytes.iter().map(|&b| u64::from(b)).sum::<u64>(), 1);
    assert_eq!(private_and_shared(&memory), (PAGE, 0));
}

/// Boot, freeze, thaw, run, freeze again, thaw again: with every planner, from sparse and dense
/// images.
#[test]
fn a_snapshot_is_thawed_and_frozen_again() {
    let dir = tempfile::tempdir().unwrap();
    let host = crate::HostFacts::read().unwrap();
    let booted = GuestMemory::anonymous(layout(&[(0, 3 * MIB), (8 * MIB, 2 * MIB)])).unwrap();
    for page in [0, 1, 700, 2048, 2559] {
        let guest_addr = GuestAddress(page * PAGE);
        booted.vm_memory().write_slice(&page_bytes(page, 9), guest_addr).unwrap();
    }
    for kind in [ImageKind::Sparse, ImageKind::Dense] {
        let first = freeze(&booted, &dir.path().join("first"), kind);
        assert_eq!(first.zero_map().pages() - first.zero_map().count(), 5);
        let thaw = |snapshot: &Snapshot, planner: &dyn crate::planners::Planner| {
            let input = crate::planners::PlanInput {
                layout: &snapshot.manifest().layout,
                image: crate::planners::ImageFacts::of_snapshot(snapshot, None).unwrap(),
                zero_map: snapshot.zero_map(),
                profile: None,
                snapshot: None,
                copies: None,
                host: &host,
            };
            let plan = planner.plan(&input).unwrap();
            let sources = Sources::image(snapshot.image_file().unwrap());
            let memory = execute(&plan, &sources).unwrap().memory;
            let same = crate::compare::compare(
                &memory,
                snapshot.image_file().unwrap(),
                snapshot.zero_map(),
            )
            .unwrap();
            assert!(same.is_equal(), "{}: {same:?}", planner.name());
            // Again, without touching a page.
            execute(&plan, &sources).unwrap().memory
        };
        for planner in ["firecracker", "firecracker:readahead=off", "dram_cached"] {
            let planner = crate::planners::parse(planner).unwrap();
            let memory = thaw(&first, &*planner);
            assert_eq!(frozen(&memory), frozen(&booted));
            let page = page_bytes(9, 9);
            memory.vm_memory().write_slice(&page, GuestAddress(9 * MIB)).unwrap();
            memory.discard(0, PAGE).unwrap();
            let second = freeze(&memory, &dir.path().join("second"), kind);
            assert_eq!(second.zero_map().pages() - second.zero_map().count(), 5);
            assert!(second.zero_map().get(0), "a discarded page is zero");
            assert_eq!(frozen(&thaw(&second, &*planner)), frozen(&memory));
        }
    }
}

proptest! {
    /// A freeze reads what the guest would read, for any plan, writes and discards.
    #[test]
    fn a_freeze_reads_what_the_guest_would(
        plan in plans(),
        writes in proptest::collection::vec((any::<u64>(), any::<u8>()), 0..20),
        discards in proptest::collection::vec((any::<u64>(), 1..5u64), 0..6),
    ) {
        let mut image = tempfile::tempfile().unwrap();
        write_image(&plan, &mut image, 5);
        let memory = execute(&plan, &Sources::image(&image)).unwrap().memory;
        let view = memory.vm_memory();
        let pages = plan.layout.pages();
        for (page, byte) in writes {
            let guest_addr = plan.layout.guest_addr(page % pages * PAGE).unwrap();
            view.write_obj(byte, GuestAddress(guest_addr)).unwrap();
        }
        for (page, len) in discards {
            // Some extend beyond their region and are refused.
            let guest_addr = plan.layout.guest_addr(page % pages * PAGE).unwrap();
            let _ = memory.discard(guest_addr, len * PAGE);
        }
        let frozen = frozen(&memory);
        let mut read = Vec::new();
        for region in plan.layout.regions() {
            let mut bytes = vec![0; usize::try_from(region.len).unwrap()];
            view.read_slice(&mut bytes, GuestAddress(region.guest_addr)).unwrap();
            read.extend(bytes);
        }
        prop_assert_eq!(frozen, read);
    }

    #[test]
    fn any_discard_is_done_or_refused(guest_addr in any::<u64>(), len in any::<u64>()) {
        let memory = GuestMemory::anonymous(layout(&[(0, MIB)])).unwrap();
        // Also near the region, and in whole pages.
        for (guest_addr, len) in [
            (guest_addr, len),
            (guest_addr % (2 * MIB), len % (2 * MIB)),
            (guest_addr / PAGE * PAGE % (2 * MIB), len / PAGE * PAGE % (2 * MIB)),
        ] {
            let inside = guest_addr.checked_add(len).is_some_and(|end| end <= MIB);
            let whole = len != 0 && guest_addr % PAGE == 0 && len % PAGE == 0;
            prop_assert_eq!(memory.discard(guest_addr, len).is_ok(), inside && whole);
        }
    }
}
