//! Real players on this host's KVM: correct memory passes, wrong memory is detected.

mod again;
mod elf;

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;

use firn_base::{GuestRange, PageRange};
use firn_memory::planners::{ImageFacts, PlanInput, Planner, PlannerError, parse, select};
use firn_memory::trace::{Access, GapUnit, Touch, Toucher, Trace, TraceOrigin};
use firn_memory::{Advice, HostFacts, Integrity, Layer, Leaf, Plan, Segment, Sharing, Source};
use firn_player::format::{PAGE, TOUCHED_WORD};
use firn_run::player::{replay, traces_of};
use firn_run::{Clock, ReplaySpec, StartError, StartReport};
use firn_snapshot::{Destination, MemoryLayout, MemoryRegion, PageSet, Snapshot};
use firn_vmm::KVM_DEVICE;
use proptest::prelude::{Just, Strategy, any, prop_oneof, proptest};
use proptest::test_runner::Config;

use super::{Leaves, PlayerInputs, PlayerOptions, freeze};
use crate::traces::{NamedTrace, load};

/// Pages of the memory of [`some_trace`].
const PAGES: u64 = 2048;
const ZERO: std::ops::Range<u64> = 1024..1536;

fn player(trace: &NamedTrace, options: PlayerOptions, dir: &Path) -> Snapshot {
    let path = dir.join("snapshot");
    let destination = Destination::Directory(path.clone());
    let inputs = PlayerInputs::new(vec![trace.clone()]).unwrap();
    freeze(&inputs, &options, KVM_DEVICE.as_ref(), destination, false).unwrap();
    Snapshot::open(&path).unwrap()
}

fn run_by(snapshot: &Snapshot, planner: &dyn Planner) -> Result<StartReport, StartError> {
    run_input(snapshot, None, planner)
}

fn run_input(
    snapshot: &Snapshot,
    input: Option<&str>,
    planner: &dyn Planner,
) -> Result<StartReport, StartError> {
    let source = firn_run::Source::open_directory(snapshot.path()).unwrap();
    let spec = ReplaySpec { input: input.map(str::to_owned), ..ReplaySpec::default() };
    let kvm = Path::new(KVM_DEVICE).into();
    replay(&source, &spec, planner, kvm, &Clock::now())
}

fn run(snapshot: &Snapshot, planner: &str) -> Result<StartReport, StartError> {
    run_by(snapshot, &*parse(planner).unwrap())
}

fn named(layout: MemoryLayout, zero: &[u64], touches: Vec<Touch>) -> NamedTrace {
    let origin = TraceOrigin {
        function: "some".into(),
        input: "a".into(),
        command: String::new(),
        host: String::new(),
        gaps: GapUnit::Instructions,
    };
    let mut zero_map = PageSet::new(layout.pages());
    zero.iter().for_each(|page| zero_map.insert(*page));
    NamedTrace {
        name: "some".into(),
        trace: Trace::new(origin, layout, zero_map, touches).unwrap(),
    }
}

fn touch(page: u64, access: Access, leaf: Leaf) -> Touch {
    Touch { page, access, by: Toucher::Instruction, leaf, gap: page % 7 * 100 }
}

/// Every kind of touch, of zero pages and others, through every leaf. A third of the pages is not
/// touched.
fn some_trace() -> NamedTrace {
    let zero: Vec<u64> = ZERO.collect();
    let mut touches = Vec::new();
    for page in (0..PAGES).rev().filter(|page| page % 3 != 0) {
        let leaf = [Leaf::Size4K, Leaf::Size2M, Leaf::Size1G]
            [usize::from(page % 4 != 0) + usize::from(page % 8 == 1)];
        let access = if page % 5 == 0 { Access::Write } else { Access::Read };
        touches.push(touch(page, access, leaf));
        if access == Access::Read && page % 4 == 2 {
            touches.push(touch(page, Access::LaterWrite, leaf));
        }
    }
    named(MemoryLayout::for_size(PAGES * PAGE).unwrap(), &zero, touches)
}

