use firn_base::PageRange;
use vm_memory::{Bytes, GuestAddress};

use firn_snapshot::{CachedRun, ImageKind, MemoryLayout, Profile, Snapshot, set_profile};
use proptest::collection::vec;
use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};

use super::*;
use crate::compare::compare;
use crate::loader::Loader;
use crate::page_cache::{cached, evict};
use crate::planners::{parse, plan};
use crate::testing::{layouts, write_snapshot};
use crate::{Executed, Sources, execute};

fn run(first: u64, pages: u64) -> PageRange {
    PageRange { first, pages }
}

fn profile_of(snapshot: &Snapshot, cached: &[PageRange], reported: Option<Vec<PageRange>>) {
    let cached = (0..).zip(cached).map(|(at_ns, run)| CachedRun { run: *run, at_ns }).collect();
    let id = snapshot.manifest().description.id;
    let profile = Profile { cached: Some(cached), reported, ..Profile::of(id) };
    set_profile(snapshot.path(), &profile).unwrap();
}

/// Plans, executes, and compares every page with the image.
fn restore(snapshot: &Snapshot) -> (Plan, Executed) {
    let snapshot = Snapshot::open(snapshot.path()).unwrap();
    let plan = plan(&snapshot, None, &SnapBpf::default()).unwrap();
    let sources = Sources::of(&snapshot, None).unwrap();
    let executed = execute(&plan, &sources).unwrap();
    let same =
        compare(&executed.memory, snapshot.image_file().unwrap(), snapshot.zero_map()).unwrap();
    assert!(same.is_equal(), "{same:?}");
    (plan, executed)
}

#[test]
fn the_image_is_loaded_in_the_order_of_first_access_and_free_pages_are_anonymous() {
    let dir = tempfile::tempdir().unwrap();
    let layout = MemoryLayout::for_size(64 * PAGE_SIZE).unwrap();
    let zero_map = PageSet::of(&[run(8, 8)], 64);
    let path = dir.path().join("s");
    let snapshot = write_snapshot(&path, &layout, &zero_map, ImageKind::Dense, 5);
    // Page 16 is not zero: the guest has written it after reporting it.
    profile_of(&snapshot, &[run(40, 3), run(2, 8)], Some(vec![run(9, 8)]));
    let (plan, executed) = restore(&snapshot);
    assert_eq!(
        plan.schedule,
        [Step::load_image(&(40..43)), Step::load_image(&(2..9))],
        "free pages are not loaded"
    );
    let zeros: Vec<_> = plan.segments.iter().filter(|s| s.source == Source::Zero).collect();
    assert_eq!(zeros.len(), 1);
    assert_eq!((zeros[0].guest.start, zeros[0].guest.len), (9 * PAGE_SIZE, 7 * PAGE_SIZE));
    assert_eq!(executed.report.zero_bytes, 7 * PAGE_SIZE);
    assert_eq!(executed.report.packed_bytes, 0);
    assert_eq!(plan.layers[0].advice, Advice::Random);
}

#[test]
fn prefetch_and_marking_can_be_left_out() {
    let dir = tempfile::tempdir().unwrap();
    let layout = MemoryLayout::for_size(64 * PAGE_SIZE).unwrap();
    let zero_map = PageSet::of(&[run(8, 8)], 64);
    let snapshot = write_snapshot(&dir.path().join("s"), &layout, &zero_map, ImageKind::Dense, 5);
    profile_of(&snapshot, &[run(2, 8)], Some(vec![run(8, 8)]));
    let plan_of = |name: &str| {
        let snapshot = Snapshot::open(snapshot.path()).unwrap();
        let planner = parse(name).unwrap();
        assert_eq!(planner.name(), name);
        let plan = plan(&snapshot, None, &*planner).unwrap();
        let executed = execute(&plan, &Sources::of(&snapshot, None).unwrap()).unwrap();
        let image = snapshot.image_file().unwrap();
        assert!(compare(&executed.memory, image, snapshot.zero_map()).unwrap().is_equal());
        plan
    };
    let anonymous = |plan: &Plan| plan.segments.iter().any(|s| s.source == Source::Zero);
    let prefetch = plan_of("snapbpf:marking=off");
    assert_eq!(
        (&prefetch.schedule[..], anonymous(&prefetch)),
        (&[Step::load_image(&(2..10))][..], false)
    );
    assert_eq!(prefetch.layers[0].advice, Advice::Random);
    let kernel = plan_of("snapbpf:prefetch=kernel");
    assert_eq!(
        kernel.schedule.iter().map(|step| step.work).collect::<Vec<_>>(),
        [
            Step::load_image(&(2..3)).work,
            Work::Prefetch { image: ImageRange { offset: 2 * PAGE_SIZE, len: 6 * PAGE_SIZE } },
        ],
        "the first page triggers the program"
    );
    let marking = plan_of("snapbpf:prefetch=off");
    assert_eq!((marking.schedule.len(), anonymous(&marking)), (0, true));
    assert_eq!(marking.layers[0].advice, Advice::Normal, "the baseline has read-ahead");
    let neither = plan_of("snapbpf:prefetch=off,marking=off");
    assert_eq!((neither.schedule.len(), anonymous(&neither)), (0, false));
}

