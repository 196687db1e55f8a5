use std::os::unix::fs::FileExt;

use firn_snapshot::MemoryRegion;

use super::*;

/// Present, writable, user, accessed, dirty.
const FLAGS: u64 = 0b110_0111;
const NX: u64 = 1 << 63;

/// Guest memory of 64 pages, and of 64 pages at 4 GiB.
fn layout() -> MemoryLayout {
    let region = |guest_addr| MemoryRegion { guest_addr, len: 64 * PAGE_SIZE };
    MemoryLayout::new(vec![region(0), region(1 << 32)]).unwrap()
}

fn leaves(pages: &[(u64, Vec<u64>)], touched: &[u64]) -> Vec<u64> {
    let image = tempfile::tempfile().unwrap();
    image.set_len(128 * PAGE_SIZE).unwrap();
    for (page, words) in pages {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        image.write_all_at(&bytes, page * PAGE_SIZE).unwrap();
    }
    let mut set = PageSet::new(128);
    touched.iter().for_each(|page| set.insert(*page));
    small_leaves(&PageStore::unchecked(image), &layout(), &set).unwrap().iter().collect()
}

#[test]
fn touched_pages_of_a_touched_table_have_small_leaves() {
    let entry = |address: u64| address | FLAGS | NX;
    let top = vec![entry(2 * PAGE_SIZE)];
    let table =
        vec![entry(10 * PAGE_SIZE), 0, entry((1 << 32) + 3 * PAGE_SIZE), entry(12 * PAGE_SIZE)];
    let pages = [(1, top), (2, table)];
    // Page 12 was not touched; no table maps page 20; the first table points to the second, which
    // is not a leaf.
    assert_eq!(leaves(&pages, &[1, 2, 10, 20, 67]), [10, 67]);
    // A table without accessed bits was not used.
    assert_eq!(leaves(&pages, &[1, 10, 20, 67]), [0; 0]);
}

/// Reference counts, small numbers and pointers.
#[test]
fn ordinary_data_is_not_a_table() {
    let table = vec![(10 * PAGE_SIZE) | FLAGS];
    let data = vec![1, 3, 0x11, 0x7fff_1234_5678, 9];
    assert_eq!(leaves(&[(1, table), (10, data)], &[0, 1, 10]), [10]);
}

#[test]
fn large_leaves_are_not_small_leaves() {
    let table = vec![FLAGS | LARGE, (10 * PAGE_SIZE) | FLAGS];
    assert_eq!(leaves(&[(1, table)], &[0, 1, 10]), [10]);
}

#[test]
fn a_page_with_an_entry_beyond_memory_is_not_a_table() {
    for beyond in [64 * PAGE_SIZE, (1 << 32) + 64 * PAGE_SIZE, 1 << 51] {
        let data = vec![(10 * PAGE_SIZE) | FLAGS, beyond | FLAGS];
        assert_eq!(leaves(&[(1, data)], &[1, 10]), [0; 0]);
        // Entries that are not present may have any value.
        let table = vec![(10 * PAGE_SIZE) | FLAGS, beyond];
        assert_eq!(leaves(&[(1, table)], &[1, 10]), [10]);
    }
}

proptest::proptest! {
    #[test]
    fn a_page_is_a_table_if_all_entries_point_to_memory(
        entries in proptest::collection::vec((0..70u64, proptest::bool::ANY), 1..512),
    ) {
        let touched: Vec<u64> = (0..128).collect();
        let flags = |large: bool| if large { FLAGS | LARGE } else { FLAGS };
        let words = entries.iter().map(|(page, large)| (page * PAGE_SIZE) | flags(*large));
        let found = leaves(&[(5, words.collect())], &touched);
        let mut expected: Vec<u64> = entries.iter().filter(|(_, large)| !large).map(|(page, _)| *page).collect();
        expected.sort_unstable();
        expected.dedup();
        expected.retain(|page| *page != 5);
        if entries.iter().any(|(page, _)| *page >= 64) {
            expected.clear();
        }
        proptest::prop_assert_eq!(found, expected);
    }
}
