use std::io::Write;

use firn_base::{PAGE_SIZE, PageRange, error_chain};
use firn_memory::trace::{Access, Touch, Toucher};

use super::*;

const PAGES: u64 = 64;

/// The file of a recording with these bytes.
fn recorded(bytes: &[u8]) -> RecordingFile {
    let mut descriptors = Descriptors::default();
    let what = Recorded::Trace { again: None, holders: false };
    let (file, spec) = RecordingFile::create(what, &mut descriptors).unwrap();
    File::from(descriptors.take(spec.out).unwrap()).write_all(bytes).unwrap();
    file
}

fn layout(pages: u64) -> MemoryLayout {
    MemoryLayout::for_size(pages * PAGE_SIZE).unwrap()
}

fn trace(bytes: &[u8]) -> Result<Trace, String> {
    let origin = TraceOrigin { function: "f".to_owned(), ..unknown_origin() };
    let read = recorded(bytes).trace(origin, layout(PAGES), PageSet::new(PAGES));
    read.map(|(trace, _)| trace).map_err(|error| error_chain(&error))
}

/// What a monitor of a guest with so many pages writes of a touch of the last one.
fn written(pages: u64) -> Vec<u8> {
    let page = pages - 1;
    let (access, by, leaf) = (Access::Write, Toucher::Device, firn_memory::Leaf::Size4K);
    let touches = vec![Touch { page, access, by, leaf, gap: 7 }];
    let (layout, zero_map) = (layout(pages), PageSet::new(pages));
    let trace = Trace::new(unknown_origin(), layout, zero_map, touches).unwrap();
    let (time, instructions) = (GuestTimeTotals::default(), HashMap::new());
    let totals = TraceTotals { unknown_leaves: 1, time, pages: None, instructions };
    let totals = serde_json::to_vec(&totals).unwrap();
    [totals, b"\n".to_vec(), trace.encode().unwrap()].concat()
}

#[test]
fn a_trace_is_read_as_it_was_written() {
    let trace = trace(&written(PAGES)).unwrap();
    assert_eq!(trace.origin().function, "f");
    assert_eq!((trace.touches().len(), trace.touches()[0].page), (1, PAGES - 1));
}

#[test]
fn a_trace_that_is_not_of_the_guest_is_refused() {
    let larger = trace(&written(2 * PAGES)).unwrap_err();
    assert!(larger.contains("outside guest memory"), "{larger}");
    let whole = written(PAGES);
    let line = whole.iter().position(|byte| *byte == b'\n').unwrap();
    for cut in [0, 1, line, line + 1, line + 20, whole.len() - 1] {
        let error = trace(&whole[..cut]).unwrap_err();
        assert!(error.starts_with("the monitor's recording of the run is not valid"), "{error}");
    }
}

#[test]
fn a_profile_that_is_not_of_the_snapshot_is_refused() {
    let id = Uuid::from_u128(7);
    let with = |snapshot, first| Profile {
        faults: Some(vec![PageRange { first, pages: 1 }]),
        ..Profile::of(snapshot)
    };
    let read = |profile: &Profile| {
        let bytes = serde_json::to_vec(profile).unwrap();
        recorded(&bytes).profile(id, PAGES).map_err(|error| error_chain(&error))
    };
    assert_eq!(read(&with(id, PAGES - 1)), Ok(with(id, PAGES - 1)));
    assert!(read(&with(id, PAGES)).unwrap_err().contains("guest memory has"));
    let other = read(&with(Uuid::from_u128(8), 0)).unwrap_err();
    assert!(other.contains("was recorded of snapshot"), "{other}");
    assert!(recorded(b"{").profile(id, PAGES).is_err());
}