#[test]
fn every_planner_restores_every_kind_of_player() {
    let trace = some_trace();
    for leaves in [Leaves::Recorded, Leaves::All4K, Leaves::All2M] {
        let dir = tempfile::tempdir().unwrap();
        let options = PlayerOptions {
            leaves,
            gaps: "0.5".parse().unwrap(),
            seed: 7,
            ..PlayerOptions::default()
        };
        let snapshot = player(&trace, options, dir.path());
        assert_eq!(traces_of(snapshot.manifest()), Some(vec!["some"]));
        let facts = HostFacts::read().unwrap();
        let input = PlanInput {
            layout: &snapshot.manifest().layout,
            image: ImageFacts::of_snapshot(&snapshot, None).unwrap(),
            zero_map: snapshot.zero_map(),
            profile: None,
            snapshot: Some(&snapshot),
            copies: None,
            host: &facts,
        };
        let planners = select("all", &input).unwrap().planners;
        assert!(planners.len() > 2);
        for planner in planners {
            let report = run_by(&snapshot, &*planner).unwrap();
            assert_eq!(report.replay.as_ref().unwrap().trace, "some");
            assert_eq!(report.planner, planner.name());
            assert_eq!(report.replay.as_ref().unwrap().touches, trace.trace.touches().len() as u64);
            assert_eq!(report.replay.as_ref().unwrap().pages, trace.trace.touched_pages());
            assert!(
                report.counters.private_bytes >= trace.trace.written_pages() * PAGE,
                "{report:?}"
            );
            assert!(
                report.counters.kvm.page_faults > 0 && report.counters.cpu_ns > 0,
                "{report:?}"
            );
        }
    }
}

/// Changes one byte of a page of the image, at `offset` in the page.
fn damage(snapshot: &Snapshot, page: u64, offset: u64) {
    let path = snapshot.path().join("memory.img");
    let image = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    image.read_exact_at(&mut byte, page * PAGE + offset).unwrap();
    image.write_all_at(&[byte[0] ^ 0x10], page * PAGE + offset).unwrap();
}

