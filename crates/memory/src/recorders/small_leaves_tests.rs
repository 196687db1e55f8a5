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
    small_leaves(&image.into(), &layout(), &set).unwrap().iter().collect()
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
    fn any_bytes_are_taken(words in proptest::collection::vec(proptest::num::u64::ANY, 512)) {
        let touched: Vec<u64> = (0..128).collect();
        let found = leaves(&[(5, words)], &touched);
        proptest::prop_assert!(found.iter().all(|page| *page < 128 && *page != 5));
    }
}
