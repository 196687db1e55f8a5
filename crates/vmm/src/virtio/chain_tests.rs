use proptest::prelude::*;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress};

use firn_memory::GuestView;

use super::*;

const SIZE: u16 = 8;
const TABLE: u64 = 0x1000;
const AVAIL: u64 = 0x2000;
const USED: u64 = 0x3000;

fn memory() -> GuestView {
    super::super::testing::memory_of(&[(0, 0x10_0000), (0x20_0000, 0x1000)])
}

type Descriptor = (u64, u32, u16, u16);

/// Parses the chain that starts at `head` of this table.
fn parse(mem: &GuestView, table: &[Descriptor], head: u16) -> Result<Chain, ChainFault> {
    for (index, (addr, len, flags, next)) in (0..).zip(table) {
        let entry = TABLE + 16 * index;
        mem.write_obj(*addr, GuestAddress(entry)).unwrap();
        mem.write_obj(*len, GuestAddress(entry + 8)).unwrap();
        mem.write_obj(*flags, GuestAddress(entry + 12)).unwrap();
        mem.write_obj(*next, GuestAddress(entry + 14)).unwrap();
    }
    mem.write_obj(1_u16, GuestAddress(AVAIL + 2)).unwrap();
    mem.write_obj(head, GuestAddress(AVAIL + 4)).unwrap();
    let mut queue = Queue::new(SIZE).unwrap();
    queue.set_desc_table_address(Some(u32::try_from(TABLE).unwrap()), None);
    queue.set_avail_ring_address(Some(u32::try_from(AVAIL).unwrap()), None);
    queue.set_used_ring_address(Some(u32::try_from(USED).unwrap()), None);
    queue.set_ready(true);
    let descriptors = queue.iter(mem).unwrap().next().unwrap();
    Chain::parse(mem, descriptors, SIZE)
}

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

#[test]
fn a_chain_is_split_into_readable_and_writable_buffers() {
    let table = [
        (0x4000, 10, NEXT, 1),
        (0x5000, 0, NEXT, 2),
        (0x6000, 20, NEXT | WRITE, 3),
        (0x7000, 30, WRITE, 0),
    ];
    let chain = parse(&memory(), &table, 0).unwrap();
    assert_eq!(chain.head(), 0);
    assert_eq!(chain.readable.len(), 10);
    assert_eq!(chain.writable.len(), 50);
    assert_eq!(chain.writable.segments().len(), 2);
    assert_eq!(chain.readable.segments().len(), 1, "an empty buffer is skipped");
}

#[test]
fn invalid_chains_are_refused() {
    let mem = memory();
    let loops = [(0x4000, 1, NEXT, 1), (0x4000, 1, NEXT, 0)];
    assert!(matches!(parse(&mem, &loops, 0), Err(ChainFault::Unterminated)));
    let leads_out = [(0x4000, 1, NEXT, SIZE)];
    assert!(matches!(parse(&mem, &leads_out, 0), Err(ChainFault::Unterminated)));
    assert!(matches!(parse(&mem, &leads_out, SIZE), Err(ChainFault::Unterminated)));
    let order = [(0x4000, 1, NEXT | WRITE, 1), (0x4000, 1, 0, 0)];
    assert!(matches!(parse(&mem, &order, 0), Err(ChainFault::Order)));
    for (addr, len) in [
        (0xf_ffff, 2),
        (0x10_0000, 1),
        (0x20_0fff, 2),
        (u64::MAX, 1),
        (u64::MAX - 1, u32::MAX),
        (0, u32::MAX),
    ] {
        for flags in [0, WRITE] {
            let outside = [(addr, len, flags, 0)];
            assert!(matches!(parse(&mem, &outside, 0), Err(ChainFault::Outside { .. })));
        }
    }
}