fn refusal(snapshot: &Snapshot) -> String {
    match run(snapshot, "firecracker") {
        Err(StartError::Wrong { wrong, .. }) => wrong,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_wrong_page_anywhere_fails_the_run() {
    let cases = [
        (7, TOUCHED_WORD * 8, "pages in the timed loop: 1 (0x7); "),
        (7, TOUCHED_WORD * 8, "pages in the second pass: 1 (0x7)"),
        // A byte of a read page that the loop does not read.
        (7, 0, "pages in the second pass: 1 (0x7)"),
        (7, PAGE - 1, "pages in the second pass: 1 (0x7)"),
        // A page that no touch reads, the last page, a zero page, and a page that is written.
        (9, 100, "pages in the second pass: 1 (0x9)"),
        (PAGES - 1, 4000, "pages in the second pass: 1 (0x7ff)"),
        (1027, TOUCHED_WORD * 8, "pages in the timed loop: 1 (0x403); "),
        (1026, 8, "pages in the second pass: 1 (0x402)"),
        (5, 16, "pages in the second pass: 1 (0x5)"),
        // The place where the monitor writes a Linux guest's generation id.
        (0xc0, 0, "pages in the second pass: 1 (0xc0)"),
    ];
    let trace = some_trace();
    for (page, offset, expected) in cases {
        let dir = tempfile::tempdir().unwrap();
        let snapshot = player(&trace, PlayerOptions::default(), dir.path());
        damage(&snapshot, page, offset);
        let wrong = refusal(&snapshot);
        assert!(wrong.contains(expected), "page {page:#x} at {offset}: {wrong}");
    }
}

/// The header, the touches, the bitmaps and the page tables; the program too, where it still runs.
#[test]
fn a_damaged_player_never_passes() {
    let trace = some_trace();
    let mut found = 0;
    for page in 0..40 {
        let dir = tempfile::tempdir().unwrap();
        let snapshot = player(&trace, PlayerOptions::default(), dir.path());
        let path = snapshot.path().join("memory.img");
        let image = OpenOptions::new().read(true).write(true).open(path).unwrap();
        let mut before = [0; 4096];
        image.read_exact_at(&mut before, (PAGES + page) * PAGE).unwrap();
        if before == [0; 4096] {
            continue;
        }
        found += 1;
        image.write_all_at(&[0; 4096], (PAGES + page) * PAGE).unwrap();
        let result = run(&snapshot, "firecracker");
        assert!(result.is_err(), "page {page}: {result:?}");
    }
    assert!(found > 8, "{found}");
}

/// Like [`some_trace`] in reverse order, with other pages written and others left out.
fn another_trace() -> NamedTrace {
    let NamedTrace { trace, .. } = some_trace();
    let touches = (0..PAGES).filter(|page| page % 7 != 0).map(|page| {
        let access = if page % 6 == 1 { Access::Write } else { Access::Read };
        touch(page, access, if page % 2 == 0 { Leaf::Size4K } else { Leaf::Size2M })
    });
    let (layout, zero_map) = (trace.layout().clone(), trace.zero_map().clone());
    let other = Trace::new(trace.origin().clone(), layout, zero_map, touches.collect()).unwrap();
    NamedTrace { name: "other".to_owned(), trace: other }
}

#[test]
fn a_player_replays_the_input_that_the_thaw_names() {
    let traces = [some_trace(), another_trace()];
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("snapshot");
    let destination = Destination::Directory(path.clone());
    let inputs = PlayerInputs::new(traces.to_vec()).unwrap();
    freeze(&inputs, &PlayerOptions::default(), KVM_DEVICE.as_ref(), destination, false).unwrap();
    let snapshot = Snapshot::open(&path).unwrap();
    assert_eq!(traces_of(snapshot.manifest()), Some(vec!["some", "other"]));
    let planner = parse("firecracker").unwrap();
    let run = |input| run_input(&snapshot, input, &*planner);
    let image = std::fs::read(path.join("memory.img")).unwrap();
    for (input, NamedTrace { name, trace }) in
        [(None, &traces[0]), (Some("some"), &traces[0]), (Some("other"), &traces[1])]
    {
        let report = run(input).unwrap();
        assert_eq!(report.replay.as_ref().unwrap().trace, *name);
        assert_eq!(report.replay.as_ref().unwrap().touches, trace.touches().len() as u64);
        assert_eq!(report.replay.as_ref().unwrap().pages, trace.touched_pages());
        assert!(report.counters.private_bytes >= trace.written_pages() * PAGE, "{report:?}");
    }
    assert!(std::fs::read(path.join("memory.img")).unwrap() == image);
    let error = run(Some("none")).unwrap_err().to_string();
    assert!(error.contains("none") && error.contains("some, other"), "{error}");
    // A page that only the other input touches is checked for both.
    damage(&snapshot, 9, 100);
    assert!(run(None).unwrap_err().to_string().contains("0x9"));
    assert!(run(Some("other")).unwrap_err().to_string().contains("0x9"));
}

#[test]
fn traces_of_different_memories_cannot_share_a_player() {
    let trace = some_trace();
    let refused = |traces| PlayerInputs::new(traces).unwrap_err().to_string();
    let zero = named(trace.trace.layout().clone(), &[], Vec::new());
    let zero = NamedTrace { name: "zero".to_owned(), ..zero };
    assert!(refused(vec![trace.clone(), zero]).contains("zero is of another guest memory"));
    let free = NamedTrace { name: "free".to_owned(), ..free_trace() };
    assert!(refused(vec![trace.clone(), free]).contains("free is of another guest memory"));
    let larger = load("sequential-read:64M").unwrap();
    assert!(refused(vec![trace.clone(), larger]).contains("another guest memory than some"));
    assert!(refused(vec![trace.clone(), trace.clone()]).contains("twice"));
    assert!(refused(Vec::new()).contains("not 0"));
    assert!(refused(vec![trace.clone(); 5]).contains("not 5"));
    let comma = NamedTrace { name: "a,b".to_owned(), ..trace };
    assert!(refused(vec![comma]).contains("comma"));
}

/// Built-in traces of one function, whose two inputs were recorded from one snapshot.
#[test]
fn recorded_inputs_of_one_function_share_a_player() {
    let traces = ["json-a", "json-b"].map(|name| load(name).unwrap());
    PlayerInputs::new(traces.to_vec()).unwrap();
}

#[test]
fn swapped_pages_are_detected() {
    let dir = tempfile::tempdir().unwrap();
    let snapshot = player(&some_trace(), PlayerOptions::default(), dir.path());
    let path = snapshot.path().join("memory.img");
    let image = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let (mut one, mut other) = ([0; 4096], [0; 4096]);
    image.read_exact_at(&mut one, 9 * PAGE).unwrap();
    image.read_exact_at(&mut other, 12 * PAGE).unwrap();
    image.write_all_at(&one, 12 * PAGE).unwrap();
    image.write_all_at(&other, 9 * PAGE).unwrap();
    assert_eq!(refusal(&snapshot), "guest pages in the second pass: 2 (0x9, 0xc)");
}

#[test]
fn many_wrong_pages_are_counted_and_the_first_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let snapshot = player(&some_trace(), PlayerOptions::default(), dir.path());
    (0..100).for_each(|page| damage(&snapshot, page * 9, 0));
    let wrong = refusal(&snapshot);
    assert!(wrong.starts_with("guest pages in the second pass: 100 (0x0, 0x9, 0x12"), "{wrong}");
    assert!(wrong.ends_with("and more)"), "{wrong}");
}

/// Serves pages from `first` on as zeros although the image has content for them.
struct Skipping {
    first: u64,
    pages: u64,
}

impl Planner for Skipping {
    fn name(&self) -> String {
        "skipping".to_owned()
    }

    fn plan(&self, input: &PlanInput<'_>) -> Result<Plan, PlannerError> {
        let mut plan = parse("firecracker").unwrap().plan(input)?;
        let guest = GuestRange { start: self.first * PAGE, len: self.pages * PAGE };
        let (source, sharing) = (Source::Zero, Sharing::Exclusive);
        let whole = plan.segments.remove(0);
        let Source::Image { offset } = whole.source else { panic!("{whole:?}") };
        let before = GuestRange { start: whole.guest.start, len: guest.start - whole.guest.start };
        let after = GuestRange { start: guest.end(), len: whole.guest.end() - guest.end() };
        let after_source = Source::Image { offset: offset + guest.end() - whole.guest.start };
        let (leaf, integrity) = (Leaf::Size4K, Integrity::CheckedOnFill);
        plan.segments.splice(
            0..0,
            [
                Segment { guest: before, ..whole },
                Segment { guest, source, sharing, leaf, integrity },
                Segment { guest: after, source: after_source, ..whole },
            ],
        );
        plan.layers.push(Layer { guest, source, sharing, advice: Advice::Normal });
        plan.planner = self.name();
        Ok(plan)
    }
}

#[test]
fn a_planner_that_skips_work_is_detected() {
    let dir = tempfile::tempdir().unwrap();
    let snapshot = player(&some_trace(), PlayerOptions::default(), dir.path());
    // One page that is read, one that is only written, one that is not touched.
    for (first, expected) in [
        (7, "guest pages in the timed loop: 1 (0x7); guest pages in the second pass: 1 (0x7)"),
        (5, "guest pages in the second pass: 1 (0x5)"),
        (9, "guest pages in the second pass: 1 (0x9)"),
    ] {
        match run_by(&snapshot, &Skipping { first, pages: 1 }) {
            Err(StartError::Wrong { planner, wrong }) => {
                assert_eq!((planner.as_str(), wrong.as_str()), ("skipping", expected));
            }
            other => panic!("{other:?}"),
        }
    }
    // Serving zero pages as zeros is correct.
    run_by(&snapshot, &Skipping { first: ZERO.start, pages: 512 }).unwrap();
}

/// Free pages: some read, some written, some neither; those from 1024 on are partly zero.
const FREE: std::ops::Range<u64> = 1000..1048;

fn free_trace() -> NamedTrace {
    let NamedTrace { name, trace } = some_trace();
    let mut free = PageSet::new(PAGES);
    free.insert_range(FREE);
    NamedTrace { name, trace: trace.with_free(free).unwrap() }
}

fn skipped(snapshot: &Snapshot, first: u64, pages: u64) -> Result<(), String> {
    match run_by(snapshot, &Skipping { first, pages }) {
        Ok(_) => Ok(()),
        Err(StartError::Wrong { wrong, .. }) => Err(wrong),
        Err(other) => panic!("{other:?}"),
    }
}

#[test]
fn free_pages_have_the_image_s_content_or_zeros() {
    for (sanitised, zero) in [(true, ZERO.start..FREE.end), (false, 0..0)] {
        let dir = tempfile::tempdir().unwrap();
        let options = PlayerOptions { sanitised, ..PlayerOptions::default() };
        let snapshot = player(&free_trace(), options, dir.path());
        let zeros =
            |pages: std::ops::Range<u64>| pages.filter(|page| snapshot.zero_map().get(*page));
        assert!(zeros(FREE).eq(zero.clone()), "{sanitised}");
        assert!(zeros(FREE.end..ZERO.end).eq(FREE.end..ZERO.end), "zero, and in use");
        let profile = snapshot.profile().unwrap().unwrap();
        assert_eq!(profile.free, Some(vec![PageRange::from(FREE)]));
        let reported = (!zero.is_empty()).then(|| vec![PageRange::from(zero)]);
        assert_eq!(profile.reported, reported);

        run(&snapshot, "firecracker").unwrap();
        skipped(&snapshot, FREE.start, FREE.end - FREE.start).unwrap();
        // One more page on either side of those that are zero anyway.
        let wrong = skipped(&snapshot, FREE.start - 1, 2).unwrap_err();
        assert!(wrong.ends_with("in the second pass: 1 (0x3e7)"), "{wrong}");
        // Neither the image's content nor zeros: a page that is read, and one that is not touched.
        for (page, in_loop) in [(1001, true), (1002, false)] {
            damage(&snapshot, page, TOUCHED_WORD * 8);
            let wrong = refusal(&snapshot);
            assert_eq!(wrong.contains("timed loop"), in_loop, "{wrong}");
            assert!(wrong.ends_with(&format!("in the second pass: 1 ({page:#x})")), "{wrong}");
            damage(&snapshot, page, TOUCHED_WORD * 8);
        }
    }
}

#[test]
fn a_snapshot_that_is_not_of_a_player_is_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let snapshot = player(&some_trace(), PlayerOptions::default(), dir.path());
    let mut manifest = snapshot.manifest().clone();
    assert!(traces_of(&manifest).is_some());
    manifest.description.function.as_mut().unwrap().handler = "player.handler".to_owned();
    assert_eq!(traces_of(&manifest), None);
    manifest.description.function = None;
    assert_eq!(traces_of(&manifest), None);
}

