use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;

use firn_base::{GuestRange, ImageRange};
use firn_snapshot::{MemoryLayout, MemoryRegion, PageSet};
use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};
use proptest::sample::Index;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::HostFacts;
use crate::compare::compare;
use crate::page_cache;
use crate::plan::{PlanError, Segment, Step, Work};
use crate::planners::{ImageFacts, PlanInput, parse};
use crate::testing::{
    Kind, assert_counted, file_on_a_medium, page_bytes, plans, segment, write_image,
};

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;

/// The plan of a planner for an image without zero pages.
fn plan_by(planner: &str, layout: &MemoryLayout, image: &File) -> Plan {
    let host = HostFacts::read().unwrap();
    let zero_map = PageSet::new(layout.pages());
    let facts = ImageFacts::of(image).unwrap();
    let input = PlanInput {
        layout,
        image: facts,
        zero_map: &zero_map,
        profile: None,
        snapshot: None,
        copies: None,
        host: &host,
    };
    parse(planner).unwrap().plan(&input).unwrap()
}

/// Writes an image of `pages` pages without zero pages to the start of `file`, and to storage.
fn fill(file: &mut File, pages: u64) {
    let bytes: Vec<u8> = (0..pages).flat_map(|page| page_bytes(page, 7)).collect();
    file.write_all(&bytes).unwrap();
    file.sync_all().unwrap();
}

fn read_page(memory: &GuestMemory, guest_addr: u64) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    memory.vm_memory().read_slice(&mut bytes, GuestAddress(guest_addr)).unwrap();
    bytes
}

/// The number of mappings of this file in the process.
fn mappings_of(path: &Path) -> usize {
    let path = path.to_str().unwrap();
    fs::read_to_string("/proc/self/maps").unwrap().lines().filter(|l| l.ends_with(path)).count()
}

#[test]
fn on_demand_restores_prefetch_nothing() {
    let Some(mut image) = file_on_a_medium() else { return };
    let layout = MemoryLayout::for_size(8 * MIB).unwrap();
    fill(&mut image, layout.pages());
    let plan = plan_by("firecracker:readahead=off", &layout, &image);
    assert!(page_cache::evict(&image).unwrap().is_cold());
    let executed = execute(&plan, &Sources::image(&image)).unwrap();
    assert_eq!(executed.report.preloaded_bytes, 0);
    assert!(page_cache::residency(&image).unwrap().is_cold());

    assert_eq!(read_page(&executed.memory, MIB), page_bytes(256, 7));
    assert_eq!(page_cache::residency(&image).unwrap().cached, 1, "readahead=off reads one page");
    assert_eq!(executed.memory.usage().unwrap().resident, PAGE);
}

#[test]
fn readahead_reads_more_than_the_guest_touches() {
    let Some(mut image) = file_on_a_medium() else { return };
    let layout = MemoryLayout::for_size(8 * MIB).unwrap();
    fill(&mut image, layout.pages());
    let plan = plan_by("firecracker", &layout, &image);
    assert!(page_cache::evict(&image).unwrap().is_cold());
    let executed = execute(&plan, &Sources::image(&image)).unwrap();
    assert!(page_cache::residency(&image).unwrap().is_cold());
    assert_eq!(read_page(&executed.memory, MIB), page_bytes(256, 7));
    assert!(page_cache::residency(&image).unwrap().cached > 1);
}

#[test]
fn dram_cached_preloads_every_stored_page() {
    // 64 KiB stored, 64 KiB hole, and so on: holes of any size are skipped.
    let on_a_medium = file_on_a_medium();
    let evictable = on_a_medium.is_some();
    let image = on_a_medium.unwrap_or_else(|| tempfile::tempfile().unwrap());
    let layout = MemoryLayout::for_size(16 * MIB).unwrap();
    image.set_len(layout.total_bytes()).unwrap();
    let stored = vec![1; 64 << 10];
    for at in (0..layout.total_bytes()).step_by(128 << 10) {
        image.write_all_at(&stored, at).unwrap();
    }
    image.sync_all().unwrap();
    let plan = plan_by("dram_cached", &layout, &image);
    let preload = || {
        if evictable {
            assert!(page_cache::evict(&image).unwrap().is_cold());
        }
        let executed = execute(&plan, &Sources::image(&image)).unwrap();
        assert_eq!(executed.report.preloaded_bytes, 8 * MIB);
        let stored = page_cache::stored_residency(&image).unwrap();
        assert_eq!(executed.memory.usage().unwrap().resident, 0, "cached, but not yet mapped");
        stored
    };
    assert_counted(&page_cache::Residency { pages: 2048, cached: 2048 }, preload);
}

