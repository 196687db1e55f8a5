use firn_memory::Leaf;
use firn_memory::trace::{GapUnit, Touch, TraceOrigin};
use firn_snapshot::{MemoryLayout, PageSet};

use super::*;

fn trace(touches: &[(u64, Access)]) -> Trace {
    let origin = TraceOrigin {
        function: "f".to_owned(),
        input: "a".to_owned(),
        command: String::new(),
        host: String::new(),
        gaps: GapUnit::Nanoseconds,
    };
    let layout = MemoryLayout::for_size(4 * CHUNK_SIZE).unwrap();
    let zero_map = PageSet::new(layout.pages());
    let by = Toucher::Instruction;
    let touch = |(page, access): &(u64, Access)| Touch {
        page: *page,
        access: *access,
        by,
        leaf: Leaf::Size4K,
        gap: 0,
    };
    Trace::new(origin, layout, zero_map, touches.iter().map(touch).collect()).unwrap()
}

/// Where the kernel is.
const TEXT: u64 = 0xffff_ffff_8100_0000;

fn described() -> Pages {
    let name = |text: &str| text.to_owned();
    Pages {
        holders: vec![name("kernel: code"), name("unused"), name("python3: heap")],
        runs: vec![(0, 2), (2, 1000), (0, 2000)],
        kernel: Some(KernelSymbols {
            text: TEXT,
            page: 1,
            symbols: vec![
                (0, name("_text")),
                (0x10, name("schedule")),
                (0xf00, name("fork")),
                (0x3000, name("clone [module]")),
            ],
        }),
    }
}

#[test]
fn pages_and_chunks_are_counted_by_holder() {
    use Access::{LaterWrite, Read, Write};
    let touches = [(1, Read), (2, Read), (3, Write), (2, LaterWrite), (700, Read), (1500, Read)];
    let instructions = [(1, TEXT + 0x1000), (2, 0x40_1000), (700, TEXT + 0x3001), (1500, TEXT)];
    let instructions = HashMap::from(instructions);
    let touched = Touched::of(&trace(&touches), &instructions, &described()).unwrap();
    let holder = |name: &str, pages, written_pages, chunks, own_chunks| Holder {
        name: name.to_owned(),
        pages,
        written_pages,
        chunks,
        own_chunks,
    };
    // Chunk 0 has pages of both, chunk 1 of the heap, chunk 2 of the code.
    let expected = [holder("python3: heap", 3, 2, 2, 1), holder("kernel: code", 2, 0, 2, 1)];
    assert_eq!(touched.holders, expected);
    let pages: Vec<_> =
        touched.pages.iter().map(|page| (page.page, page.written, page.holder)).collect();
    let expected = [(1, false, 1), (2, true, 0), (3, true, 0), (700, false, 0), (1500, false, 1)];
    assert_eq!(pages, expected);
    let symbols: Vec<_> = touched.pages.iter().map(|page| page.symbol.as_deref()).collect();
    assert_eq!(symbols, [Some("schedule"), None, None, None, None]);
    let functions: Vec<_> = touched.pages.iter().map(|page| page.function.as_deref()).collect();
    assert_eq!(functions, [Some("fork"), None, None, Some("clone [module]"), Some("_text")]);
}

#[test]
fn a_description_that_is_not_of_the_guest_is_refused() {
    let trace = trace(&[(1600, Access::Read)]);
    let refused = |runs| {
        let described = Pages { runs, ..described() };
        Touched::of(&trace, &HashMap::new(), &described).unwrap_err().to_string()
    };
    assert!(refused(vec![(0, 1600)]).contains("0x640"));
    assert!(refused(vec![(3, 1601)]).contains("holder 3, and has named 3"));
    assert!(refused(vec![(0, 1), (3, u64::MAX), (0, u64::MAX)]).contains("holder 3"));
}
