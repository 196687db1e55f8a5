use firn_base::num::u64_of;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::{HUGE, SMALL, huge_bytes, of_mapping, scan};
use crate::media::{How, Memory};

const SMAPS: &str = "\
7f0000000000-7f0000400000 rw-s 00000000 00:01 1024 /memfd:firn-pool (deleted)
Size:               4096 kB
ShmemPmdMapped:     2048 kB
FilePmdMapped:         0 kB
Shared_Hugetlb:        0 kB
VmFlags: rd wr sh mr mw me ms
7f0000400000-7f0000800000 rw-s 00000000 00:01 1024 /memfd:firn-pool (deleted)
Shared_Hugetlb:     4096 kB
";

#[test]
fn only_the_mapping_at_the_address_is_read() {
    assert_eq!(huge_bytes(SMAPS, 0x7f00_0000_0000), 2 << 20);
    assert_eq!(huge_bytes(SMAPS, 0x7f00_0040_0000), 4 << 20);
    assert_eq!(huge_bytes(SMAPS, 0x7f00_0080_0000), 0);
}

#[test]
fn leaf_sizes_match_the_page_tables() {
    let file = memfd_create("leaves", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 4 * HUGE).unwrap();
    let how = How { writable: true, synchronous: false, align: HUGE };
    let map = |offset, len| Memory::map(&file, offset, len, how).unwrap();
    let (first, second) = (map(0, 2 * HUGE), map(2 * HUGE, 2 * HUGE));
    // Two chunks in pages of 2 MiB and two in small pages.
    if [0, HUGE].into_iter().any(|chunk| first.take_huge(chunk).is_err()) {
        // Linux before 6.1, or too little memory.
        return;
    }
    first.populate().unwrap();
    second.populate().unwrap();
    assert_eq!(of_mapping(first.base().addr(), first.len()), HUGE);
    assert_eq!(of_mapping(second.base().addr(), second.len()), SMALL);
    let whole = map(0, 4 * HUGE);
    whole.populate().unwrap();
    assert_eq!(of_mapping(whole.base().addr(), whole.len()), SMALL);
    // Linux 6.7 and later.
    if let Ok(huge) = scan(u64_of(whole.base().addr()), whole.len()) {
        assert_eq!(huge, 2 * HUGE);
    }
}
