use firn_base::PageRange;
use firn_snapshot::{ImageKind, MemoryRegion, Profile, Snapshot, set_profile};
use proptest::collection::vec;
use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::compare::compare;
use crate::page_cache::{evict, residency};
use crate::planners::{PackError, PackReport, PlanSnapshotError, pack, parse, plan};
use crate::testing::{layouts, write_snapshot};
use crate::{ExecuteError, ExecuteReport, PlanError, ProcessCounters, Sources, execute};

fn run(first: u64, pages: u64) -> PageRange {
    PageRange { first, pages }
}

fn zeros(pages: u64, runs: &[PageRange]) -> PageSet {
    PageSet::of(runs, pages)
}

fn layout(pages: u64) -> MemoryLayout {
    MemoryLayout::for_size(pages * PAGE_SIZE).unwrap()
}

fn groups_of(snapshot: &Snapshot, groups: Vec<Vec<PageRange>>) {
    let id = snapshot.manifest().description.id;
    set_profile(snapshot.path(), &Profile { groups: Some(groups), ..Profile::of(id) }).unwrap();
}

/// Plans, executes, and compares every page with the image.
fn restore(snapshot: &Snapshot, planner: &str) -> (Plan, ExecuteReport) {
    let snapshot = Snapshot::open(snapshot.path()).unwrap();
    let planner = parse(planner).unwrap();
    let plan = plan(&snapshot, None, &*planner).unwrap();
    let executed = execute(&plan, &Sources::of(&snapshot, None).unwrap()).unwrap();
    let same =
        compare(&executed.memory, snapshot.image_file().unwrap(), snapshot.zero_map()).unwrap();
    assert!(same.is_equal(), "{same:?}");
    (plan, executed.report)
}

fn packed(snapshot: &Snapshot, planner: &str) -> Result<PackReport, PackError> {
    pack(snapshot.path(), &*parse(planner).unwrap()).map(Option::unwrap)
}

#[test]
fn the_loading_set_is_the_working_set_without_zeros_by_group_and_address() {
    let groups = [vec![run(100, 4), run(40, 2)], vec![run(0, 3), run(104, 1)], vec![run(60, 1)]];
    let zero_map = zeros(128, &[run(1, 1), run(60, 1)]);
    let set = |merge| {
        let set = loading_set(&groups, &zero_map, &layout(128), merge);
        (set.runs, set.before_merging)
    };
    // Page 104 is merged into a region whose lowest group is 0.
    let unmerged = vec![run(40, 2), run(100, 5), run(0, 1), run(2, 1)];
    assert_eq!(set(0), (unmerged.clone(), 4));
    assert_eq!(set(1), (unmerged, 4), "a gap of one page is not smaller than merge=1");
    assert_eq!(set(2), (vec![run(40, 2), run(100, 5), run(0, 3)], 4));
    // 37 pages lie between 3 and 40, 58 between 42 and 100.
    assert_eq!(set(38), (vec![run(0, 42), run(100, 5)], 4));
    assert_eq!(set(59), (vec![run(0, 105)], 4));
}

#[test]
fn no_region_spans_a_gap_of_guest_memory() {
    let region = |guest_addr, pages| MemoryRegion { guest_addr, len: pages * PAGE_SIZE };
    let layout = MemoryLayout::new(vec![region(0, 8), region(1 << 20, 8)]).unwrap();
    let set = loading_set(&[vec![run(6, 4)]], &zeros(16, &[]), &layout, 32);
    assert_eq!(set.runs, [run(6, 2), run(8, 2)]);
}