#[test]
fn an_index_is_built_for_reading_and_copies_nothing() {
    let mut image = tempfile::tempfile().unwrap();
    let layout = MemoryLayout::for_size(4 * MIB).unwrap();
    fill(&mut image, layout.pages());
    let mut plan = plan_by("firecracker", &layout, &image);
    let guest = GuestRange { start: MIB, len: MIB };
    let step = |when| Step { when, work: Work::Index { guest } };
    plan.schedule = vec![step(When::AfterResume)];
    assert_counted(&true, || {
        let executed = execute(&plan, &Sources::image(&image)).unwrap();
        assert_eq!(executed.memory.usage().unwrap().resident, 0);
        assert_eq!(executed.after_resume.steps(), plan.schedule);

        let reports = executed.after_resume.run(&executed.memory).unwrap();
        assert_eq!(reports.len(), 1);
        assert_eq!(reports[0].indexed_bytes, MIB);
        let usage = executed.memory.usage().unwrap();
        assert_eq!(usage.private, 0, "no page was copied");
        usage.resident >= MIB
    });

    plan.schedule = vec![step(When::BeforeResume)];
    assert_counted(&true, || {
        let executed = execute(&plan, &Sources::image(&image)).unwrap();
        assert_eq!(executed.report.steps.len(), 1);
        let usage = executed.memory.usage().unwrap();
        assert!(executed.after_resume.run(&executed.memory).unwrap().is_empty());
        usage.shared >= MIB
    });
}

#[test]
fn errors_name_the_defect_and_nothing_stays_mapped() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("memory.img");
    fs::write(&path, vec![1; 1 << 20]).unwrap();
    let image = File::open(&path).unwrap();
    let layout = MemoryLayout::for_size(MIB).unwrap();
    let good = plan_by("firecracker", &layout, &image);

    let executed = execute(&good, &Sources::image(&image)).unwrap();
    assert_eq!(mappings_of(&path), 1);
    drop(executed);
    assert_eq!(mappings_of(&path), 0);

    let mut wrong = good.clone();
    wrong.segments.clear();
    let refused = execute(&wrong, &Sources::image(&image)).unwrap_err();
    assert!(matches!(refused, ExecuteError::Plan { source: PlanError::Gap { .. }, .. }));
    assert_eq!(mappings_of(&path), 0);

    let truncated = fs::OpenOptions::new().write(true).open(&path).unwrap();
    truncated.set_len(MIB / 2).unwrap();
    let refused = execute(&good, &Sources::image(&image)).unwrap_err();
    let ExecuteError::ImageTooShort { len, expected } = refused else { panic!("{refused}") };
    assert_eq!((len, expected), (MIB / 2, MIB));
    assert_eq!(mappings_of(&path), 0);

    truncated.set_len(MIB).unwrap();
    truncated.write_all_at(&[1; 4096], 0).unwrap();
    // A write-only descriptor can be neither mapped nor read.
    let refused = execute(&good, &Sources::image(&truncated)).unwrap_err();
    assert!(matches!(refused, ExecuteError::Layer { index: 0, .. }), "{refused}");
    let mut preload = good.clone();
    let whole = GuestRange { start: 0, len: MIB };
    let zero = segment(&layout, whole, Kind::Zero);
    preload.segments = vec![zero];
    preload.layers[0].source = zero.source;
    preload.layers[0].sharing = zero.sharing;
    let work = Work::Preload { image: ImageRange { offset: 0, len: MIB } };
    preload.schedule = vec![Step { when: When::BeforeResume, work }];
    let refused = execute(&preload, &Sources::image(&truncated)).unwrap_err();
    assert!(matches!(refused, ExecuteError::Step { index: 0, .. }), "{refused}");
    assert_eq!(mappings_of(&path), 0);
}

#[test]
fn a_restore_of_two_regions_takes_as_many_calls_as_of_a_small_one() {
    let image = tempfile::tempfile().unwrap();
    let mut calls = Vec::new();
    for size in [256 * MIB, 8192 * MIB] {
        let layout = MemoryLayout::for_size(size).unwrap();
        image.set_len(layout.total_bytes()).unwrap();
        let plan = plan_by("firecracker:readahead=off", &layout, &image);
        let executed = execute(&plan, &Sources::image(&image)).unwrap();
        let regions = layout.regions().count() as u64;
        let report = &executed.report;
        assert_eq!((report.mmaps, report.madvises), (1 + regions, regions));
        calls.push(report.mmaps + report.madvises);
    }
    assert_eq!(calls, [3, 5], "one region, two regions");
}

