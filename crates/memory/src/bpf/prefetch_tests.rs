use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use firn_base::ImageRange;
use firn_snapshot::{CopyTable, MemoryLayout, PageSet};

use super::*;
use crate::bpf::tests::ADD_FOLIO;
use crate::page_cache::{cached, evict};
use crate::plan::{Step, When};
use crate::testing::file_on_a_medium;

const PAGES: u64 = 4096;

fn plan(ranges: &[Range<u64>]) -> Plan {
    let step = |pages: &Range<u64>| {
        let image = ImageRange {
            offset: pages.start * PAGE_SIZE,
            len: (pages.end - pages.start) * PAGE_SIZE,
        };
        Step { when: When::AtRequest, work: Work::Prefetch { image } }
    };
    Plan {
        planner: "snapbpf:prefetch=kernel".to_owned(),
        layout: MemoryLayout::for_size(PAGES * PAGE_SIZE).unwrap(),
        segments: Vec::new(),
        layers: Vec::new(),
        schedule: ranges.iter().map(step).collect(),
        pager: None,
        copies: CopyTable::default(),
        populated: Vec::new(),
    }
}

#[test]
fn the_loop_goes_back_to_its_turn_and_calls_the_module() {
    let program = prefetching(&ADD_FOLIO, 7, 1 << 40, 900, 3, 0x1234);
    let (back, insn) = program.iter().enumerate().find(|(_, insn)| insn.code == 0xb5).unwrap();
    let turn = isize::try_from(back).unwrap() + 1 + isize::from(insn.offset);
    // It begins by storing the index of the entry.
    let turn = &program[usize::try_from(turn).unwrap()];
    assert_eq!((turn.code, turn.registers, turn.offset), (0x63, 0x7a, -4));
    let call = program.iter().find(|insn| insn.code == 0x85 && insn.registers == 0x20).unwrap();
    assert_eq!(call.offset, 1, "the first module");
}

#[test]
fn a_plan_without_such_ranges_needs_no_program() {
    let file = tempfile::tempfile().unwrap();
    assert!(Prefetch::attach(&plan(&[]), &file).unwrap().is_none());
    let many: Vec<Range<u64>> = (0..=MAX_RANGES as u64).map(|page| page..page + 1).collect();
    let error = Prefetch::attach(&plan(&many), &file).unwrap_err();
    assert!(error.to_string().contains("6001 ranges"), "{error}");
}

#[test]
fn a_kernel_without_the_module_is_an_error_that_names_it() {
    let file = tempfile::tempfile().unwrap();
    let error = Prefetch::attach(&plan(&[0..1, 2..3]), &file).unwrap_err();
    assert!(matches!(error, BpfError::NoModule), "{error}");
    assert!(error.to_string().contains("firn lab build --snapbpf"), "{error}");
}

/// The module is that of the lab's kernel.
#[test]
#[ignore = "in the lab, with the module: make test-snapbpf"]
fn the_first_page_has_the_program_read_all_ranges_once() {
    let file = file_on_a_medium().unwrap();
    let page = [7; 4096];
    (0..PAGES).for_each(|number| file.write_all_at(&page, number * PAGE_SIZE).unwrap());
    file.sync_all().unwrap();
    let ranges = [100..160, 5..6, 3000..3700, 4090..4096];
    let expected = ranges.iter().map(|range| range.end - range.start).sum::<u64>();
    assert!(evict(&file).unwrap().is_cold());
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).unwrap();
    let _program = Prefetch::attach(&plan(&ranges), &file).unwrap().unwrap();
    let read = |page: u64| file.read_exact_at(&mut [0; 1], page * PAGE_SIZE).unwrap();
    let begin = Instant::now();
    read(100);
    let all = PageSet::count;
    loop {
        let now = cached(&file, PAGES).unwrap();
        if all(&now) >= expected || begin.elapsed() > Duration::from_secs(60) {
            let mut sorted = ranges.clone();
            sorted.sort_by_key(|range| range.start);
            assert_eq!(now.ranges().collect::<Vec<_>>(), sorted);
            break;
        }
    }
    // It has done its work.
    assert!(evict(&file).unwrap().is_cold());
    read(200);
    let now = cached(&file, PAGES).unwrap();
    assert_eq!((now.count(), now.get(200)), (1, true));
}
