//! Planners that need a profile, on players: recorded on one trace, replayed with the other, from
//! dense images.

use std::collections::BTreeSet;
use std::path::Path;

use firn_memory::page_cache::{cached, evict};
use firn_memory::planners::{Planner, pack, parse};
use firn_memory::recorders::{Part, of};
use firn_memory::trace::Access;
use firn_player::format::PAGE;
use firn_run::player::replay;
use firn_run::{Clock, ReplaySpec, Source, StartReport};
use firn_snapshot::{Destination, PackedFile, PageSet, Profile, Snapshot, set_profile};
use firn_vmm::KVM_DEVICE;

use super::{PlayerInputs, PlayerOptions, freeze};
use crate::testing::record;
use crate::traces::{NamedTrace, load};

/// A dense snapshot of a player with two inputs, on a medium whose files can be evicted from the
/// page cache.
fn player(dir: &Path) -> Option<Snapshot> {
    frozen(dir, ["json-a", "json-b"].map(|name| load(name).unwrap()), true)
}

/// The same with free pages: the pages that either input writes before it reads them.
fn player_with_free_pages(dir: &Path, sanitised: bool) -> Option<(Snapshot, PageSet)> {
    let mut traces = ["json-a", "json-b"].map(|name| load(name).unwrap());
    let layout = traces[0].trace.layout().clone();
    let mut free = PageSet::new(layout.pages());
    let touches = traces.iter().flat_map(|named| named.trace.touches());
    for touch in touches.filter(|touch| touch.access == Access::Write) {
        free.insert(layout.image_offset(touch.page * PAGE).unwrap() / PAGE);
    }
    traces = traces.map(|NamedTrace { name, trace }| NamedTrace {
        name,
        trace: trace.with_free(free.clone()).unwrap(),
    });
    Some((frozen(dir, traces, sanitised)?, free))
}

fn frozen(dir: &Path, traces: [NamedTrace; 2], sanitised: bool) -> Option<Snapshot> {
    let path = dir.join("snapshot");
    let destination = Destination::Directory(path.clone());
    let inputs = PlayerInputs::new(traces.into()).unwrap();
    let options = PlayerOptions { sanitised, ..PlayerOptions::default() };
    freeze(&inputs, &options, KVM_DEVICE.as_ref(), destination, true).unwrap();
    let snapshot = Snapshot::open(&path).unwrap();
    let cold = evict(snapshot.image_file().unwrap()).unwrap().is_cold();
    firn_required::has("disk", cold).then_some(snapshot)
}

fn profile(snapshot: &Snapshot, part: Part) -> Profile {
    let mut profile = Snapshot::open(snapshot.path()).unwrap().profile_or_empty().unwrap();
    for recorder in of(&[part]) {
        record(snapshot, Some("json-b"), recorder, &mut profile).unwrap();
    }
    set_profile(snapshot.path(), &profile).unwrap();
    profile
}

/// The player checks every byte of its memory.
fn replayed(path: &Path, planner: &dyn Planner) -> (Snapshot, StartReport) {
    let snapshot = Snapshot::open(path).unwrap();
    assert!(evict(snapshot.image_file().unwrap()).unwrap().is_cold());
    if let Some(packed) = snapshot.packed(PackedFile::LoadingSet).unwrap() {
        assert!(evict(packed.file()).unwrap().is_cold());
    }
    let source = Source::new(snapshot, None);
    let spec = ReplaySpec { input: Some("json-a".to_owned()), ..ReplaySpec::default() };
    let kvm = Path::new(KVM_DEVICE).into();
    let report = replay(&source, &spec, planner, kvm, &Clock::now()).unwrap();
    (Snapshot::open(path).unwrap(), report)
}

#[test]
fn faasnap_runs_on_a_loading_set_of_the_other_input() {
    let dir = tempfile::tempdir().unwrap();
    let Some(snapshot) = player(dir.path()) else { return };
    profile(&snapshot, Part::Groups);
    let mut runs = Vec::new();
    for written in ["faasnap:merge=0", "faasnap"] {
        let planner = parse(written).unwrap();
        let packed = pack(snapshot.path(), &*planner).unwrap().unwrap();
        let (_, report) = replayed(snapshot.path(), &*planner);
        assert_eq!(
            (report.execute.packed_regions, report.execute.packed_bytes),
            (packed.runs, packed.pages * PAGE)
        );
        // Pages that are merged with the loading set are not anonymous.
        let zero = snapshot.zero_map().count() * PAGE;
        assert!(
            report.execute.zero_bytes <= zero && report.execute.zero_bytes > zero / 2,
            "{report:?}"
        );
        let loader = report.loader.unwrap();
        assert_eq!((loader.loaded, loader.ranges, loader.bytes), (true, 1, packed.pages * PAGE));
        // FaaSnap 4.2: the loader starts at the request, before the monitor.
        let times = &report.times;
        let monitor = times.load_ns + times.execute_ns + times.resume_ns + times.replay_ns.unwrap();
        assert!(loader.start_ns <= times.total_ns - monitor, "{report:?}");
        // The guest may have touched the pages before the loader.
        assert!(loader.read_bytes <= loader.bytes);
        runs.push((packed.runs, packed.runs_before_merging));
    }
    let [(unmerged, before), (merged, also_before)] = runs[..] else { panic!("{runs:?}") };
    assert_eq!((unmerged, before), (before, also_before));
    assert!(merged < unmerged);
}

