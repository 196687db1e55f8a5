//! Second invocations, repeated accesses, and the modelled medium.

use std::num::NonZero;

use firn_memory::trace::{Again, Repeat};

use super::{
    Access, Destination, FileExt, KVM_DEVICE, Leaf, MemoryLayout, NamedTrace, OpenOptions, PAGE,
    PAGES, Path, PlayerInputs, PlayerOptions, ReplaySpec, Snapshot, StartReport, TOUCHED_WORD,
    freeze, named, parse, player, replay, some_trace, touch,
};
use crate::player::{FreezePlayerError, GapFactor, MediumModel, PlayerMemoryError, Repeats};

fn run(snapshot: &Snapshot, planner: &str, warm: bool) -> StartReport {
    let source = firn_run::Source::open_directory(snapshot.path()).unwrap();
    let spec = ReplaySpec { warm, ..ReplaySpec::default() };
    let kvm = Path::new(KVM_DEVICE).into();
    let planner = parse(planner).unwrap();
    replay(&source, &spec, &*planner, kvm, &firn_run::Clock::now()).unwrap()
}

/// Gaps of 700 instructions in the mean; half of the pages is read, half is written.
fn working_trace() -> NamedTrace {
    let access = |page| if page % 2 == 0 { Access::Read } else { Access::Write };
    let touches = (0..PAGES).map(|page| touch(page, access(page), Leaf::Size4K)).collect();
    named(MemoryLayout::for_size(PAGES * PAGE).unwrap(), &[], touches)
}

#[test]
fn a_second_invocation_finds_what_the_first_one_wrote() {
    for planner in ["firecracker", "firecracker:readahead=off"] {
        let dir = tempfile::tempdir().unwrap();
        let snapshot = player(&some_trace(), PlayerOptions::default(), dir.path());
        let alone = run(&snapshot, planner, false);
        let both = run(&snapshot, planner, true);
        assert_eq!((alone.times.warm_ns, both.times.warm_ns.is_some()), (None, true));
        // Counters are of the first invocation.
        let touches = |report: &StartReport| report.replay.as_ref().unwrap().touches;
        assert_eq!(touches(&alone), touches(&both));
    }
}

#[test]
fn repeated_accesses_follow_the_work_at_their_rate() {
    let trace = working_trace();
    let turns: u64 = trace.trace.touches().iter().map(|touch| touch.gap / 2).sum();
    for every in [200, 1000] {
        let dir = tempfile::tempdir().unwrap();
        let again = NonZero::new(every).map(Repeats::Random);
        let options = PlayerOptions { gaps: GapFactor::FULL, again, ..PlayerOptions::default() };
        let snapshot = player(&trace, options, dir.path());
        let replayed = run(&snapshot, "firecracker", true).replay.unwrap();
        // Nothing was touched before the first touch, which has no gap here.
        assert_eq!(replayed.repeated, turns / u64::from(every / 2));
        // Reads of the trace, and about half of the repeated accesses.
        let repeats = replayed.read_only_loads - PAGES / 2;
        let share = repeats as f64 / replayed.repeated as f64;
        assert!((0.4..0.6).contains(&share), "{share}");
    }
}

#[test]
fn a_player_without_repeats_or_model_counts_none() {
    let dir = tempfile::tempdir().unwrap();
    let snapshot = player(&working_trace(), PlayerOptions::default(), dir.path());
    let report = run(&snapshot, "firecracker", false);
    let replayed = report.replay.unwrap();
    assert_eq!((replayed.repeated, replayed.read_only_loads), (0, 0));
    assert_eq!(report.times.connect_ns, None);
}

#[test]
fn the_time_to_connect_is_a_part_of_the_start() {
    let trace = working_trace();
    let of = |connect| {
        let dir = tempfile::tempdir().unwrap();
        let options = PlayerOptions { connect: Some(connect), ..PlayerOptions::default() };
        let report = run(&player(&trace, options, dir.path()), "firecracker", false);
        (report.times.connect_ns.unwrap(), report.times.total_ns)
    };
    // The second counts every touch, also with a number beyond the trace's.
    for connect in [PAGES / 2, PAGES, PAGES * 2] {
        let (connecting, all) = of(connect);
        assert!(0 < connecting && connecting < all, "{connecting} of {all}");
    }
}

#[test]
fn a_modelled_medium_counts_the_loads_from_pages_that_are_never_written() {
    let dir = tempfile::tempdir().unwrap();
    let medium = Some(MediumModel { load_ns: 220.0, copy_ns: 644.0 });
    let options = PlayerOptions { medium, ..PlayerOptions::default() };
    let snapshot = player(&working_trace(), options, dir.path());
    let replayed = run(&snapshot, "firecracker", true).replay.unwrap();
    assert_eq!((replayed.repeated, replayed.read_only_loads), (0, PAGES / 2));
}

