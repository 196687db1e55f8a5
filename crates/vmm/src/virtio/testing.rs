//! A guest's driver, for tests: it sets up a device with its registers and shares real rings with
//! it.
//!
//! The mock of `virtio_queue` supports neither rings that wrap around nor event indices.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use event_manager::{EventManager, SubscriberOps};
use vm_memory::{Bytes, GuestAddress};

use firn_memory::{GuestMemory, GuestView};
use firn_snapshot::{MemoryLayout, MemoryRegion};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{TransportState, VirtioDevice, VirtioMmio};
use crate::subscriber::Subscriber;

/// Guest memory is `[0, 16 MiB)` and, after a hole, `[32 MiB, 33 MiB)`.
pub(super) const HIGH: u64 = 32 << 20;
pub(super) const HIGH_LEN: u64 = 1 << 20;
/// Every descriptor has its own buffer.
pub(super) const BUFFER: u64 = 8192;
/// Rings of queue `n` are at `n * RINGS`, buffers start at `BUFFERS`.
const RINGS: u64 = 0x1_0000;
const BUFFERS: u64 = 0x10_0000;

pub(super) const NEXT: u16 = 1;
pub(super) const WRITE: u16 = 2;

pub(super) const ACKNOWLEDGE: u32 = 1;
pub(super) const DRIVER: u32 = 2;
pub(super) const DRIVER_OK: u32 = 4;
pub(super) const FEATURES_OK: u32 = 8;
pub(super) const NEEDS_RESET: u32 = 64;

pub(super) const EVENT_IDX: u64 = 1 << 29;
pub(super) const VERSION_1: u64 = 1 << 32;

pub(super) const STATUS: u64 = 0x70;

pub(super) fn memory() -> GuestView {
    memory_of(&[(0, 16 << 20), (HIGH, HIGH_LEN)])
}

/// Guest memory of these ranges: first byte and length.
pub(super) fn memory_of(ranges: &[(u64, u64)]) -> GuestView {
    let regions = ranges.iter().map(|&(guest_addr, len)| MemoryRegion { guest_addr, len });
    let layout = MemoryLayout::new(regions.collect()).unwrap();
    GuestMemory::anonymous(layout).unwrap().vm_memory()
}

/// A chain that the device has used.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Used {
    pub(super) head: u16,
    /// The bytes that the device wrote to the writable buffers.
    pub(super) data: Vec<u8>,
}

/// The driver's side of a queue.
#[derive(Debug, Clone)]
pub(super) struct Ring {
    pub(super) size: u16,
    pub(super) base: u64,
    buffers: u64,
    free: Vec<u16>,
    /// Descriptors of each chain in flight, by its head.
    chains: Vec<Vec<(u64, u32, u16)>>,
    indices: Vec<Vec<u16>>,
    avail: u16,
    seen: u16,
    /// The available index when the driver last checked whether to notify.
    kicked: u16,
}

impl Ring {
    fn new(index: u64, size: u16) -> Self {
        let chains = usize::from(size);
        Self {
            size,
            base: index * RINGS,
            buffers: BUFFERS + index * 256 * BUFFER,
            free: (0..size).rev().collect(),
            chains: vec![Vec::new(); chains],
            indices: vec![Vec::new(); chains],
            avail: 0,
            seen: 0,
            kicked: 0,
        }
    }

    pub(super) fn avail_ring(&self) -> u64 {
        self.base + 16 * u64::from(self.size)
    }

    pub(super) fn used_ring(&self) -> u64 {
        self.base + 0x8000
    }
}

pub(super) type Shared<D> = Arc<Mutex<VirtioMmio<D>>>;

/// A guest with one device.
pub(super) struct Guest<D: VirtioDevice> {
    pub(super) mem: GuestView,
    pub(super) interrupt: EventFd,
    pub(super) rings: Vec<Ring>,
    pub(super) notifications: usize,
    features: u64,
    transport: Shared<D>,
    events: EventManager<Subscriber<VirtioMmio<D>>>,
}