#[test]
fn three_layers_are_flattened_to_four_types_of_pages() {
    let dir = tempfile::tempdir().unwrap();
    let zero_map = zeros(64, &[run(10, 20), run(33, 1)]);
    let path = dir.path().join("s");
    let snapshot = write_snapshot(&path, &layout(64), &zero_map, ImageKind::Dense, 5);
    groups_of(&snapshot, vec![vec![run(40, 2), run(12, 2)], vec![run(32, 3)]]);
    let report = packed(&snapshot, "faasnap:merge=2").unwrap();
    assert_eq!((report.runs, report.runs_before_merging, report.pages), (2, 3, 5));
    let (plan, report) = restore(&snapshot, "faasnap:merge=2");
    let kinds: Vec<_> =
        plan.segments.iter().map(|s| (s.guest.start / PAGE_SIZE, s.source)).collect();
    let (image, pages) = (|page| Source::Image { offset: page * PAGE_SIZE }, PAGE_SIZE);
    let loaded =
        |place: u64, page: u64| Source::Packed { offset: (2 + place) * pages, image: page * pages };
    let expected = [
        (0, image(0)),
        (10, Source::Zero),
        (30, image(30)),
        // A zero page in a merged region is mapped from the packed file.
        (32, loaded(2, 32)),
        (35, image(35)),
        (40, loaded(0, 40)),
        (42, image(42)),
    ];
    assert_eq!(kinds, expected);
    let order: Vec<_> = plan.layers.iter().map(|layer| layer.source).collect();
    let layers = [Source::Zero, image(0), image(30), image(34), loaded(2, 32), loaded(0, 40)];
    assert_eq!(order, layers);
    assert_eq!((report.packed_regions, report.packed_bytes), (2, 5 * pages));
    assert_eq!(report.zero_bytes, 20 * pages);
    let work = Work::Load { file: LoadFile::Packed, offset: 2 * pages, len: 5 * pages };
    assert_eq!(plan.schedule, [Step { when: When::AtRequest, work }]);
}

#[test]
fn each_step_can_be_left_out() {
    let dir = tempfile::tempdir().unwrap();
    let zero_map = zeros(64, &[run(10, 20)]);
    let path = dir.path().join("s");
    let snapshot = write_snapshot(&path, &layout(64), &zero_map, ImageKind::Dense, 5);
    // Two groups, neither of them in the order of addresses.
    groups_of(&snapshot, vec![vec![run(50, 2), run(40, 2)], vec![run(12, 2), run(2, 1)]]);
    let steps = |runs: &[Range<u64>]| runs.iter().map(Step::load_image).collect::<Vec<_>>();
    let of = |name: &str| {
        assert_eq!(parse(name).unwrap().name(), name);
        let (plan, report) = restore(&snapshot, name);
        (plan.schedule, report.zero_bytes / PAGE_SIZE, report.packed_bytes / PAGE_SIZE)
    };
    // Concurrent paging alone reads the working set, with zero pages, in the order of addresses.
    let by_address = steps(&[2..3, 12..14, 40..42, 50..52]);
    assert_eq!(of("faasnap:loading_set=off,regions=off"), (by_address, 0, 0));
    let by_group = steps(&[40..42, 50..52, 2..3, 12..14]);
    assert_eq!(of("faasnap:loading_set=off"), (by_group, 20, 0));
    assert_eq!(of("faasnap:loading_set=off,paging=off"), (Vec::new(), 20, 0));
    assert_eq!(of("faasnap:loading_set=off,paging=off,regions=off"), (Vec::new(), 0, 0));
    packed(&snapshot, "faasnap:merge=0").unwrap();
    let work = Work::Load { file: LoadFile::Packed, offset: 2 * PAGE_SIZE, len: 5 * PAGE_SIZE };
    let loading = vec![Step { when: When::AtRequest, work }];
    assert_eq!(of("faasnap:merge=0"), (loading.clone(), 20, 5));
    assert_eq!(of("faasnap:merge=0,paging=off"), (Vec::new(), 20, 5));
    assert_eq!(of("faasnap:merge=0,regions=off"), (loading, 0, 5));
}