#[test]
fn snapbpf_loads_from_the_image_and_never_reads_free_pages() {
    let dir = tempfile::tempdir().unwrap();
    let Some(snapshot) = player(dir.path()) else { return };
    // As if the guest had reported nothing.
    let recorded = Profile { reported: None, ..profile(&snapshot, Part::Cache) };
    set_profile(snapshot.path(), &recorded).unwrap();
    let captured = recorded.cached.clone().unwrap();
    assert!(!captured.is_empty());
    assert!(captured.is_sorted_by_key(|range| range.at_ns));
    let pages = snapshot.manifest().layout.pages();
    let of_trace = load("json-b").unwrap().trace;
    let captured = PageSet::of(captured.iter().map(|range| &range.run), pages);
    for touch in of_trace.touches() {
        let page = of_trace.layout().image_offset(touch.page * PAGE).unwrap() / PAGE;
        assert!(captured.get(page), "page {page:#x} was touched");
    }
    let planner = parse("snapbpf").unwrap();
    let (_, report) = replayed(snapshot.path(), &*planner);
    assert_eq!((report.execute.packed_bytes, report.execute.zero_bytes), (0, 0));
    let loader = report.loader.unwrap();
    assert_eq!((loader.loaded, loader.bytes), (true, captured.count() * PAGE));

    // As if the guest had reported all its zero pages.
    let reported = Some(snapshot.zero_map().to_ranges());
    set_profile(snapshot.path(), &Profile { reported, ..recorded }).unwrap();
    let (again, report) = replayed(snapshot.path(), &*planner);
    assert_eq!(report.execute.zero_bytes, snapshot.zero_map().count() * PAGE);
    let cached = cached(again.image_file().unwrap(), pages).unwrap();
    assert!(cached.iter().all(|page| !snapshot.zero_map().get(page)), "a free page was read");
}

/// The number of some image pages in the page cache.
fn cached_of(snapshot: &Snapshot, pages: &PageSet) -> u64 {
    let cached = cached(snapshot.image_file().unwrap(), pages.pages()).unwrap();
    pages.iter().filter(|page| cached.get(*page)).count() as u64
}

#[test]
fn faast_maps_zeros_for_free_pages() {
    let dir = tempfile::tempdir().unwrap();
    let Some((snapshot, free)) = player_with_free_pages(dir.path(), false) else { return };
    assert!(free.iter().all(|page| !snapshot.zero_map().get(page)), "no free page is zero");
    profile(&snapshot, Part::Faults);
    let [reap, faast] = ["reap", "faast"].map(|written| {
        let planner = parse(written).unwrap();
        let packed = pack(snapshot.path(), &*planner).unwrap().unwrap();
        // The player has already checked all its memory.
        let (_, report) = replayed(snapshot.path(), &*planner);
        (packed.pages, report.counters.pager.unwrap(), report.execute.zero_bytes)
    });
    let of_b = load("json-b").unwrap().trace;
    let written = of_b.touches().iter().filter(|touch| touch.access == Access::Write).count();
    assert_eq!(reap.0 - faast.0, written as u64, "written free pages are not in the working set");
    assert_eq!((reap.2, faast.2), (0, free.count() * PAGE));
    // The pager serves no fault for a free page.
    let first_touches = |name| {
        let trace = load(name).unwrap().trace;
        let first = trace.touches().iter().filter(|touch| touch.access != Access::LaterWrite);
        first.map(|touch| touch.page).collect::<BTreeSet<_>>()
    };
    let missing = &first_touches("json-a") - &first_touches("json-b");
    let missing_and_free = missing.iter().filter(|page| free.get(**page)).count() as u64;
    assert_eq!(reap.1.faults - faast.1.faults, missing_and_free);
    assert_eq!((reap.1.direct_reads, faast.1.direct_reads), (1, 1));
}

#[test]
fn snapbpf_never_reads_pages_that_the_guest_reported_free() {
    let dir = tempfile::tempdir().unwrap();
    let Some((snapshot, free)) = player_with_free_pages(dir.path(), true) else { return };
    let recorded = profile(&snapshot, Part::Cache);
    let reported = PageSet::of(recorded.reported.as_ref().unwrap(), free.pages());
    assert!(reported.count() > 100);
    assert!(reported.iter().all(|page| free.get(page) && snapshot.zero_map().get(page)));
    let (again, report) = replayed(snapshot.path(), &*parse("snapbpf").unwrap());
    assert_eq!(report.execute.zero_bytes, reported.count() * PAGE);
    assert_eq!((report.execute.packed_bytes, cached_of(&again, &reported)), (0, 0));
}
