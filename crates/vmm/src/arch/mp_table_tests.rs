use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::*;

fn sum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
}

/// Walks the entries, as a kernel does: their kinds in order.
fn kinds(table: &[u8]) -> Vec<u8> {
    let mut kinds = Vec::new();
    let mut at = HEADER;
    while at < table.len() {
        kinds.push(table[at]);
        at += if table[at] == 0 { PROCESSOR } else { OTHER };
    }
    assert_eq!(at, table.len());
    kinds
}

#[test]
fn a_kernel_finds_processors_and_interrupts() {
    for vcpus in [1, 2, MAX_VCPUS] {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 2 << 20)]).unwrap();
        write(&memory, vcpus).unwrap();
        let mut pointer = [0; POINTER];
        memory.read_slice(&mut pointer, GuestAddress(layout::MP_TABLE)).unwrap();
        assert_eq!((&pointer[..4], sum(&pointer)), (&b"_MP_"[..], 0));
        let start = u32::from_le_bytes(pointer[4..8].try_into().unwrap());
        let len: u16 = memory.read_obj(GuestAddress(u64::from(start) + 4)).unwrap();
        let mut table = vec![0; usize::from(len)];
        memory.read_slice(&mut table, GuestAddress(start.into())).unwrap();
        assert_eq!((&table[..4], sum(&table)), (&b"PCMP"[..], 0));
        assert!(u64::from(start) + u64::from(len) <= layout::MP_TABLE_END);

        let kinds = kinds(&table);
        let of = |kind| kinds.iter().filter(|found| **found == kind).count();
        assert_eq!(of(0), usize::from(vcpus));
        assert_eq!((of(1), of(2), of(3), of(4)), (1, 1, 24, 2));
        assert_eq!(usize::from(u16::from_le_bytes([table[34], table[35]])), kinds.len());
        let booting = (0..usize::from(vcpus)).filter(|id| table[HEADER + id * PROCESSOR + 3] == 3);
        assert_eq!(booting.collect::<Vec<_>>(), [0]);
    }
}
