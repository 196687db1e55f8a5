use firn_base::PageRange;

use super::*;

fn run(first: u64, pages: u64) -> PageRange {
    PageRange { first, pages }
}

#[test]
fn parts_of_a_copy_are_consecutive() {
    let table = CopyTable::new([run(512, 512), run(2048, 1024)]);
    assert_eq!(table.bytes(), 1536 * PAGE_SIZE);
    assert_eq!(table.place(512 * PAGE_SIZE), Some(0));
    assert_eq!(table.place(1023 * PAGE_SIZE + 5), Some(511 * PAGE_SIZE + 5));
    assert_eq!(table.place(2048 * PAGE_SIZE), Some(512 * PAGE_SIZE));
    assert_eq!(
        table.piece(2049 * PAGE_SIZE + 7),
        Some((513 * PAGE_SIZE + 7, 1023 * PAGE_SIZE - 7))
    );
    for outside in [0, 511, 1024, 2047, 3072] {
        assert_eq!(table.place(outside * PAGE_SIZE), None, "page {outside}");
    }
}

#[test]
fn a_copy_table_has_no_duplicates() {
    let table = CopyTable::new([run(512, 512), run(600, 1), run(4096, 1)]);
    assert_eq!(table.parts().collect::<Vec<_>>(), [(run(512, 512), 0)]);
    assert!(CopyTable::new([run(0, 0)]).is_empty());
    assert!(CopyTable::new([run(0, u64::MAX)]).is_empty());
}