/// 1 GiB, nearly all of it zero; and memory on both sides of the gap for devices.
#[test]
fn large_guests_and_several_regions_are_replayed() {
    let giga = MemoryLayout::for_size(1 << 30).unwrap();
    let content: Vec<u64> = (0..200).map(|n| n * 1301).collect();
    let zero: Vec<u64> = (0..giga.pages()).filter(|page| !content.contains(page)).collect();
    let touches: Vec<Touch> = (0..giga.pages())
        .step_by(650)
        .map(|page| touch(page, Access::Read, Leaf::Size4K))
        .collect();
    let regions = [(0, 3 << 20), (4 << 30, 1 << 20)];
    let split = regions.map(|(guest_addr, len)| MemoryRegion { guest_addr, len });
    let split = MemoryLayout::new(split.to_vec()).unwrap();
    let pages = (0..768).chain((4 << 18)..(4 << 18) + 256);
    let all = pages.map(|page| touch(page, Access::Write, Leaf::Size2M)).collect();
    for trace in [named(giga, &zero, touches), named(split, &[3, 770], all)] {
        let dir = tempfile::tempdir().unwrap();
        let snapshot = player(&trace, PlayerOptions::default(), dir.path());
        let report = run(&snapshot, "firecracker").unwrap();
        assert_eq!(report.replay.as_ref().unwrap().touches, trace.trace.touches().len() as u64);
    }
}

