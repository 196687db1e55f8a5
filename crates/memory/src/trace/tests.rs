use firn_snapshot::{MemoryLayout, PageSet};
use proptest::prelude::{Just, Strategy, any, prop_oneof, proptest};

use super::DecodeTraceError;
use super::{Access, Again, GapUnit, Repeat, Touch, Toucher, Trace, TraceError, TraceOrigin};
use crate::plan::Leaf;

const PAGES: u64 = 4096;

fn origin() -> TraceOrigin {
    TraceOrigin {
        function: "hello".into(),
        input: "a".into(),
        command: "firn record hello".into(),
        host: "a host".into(),
        gaps: GapUnit::Instructions,
    }
}

fn layout() -> MemoryLayout {
    MemoryLayout::for_size(PAGES * 4096).unwrap()
}

fn trace(touches: Vec<Touch>) -> Result<Trace, TraceError> {
    Trace::new(origin(), layout(), PageSet::new(PAGES), touches)
}

fn touch(page: u64, access: Access) -> Touch {
    Touch { page, access, by: Toucher::Instruction, leaf: Leaf::Size4K, gap: 7 }
}

#[test]
fn counts_pages_touched_and_written() {
    let touches = vec![
        touch(5, Access::Read),
        touch(1, Access::Write),
        touch(2, Access::Read),
        touch(5, Access::LaterWrite),
    ];
    let trace = trace(touches).unwrap();
    assert_eq!((trace.touched_pages(), trace.written_pages()), (3, 2));
}

#[test]
fn a_page_outside_memory_is_refused() {
    let refused = trace(vec![touch(PAGES, Access::Read)]);
    assert_eq!(refused, Err(TraceError::Outside { index: 0, page: PAGES }));
}

#[test]
fn a_touch_that_is_not_the_first_of_its_kind_is_refused() {
    for (first, second) in [
        (Access::Read, Access::Read),
        (Access::Read, Access::Write),
        (Access::Write, Access::Read),
        (Access::Write, Access::LaterWrite),
    ] {
        let refused = trace(vec![touch(3, first), touch(3, second)]);
        assert_eq!(refused, Err(TraceError::Repeated { index: 1, page: 3 }));
    }
    let refused = trace(vec![touch(3, Access::LaterWrite)]);
    assert_eq!(refused, Err(TraceError::Repeated { index: 0, page: 3 }));
}

#[test]
fn a_zero_map_of_another_memory_is_refused() {
    let refused = Trace::new(origin(), layout(), PageSet::new(1), Vec::new());
    assert_eq!(refused, Err(TraceError::ZeroMap { zero_map: 1, memory: PAGES }));
}

#[test]
fn a_file_with_any_damaged_byte_is_refused() {
    let file = trace(vec![touch(5, Access::Read)]).unwrap().encode().unwrap();
    for at in 0..file.len() {
        let mut damaged = file.clone();
        damaged[at] ^= 0x40;
        let error = Trace::decode(&damaged).unwrap_err();
        match at {
            0..8 => assert!(matches!(error, DecodeTraceError::Magic), "{at}: {error}"),
            8..12 => assert!(matches!(error, DecodeTraceError::Version(_)), "{at}: {error}"),
            _ => assert!(matches!(error, DecodeTraceError::Checksum), "{at}: {error}"),
        }
    }
    assert!(matches!(Trace::decode(&file[..10]), Err(DecodeTraceError::Magic)));
}

#[test]
fn a_free_set_of_another_memory_is_refused() {
    let refused = trace(Vec::new()).unwrap().with_free(PageSet::new(1));
    assert_eq!(refused, Err(TraceError::FreeSet { free: 1, memory: PAGES }));
}

/// The file with this version and a body changed by `change`.
fn changed(file: &[u8], version: u8, change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut body = Vec::new();
    let mut decoder = flate2::read::DeflateDecoder::new(&file[16..]);
    std::io::Read::read_to_end(&mut decoder, &mut body).unwrap();
    change(&mut body);
    file_of(version, &body)
}

fn file_of(version: u8, body: &[u8]) -> Vec<u8> {
    let mut packed = Vec::new();
    let mut encoder = flate2::read::DeflateEncoder::new(body, flate2::Compression::fast());
    std::io::Read::read_to_end(&mut encoder, &mut packed).unwrap();
    let mut file = b"FIRNTRCE".to_vec();
    file.extend([version, 0, 0, 0]);
    file.extend(crc32fast::hash(&packed).to_le_bytes());
    file.extend(packed);
    file
}

