//! Block device (virtio 1.2, 5.2).

mod content;
mod disk;
mod overlay;
mod request;

use std::os::fd::{AsFd, BorrowedFd};

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO,
    VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;

use super::device::{DeviceContext, VirtioDevice};
use super::error::{DeviceError, RestoreDeviceError};
use super::rate_limiter::{LimiterCounters, RateLimit, RateLimiter};
use super::state::{BlockState, DeviceState};

pub(crate) use disk::{Disk, ReadOnlyDisk, WritableDisk};
pub use disk::{DiskCache, OpenDiskError};
pub(crate) use overlay::OverlayDisk;
pub use overlay::{is_in_memory, scratch_file};
pub use request::DiskCounters;

/// Bytes of a sector, the unit of virtio-blk, independent of the disk's own.
const SECTOR: u64 = 512;
/// Bytes of a disk's name (5.2.6).
const SERIAL_LEN: usize = 20;
const QUEUE_SIZE: u16 = 256;
/// The most data buffers of a request: a chain is not longer than the queue, and two of its
/// descriptors are the request's header and its status.
const SEG_MAX: u32 = 254;
/// The most sectors of one segment of a discard or write-zeroes request: 128 MiB.
const MAX_ZERO_SECTORS: u32 = 1 << 18;
/// The most segments of one discard or write-zeroes request.
const MAX_ZERO_SEGMENTS: u32 = 16;

/// A disk of the guest. It serves requests in sequence, on the event loop's thread.
#[derive(Debug)]
pub(crate) struct Block {
    disk: Disk,
    serial: [u8; SERIAL_LEN],
    limiter: Option<RateLimiter>,
    counters: DiskCounters,
}

impl Block {
    /// A device for `disk`. Its serial number for the guest is the first 20 bytes of `serial`.
    #[must_use]
    pub(crate) fn new(disk: Disk, serial: &str) -> Self {
        let mut padded = [0; SERIAL_LEN];
        for (to, from) in padded.iter_mut().zip(serial.bytes()) {
            *to = from;
        }
        Self { disk, serial: padded, limiter: None, counters: DiskCounters::default() }
    }

    /// Limits its requests, and the bytes that they read and write.
    #[must_use]
    pub(crate) fn with_limiter(self, limiter: Option<RateLimiter>) -> Self {
        Self { limiter, ..self }
    }

    /// The disk.
    #[must_use]
    pub(crate) fn disk(&self) -> &Disk {
        &self.disk
    }

    /// Exchanges the disk for one with the same features.
    pub(crate) fn replace(&mut self, disk: Disk) {
        self.disk = disk;
    }

    /// Changes the limit of a device that has a limiter; returns whether it has one.
    pub(crate) fn set_limit(&mut self, limit: RateLimit) -> bool {
        self.limiter.as_mut().map(|limiter| limiter.set(limit)).is_some()
    }

    /// The requests so far.
    pub(crate) fn counters(&self) -> DiskCounters {
        let limiter = LimiterCounters::of(self.limiter.as_ref());
        DiskCounters { limiter, ..self.counters }
    }

    fn sectors(&self) -> u64 {
        self.disk.size() / SECTOR
    }

    fn state(&self) -> BlockState {
        BlockState {
            sectors: self.sectors(),
            read_only: self.disk.is_read_only(),
            serial: self.serial,
        }
    }
}

impl VirtioDevice for Block {
    fn id(&self) -> u32 {
        VIRTIO_ID_BLOCK
    }

    fn features(&self) -> u64 {
        let zeroing = 1 << VIRTIO_BLK_F_DISCARD | 1 << VIRTIO_BLK_F_WRITE_ZEROES;
        [
            (true, 1 << VIRTIO_BLK_F_SEG_MAX | 1 << VIRTIO_BLK_F_BLK_SIZE),
            (self.disk.is_read_only(), 1 << VIRTIO_BLK_F_RO),
            (self.disk.can_be_flushed(), 1 << VIRTIO_BLK_F_FLUSH),
            (self.disk.can_be_zeroed(), zeroing),
        ]
        .into_iter()
        .fold(0, |features, (offered, bits)| if offered { features | bits } else { features })
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE]
    }

    /// `struct virtio_blk_config` (5.2.4).
    fn config(&self) -> Vec<u8> {
        let mut config = vec![0; 60];
        let mut put = |offset: usize, bytes: &[u8]| {
            config[offset..offset + bytes.len()].copy_from_slice(bytes);
        };
        put(0, &self.sectors().to_le_bytes());
        put(12, &SEG_MAX.to_le_bytes());
        put(20, &512_u32.to_le_bytes());
        if self.disk.can_be_zeroed() {
            let cluster_sectors = 8_u32;
            put(36, &MAX_ZERO_SECTORS.to_le_bytes());
            put(40, &MAX_ZERO_SEGMENTS.to_le_bytes());
            put(44, &cluster_sectors.to_le_bytes());
            put(48, &MAX_ZERO_SECTORS.to_le_bytes());
            put(52, &MAX_ZERO_SEGMENTS.to_le_bytes());
            // write_zeroes_may_unmap
            put(56, &[1]);
        }
        config
    }

    fn process_queue(
        &mut self,
        index: usize,
        context: &mut DeviceContext<'_>,
    ) -> Result<(), DeviceError> {
        let Some(queue) = context.queues.get_mut(index) else { return Ok(()) };
        let Self { disk, serial, limiter, counters } = self;
        while queue.is_allowed(context.mem, limiter.as_mut())?
            && let Some(chain) = queue.pop(context.mem)?
        {
            counters.remaining += u64::from(queue.pending(context.mem)?);
            let before = *counters;
            request::serve(disk, serial, counters, context.mem, &chain)
                .map_err(|fault| queue.chain_error(fault))?;
            limiter.iter_mut().for_each(|limiter| limiter.take(counters.bytes_since(&before)));
            // The full length even after an error, as QEMU does: the status is at the end.
            queue.push_used(context.mem, &chain, chain.writable.len())?;
        }
        Ok(())
    }

    fn event_source(&self) -> Option<BorrowedFd<'_>> {
        self.limiter.as_ref().map(AsFd::as_fd)
    }

    fn process_event(&mut self, context: &mut DeviceContext<'_>) -> Result<(), DeviceError> {
        self.limiter.iter_mut().for_each(RateLimiter::acknowledge);
        self.process_queue(0, context)
    }

    fn reset(&mut self) {}

    fn save(&self) -> DeviceState {
        DeviceState::Block(self.state())
    }

    fn restore(&mut self, state: &DeviceState, _running: bool) -> Result<(), RestoreDeviceError> {
        let DeviceState::Block(saved) = state else {
            return Err(RestoreDeviceError::OtherDevice { id: self.id() });
        };
        let now = self.state();
        if (saved.sectors, saved.read_only) != (now.sectors, now.read_only) {
            return Err(RestoreDeviceError::OtherDisk {
                saved: saved.sectors,
                saved_read_only: saved.read_only,
                sectors: now.sectors,
                read_only: now.read_only,
            });
        }
        self.serial = saved.serial;
        Ok(())
    }
}

#[cfg(test)]
mod durability_tests;
#[cfg(test)]
mod tests;
