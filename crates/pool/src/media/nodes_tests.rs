use std::os::fd::AsFd;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::*;
use crate::media::{How, Memory};

#[test]
fn pages_count_by_their_size() {
    let maps = "\
7f0000000000 default file=/memfd:firn-pool\\040(deleted) dirty=1024 N0=512 N2=512 kernelpagesize_kB=4
7f0040000000 bind:1 file=/dev/hugepages/N9=1 huge dirty=2 N1=2 kernelpagesize_kB=1048576
7f00c0000000 default
";
    let node = |node, bytes| NodeBytes { node, bytes };
    assert_eq!(parse(maps, 0x7f00_0000_0000), [node(0, 2 << 20), node(2, 2 << 20)]);
    assert_eq!(parse(maps, 0x7f00_4000_0000), [node(1, 2 << 30)]);
    assert_eq!(parse(maps, 0x7f00_c000_0000), []);
    assert_eq!(parse(maps, 0x7f00_0000_1000), []);
}

#[test]
fn this_process_knows_where_its_pages_are() {
    let file = memfd_create("nodes", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 4 << 20).unwrap();
    let how = How { writable: true, synchronous: false, align: 2 << 20 };
    let memory = Memory::map(file.as_fd(), 0, 4 << 20, how).unwrap();
    memory.populate().unwrap();
    let nodes = of_mapping(memory.base().addr());
    assert_eq!(nodes.iter().map(|node| node.bytes).sum::<u64>(), 4 << 20, "{nodes:?}");
}