#[test]
fn errors_name_the_command_that_makes_a_missing_or_stale_file() {
    let dir = tempfile::tempdir().unwrap();
    let (path, zero_map) = (dir.path().join("s"), zeros(16, &[]));
    let snapshot = write_snapshot(&path, &layout(16), &zero_map, ImageKind::Sparse, 5);
    let refused = |planner: &str| {
        let snapshot = Snapshot::open(&path).unwrap();
        let PlanSnapshotError::Planner(error) =
            plan(&snapshot, None, &*parse(planner).unwrap()).unwrap_err()
        else {
            panic!("another error")
        };
        error.to_string()
    };
    assert!(refused("faasnap").contains("firn profile record --part groups"));
    assert!(matches!(packed(&snapshot, "faasnap"), Err(PackError::Planner(_))));
    groups_of(&snapshot, vec![vec![run(1, 2)]]);
    assert!(refused("faasnap").contains("firn profile pack --planner faasnap:merge=32"));
    assert!(!packed(&snapshot, "faasnap").unwrap().was_there);
    assert!(packed(&snapshot, "faasnap").unwrap().was_there);
    restore(&snapshot, "faasnap");
    assert!(refused("faasnap:merge=0").contains("firn profile pack --planner faasnap:merge=0"));
    groups_of(&snapshot, vec![vec![run(1, 3)]]);
    assert!(refused("faasnap").contains("from another profile"));
    assert!(!packed(&snapshot, "faasnap").unwrap().was_there);
    restore(&snapshot, "faasnap");
}

/// A dense image stores zero pages, too.
#[test]
fn pages_of_zero_regions_are_never_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let zero_map = zeros(256, &[run(32, 64), run(200, 8)]);
    let snapshot = write_snapshot(&path, &layout(256), &zero_map, ImageKind::Dense, 5);
    groups_of(&snapshot, vec![vec![run(0, 8)]]);
    packed(&snapshot, "faasnap").unwrap();
    let snapshot = Snapshot::open(&path).unwrap();
    let plan = plan(&snapshot, None, &*parse("faasnap").unwrap()).unwrap();
    let memory = execute(&plan, &Sources::of(&snapshot, None).unwrap()).unwrap().memory.vm_memory();
    // On tmpfs every page stays cached.
    if !firn_required::has("disk", evict(snapshot.image_file().unwrap()).unwrap().is_cold()) {
        return;
    }
    let major_faults = || ProcessCounters::of_this_thread().unwrap().major_faults;
    let touch = |page: u64| memory.read_obj::<u8>(GuestAddress(page * PAGE_SIZE)).unwrap();
    let segments = plan.segments.iter().filter(|segment| segment.source == Source::Zero);
    let pages = segments.flat_map(|segment| {
        let first = segment.guest.start / PAGE_SIZE;
        first..first + segment.guest.len / PAGE_SIZE
    });
    let before = major_faults();
    let touched: Vec<u8> = pages.map(touch).collect();
    assert_eq!(touched, [0; 72]);
    assert_eq!(residency(snapshot.image_file().unwrap()).unwrap().cached, 0);
    assert_eq!(major_faults(), before);
    // Pages that are not zero are read.
    touch(120);
    assert!(residency(snapshot.image_file().unwrap()).unwrap().cached > 0);
    assert!(major_faults() > before);
}

#[test]
fn the_plan_of_an_empty_profile_loads_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let zero_map = zeros(16, &[run(3, 4)]);
    let snapshot = write_snapshot(&path, &layout(16), &zero_map, ImageKind::Sparse, 5);
    groups_of(&snapshot, vec![]);
    packed(&snapshot, "faasnap").unwrap();
    let (plan, report) = restore(&snapshot, "faasnap");
    assert!(plan.schedule.is_empty());
    assert_eq!((report.packed_bytes, report.zero_bytes), (0, 4 * PAGE_SIZE));
}

/// A plan whose segments do not match the packed file's own table is not executed.
#[test]
fn segments_must_match_the_table_of_the_packed_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let snapshot = write_snapshot(&path, &layout(16), &zeros(16, &[]), ImageKind::Sparse, 5);
    groups_of(&snapshot, vec![vec![run(1, 2)], vec![run(8, 2)]]);
    packed(&snapshot, "faasnap:merge=0").unwrap();
    let snapshot = Snapshot::open(&path).unwrap();
    let good = plan(&snapshot, None, &*parse("faasnap:merge=0").unwrap()).unwrap();
    assert!(matches!(
        execute(&good, &Sources::image(snapshot.image_file().unwrap())),
        Err(ExecuteError::NoPackedFile { .. })
    ));
    let change = |change: fn(&mut u64, &mut u64)| {
        let mut plan = good.clone();
        for source in plan
            .segments
            .iter_mut()
            .map(|s| &mut s.source)
            .chain(plan.layers.iter_mut().map(|l| &mut l.source))
        {
            if let Source::Packed { offset, image } = source {
                change(offset, image);
            }
        }
        execute(&plan, &Sources::of(&snapshot, None).unwrap()).unwrap_err()
    };
    for change in [
        change(|offset, _| *offset += PAGE_SIZE),
        change(|offset, _| *offset -= PAGE_SIZE),
        change(|offset, _| *offset = 1 << 40),
    ] {
        assert!(matches!(change, ExecuteError::WrongPackedOffset { .. }), "{change}");
    }
    let error = change(|_, image| *image += PAGE_SIZE);
    assert!(matches!(error, ExecuteError::Plan { source: PlanError::WrongImageOffset { .. }, .. }));
}