impl<D: VirtioDevice + 'static> Guest<D> {
    /// A guest whose driver has not accessed `device`.
    pub(super) fn new(device: D) -> Self {
        Self::with_memory(device, memory())
    }

    /// The same with other memory.
    pub(super) fn with_memory(device: D, mem: GuestView) -> Self {
        let interrupt = EventFd::new(EFD_NONBLOCK).unwrap();
        let rings =
            (0..).zip(device.queue_sizes()).map(|(index, size)| Ring::new(index, *size)).collect();
        let transport =
            VirtioMmio::new(device, mem.clone(), interrupt.try_clone().unwrap()).unwrap();
        let transport = Arc::new(Mutex::new(transport));
        let mut events = EventManager::new().unwrap();
        events.add_subscriber(Subscriber::new(transport.clone()));
        Self { mem, interrupt, rings, notifications: 0, features: 0, transport, events }
    }

    /// A guest whose driver has started `device`, with all offered features except `without`.
    pub(super) fn started_without(device: D, without: u64) -> Self {
        let mut guest = Self::new(device);
        guest.start(without);
        guest
    }

    pub(super) fn start(&mut self, without: u64) {
        self.negotiate(without);
        self.set_up_queues();
        self.set(STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
        assert_eq!(self.get(STATUS), ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
    }

    pub(super) fn started(device: D) -> Self {
        Self::started_without(device, 0)
    }

    /// Initialises the device up to FEATURES_OK.
    pub(super) fn negotiate(&mut self, without: u64) {
        self.set(STATUS, ACKNOWLEDGE);
        self.set(STATUS, ACKNOWLEDGE | DRIVER);
        self.features = self.offered() & !without;
        self.accept(self.features);
        self.set(STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK);
    }

    pub(super) fn offered(&mut self) -> u64 {
        self.set(0x14, 1);
        let high = u64::from(self.get(0x10));
        self.set(0x14, 0);
        high << 32 | u64::from(self.get(0x10))
    }

    pub(super) fn accept(&mut self, features: u64) {
        self.set(0x24, 0);
        self.set(0x20, u32::try_from(features & 0xffff_ffff).unwrap());
        self.set(0x24, 1);
        self.set(0x20, u32::try_from(features >> 32).unwrap());
    }

    pub(super) fn set_up_queues(&mut self) {
        for index in 0..self.rings.len() {
            let ring = self.rings[index].clone();
            self.set(0x30, u32::try_from(index).unwrap());
            assert_eq!(self.get(0x34), u32::from(ring.size));
            self.set(0x38, u32::from(ring.size));
            for (register, addr) in
                [(0x80, ring.base), (0x90, ring.avail_ring()), (0xa0, ring.used_ring())]
            {
                self.set(register, u32::try_from(addr & 0xffff_ffff).unwrap());
                self.set(register + 4, u32::try_from(addr >> 32).unwrap());
            }
            self.set(0x44, 1);
            assert_eq!(self.get(0x44), 1);
        }
    }

    /// The same, without a check that the device accepts it.
    pub(super) fn set_up_queues_if_possible(&mut self) {
        for index in 0..self.rings.len() {
            self.set(0x30, u32::try_from(index).unwrap());
            self.set(0x44, 1);
        }
    }

    /// Starts again with empty rings, as a driver does after a reset.
    pub(super) fn forget_rings(&mut self) {
        self.rings =
            (0..).zip(&self.rings).map(|(index, ring)| Ring::new(index, ring.size)).collect();
    }

    pub(super) fn transport(&self) -> MutexGuard<'_, VirtioMmio<D>> {
        self.transport.lock()
    }

    pub(super) fn get(&self, offset: u64) -> u32 {
        let mut data = [0; 4];
        self.transport().read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    pub(super) fn set(&mut self, offset: u64, value: u32) {
        self.transport().write(offset, &value.to_le_bytes());
    }

    /// Makes a chain of these descriptors (address, length, flags but NEXT) available.
    pub(super) fn add_raw(&mut self, queue: usize, descriptors: &[(u64, u32, u16)]) -> u16 {
        let ring = &mut self.rings[queue];
        let at = ring.free.len() - descriptors.len();
        let mut indices = ring.free.split_off(at);
        indices.reverse();
        for (position, (addr, len, flags)) in descriptors.iter().enumerate() {
            let next = indices.get(position + 1).copied();
            let flags = flags | if next.is_some() { NEXT } else { 0 };
            let entry = ring.base + 16 * u64::from(indices[position]);
            self.mem.write_obj(*addr, GuestAddress(entry)).unwrap();
            self.mem.write_obj(*len, GuestAddress(entry + 8)).unwrap();
            self.mem.write_obj(flags, GuestAddress(entry + 12)).unwrap();
            self.mem.write_obj(next.unwrap_or(0), GuestAddress(entry + 14)).unwrap();
        }
        let head = indices[0];
        ring.chains[usize::from(head)] = descriptors.to_vec();
        ring.indices[usize::from(head)] = indices;
        self.offer(queue, head);
        head
    }

    /// Puts `head` into the available ring, valid or not.
    pub(super) fn offer(&mut self, queue: usize, head: u16) {
        let ring = &mut self.rings[queue];
        let slot = ring.avail_ring() + 4 + 2 * u64::from(ring.avail % ring.size);
        self.mem.write_obj(head, GuestAddress(slot)).unwrap();
        ring.avail = ring.avail.wrapping_add(1);
        self.mem.write_obj(ring.avail, GuestAddress(ring.avail_ring() + 2)).unwrap();
    }

    /// Makes a chain available: `readable` buffers with their content, `writable` ones by length.
    pub(super) fn add(&mut self, queue: usize, readable: &[&[u8]], writable: &[u32]) -> u16 {
        let ring = &self.rings[queue];
        let count = readable.len() + writable.len();
        let buffers: Vec<u64> = (0..count)
            .map(|position| {
                let index = ring.free[ring.free.len() - 1 - (count - 1 - position)];
                ring.buffers + u64::from(index) * BUFFER
            })
            .collect();
        let mut descriptors = Vec::new();
        for (data, addr) in readable.iter().zip(&buffers) {
            assert!(data.len() <= 8192);
            self.mem.write_slice(data, GuestAddress(*addr)).unwrap();
            descriptors.push((*addr, u32::try_from(data.len()).unwrap(), 0));
        }
        for (len, addr) in writable.iter().zip(&buffers[readable.len()..]) {
            assert!(*len <= 8192);
            descriptors.push((*addr, *len, WRITE));
        }
        self.add_raw(queue, &descriptors)
    }

    /// Notifies the device if it requires a notification, as Linux does, and runs the event loop.
    pub(super) fn kick(&mut self, queue: usize) {
        let ring = &mut self.rings[queue];
        let (old, new) = (ring.kicked, ring.avail);
        ring.kicked = new;
        let wanted = if self.features & EVENT_IDX != 0 {
            let event = ring.used_ring() + 4 + 8 * u64::from(ring.size);
            let event: u16 = self.mem.read_obj(GuestAddress(event)).unwrap();
            new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
        } else {
            let flags: u16 = self.mem.read_obj(GuestAddress(ring.used_ring())).unwrap();
            flags & 1 == 0
        };
        if wanted {
            self.notifications += 1;
            self.set(0x50, u32::try_from(queue).unwrap());
        }
        self.run();
    }

    /// Runs the event loop until it has no events.
    pub(super) fn run(&mut self) {
        while self.events.run_with_timeout(0).unwrap() > 0 {}
    }

    /// One round of the event loop.
    pub(super) fn run_once(&mut self) -> usize {
        self.events.run_with_timeout(0).unwrap()
    }

    /// The next chain that the device has used, and the number of bytes that it reports as written.
    fn used_entry(&mut self, queue: usize) -> Option<(u16, u32)> {
        let ring = &mut self.rings[queue];
        let index: u16 = self.mem.read_obj(GuestAddress(ring.used_ring() + 2)).unwrap();
        if index == ring.seen {
            return None;
        }
        let entry = ring.used_ring() + 4 + 8 * u64::from(ring.seen % ring.size);
        let id: u32 = self.mem.read_obj(GuestAddress(entry)).unwrap();
        let len: u32 = self.mem.read_obj(GuestAddress(entry + 4)).unwrap();
        ring.seen = ring.seen.wrapping_add(1);
        // Requests an interrupt after the next one.
        let event = ring.avail_ring() + 4 + 2 * u64::from(ring.size);
        self.mem.write_obj(ring.seen, GuestAddress(event)).unwrap();

        let head = u16::try_from(id).unwrap();
        let mut indices = std::mem::take(&mut ring.indices[usize::from(head)]);
        assert!(!indices.is_empty(), "used without being available: {head}");
        indices.reverse();
        ring.free.append(&mut indices);
        Some((head, len))
    }

    /// Like [`Guest::used`], for chains with invalid buffers.
    pub(super) fn used_len(&mut self, queue: usize) -> Option<u32> {
        self.used_entry(queue).map(|(_, len)| len)
    }

    /// The next chain that the device has used.
    pub(super) fn used(&mut self, queue: usize) -> Option<Used> {
        let (head, len) = self.used_entry(queue)?;
        let ring = &self.rings[queue];
        let mut data = Vec::new();
        for (addr, room, _) in
            ring.chains[usize::from(head)].iter().filter(|(_, _, flags)| flags & WRITE != 0)
        {
            let left = usize::try_from(len).unwrap() - data.len();
            let mut part = vec![0; left.min(usize::try_from(*room).unwrap())];
            self.mem.read_slice(&mut part, GuestAddress(*addr)).unwrap();
            data.extend(part);
        }
        assert_eq!(
            data.len(),
            usize::try_from(len).unwrap(),
            "more bytes written than the buffers have"
        );
        Some(Used { head, data })
    }

    /// Sends one chain, which the device must use at once.
    pub(super) fn request(
        &mut self,
        queue: usize,
        readable: &[&[u8]],
        writable: &[u32],
    ) -> Vec<u8> {
        let head = self.add(queue, readable, writable);
        self.kick(queue);
        let used = self.used(queue).expect("the device uses the chain");
        assert_eq!(used.head, head);
        assert_eq!(self.used(queue), None);
        used.data
    }

    /// Interrupts since the last call.
    pub(super) fn interrupts(&self) -> u64 {
        self.interrupt.read().unwrap_or(0)
    }

    pub(super) fn save(&self) -> TransportState {
        // Encoded and decoded, as in a snapshot.
        let bytes = postcard::to_stdvec(&self.transport().save()).unwrap();
        postcard::from_bytes(&bytes).unwrap()
    }

    /// The guest, thawed with `device` from `state`. Guest memory keeps later writes of the device.
    pub(super) fn restored(&self, device: D, state: &TransportState) -> Self {
        let mut guest = Self::with_memory(device, self.mem.clone());
        guest.rings.clone_from(&self.rings);
        guest.features = self.features;
        guest.transport().restore(state).unwrap();
        guest.transport().kick_all();
        guest
    }
}