#[test]
fn pages_of_the_reported_set_are_never_read() {
    let dir = tempfile::tempdir().unwrap();
    let layout = MemoryLayout::for_size(256 * PAGE_SIZE).unwrap();
    let free = [run(32, 64)];
    let zero_map = PageSet::of(&free, 256);
    let path = dir.path().join("s");
    let snapshot = write_snapshot(&path, &layout, &zero_map, ImageKind::Dense, 5);
    let read = |reported: Option<Vec<PageRange>>| {
        profile_of(&snapshot, &[run(0, 8)], reported);
        snapshot.image_file().unwrap().sync_all().unwrap();
        if !firn_required::has("disk", evict(snapshot.image_file().unwrap()).unwrap().is_cold()) {
            return None;
        }
        let snapshot = Snapshot::open(&path).unwrap();
        let plan = plan(&snapshot, None, &SnapBpf::default()).unwrap();
        let memory = execute(&plan, &Sources::of(&snapshot, None).unwrap()).unwrap().memory;
        // The guest reads every page.
        for page in 0..256 {
            let _: u8 = memory.vm_memory().read_obj(GuestAddress(page * PAGE_SIZE)).unwrap();
        }
        let cached = cached(snapshot.image_file().unwrap(), 256).unwrap();
        Some(cached.ranges_in(32..96).map(|pages| pages.end - pages.start).sum())
    };
    let Some(pages) = read(Some(free.to_vec())) else { return };
    let without: Option<u64> = read(None);
    assert_eq!((pages, without), (0, Some(64)));
}

#[test]
fn ten_microvms_share_one_load() {
    let dir = tempfile::tempdir().unwrap();
    let layout = MemoryLayout::for_size(1024 * PAGE_SIZE).unwrap();
    let path = dir.path().join("s");
    let snapshot = write_snapshot(&path, &layout, &PageSet::new(1024), ImageKind::Dense, 5);
    profile_of(&snapshot, &[run(100, 200), run(7, 1), run(600, 300)], None);
    if !firn_required::has("disk", evict(snapshot.image_file().unwrap()).unwrap().is_cold()) {
        return;
    }
    let reports: Vec<_> = (0..10)
        .map(|_| {
            let snapshot = Snapshot::open(&path).unwrap();
            let plan = plan(&snapshot, None, &SnapBpf::default()).unwrap();
            Loader::start(&plan, &Sources::of(&snapshot, None).unwrap(), 0).unwrap().unwrap()
        })
        .collect::<Vec<_>>()
        .into_iter()
        .map(|loader| loader.finish().unwrap())
        .collect();
    let read: u64 = reports.iter().map(|report| report.read_bytes).sum();
    assert_eq!(read, 501 * PAGE_SIZE, "{reports:?}");
    assert!(reports.iter().all(|report| report.loaded || report.read_bytes == 0));
    assert!(reports.iter().all(|report| (report.ranges, report.bytes) == (3, 501 * PAGE_SIZE)));
}

#[test]
fn the_error_for_a_missing_part_names_the_command() {
    let dir = tempfile::tempdir().unwrap();
    let layout = MemoryLayout::for_size(16 * PAGE_SIZE).unwrap();
    let path = dir.path().join("s");
    let snapshot = write_snapshot(&path, &layout, &PageSet::new(16), ImageKind::Sparse, 5);
    let refused = plan(&snapshot, None, &SnapBpf::default()).unwrap_err().to_string();
    assert!(refused.contains("firn profile record --part cache"), "{refused}");
    profile_of(&snapshot, &[], None);
    assert!(restore(&snapshot).0.schedule.is_empty());
}

proptest! {
    #![proptest_config(proptest::test_runner::Config::with_cases(64))]

    #[test]
    fn random_profiles_restore_every_page(
        layout in layouts(),
        stored in vec(any::<bool>(), 120),
        cached in vec(any::<bool>(), 120),
        reported in vec(any::<bool>(), 120),
        dense in any::<bool>(),
    ) {
        let pages = layout.pages();
        let set = |of: &dyn Fn(u64) -> bool| {
            let mut set = PageSet::new(pages);
            (0..pages).filter(|page| of(*page)).for_each(|page| set.insert(page));
            set
        };
        let at = |page: u64| usize::try_from(page).unwrap();
        let zero_map = set(&|page| !stored[at(page)]);
        let dir = tempfile::tempdir().unwrap();
        let kind = if dense { ImageKind::Dense } else { ImageKind::Sparse };
        let snapshot = write_snapshot(&dir.path().join("s"), &layout, &zero_map, kind, 9);
        let cached = set(&|page| cached[at(page)]).to_ranges();
        let free = set(&|page| reported[at(page)]).to_ranges();
        profile_of(&snapshot, &cached, Some(free));
        let (plan, executed) = restore(&snapshot);
        let free = set(&|page| reported[at(page)] && !stored[at(page)]).count();
        prop_assert_eq!(executed.report.zero_bytes, free * PAGE_SIZE);
        prop_assert!(plan.layers.len() as u64 <= layout.regions().count() as u64 + free);
    }
}