#[test]
fn host_and_guest_addresses_are_congruent_modulo_the_largest_leaf() {
    let image = tempfile::tempfile().unwrap();
    let layout = MemoryLayout::new(vec![
        MemoryRegion { guest_addr: 3 * PAGE, len: PAGE },
        MemoryRegion { guest_addr: 1024 * MIB, len: 1024 * MIB },
    ])
    .unwrap();
    image.set_len(layout.total_bytes()).unwrap();
    let mut plan = plan_by("firecracker", &layout, &image);
    let zero = segment(&layout, plan.segments[1].guest, Kind::Zero);
    plan.segments[1] = Segment { leaf: crate::Leaf::Size1G, ..zero };
    plan.layers[1].source = zero.source;
    plan.layers[1].sharing = zero.sharing;
    let memory = execute(&plan, &Sources::image(&image)).unwrap().memory;
    for slot in memory.slots() {
        assert_eq!(slot.host_addr % (1024 * MIB), slot.guest_addr % (1024 * MIB));
    }
}

#[test]
fn many_threads_may_execute_one_plan() {
    let mut image = tempfile::tempfile().unwrap();
    let layout = MemoryLayout::for_size(MIB).unwrap();
    fill(&mut image, layout.pages());
    let plan = plan_by("dram_cached", &layout, &image);
    let zero_map = PageSet::new(layout.pages());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let memory = execute(&plan, &Sources::image(&image)).unwrap().memory;
                assert!(compare(&memory, &image, &zero_map).unwrap().is_equal());
            });
        }
    });
}

proptest! {
    /// For any plan: guest memory equals the snapshot, the guest's writes are private, and
    /// discarded memory reads as zeros.
    #[test]
    fn random_plans_restore_every_page(
        plan in plans(),
        seed in any::<u8>(),
        written in proptest::collection::vec(any::<Index>(), 1..20),
        discarded in proptest::collection::vec((any::<Index>(), any::<Index>()), 0..6),
    ) {
        let mut image = tempfile::tempfile().unwrap();
        let zero_map = write_image(&plan, &mut image, seed);
        let Executed { memory, after_resume, .. } =
            execute(&plan, &Sources::image(&image)).unwrap();
        after_resume.run(&memory).unwrap();
        for slot in memory.slots() {
            prop_assert_eq!(slot.host_addr % (2 * MIB), slot.guest_addr % (2 * MIB));
        }
        let report = compare(&memory, &image, &zero_map).unwrap();
        prop_assert!(report.is_equal(), "{report:?}");
        prop_assert_eq!(report.pages, plan.layout.pages());

        // The expected contents of every page, by image page.
        let pages = plan.layout.pages();
        let mut expected: Vec<Vec<u8>> = (0..pages)
            .map(|p| if zero_map.get(p) { vec![0; 4096] } else { page_bytes(p, seed) })
            .collect();
        let view = memory.vm_memory();
        for index in written {
            let page = index.index(expected.len());
            let guest_addr = plan.layout.guest_addr(page as u64 * PAGE).unwrap();
            expected[page][17] ^= 0xff;
            view.write_obj(expected[page][17], GuestAddress(guest_addr + 17)).unwrap();
        }
        let regions: Vec<_> = plan.layout.regions().collect();
        for (region, start) in discarded {
            let region = region.get(&regions);
            let pages_in = usize::try_from(region.len / PAGE).unwrap();
            let first = start.index(pages_in);
            let len = (pages_in - first).div_ceil(2);
            memory.discard(region.guest_addr + first as u64 * PAGE, len as u64 * PAGE).unwrap();
            let first = usize::try_from(region.image_offset / PAGE).unwrap() + first;
            expected[first..first + len].fill(vec![0; 4096]);
        }
        for (page, expected) in (0..).zip(&expected) {
            let guest_addr = plan.layout.guest_addr(page * PAGE).unwrap();
            prop_assert_eq!(&read_page(&memory, guest_addr), expected);
        }
        for page in 0..pages {
            let mut bytes = vec![0; 4096];
            image.read_exact_at(&mut bytes, page * PAGE).unwrap();
            prop_assert_eq!(bytes, page_bytes(page, seed), "the image is never written");
        }
    }

    #[test]
    fn a_comparison_lists_the_differing_pages(
        plan in plans(),
        changed in proptest::collection::btree_set(0..40u64, 1..20),
    ) {
        let mut image = tempfile::tempfile().unwrap();
        let zero_map = write_image(&plan, &mut image, 3);
        let memory = execute(&plan, &Sources::image(&image)).unwrap().memory;
        let changed: Vec<u64> = changed.into_iter().filter(|&p| p < plan.layout.pages()).collect();
        let mut guest_pages = Vec::new();
        for page in &changed {
            let guest_addr = plan.layout.guest_addr(page * PAGE).unwrap();
            let last = GuestAddress(guest_addr + PAGE - 1);
            let byte: u8 = memory.vm_memory().read_obj(last).unwrap();
            memory.vm_memory().write_obj(byte ^ 1, last).unwrap();
            guest_pages.push(guest_addr / PAGE);
        }
        let report = compare(&memory, &image, &zero_map).unwrap();
        prop_assert_eq!(report.differing, changed.len() as u64);
        guest_pages.truncate(16);
        prop_assert_eq!(report.first_differing, guest_pages);
    }
}
