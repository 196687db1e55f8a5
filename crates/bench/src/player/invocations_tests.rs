use firn_memory::Leaf;
use firn_memory::trace::{Access, Again, GapUnit, Repeat, Touch, Toucher, Trace, TraceOrigin};
use firn_player::format::{self, Kind, PAGE};
use firn_snapshot::{MemoryLayout, PageSet};

use super::{gaps, invocations};
use crate::player::{GapFactor, PlayerOptions, Repeats};

fn touch(page: u64, access: Access, gap: u64) -> Touch {
    Touch { page, access, by: Toucher::Instruction, leaf: Leaf::Size4K, gap }
}

fn trace(touches: Vec<Touch>) -> Trace {
    let origin = TraceOrigin {
        function: String::new(),
        input: String::new(),
        command: String::new(),
        host: String::new(),
        gaps: GapUnit::Instructions,
    };
    let layout = MemoryLayout::for_size(1 << 20).unwrap();
    let zero_map = PageSet::new(layout.pages());
    Trace::new(origin, layout, zero_map, touches).unwrap()
}

#[test]
fn gaps_are_scaled_and_become_iterations() {
    let scaled = |unit, factor: &str, list: &[u64]| {
        let touches: Vec<Touch> = list.iter().map(|gap| touch(0, Access::Read, *gap)).collect();
        gaps(unit, factor.parse().unwrap(), &touches)
    };
    let instructions = |factor| scaled(GapUnit::Instructions, factor, &[0, 1, 1000, u64::MAX]);
    assert_eq!(instructions("0"), [0; 4]);
    assert_eq!(instructions("1"), [0, 0, 500, u32::MAX]);
    assert_eq!(instructions("0.5"), [0, 0, 250, u32::MAX]);
    assert_eq!(instructions("3"), [0, 1, 1500, u32::MAX]);
    assert_eq!(scaled(GapUnit::Nanoseconds, "2", &[0, 100]), [0, 600]);
}

/// Page 0 is zero. Pages 0 and 1 are read, page 2 is written; page 1 is written later.
fn recorded() -> Trace {
    let trace = trace(vec![
        touch(0, Access::Read, 10),
        touch(1, Access::Read, 20),
        touch(2, Access::Write, 30),
        touch(1, Access::LaterWrite, 400),
    ]);
    let repeat = |after, page, access, gap| Repeat { after, touch: touch(page, access, gap) };
    let repeats = vec![
        repeat(3, 0, Access::Read, 100),
        repeat(3, 1, Access::Read, 60),
        repeat(3, 2, Access::Read, 40),
        repeat(4, 1, Access::Write, 8),
    ];
    let second = vec![
        touch(2, Access::Read, 2),
        touch(3, Access::Read, 4),
        touch(3, Access::Write, 6),
        touch(2, Access::Read, 8),
        touch(3, Access::Write, 10),
        touch(0, Access::Write, 12),
    ];
    trace.with_again(Again { period: 50, request: 5, repeats, second }).unwrap()
}

fn of(trace: &Trace, again: Option<Repeats>) -> (super::Invocation, super::Invocation, u64) {
    let mut zero_map = PageSet::new(trace.layout().pages());
    zero_map.insert(0);
    let options = PlayerOptions { again, gaps: GapFactor::FULL, ..PlayerOptions::default() };
    invocations(trace, &zero_map, &options, (0, 0)).unwrap()
}

fn list(invocation: &super::Invocation) -> Vec<(u64, Kind, u32)> {
    let touch = |(touch, gap): (&format::Touch, &u32)| (touch.page(), touch.kind(), *gap);
    invocation.touches.iter().zip(&invocation.gaps).map(touch).collect()
}

#[test]
fn repeats_stand_between_the_touches_and_the_work_stays_the_same() {
    let (first, second, connected) = of(&recorded(), Some(Repeats::Recorded));
    let expected = [
        (0, Kind::ReadZero, 5),
        (1, Kind::Read, 10),
        (2, Kind::Write, 15),
        (0, Kind::ReadAgainZero, 50),
        (1, Kind::ReadAgain, 30),
        (2, Kind::ReadAgain, 20),
        (1, Kind::Write, 100),
        (1, Kind::WriteAgain, 4),
    ];
    assert_eq!((list(&first), first.repeats, connected), (expected.to_vec(), 4, 5));
    let expected = [
        (2, Kind::ReadAgain, 1),
        (3, Kind::Read, 2),
        (3, Kind::Write, 3),
        (2, Kind::ReadAgain, 4),
        (3, Kind::WriteAgain, 5),
        (0, Kind::Write, 6),
    ];
    assert_eq!((list(&second), second.repeats), (expected.to_vec(), 0));
    assert_eq!(first.written.iter().collect::<Vec<_>>(), [1, 2]);
    assert_eq!(second.written.iter().collect::<Vec<_>>(), [0, 1, 2, 3]);
}

#[test]
fn without_repeats_their_work_remains() {
    let (first, second, connected) = of(&recorded(), None);
    let expected =
        [(0, Kind::ReadZero, 5), (1, Kind::Read, 10), (2, Kind::Write, 15), (1, Kind::Write, 200)];
    // Three touches and two repeats are before the request.
    assert_eq!((list(&first), first.repeats, connected), (expected.to_vec(), 0, 3));
    let expected =
        [(2, Kind::ReadAgain, 1), (3, Kind::Read, 2), (3, Kind::Write, 3), (0, Kind::Write, 15)];
    assert_eq!(list(&second), expected);
}

#[test]
fn without_a_recorded_second_invocation_the_first_is_repeated_word_by_word() {
    let trace = trace(recorded().touches().to_vec());
    let (first, second, connected) = of(&trace, None);
    let expected = [
        (0, Kind::ReadZero, 5),
        (1, Kind::ReadWritten, 10),
        (2, Kind::WriteAgain, 15),
        (1, Kind::WriteAgain, 200),
    ];
    assert_eq!((list(&second), connected), (expected.to_vec(), 0));
    assert_eq!(first.gaps, second.gaps);
}

#[test]
fn reads_of_unchecked_memory_compare_nothing() {
    let trace = trace(vec![touch(0, Access::Read, 0), touch(1, Access::Write, 0)]);
    let repeats = vec![Repeat { after: 2, touch: touch(0, Access::Read, 0) }];
    let second = vec![touch(1, Access::Read, 0)];
    let trace = trace.with_again(Again { period: 1, request: 0, repeats, second }).unwrap();
    let options = PlayerOptions { again: Some(Repeats::Recorded), ..PlayerOptions::default() };
    let zero_map = PageSet::new(trace.layout().pages());
    let kinds = |unchecked| {
        let (first, second, _) = invocations(&trace, &zero_map, &options, unchecked).unwrap();
        let all = [first.touches, second.touches].concat();
        all.into_iter().map(format::Touch::kind).collect::<Vec<_>>()
    };
    let (unknown, again) = (Kind::ReadUnknown, Kind::ReadAgain);
    assert_eq!(kinds((0, 0)), [Kind::Read, Kind::Write, again, again]);
    // The first read is of another word, the repeat of any.
    assert_eq!(kinds((8, 8)), [Kind::Read, Kind::Write, unknown, again]);
    assert_eq!(kinds((0, PAGE)), [unknown, Kind::Write, unknown, again]);
}