/// A trace as the golden files have it, without free pages.
fn golden() -> Trace {
    let touch = |page, access, by, leaf, gap| Touch { page, access, by, leaf, gap };
    let touches = vec![
        touch(5, Access::Read, Toucher::Instruction, Leaf::Size4K, 0),
        touch(4000, Access::Write, Toucher::Device, Leaf::Size4K, 3),
        touch(200, Access::Read, Toucher::Walk, Leaf::Size2M, 70_000),
        touch(5, Access::LaterWrite, Toucher::Instruction, Leaf::Size1G, 9),
    ];
    let mut zero_map = PageSet::new(PAGES);
    zero_map.insert_range(100..300);
    Trace::new(origin(), layout(), zero_map, touches).unwrap()
}

fn golden_free() -> PageSet {
    let mut free = PageSet::new(PAGES);
    free.insert_range(1000..2000);
    free
}

#[test]
fn files_of_old_versions_are_read() {
    let first = Trace::decode(include_bytes!("golden/v1.trace")).unwrap();
    assert_eq!(first, golden());
    let second = Trace::decode(include_bytes!("golden/v2.trace")).unwrap();
    assert_eq!(second, golden().with_free(golden_free()).unwrap());
}

#[test]
fn a_file_of_this_version_stays_as_it_is() {
    let trace = golden().with_free(golden_free()).unwrap().with_again(again()).unwrap();
    let file = include_bytes!("golden/v3.trace");
    assert_eq!(Trace::decode(file).unwrap(), trace);
    assert_eq!(trace.encode().unwrap(), file);
}

fn repeat(after: usize, page: u64, access: Access, gap: u64) -> Repeat {
    Repeat { after, touch: Touch { gap, ..touch(page, access) } }
}

/// Repeats of the golden trace.
fn again() -> Again {
    Again {
        period: 1000,
        request: 3,
        repeats: vec![
            repeat(2, 5, Access::Read, 20_000),
            repeat(2, 4000, Access::Write, 30_000),
            repeat(4, 5, Access::Write, 11),
        ],
        second: vec![touch(9, Access::Write), touch(200, Access::Read), touch(200, Access::Read)],
    }
}

#[test]
fn repeats_take_their_work_out_of_the_gap_of_the_next_touch() {
    let trace = golden().with_again(again()).unwrap();
    let accesses: Vec<_> =
        trace.accesses().map(|(touch, repeat)| (touch.page, touch.gap, repeat)).collect();
    let expected = [
        (5, 0, false),
        (4000, 3, false),
        (5, 20_000, true),
        (4000, 30_000, true),
        (200, 20_000, false),
        (5, 9, false),
        (5, 11, true),
    ];
    assert_eq!(accesses, expected);
    assert_eq!(golden().accesses().map(|(touch, _)| touch).collect::<Vec<_>>(), golden().touches());
}

#[test]
fn repeats_that_contradict_the_touches_are_refused() {
    let refused = |why: &str, change: fn(&mut Again)| {
        let mut again = again();
        change(&mut again);
        assert_eq!(
            golden().with_again(again).unwrap_err().to_string(),
            format!("the repeated accesses are not valid: {why}")
        );
    };
    refused("their period is 0", |again| again.period = 0);
    refused("the request begins after the last access", |again| again.request = 8);
    refused("they are not in order", |again| again.repeats[0].after = 3);
    refused("a repeat follows more touches than there are", |again| again.repeats[2].after = 5);
    let early = "a repeat precedes the first access or write of its page";
    refused(early, |again| again.repeats[0].touch.page = 200);
    refused(early, |again| again.repeats[0].touch.access = Access::Write);
    refused("their gaps exceed that of the next touch", |again| {
        again.repeats[0].touch.gap = 40_001;
    });
    refused("their gaps are too large", |again| again.repeats[1].touch.gap = u64::MAX);
    refused("one is a later write", |again| again.repeats[2].touch.access = Access::LaterWrite);
    refused("one is a later write", |again| again.second[0].access = Access::LaterWrite);
    refused("a page is outside guest memory", |again| again.repeats[0].touch.page = PAGES);
    refused("a page is outside guest memory", |again| again.second[2].page = PAGES);
}

#[test]
fn repeats_that_are_damaged_are_refused() {
    let file = golden().with_again(again()).unwrap().encode().unwrap();
    let more = changed(&file, 3, |body| body.push(0));
    let error = Trace::decode(&more).unwrap_err();
    assert!(matches!(error, DecodeTraceError::Contradiction("bytes follow them")), "{error}");
    let short = changed(&file, 3, |body| body.truncate(body.len() - 1));
    assert!(matches!(Trace::decode(&short), Err(DecodeTraceError::Columns(_))));
}

#[test]
fn a_free_set_that_does_not_fit_the_memory_or_is_missing_is_refused() {
    let file = trace(Vec::new()).unwrap().with_free(PageSet::new(PAGES)).unwrap();
    let file = file.encode().unwrap();
    // Two runs: none free, and all 4096 pages, whose number takes two bytes.
    let beyond = changed(&file, 2, |body| {
        body.pop();
        *body.last_mut().unwrap() += 1;
    });
    let error = Trace::decode(&beyond).unwrap_err();
    assert!(error.to_string().contains("free set"), "{error}");
    let short = changed(&file, 2, |body| body.truncate(body.len() - 2));
    assert!(matches!(Trace::decode(&short), Err(DecodeTraceError::Columns(_))));
}

