use std::io::Write;
use std::os::unix::fs::FileExt;

use super::*;
use crate::page_cache::evict;
use crate::testing::file_on_a_medium;

const FORMAT: &str = "name: mm_filemap_add_to_page_cache
ID: 600
format:
	field:unsigned short common_type;	offset:0;	size:2;	signed:0;
	field:int common_pid;	offset:4;	size:4;	signed:1;

	field:unsigned long pfn;	offset:8;	size:8;	signed:0;
	field:unsigned long i_ino;	offset:16;	size:8;	signed:0;
	field:unsigned long index;	offset:24;	size:8;	signed:0;
	field:dev_t s_dev;	offset:32;	size:4;	signed:0;
	field:unsigned char order;	offset:36;	size:1;	signed:0;

print fmt: \"dev %d:%d ino %lx\", REC->s_dev
";

#[test]
fn the_fields_are_found_by_name_and_size() {
    let found = Tracepoint::parse(FORMAT).unwrap();
    let expected = Tracepoint { id: 0, inode: 16, index: 24, device: 32, order: Some(36) };
    assert_eq!(found, expected);
    let without = FORMAT.replace("order", "other");
    assert_eq!(Tracepoint::parse(&without).unwrap(), Tracepoint { order: None, ..expected });
    for (from, to) in
        [("i_ino;", "ino;"), ("dev_t s_dev;	offset:32;	size:4", "dev_t s_dev;	offset:32;	size:8")]
    {
        assert!(matches!(
            Tracepoint::parse(&FORMAT.replace(from, to)),
            Err(BpfError::Field { .. })
        ));
    }
}

/// The function as a kernel may have it.
pub(super) const ADD_FOLIO: AddFolio = AddFolio {
    id: 1,
    inode: 0,
    number: 64,
    superblock: 40,
    device: 16,
    flags: 0,
    large: 6,
    order: 64,
};

#[test]
fn every_exit_jumps_to_the_end() {
    let tracepoint = Hook::Tracepoint(Tracepoint::parse(FORMAT).unwrap());
    for (hook, expected) in [(tracepoint, 5), (Hook::Function(ADD_FOLIO), 6)] {
        let program = program(&hook, 7, 1 << 40, 100, 3);
        // All jumps but the one that skips the order of a folio of one page.
        let jumps = (0..).zip(&program).filter(|(_, insn)| {
            [5, 6].contains(&(insn.code & 7)) && insn.offset > 0 && insn.registers != 3
        });
        let to: Vec<_> =
            jumps.map(|(at, insn)| at + 1 + usize::try_from(insn.offset).unwrap()).collect();
        assert_eq!(to, vec![program.len() - 2; expected], "{hook}");
    }
}

#[test]
fn entries_of_the_map_are_decoded() {
    assert_eq!(entered(0), None);
    assert_eq!(entered(1 << 6), Some(Entered { at_ns: 1, pages: 1 }));
    assert_eq!(entered(641 << 6 | 4), Some(Entered { at_ns: 641, pages: 16 }));
    assert_eq!(entered(u64::MAX).unwrap().pages, 1 << 30, "no folio has such an order");
}

/// A cold file of `pages` pages.
fn cold_file(pages: usize) -> Option<File> {
    let mut file = file_on_a_medium()?;
    file.write_all(&vec![1; pages * 4096]).unwrap();
    file.sync_all().unwrap();
    assert!(evict(&file).unwrap().is_cold());
    Some(file)
}

/// Skips the test without root; any other error is a defect.
fn permitted<T>(result: Result<T, BpfError>) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(
            BpfError::Tracepoint { source: error, .. }
            | BpfError::Refused { source: error, .. }
            | BpfError::Attach(error),
        ) if error.kind() == io::ErrorKind::PermissionDenied
            && !firn_required::has("root", false) =>
        {
            None
        }
        Err(error) => panic!("{error}: {:?}", std::error::Error::source(&error)),
    }
}

/// The pages that entered, in order.
fn in_order(entered: &[Option<Entered>]) -> Vec<usize> {
    let mut pages: Vec<(u64, usize)> = entered
        .iter()
        .enumerate()
        .filter_map(|(page, entered)| Some((entered.as_ref()?.at_ns, page)))
        .collect();
    pages.sort_unstable();
    pages.into_iter().map(|(_, page)| page).collect()
}

fn read(file: &File, page: u64) {
    file.read_exact_at(&mut [0; 1], page * 4096).unwrap();
}

#[test]
fn only_the_pages_that_enter_are_recorded() {
    let (Some(file), Some(other)) = (cold_file(64), cold_file(64)) else { return };
    let Some(hook) = permitted(Hook::find(&file)) else { return };
    for file in [&file, &other] {
        assert!(evict(file).unwrap().is_cold());
        rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::Random).unwrap();
    }
    let mut capture = Capture::start(&hook, &file, 60).unwrap();
    for page in [40, 3, 41, 62] {
        read(&file, page);
    }
    read(&other, 5);
    capture.stop();
    read(&file, 20);
    let entered = capture.entered().unwrap();
    let expected = [40, 3, 41];
    assert_eq!(
        in_order(&entered),
        expected,
        "62 is beyond the watched range, 20 came after the end"
    );
    assert!(entered.iter().flatten().all(|entered| entered.pages == 1));
}

/// The kernel of the lab allows programs at functions.
#[test]
#[ignore = "in the lab: make lab-tests"]
fn the_function_and_the_tracepoint_see_the_same() {
    let file = cold_file(4096).unwrap();
    let hooks = [Hook::find(&file).unwrap(), Hook::Tracepoint(Tracepoint::find().unwrap())];
    assert!(matches!(hooks[0], Hook::Function(_)), "{}", hooks[0]);
    assert!(evict(&file).unwrap().is_cold());
    let mut captures = hooks.each_ref().map(|hook| Capture::start(hook, &file, 4096).unwrap());
    // By read-ahead, and by faults without it.
    (1000..1200).for_each(|page| read(&file, page));
    let mapping = Mapping::reserve(4096 * PAGE_SIZE, PAGE_SIZE).unwrap();
    mapping.map_private(mapping.base(), 4096 * PAGE_SIZE, &file, 0).unwrap();
    mapping.advise_random(mapping.base(), 4096 * PAGE_SIZE).unwrap();
    for page in (0..900).rev().step_by(7) {
        mapping.populate_read(mapping.base() + page * PAGE_SIZE, PAGE_SIZE).unwrap();
    }
    captures.iter_mut().for_each(Capture::stop);
    let [function, tracepoint] = captures.map(|capture| capture.entered().unwrap());
    let order = in_order(&function);
    assert!(order.len() > 129, "{}", order.len());
    assert_eq!(order, in_order(&tracepoint));
    let sizes = |entered: &[Option<Entered>]| -> Vec<_> {
        entered.iter().map(|entered| entered.map(|entered| entered.pages)).collect()
    };
    assert_eq!(sizes(&function), sizes(&tracepoint));
}