#[test]
fn a_chain_in_an_indirect_table_is_not_longer_than_the_queue() {
    let mem = memory();
    let entries = 2 * u64::from(SIZE);
    for entry in 0..entries {
        let addr = 0x8000 + 16 * entry;
        let flags = if entry + 1 < entries { NEXT } else { 0 };
        mem.write_obj(0x4000_u64, GuestAddress(addr)).unwrap();
        mem.write_obj(1_u32, GuestAddress(addr + 8)).unwrap();
        mem.write_obj(flags, GuestAddress(addr + 12)).unwrap();
        mem.write_obj(u16::try_from(entry + 1).unwrap(), GuestAddress(addr + 14)).unwrap();
    }
    let len = u32::try_from(16 * entries).unwrap();
    let fault = parse(&mem, &[(0x8000, len, INDIRECT, 0)], 0).unwrap_err();
    assert!(matches!(fault, ChainFault::TooLong { limit: SIZE }));
    // The last entries are as many as the queue's descriptors.
    let chain =
        parse(&mem, &[(0x8000 + 16 * u64::from(SIZE), len / 2, INDIRECT, 0)], 0).unwrap_err();
    assert!(matches!(chain, ChainFault::Unterminated), "links are indices in the indirect table");
}

#[test]
fn bytes_cross_buffers() {
    let mem = memory();
    let table = [
        (0x4000, 3, NEXT, 1),
        (0x5000, 4, NEXT, 2),
        (0x6000, 3, NEXT | WRITE, 3),
        (0x7000, 4, WRITE, 0),
    ];
    mem.write_slice(b"abc", GuestAddress(0x4000)).unwrap();
    mem.write_slice(b"defg", GuestAddress(0x5000)).unwrap();
    let chain = parse(&mem, &table, 0).unwrap();
    let mut bytes = [0; 4];
    chain.readable.read_at(&mem, 2, &mut bytes).unwrap();
    assert_eq!(&bytes, b"cdef");
    chain.writable.write_at(&mem, 1, b"12345").unwrap();
    let mut seen = [0; 3];
    mem.read_slice(&mut seen, GuestAddress(0x6000)).unwrap();
    assert_eq!(&seen, b"\x0012");
    let mut seen = [0; 4];
    mem.read_slice(&mut seen, GuestAddress(0x7000)).unwrap();
    assert_eq!(&seen, b"345\0");
    let fault = chain.writable.write_at(&mem, 3, b"12345").unwrap_err();
    assert!(matches!(fault, ChainFault::TooShort { needed: 8, found: 7 }));
    assert!(chain.readable.read_at(&mem, usize::MAX, &mut bytes).is_err());
}

fn descriptor() -> impl Strategy<Value = Descriptor> {
    let addr = prop_oneof![
        4 => 0_u64..0x11_0000,
        1 => 0x1f_f000_u64..0x20_2000,
        1 => any::<u64>(),
    ];
    let len = prop_oneof![4 => 0_u32..0x2000, 1 => any::<u32>()];
    (addr, len, prop_oneof![4 => 0_u16..4, 1 => any::<u16>()], 0..SIZE + 1)
}

proptest! {
    /// For any content of the table, an accepted chain is in guest memory, in order and within the
    /// limits.
    #[test]
    fn an_accepted_chain_keeps_the_rules(
        table in prop::collection::vec(descriptor(), usize::from(SIZE)),
        head in 0..SIZE + 1,
    ) {
        let mem = memory();
        if let Ok(chain) = parse(&mem, &table, head) {
            let buffers = [&chain.readable, &chain.writable];
            let count: usize = buffers.iter().map(|buffers| buffers.segments().len()).sum();
            prop_assert!(count <= usize::from(SIZE));
            for buffers in buffers {
                let mut all = vec![1; buffers.len()];
                buffers.read_at(&mem, 0, &mut all).unwrap();
                prop_assert_eq!(buffers.slices(&mem, 0, buffers.len()).unwrap().len(), buffers.segments().len());
                for Segment { addr, len } in buffers.segments() {
                    prop_assert!(addr.0 + u64::from(*len) <= 0x10_0000
                        || (addr.0 >= 0x20_0000 && addr.0 + u64::from(*len) <= 0x20_1000));
                }
            }
        }
    }
}
