//! Guests that write arbitrary data to the queues of every device.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use proptest::prelude::*;
use rustix::event::epoll::EventFlags;
use rustix::event::{EventfdFlags, eventfd};
use tempfile::TempDir;
use vm_memory::{Bytes, GuestAddress};

use firn_memory::GuestView;

use super::testing::{Guest, HIGH, HIGH_LEN};
use super::{
    Balloon, BalloonConfig, Block, Disk, DiskCache, Metadata, Net, Network, NetworkBackend,
    NetworkConfig, OverlayDisk, PageDiscard, RateLimit, RateLimiter, ReadOnlyDisk, Rng,
    TokenBucket, Traffic, VirtioDevice, Vsock, VsockBroker, VsockListener, WritableDisk,
};
use crate::open_file::OpenFile;

/// The memory of the chains' buffers. The rest of memory must not change.
const ARENA: u64 = 0x40_0000;
const ARENA_LEN: u64 = 0x2_0000;
/// The number of descriptors in use.
const TABLE: usize = 24;

/// Discards nothing, so that memory can be compared.
struct Keep;

impl PageDiscard for Keep {
    fn discard(&self, addr: u64, len: u64) -> std::io::Result<()> {
        let end = addr.checked_add(len).unwrap();
        assert!(end <= 16 << 20 || (addr >= HIGH && end <= HIGH + HIGH_LEN), "{addr:#x} {len}");
        assert_eq!((addr % 4096, len % 4096), (0, 0));
        Ok(())
    }
}

#[derive(Clone, Debug)]
struct Attack {
    queue: usize,
    /// Address, length, flags, next.
    table: Vec<(u64, u32, u16, u16)>,
    heads: Vec<u16>,
    /// Content of the arena: most bytes are zeros, so that some headers are valid.
    bytes: Vec<(u64, Vec<u8>)>,
    /// Added to the available index.
    jump: u16,
}

fn attack() -> impl Strategy<Value = Attack> {
    let addr = prop_oneof![
        8 => (0..ARENA_LEN / 16).prop_map(|at| ARENA + 16 * at),
        1 => Just(HIGH - 8),
        1 => Just((16 << 20) - 8),
        1 => any::<u64>(),
    ];
    let len = prop_oneof![
        4 => prop::sample::select(vec![0_u32, 1, 4, 16, 44, 45, 512, 513, 4096]),
        2 => 0..9000_u32,
        1 => any::<u32>(),
    ];
    let flags = prop_oneof![10 => 0..4_u16, 1 => 4..8_u16];
    let index = || prop_oneof![20 => 0..24_u16, 1 => any::<u16>()];
    let kind = prop::sample::select(vec![0_u8, 1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 255]);
    let bytes = (
        0..ARENA_LEN / 16,
        prop_oneof![
            3 => kind.prop_map(|kind| vec![kind]),
            1 => prop::collection::vec(any::<u8>(), 1..48),
        ],
    );
    (
        0..3_usize,
        prop::collection::vec((addr, len, flags, index()), TABLE),
        prop::collection::vec(index(), 0..20),
        prop::collection::vec(bytes, 0..40),
        prop_oneof![9 => Just(0_u16), 1 => any::<u16>()],
    )
        .prop_map(|(queue, table, heads, bytes, jump)| Attack {
            queue,
            table,
            heads,
            bytes,
            jump,
        })
}

fn all_of(mem: &GuestView) -> Vec<u8> {
    let mut all = vec![0; (16 << 20) + usize::try_from(HIGH_LEN).unwrap()];
    let (low, high) = all.split_at_mut(16 << 20);
    mem.read_slice(low, GuestAddress(0)).unwrap();
    mem.read_slice(high, GuestAddress(HIGH)).unwrap();
    all
}

/// The position of a range of guest memory in `all_of`, if it is there.
fn place(addr: u64, len: u64) -> std::ops::Range<usize> {
    let start = match addr {
        HIGH.. => addr - HIGH + (16 << 20),
        _ => addr,
    };
    match start.checked_add(len) {
        Some(end) if end <= (16 << 20) + HIGH_LEN => {
            usize::try_from(start).unwrap()..usize::try_from(end).unwrap()
        }
        _ => 0..0,
    }
}

/// Runs the attacks, and checks that the device wrote only to writable buffers and used rings.
fn withstand<D: VirtioDevice + 'static>(device: D, attacks: Vec<Attack>) {
    let mut guest = Guest::started(device);
    // A device may take chains from other queues than the notified one.
    let mut tables = vec![Vec::new(); guest.rings.len()];
    for attack in attacks {
        let queue = attack.queue % guest.rings.len();
        let base = guest.rings[queue].base;
        for (index, (addr, len, flags, next)) in (0..).zip(&attack.table) {
            let entry = base + 16 * index;
            guest.mem.write_obj(*addr, GuestAddress(entry)).unwrap();
            guest.mem.write_obj(*len, GuestAddress(entry + 8)).unwrap();
            guest.mem.write_obj(*flags, GuestAddress(entry + 12)).unwrap();
            guest.mem.write_obj(*next, GuestAddress(entry + 14)).unwrap();
        }
        for (at, bytes) in &attack.bytes {
            guest.mem.write_slice(bytes, GuestAddress(ARENA + 16 * at)).unwrap();
        }
        for head in &attack.heads {
            guest.offer(queue, *head);
        }
        let index = GuestAddress(guest.rings[queue].avail_ring() + 2);
        let jumped: u16 = guest.mem.read_obj::<u16>(index).unwrap().wrapping_add(attack.jump);
        guest.mem.write_obj(jumped, index).unwrap();

        let mut before = all_of(&guest.mem);
        guest.set(0x50, u32::try_from(queue).unwrap());
        guest.run();
        let mut after = all_of(&guest.mem);
        tables[queue].clone_from(&attack.table);
        let all = || tables.iter().flatten();
        let indirect = all().any(|(_, _, flags, _)| flags & 4 != 0);
        let writable = all().filter(|(_, _, flags, _)| flags & 2 != 0);
        let rings = guest.rings.iter().map(|ring| (ring.used_ring(), 0x1000));
        for (addr, len) in writable.map(|(addr, len, ..)| (*addr, u64::from(*len))).chain(rings) {
            let place = place(addr, len);
            before[place.clone()].fill(0);
            after[place].fill(0);
        }
        // An indirect table may declare any memory writable.
        assert!(indirect || before == after, "the device wrote outside writable buffers");
        let state = guest.save();
        guest.transport().restore(&state).expect("every state can be saved and restored");
    }
}

