//! The free pages of a frozen Linux guest, from a walk over the
//! allocator's lists, as `/proc/buddyinfo` counts them. firn itself reads the array of `struct
//! page` instead.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

const PAGE: u64 = 4096;
/// The start of the mapping of the kernel's text and data.
const KERNEL_MAP: u64 = 0xffff_ffff_8000_0000;
/// Alignment of the array of `struct page`, and the limit of its size.
const STRUCTS: u64 = 1 << 30;
const PRESENT: u64 = 1;
const LARGE: u64 = 1 << 7;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// The free lists of an allocator.
#[derive(Debug)]
pub struct FreeLists {
    /// Page numbers of all free blocks.
    pub pages: BTreeSet<u64>,
    /// Number of free blocks on the lists, by order.
    pub blocks: Vec<u64>,
    /// The kernel's own count of them, by order: the sums of `/proc/buddyinfo`.
    pub counted: Vec<u64>,
}

/// The memory of a guest with less than 3 GiB: guest-physical addresses are offsets in its image.
struct Guest {
    image: File,
    tables: u64,
}

impl Guest {
    fn word(&self, physical: u64) -> u64 {
        let mut bytes = [0; 8];
        self.image.read_exact_at(&mut bytes, physical).unwrap();
        u64::from_le_bytes(bytes)
    }

    /// The guest-physical address that four levels of page tables map `address` to.
    fn physical(&self, address: u64) -> u64 {
        let mut table = self.tables;
        for shift in [39, 30, 21, 12] {
            let entry = self.word(table + (address >> shift & 511) * 8);
            assert!(entry & PRESENT != 0, "{address:#x} is not mapped");
            let size = 1 << shift;
            if shift == 12 || (shift < 39 && entry & LARGE != 0) {
                return (entry & ADDRESS & !(size - 1)) + address % size;
            }
            table = entry & ADDRESS;
        }
        unreachable!()
    }

    /// The word at a kernel address.
    fn at(&self, address: u64) -> u64 {
        self.word(self.physical(address))
    }
}

/// The kernel's description of itself for crash dumps.
fn description(image: &File) -> HashMap<String, String> {
    let len = image.metadata().unwrap().len();
    let mut page = vec![0; 4096];
    for at in (0..len).step_by(4096) {
        image.read_exact_at(&mut page, at).unwrap();
        if !page.starts_with(b"OSRELEASE=") {
            continue;
        }
        let text = page.split(|byte| *byte == 0).next().unwrap();
        let lines = std::str::from_utf8(text).unwrap().lines();
        let fields: HashMap<String, String> = lines
            .filter_map(|line| line.split_once('='))
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect();
        if fields.contains_key("SYMBOL(node_data)") {
            return fields;
        }
    }
    panic!("the guest does not describe itself")
}

/// Walks the free lists of the guest in a snapshot's directory.
#[track_caller]
pub fn free_lists(snapshot: &Path) -> FreeLists {
    let image = File::open(snapshot.join("memory.img")).unwrap();
    let fields = description(&image);
    let field = |name: &str| fields.get(name).unwrap_or_else(|| panic!("no {name}: {fields:?}"));
    let number = |name: &str| field(name).parse::<i64>().unwrap();
    let size = |name: &str| u64::try_from(number(name)).unwrap();
    let symbol = |name: &str| u64::from_str_radix(field(name), 16).unwrap();
    let root = symbol("SYMBOL(swapper_pg_dir)") - KERNEL_MAP;
    let tables = root.checked_add_signed(number("NUMBER(phys_base)")).unwrap();
    let guest = Guest { image, tables };
    let (orders, lists) = (size("LENGTH(zone.free_area)"), size("LENGTH(free_area.free_list)"));
    let (area_size, list_size) = (size("SIZE(free_area)"), size("SIZE(list_head)"));
    let (lru, next) = (size("OFFSET(page.lru)"), size("OFFSET(list_head.next)"));
    let (mut pages, mut blocks) = (BTreeSet::new(), vec![0; usize::try_from(orders).unwrap()]);
    let mut counted = blocks.clone();
    for node in 0..size("LENGTH(node_data)") {
        let node = guest.at(symbol("SYMBOL(node_data)") + node * 8);
        if node == 0 {
            continue;
        }
        let zones = guest.at(node + size("OFFSET(pglist_data.nr_zones)")) & 0xffff_ffff;
        for zone in 0..zones {
            let zone = node + size("OFFSET(pglist_data.node_zones)") + zone * size("SIZE(zone)");
            for (order, index) in (0..orders).zip(0..) {
                let area = zone + size("OFFSET(zone.free_area)") + order * area_size;
                // `nr_free` follows the lists.
                counted[index] += guest.at(area + area_size - 8);
                for list in 0..lists {
                    let head = area + size("OFFSET(free_area.free_list)") + list * list_size;
                    let mut entry = guest.at(head + next);
                    while entry != head {
                        let first = (entry - lru) % STRUCTS / size("SIZE(page)");
                        for page in first..first + (1 << order) {
                            assert!(pages.insert(page), "page {page} is free twice");
                        }
                        blocks[index] += 1;
                        entry = guest.at(entry + next);
                    }
                }
            }
        }
    }
    let memory = guest.image.metadata().unwrap().len() / PAGE;
    assert!(pages.last().is_none_or(|last| *last < memory));
    FreeLists { pages, blocks, counted }
}
