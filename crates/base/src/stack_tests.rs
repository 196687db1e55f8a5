use std::fs::File;
use std::hint::black_box;
use std::os::unix::fs::FileExt;
use std::thread;

use super::*;
use crate::PAGE_SIZE;
use crate::num::{u64_of, usize_of};

const BYTES: usize = 64 << 10;
const PAGES: usize = BYTES / usize_of(PAGE_SIZE);

/// Pages of this thread's stack that are mapped among the `BYTES` below the caller.
fn mapped() -> usize {
    let here = 0_u8;
    let address = u64_of(black_box(&raw const here).addr());
    let mut entries = vec![0; 8 * PAGES];
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    pagemap.read_exact_at(&mut entries, 8 * (address / PAGE_SIZE - u64_of(PAGES))).unwrap();
    // Bit 63 of an entry: the page is present (Documentation/admin-guide/mm/pagemap.rst).
    entries.chunks(8).filter(|entry| entry[7] & 0x80 != 0).count()
}

#[test]
fn the_next_pages_of_a_stack_are_mapped_after_a_touch() {
    let thread = thread::spawn(|| {
        let before = mapped();
        touch_stack::<BYTES>();
        (before, mapped())
    });
    let (before, after) = thread.join().unwrap();
    assert_eq!(after, PAGES, "{before} before");
}