#[test]
fn more_mappings_than_a_process_may_have_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let mut zero_map = PageSet::new(64);
    (0..64).step_by(2).for_each(|page| zero_map.insert(page));
    write_snapshot(&path, &layout(64), &zero_map, ImageKind::Sparse, 5);
    // One merged region hides all earlier mappings, so the final number is equal or two.
    for (groups, segments) in [(vec![], 64), (vec![vec![run(0, 64)]], 2)] {
        let snapshot = Snapshot::open(&path).unwrap();
        groups_of(&snapshot, groups);
        packed(&snapshot, "faasnap").unwrap();
        let snapshot = Snapshot::open(&path).unwrap();
        let profile = snapshot.profile().unwrap();
        let mut host = crate::HostFacts::read().unwrap();
        let mut planned = |limit| {
            host.max_mappings = crate::planners::SPARE_MAPPINGS + limit;
            parse("faasnap").unwrap().plan(&PlanInput {
                layout: &snapshot.manifest().layout,
                image: crate::planners::ImageFacts::of_snapshot(&snapshot, None).unwrap(),
                zero_map: snapshot.zero_map(),
                profile: profile.as_ref(),
                snapshot: Some(&snapshot),
                copies: None,
                host: &host,
            })
        };
        assert_eq!(planned(64).unwrap().segments.len(), segments);
        let refused = planned(63).unwrap_err();
        assert!(matches!(refused, PlannerError::TooManyMappings { needed: 64, limit: 63, .. }));
    }
}

proptest! {
    #![proptest_config(proptest::test_runner::Config::with_cases(100))]

    /// Every page equals the image, for any layout, zero pages, profile and merge distance.
    #[test]
    fn random_profiles_restore_every_page(
        layout in layouts(),
        stored in vec(any::<bool>(), 120),
        group in vec(0u8..6, 120),
        merge in 0u64..10,
        dense in any::<bool>(),
    ) {
        let pages = layout.pages();
        let at = |page: u64| usize::try_from(page).unwrap();
        let mut zero_map = PageSet::new(pages);
        (0..pages).filter(|page| !stored[at(*page)]).for_each(|page| zero_map.insert(page));
        // Group 0 means: not in the working set.
        let groups: Vec<Vec<PageRange>> = (1..6)
            .map(|n| (0..pages).filter(|page| group[at(*page)] == n).map(|page| run(page, 1)).collect())
            .collect();
        let dir = tempfile::tempdir().unwrap();
        let kind = if dense { ImageKind::Dense } else { ImageKind::Sparse };
        let snapshot = write_snapshot(&dir.path().join("s"), &layout, &zero_map, kind, 9);
        groups_of(&snapshot, groups);
        let planner = format!("faasnap:merge={merge}");
        packed(&snapshot, &planner).unwrap();
        let (plan, report) = restore(&snapshot, &planner);
        // The whole loading set is loaded, and zero pages only in gaps of its regions.
        let mut loaded = PageSet::new(pages);
        for segment in &plan.segments {
            if let Source::Packed { image, .. } = segment.source {
                loaded.insert_range(image / PAGE_SIZE..(image + segment.guest.len) / PAGE_SIZE);
            }
        }
        for page in 0..pages {
            let in_loading_set = group[at(page)] > 0 && stored[at(page)];
            prop_assert!(!in_loading_set || loaded.get(page));
            prop_assert!(merge > 1 || in_loading_set || !loaded.get(page));
        }
        prop_assert_eq!(report.packed_bytes, loaded.count() * PAGE_SIZE);
    }
}