#[test]
fn the_seed_determines_the_content() {
    let image = |seed| {
        let dir = tempfile::tempdir().unwrap();
        let trace = load("sequential-read:1M").unwrap();
        let options = PlayerOptions { seed, ..PlayerOptions::default() };
        let snapshot = player(&trace, options, dir.path());
        run(&snapshot, "firecracker").unwrap();
        let mut page = [0; 4096];
        snapshot.image_file().unwrap().read_exact_at(&mut page, 17 * PAGE).unwrap();
        page
    };
    assert_ne!(image(1), image(2));
    assert_eq!(image(u64::MAX), image(u64::MAX));
}

/// Touches of different pages in any order, some of them written later.
fn touches() -> impl Strategy<Value = Vec<Touch>> {
    let leaf = prop_oneof![Just(Leaf::Size4K), Just(Leaf::Size2M), Just(Leaf::Size1G)];
    let touch = (0..PAGES, any::<bool>(), any::<bool>(), leaf, 0..10_000_u64);
    proptest::collection::vec(touch, 0..300).prop_map(|list| {
        let mut seen = std::collections::BTreeSet::new();
        let (mut first, mut later) = (Vec::new(), Vec::new());
        for (page, writes, again, leaf, gap) in list {
            if seen.insert(page) {
                let access = if writes { Access::Write } else { Access::Read };
                let by = Toucher::Instruction;
                first.push(Touch { page, access, by, leaf, gap });
                if again && !writes {
                    later.push(Touch { page, access: Access::LaterWrite, by, leaf, gap });
                }
            }
        }
        first.extend(later);
        first
    })
}

proptest! {
    #![proptest_config(Config::with_cases(16))]
    #[test]
    fn any_trace_is_replayed(
        touches in touches(),
        zero in proptest::collection::vec(0..PAGES, 0..500),
        seed: u64,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let trace = named(MemoryLayout::for_size(PAGES * PAGE).unwrap(), &zero, touches);
        let gaps = "0.1".parse().unwrap();
        let options = PlayerOptions { seed, gaps, ..PlayerOptions::default() };
        let snapshot = player(&trace, options, dir.path());
        let report = run(&snapshot, "firecracker:readahead=off").unwrap();
        assert_eq!(report.replay.as_ref().unwrap().pages, trace.trace.touched_pages());
    }
}
