use firn_snapshot::{MemoryLayout, PageSet};
use proptest::prelude::{Just, Strategy, any, prop_oneof, proptest};

use super::DecodeTraceError;
use super::{Access, GapUnit, Touch, Toucher, Trace, TraceError, TraceOrigin};
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
        damaged[at] ^= 1;
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

/// The body of the first version ends with the columns.
#[test]
fn a_file_of_the_first_version_has_no_free_pages() {
    let trace = trace(vec![touch(5, Access::Read)]).unwrap();
    let first = changed(&trace.encode().unwrap(), 1, |body| assert_eq!(body.pop(), Some(0)));
    let decoded = Trace::decode(&first).unwrap();
    assert_eq!((decoded.free(), &decoded), (None, &trace));
}

#[test]
fn a_free_set_that_does_not_fit_the_memory_or_is_missing_is_refused() {
    let file = trace(Vec::new()).unwrap().with_free(PageSet::new(PAGES)).unwrap();
    let file = file.encode().unwrap();
    // Two runs: none free, and all 4096 pages, whose number takes two bytes.
    let beyond = changed(&file, 2, |body| *body.last_mut().unwrap() += 1);
    let error = Trace::decode(&beyond).unwrap_err();
    assert!(error.to_string().contains("free set"), "{error}");
    let short = changed(&file, 2, |body| body.truncate(body.len() - 1));
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

proptest! {
    #[test]
    fn a_trace_survives_its_file(
        touches in touches(),
        zero in proptest::collection::vec(0..PAGES, 0..200),
        free in proptest::option::of(proptest::collection::vec(0..PAGES, 0..200)),
    ) {
        let mut zero_map = PageSet::new(PAGES);
        zero.into_iter().for_each(|page| zero_map.insert(page));
        let mut trace = Trace::new(origin(), layout(), zero_map, touches).unwrap();
        if let Some(pages) = free {
            let mut free = PageSet::new(PAGES);
            pages.into_iter().for_each(|page| free.insert(page));
            trace = trace.with_free(free).unwrap();
        }
        assert_eq!(Trace::decode(&trace.encode().unwrap()).unwrap(), trace);
    }

    #[test]
    fn a_hostile_body_never_panics(body in proptest::collection::vec(any::<u8>(), 0..600)) {
        for version in [1, 2] {
            let _ = Trace::decode(&file_of(version, &body));
        }
    }

    #[test]
    fn a_hostile_free_set_never_panics(tail in proptest::collection::vec(any::<u8>(), 0..60)) {
        let file = trace(vec![touch(5, Access::Read)]).unwrap().encode().unwrap();
        let _ = Trace::decode(&changed(&file, 2, |body| {
            body.pop();
            body.extend(&tail);
        }));
    }
}