fn disk(dir: &TempDir) -> ReadOnlyDisk {
    let path = dir.path().join("disk");
    std::fs::write(&path, vec![0x5a; 64 << 10]).unwrap();
    ReadOnlyDisk::new(OpenFile::open(&path).unwrap()).unwrap()
}

fn attacks() -> impl Strategy<Value = Vec<Attack>> {
    prop::collection::vec(attack(), 1..4)
}

/// Sends these packets, and takes all.
#[derive(Debug)]
struct Frames {
    never: OwnedFd,
    frames: Vec<Vec<u8>>,
    next: usize,
}

impl NetworkBackend for Frames {
    fn start(&mut self, _features: u64) -> std::io::Result<()> {
        Ok(())
    }

    fn event_sources(&self) -> Vec<(BorrowedFd<'_>, EventFlags)> {
        vec![(self.never.as_fd(), EventFlags::empty())]
    }

    fn packet(&mut self) -> Option<&mut [u8]> {
        self.frames.get_mut(self.next).map(Vec::as_mut_slice)
    }

    fn taken(&mut self) {
        self.next += 1;
    }

    fn transmit(&mut self, packets: &[&[u8]]) -> Traffic {
        assert!(packets.iter().all(|packet| packet.len() >= 12));
        Traffic::default()
    }
}

fn frames() -> impl Strategy<Value = Vec<Vec<u8>>> {
    let len = prop_oneof![2 => 12..2000_usize, 1 => 2000..65_000_usize];
    prop::collection::vec(len.prop_map(|len| vec![0x77; len]), 0..30)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_read_only_disk_withstands_attacks(attacks in attacks()) {
        let dir = TempDir::new().unwrap();
        withstand(Block::new(Disk::ReadOnly(disk(&dir)), "disk"), attacks);
    }

    #[test]
    fn an_overlay_disk_withstands_attacks(attacks in attacks()) {
        let dir = TempDir::new().unwrap();
        let overlay = OverlayDisk::new(disk(&dir), None).unwrap();
        withstand(Block::new(Disk::Overlay(overlay), "disk"), attacks);
        prop_assert!(std::fs::read(dir.path().join("disk")).unwrap() == vec![0x5a; 64 << 10]);
    }

    #[test]
    fn a_written_disk_withstands_attacks(attacks in attacks()) {
        let dir = TempDir::new().unwrap();
        drop(disk(&dir));
        let path = dir.path().join("disk");
        let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
        let open = OpenFile { file, path: path.clone() };
        let written = WritableDisk::new(open, DiskCache::Writeback).unwrap();
        let limit = TokenBucket { size: 8, burst: 8, refill: Duration::from_millis(1) };
        let limit = RateLimit { bytes: None, operations: Some(limit) };
        let limiter = Some(RateLimiter::new(limit).unwrap());
        let block = Block::new(Disk::Writable(written), "disk").with_limiter(limiter);
        withstand(block, attacks);
        prop_assert_eq!(std::fs::metadata(path).unwrap().len(), 64 << 10);
    }

    #[test]
    fn a_random_number_generator_withstands_attacks(attacks in attacks()) {
        withstand(Rng::new(None), attacks);
    }

    #[test]
    fn a_balloon_withstands_attacks(attacks in attacks()) {
        let config = BalloonConfig {
            target: 512,
            deflate_on_oom: true,
            statistics: true,
            reporting: true,
        };
        withstand(Balloon::new(config, None, Keep).unwrap(), attacks);
    }

    #[test]
    fn a_socket_device_withstands_attacks(attacks in attacks()) {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("v");
        let broker = VsockBroker::start(path.clone()).unwrap();
        let listener = VsockListener::bind(&path).unwrap().with_broker(Some(broker));
        withstand(Vsock::new(3, listener).unwrap(), attacks);
    }

    #[test]
    fn a_network_device_withstands_attacks(attacks in attacks(), frames in frames()) {
        let never = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let backend = Some(Box::new(Frames { never, frames, next: 0 }) as _);
        let config = NetworkConfig { mac: [2; 6], mtu: 1500 };
        withstand(Net::with_backend(config, backend, None, None).unwrap(), attacks);
    }

    #[test]
    fn a_network_device_with_metadata_withstands_attacks(attacks in attacks()) {
        let metadata = Metadata { config: Default::default(), store: Default::default() };
        let network = Network { metadata: Some(metadata), ..Network::default() };
        let config = NetworkConfig { mac: [2; 6], mtu: 1500 };
        withstand(Net::new(config, network).unwrap(), attacks);
    }
}
