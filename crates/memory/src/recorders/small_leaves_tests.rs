use std::os::unix::fs::FileExt;

use firn_snapshot::MemoryRegion;

use super::*;

/// Present, writable, user, accessed, dirty.
const FLAGS: u64 = 0b110_0111;
const NX: u64 = 1 << 63;

/// Guest memory of 64 pages, and of 64 at 4 GiB.
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
fn what_a_touched_table_maps_and_was_touched_has_a_small_leaf() {
    let entry = |address: u64| address | FLAGS | NX;
    let top = vec![entry(2 * PAGE_SIZE)];
    let table =
        vec![entry(10 * PAGE_SIZE), 0, entry((1 << 32) + 3 * PAGE_SIZE), entry(12 * PAGE_SIZE)];
    let pages = [(1, top), (2, table)];
    // Page 12 was not touched; 20 is mapped by nobody; the second table is named by the first, and no leaf.
    assert_eq!(leaves(&pages, &[1, 2, 10, 20, 67]), [10, 67]);
    // A table that nobody walked maps nothing that was touched through it.
    assert_eq!(leaves(&pages, &[1, 10, 20, 67]), [0; 0]);
}

/// Reference counts, small numbers and pointers.
#[test]
fn ordinary_data_is_no_table() {
    let table = vec![(10 * PAGE_SIZE) | FLAGS];
    let data = vec![1, 3, 0x11, 0x7fff_1234_5678, 9];
    assert_eq!(leaves(&[(1, table), (10, data)], &[0, 1, 10]), [10]);
}

#[test]
fn large_leaves_are_none() {
    let table = vec![FLAGS | LARGE, (10 * PAGE_SIZE) | FLAGS];
    assert_eq!(leaves(&[(1, table)], &[0, 1, 10]), [10]);
}

#[test]
fn a_page_that_names_one_beyond_memory_is_no_table() {
    for beyond in [64 * PAGE_SIZE, (1 << 32) + 64 * PAGE_SIZE, 1 << 51] {
        let data = vec![(10 * PAGE_SIZE) | FLAGS, beyond | FLAGS];
        assert_eq!(leaves(&[(1, data)], &[1, 10]), [0; 0]);
        // What is not present may be anything.
        let table = vec![(10 * PAGE_SIZE) | FLAGS, beyond];
        assert_eq!(leaves(&[(1, table)], &[1, 10]), [10]);
    }
}

proptest::proptest! {
    #[test]
    fn a_table_counts_where_no_entry_leads_out_of_memory(
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