/// The spin is a loop of a known length, so it is a lower bound that no load of the host shortens:
/// only the calibration, which can have run at a tenth of the guest's speed.
#[test]
fn a_modelled_medium_lengthens_a_replay_by_its_loads_and_copies() {
    let of = |medium, warm| {
        let dir = tempfile::tempdir().unwrap();
        let options = PlayerOptions { medium, ..PlayerOptions::default() };
        run(&player(&working_trace(), options, dir.path()), "firecracker", warm).times
    };
    const SPIN: u64 = 200_000;
    let least = PAGES / 2 * SPIN / 10;
    let loads = MediumModel { load_ns: SPIN as f64, copy_ns: 0.0 };
    let copies = MediumModel { load_ns: 0.0, copy_ns: SPIN as f64 };
    let loading = of(Some(loads), true);
    assert!(loading.replay_ns.unwrap() >= least, "{loading:?}");
    // A page that is never written stays on the medium.
    assert!(loading.warm_ns.unwrap() >= least, "{loading:?}");
    let copying = of(Some(copies), false);
    assert!(copying.replay_ns.unwrap() >= least, "{copying:?}");
}

#[test]
fn an_unchecked_player_checks_what_it_touches_and_nothing_else() {
    let trace = working_trace();
    let dir = tempfile::tempdir().unwrap();
    let snapshot = player(&trace, PlayerOptions::default(), dir.path());
    let of = |unchecked| {
        let source = firn_run::Source::open_directory(snapshot.path()).unwrap();
        let spec = ReplaySpec { unchecked, ..ReplaySpec::default() };
        let kvm = Path::new(KVM_DEVICE).into();
        let planner = parse("firecracker").unwrap();
        replay(&source, &spec, &*planner, kvm, &firn_run::Clock::now()).map(drop)
    };
    let image = OpenOptions::new().write(true).open(snapshot.path().join("memory.img")).unwrap();
    // Beside the word that a touch of page 0 reads.
    let beside = (TOUCHED_WORD + 1) * 8;
    image.write_all_at(&[0xab; 8], beside).unwrap();
    of(true).unwrap();
    assert!(of(false).unwrap_err().to_string().contains("second pass"));
    image.write_all_at(&[0xab; 8], TOUCHED_WORD * 8).unwrap();
    assert!(of(true).unwrap_err().to_string().contains("timed loop"));
}

/// The first invocation reads pages 0 and 2, and writes page 1; some accesses are repeated. The
/// second one also reads page 3, writes page 2, and touches pages of its own.
fn recorded_trace() -> NamedTrace {
    let touch = |page, access| touch(page, access, Leaf::Size4K);
    let touches = [(0, Access::Read), (1, Access::Write), (2, Access::Read), (4, Access::Read)];
    let touches = touches.map(|(page, access)| touch(page, access)).to_vec();
    let repeat = |after, page, access| {
        let touch = firn_memory::trace::Touch { gap: 1, ..touch(page, access) };
        Repeat { after, touch }
    };
    let repeats = vec![
        repeat(2, 0, Access::Read),
        repeat(2, 1, Access::Write),
        repeat(3, 1, Access::Read),
        repeat(4, 4, Access::Read),
        repeat(4, 2, Access::Read),
    ];
    let second = [
        (2, Access::Write),
        (2, Access::Read),
        (1, Access::Read),
        (1, Access::Write),
        (3, Access::Read),
        (5, Access::Write),
        (0, Access::Read),
        (0, Access::Read),
        (4, Access::Write),
    ];
    let second = second.map(|(page, access)| touch(page, access)).to_vec();
    let again = Again { period: 100, request: 3, repeats, second };
    // Page 4 is zero.
    let NamedTrace { name, trace } =
        named(MemoryLayout::for_size(PAGES * PAGE).unwrap(), &[4], touches);
    NamedTrace { name, trace: trace.with_again(again).unwrap() }
}

#[test]
fn recorded_repeats_and_a_recorded_second_invocation_are_replayed() {
    let all = [None, Some(Repeats::Recorded), NonZero::new(100).map(Repeats::Random)];
    for (again, repeated) in all.into_iter().zip([0, 5, 0]) {
        for medium in [None, Some(MediumModel { load_ns: 1.0, copy_ns: 1.0 })] {
            let dir = tempfile::tempdir().unwrap();
            let options = PlayerOptions { again, medium, ..PlayerOptions::default() };
            let snapshot = player(&recorded_trace(), options, dir.path());
            // The second pass checks what the first invocation has written, or both.
            for warm in [false, true] {
                let report = run(&snapshot, "firecracker", warm);
                let replayed = report.replay.unwrap();
                assert_eq!((replayed.touches, replayed.pages), (4, 4));
                assert_eq!((replayed.repeated, report.times.warm_ns.is_some()), (repeated, warm));
                assert!(report.times.connect_ns.unwrap() > 0);
            }
        }
    }
}

#[test]
fn repeats_that_a_trace_does_not_have_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let options = PlayerOptions { again: Some(Repeats::Recorded), ..PlayerOptions::default() };
    let destination = Destination::Directory(dir.path().join("snapshot"));
    let inputs = PlayerInputs::new(vec![some_trace()]).unwrap();
    let refused = freeze(&inputs, &options, KVM_DEVICE.as_ref(), destination, false).unwrap_err();
    let FreezePlayerError::Memory(PlayerMemoryError::NoRepeats(function)) = refused else {
        panic!("{refused}")
    };
    assert_eq!(function, "some");
}