/// Touches of different pages, in any order, some with a later write.
fn touches() -> impl Strategy<Value = Vec<Touch>> {
    let by = prop_oneof![Just(Toucher::Instruction), Just(Toucher::Walk), Just(Toucher::Device)];
    let leaf = prop_oneof![Just(Leaf::Size4K), Just(Leaf::Size2M), Just(Leaf::Size1G)];
    let touch = (0..PAGES, any::<bool>(), any::<bool>(), by, leaf, any::<u64>());
    proptest::collection::vec(touch, 0..300).prop_map(|list| {
        let mut seen = std::collections::BTreeSet::new();
        let mut touches = Vec::new();
        for (page, writes, later, by, leaf, gap) in list {
            if seen.insert(page) {
                let access = if writes { Access::Write } else { Access::Read };
                touches.push(Touch { page, access, by, leaf, gap });
                if later && !writes {
                    let access = Access::LaterWrite;
                    touches.push(Touch { page, access, by, leaf, gap: gap / 2 });
                }
            }
        }
        touches
    })
}

/// Repeats of a trace's own accesses: for each pair, one after so many touches, whose page is one
/// of those touched before.
fn repeats_of(touches: &[Touch], pairs: &[(usize, usize)]) -> Vec<Repeat> {
    let mut places: Vec<usize> =
        pairs.iter().map(|(after, _)| after % (touches.len() + 1)).collect();
    places.sort_unstable();
    let repeat = |(after, (_, index)): (usize, &(usize, usize))| {
        let before = touches[..after].get(index % after.max(1))?;
        let access = if before.access == Access::Read { Access::Read } else { Access::Write };
        // Gaps of at most a part of the next touch's.
        let gap = touches.get(after).map_or(5, |next| next.gap / (1 + pairs.len() as u64));
        Some(Repeat { after, touch: Touch { access, gap, ..*before } })
    };
    places.into_iter().zip(pairs).filter_map(repeat).collect()
}

proptest! {
    #[test]
    fn a_trace_survives_its_file(
        touches in touches(),
        zero in proptest::collection::vec(0..PAGES, 0..200),
        free in proptest::option::of(proptest::collection::vec(0..PAGES, 0..200)),
        pairs in proptest::option::of(proptest::collection::vec(any::<(usize, usize)>(), 0..60)),
        second in touches(),
    ) {
        let mut zero_map = PageSet::new(PAGES);
        zero.into_iter().for_each(|page| zero_map.insert(page));
        let mut trace = Trace::new(origin(), layout(), zero_map, touches).unwrap();
        if let Some(pages) = free {
            let mut free = PageSet::new(PAGES);
            pages.into_iter().for_each(|page| free.insert(page));
            trace = trace.with_free(free).unwrap();
        }
        if let Some(pairs) = pairs {
            let repeats = repeats_of(trace.touches(), &pairs);
            let request = trace.touches().len() / 2;
            let mut second = second;
            second.retain(|touch| touch.access != Access::LaterWrite);
            trace = trace.with_again(Again { period: 7, request, repeats, second }).unwrap();
        }
        assert_eq!(Trace::decode(&trace.encode().unwrap()).unwrap(), trace);
        // No work is lost or counted twice.
        let sum = |gaps: &mut dyn Iterator<Item = u64>| gaps.map(u128::from).sum::<u128>();
        let all = sum(&mut trace.accesses().map(|(touch, _)| touch.gap));
        let touches = sum(&mut trace.touches().iter().map(|touch| touch.gap));
        let repeats = trace.again().map_or(&[][..], |again| &again.repeats);
        let trailing = repeats.iter().filter(|repeat| repeat.after == trace.touches().len());
        assert_eq!(all, touches + sum(&mut trailing.map(|repeat| repeat.touch.gap)));
    }

    #[test]
    fn a_hostile_body_never_panics(body in proptest::collection::vec(any::<u8>(), 0..600)) {
        for version in [1, 2, 3] {
            let _ = Trace::decode(&file_of(version, &body));
        }
    }

    #[test]
    fn a_hostile_tail_never_panics(tail in proptest::collection::vec(any::<u8>(), 0..60)) {
        let file = trace(vec![touch(5, Access::Read)]).unwrap().encode().unwrap();
        for version in [2, 3] {
            let _ = Trace::decode(&changed(&file, version, |body| {
                body.truncate(body.len() - 2);
                body.extend(&tail);
            }));
            // Repeats that are as long as they say.
            let _ = Trace::decode(&changed(&file, version, |body| {
                body.pop();
                body.push(1);
                body.extend(&tail);
            }));
        }
    }
}
