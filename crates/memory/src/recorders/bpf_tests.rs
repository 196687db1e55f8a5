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
        assert!(matches!(Tracepoint::parse(&FORMAT.replace(from, to)), Err(BpfError::Field(_))));
    }
}

#[test]
fn every_jump_ends_at_the_end() {
    let tracepoint = Tracepoint::parse(FORMAT).unwrap();
    let program = program(&tracepoint, 7, 1 << 40, 100, 3);
    let jumps: Vec<_> =
        (0..).zip(&program).filter(|(_, insn)| insn.code & 7 == 5 && insn.offset > 0).collect();
    assert_eq!(jumps.len(), 5);
    for (at, insn) in jumps {
        let to = at + 1 + usize::try_from(insn.offset).unwrap();
        assert_eq!(to, program.len() - 2);
    }
}

#[test]
fn what_is_written_down_is_decoded() {
    assert_eq!(entered(0), None);
    assert_eq!(entered(64), Some(Entered { at_ns: 64, pages: 1 }));
    assert_eq!(entered(640 | 4), Some(Entered { at_ns: 640, pages: 16 }));
    assert_eq!(entered(u64::MAX).unwrap().pages, 1 << 30, "an order that no folio has");
}

#[test]
fn the_pages_that_enter_are_written_down_and_no_others() {
    let Some(mut file) = file_on_a_medium() else { return };
    let Some(mut other) = file_on_a_medium() else { return };
    for file in [&mut file, &mut other] {
        file.write_all(&vec![1; 64 * 4096]).unwrap();
        file.sync_all().unwrap();
        assert!(evict(file).unwrap().is_cold());
        rustix::fs::fadvise(&*file, 0, None, rustix::fs::Advice::Random).unwrap();
    }
    let mut capture = match Capture::start(&file, 60) {
        Ok(capture) => capture,
        // Without root there is nothing to see; anything else is a defect.
        Err(
            BpfError::Tracepoint(error)
            | BpfError::Refused { source: error, .. }
            | BpfError::Attach(error),
        ) if error.kind() == io::ErrorKind::PermissionDenied => {
            return;
        }
        Err(error) => panic!("{error}: {:?}", std::error::Error::source(&error)),
    };
    let read = |file: &File, page: u64| file.read_exact_at(&mut [0; 1], page * 4096).unwrap();
    for page in [40, 3, 41, 62] {
        read(&file, page);
    }
    read(&other, 5);
    capture.stop();
    read(&file, 20);
    let entered = capture.entered().unwrap();
    let mut pages: Vec<(u64, usize)> = entered
        .iter()
        .enumerate()
        .filter_map(|(page, entered)| Some((entered.as_ref()?.at_ns, page)))
        .collect();
    pages.sort_unstable();
    let order: Vec<usize> = pages.into_iter().map(|(_, page)| page).collect();
    assert_eq!(order, [40, 3, 41], "62 is beyond what is watched, 20 came after the end");
    assert!(entered.iter().flatten().all(|entered| entered.pages == 1));
}
