use super::huge_bytes;

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
fn the_mapping_at_the_address_is_read_and_no_other() {
    assert_eq!(huge_bytes(SMAPS, 0x7f00_0000_0000), 2 << 20);
    assert_eq!(huge_bytes(SMAPS, 0x7f00_0040_0000), 4 << 20);
    assert_eq!(huge_bytes(SMAPS, 0x7f00_0080_0000), 0);
}
