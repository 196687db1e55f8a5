//! One request to a disk.

use std::io;
use std::time::Instant;

use firn_base::num::u64_of;
use firn_memory::GuestView;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD,
    VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
    VIRTIO_BLK_T_WRITE_ZEROES, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};

use super::super::chain::{Chain, ChainFault};
use super::super::rate_limiter::LimiterCounters;
use super::disk::Disk;
use super::{MAX_ZERO_SECTORS, MAX_ZERO_SEGMENTS, SECTOR, SERIAL_LEN};
use crate::counters::Timed;

/// Bytes of the header: type, reserved, sector.
const HEADER_LEN: usize = 16;
/// Bytes of a segment of a discard or write-zeroes request: sector, sectors, flags.
const SEGMENT_LEN: usize = 16;

/// The requests of a guest to a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskCounters {
    /// Read requests.
    pub reads: Timed,
    /// Bytes read.
    pub bytes_read: u64,
    /// Write requests.
    pub writes: Timed,
    /// Bytes written.
    pub bytes_written: u64,
    /// Flush requests.
    pub flushes: u64,
    /// Requests that the disk does not know, or that are not valid.
    pub refused: u64,
    /// Requests that the host's file failed.
    pub failed: u64,
    /// Requests that waited when another one was taken, again at each.
    pub remaining: u64,
    /// Its limiter, if it has one.
    pub limiter: LimiterCounters,
}

impl DiskCounters {
    /// Bytes read and written since `before`.
    pub(super) fn bytes_since(&self, before: &Self) -> u64 {
        self.bytes_read - before.bytes_read + (self.bytes_written - before.bytes_written)
    }
}

/// Why a request fails. The guest sees only the status byte.
enum Refusal {
    Unsupported,
    Bad,
    Io,
    Fault(ChainFault),
}

impl From<ChainFault> for Refusal {
    fn from(fault: ChainFault) -> Self {
        Self::Fault(fault)
    }
}

impl From<io::Error> for Refusal {
    fn from(_: io::Error) -> Self {
        Self::Io
    }
}

/// Serves one request and fills in its status.
///
/// # Errors
/// The chain has no room for a header and a status.
pub(super) fn serve(
    disk: &mut Disk,
    serial: &[u8; SERIAL_LEN],
    counters: &mut DiskCounters,
    mem: &GuestView,
    chain: &Chain,
) -> Result<(), ChainFault> {
    let mut header = [0; HEADER_LEN];
    chain.readable.read_at(mem, 0, &mut header)?;
    // The status is the last byte, independent of the buffers' boundaries.
    let Some(data_len) = chain.writable.len().checked_sub(1) else {
        return Err(ChainFault::TooShort { needed: 1, found: 0 });
    };
    let kind = u32::from_le_bytes([header[0], header[1], header[2], header[3]]);
    let sector = u64::from_le_bytes([
        header[8], header[9], header[10], header[11], header[12], header[13], header[14],
        header[15],
    ]);
    let mut request = Request { disk, mem, chain, data_len };
    let begin = Instant::now();
    let answer = match kind {
        VIRTIO_BLK_T_IN => request.read(sector).inspect(|()| {
            counters.reads += Timed::once(begin.elapsed());
            counters.bytes_read += u64_of(data_len);
        }),
        VIRTIO_BLK_T_OUT => request.write(sector).map(|bytes| {
            counters.writes += Timed::once(begin.elapsed());
            counters.bytes_written += bytes;
        }),
        VIRTIO_BLK_T_FLUSH if request.disk.can_be_flushed() => {
            request.disk.flush().map_err(Refusal::from).inspect(|()| counters.flushes += 1)
        }
        VIRTIO_BLK_T_GET_ID => request.identify(serial),
        VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES => request.zero(kind),
        _ => Err(Refusal::Unsupported),
    };
    let (status, counter) = match answer {
        Ok(()) => (VIRTIO_BLK_S_OK, None),
        Err(Refusal::Fault(fault)) => return Err(fault),
        Err(Refusal::Unsupported) => (VIRTIO_BLK_S_UNSUPP, Some(&mut counters.refused)),
        Err(Refusal::Bad) => (VIRTIO_BLK_S_IOERR, Some(&mut counters.refused)),
        Err(Refusal::Io) => (VIRTIO_BLK_S_IOERR, Some(&mut counters.failed)),
    };
    if let Some(counter) = counter {
        *counter += 1;
    }
    let [status, ..] = status.to_le_bytes();
    chain.writable.write_at(mem, data_len, &[status])
}

struct Request<'a> {
    disk: &'a mut Disk,
    mem: &'a GuestView,
    chain: &'a Chain,
    /// Bytes of the writable buffers before the status.
    data_len: usize,
}

impl Request<'_> {
    fn read(&mut self, sector: u64) -> Result<(), Refusal> {
        let mut offset = self.byte_range(sector, u64_of(self.data_len))?;
        for slice in self.chain.writable.slices(self.mem, 0, self.data_len)? {
            self.disk.read_at(offset, &slice)?;
            offset += u64_of(slice.len());
        }
        Ok(())
    }

    fn write(&mut self, sector: u64) -> Result<u64, Refusal> {
        let len = self.chain.readable.len() - HEADER_LEN;
        let mut offset = self.byte_range(sector, u64_of(len))?;
        for slice in self.chain.readable.slices(self.mem, HEADER_LEN, len)? {
            self.disk.write_at(offset, &slice)?;
            offset += u64_of(slice.len());
        }
        Ok(u64_of(len))
    }

    fn identify(&self, serial: &[u8; SERIAL_LEN]) -> Result<(), Refusal> {
        let len = self.data_len.min(SERIAL_LEN);
        Ok(self.chain.writable.write_at(self.mem, 0, &serial[..len])?)
    }

    /// Discard and write zeroes: both leave zeros (5.2.6.2).
    fn zero(&mut self, kind: u32) -> Result<(), Refusal> {
        if !self.disk.can_be_zeroed() {
            return Err(Refusal::Unsupported);
        }
        let len = self.chain.readable.len() - HEADER_LEN;
        let segments = u32::try_from(len / SEGMENT_LEN).map_err(|_| Refusal::Bad)?;
        if !len.is_multiple_of(SEGMENT_LEN) || segments == 0 || segments > MAX_ZERO_SEGMENTS {
            return Err(Refusal::Bad);
        }
        for at in (HEADER_LEN..HEADER_LEN + len).step_by(SEGMENT_LEN) {
            let mut sector = [0; 8];
            let mut sectors = [0; 4];
            let mut flags = [0; 4];
            self.chain.readable.read_at(self.mem, at, &mut sector)?;
            self.chain.readable.read_at(self.mem, at + 8, &mut sectors)?;
            self.chain.readable.read_at(self.mem, at + 12, &mut flags)?;
            let known =
                if kind == VIRTIO_BLK_T_DISCARD { 0 } else { VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP };
            if u32::from_le_bytes(flags) & !known != 0 {
                return Err(Refusal::Unsupported);
            }
            let sectors = u32::from_le_bytes(sectors);
            if sectors > MAX_ZERO_SECTORS {
                return Err(Refusal::Bad);
            }
            let len = u64::from(sectors) * SECTOR;
            let offset = self.byte_range(u64::from_le_bytes(sector), len)?;
            self.disk.write_zeroes(offset, len)?;
        }
        Ok(())
    }

    /// The disk offset of `sector`, if `len` bytes from there are complete sectors of the disk.
    fn byte_range(&self, sector: u64, len: u64) -> Result<u64, Refusal> {
        let offset = sector.checked_mul(SECTOR).ok_or(Refusal::Bad)?;
        let end = offset.checked_add(len).ok_or(Refusal::Bad)?;
        if len.is_multiple_of(SECTOR) && end <= self.disk.size() {
            Ok(offset)
        } else {
            Err(Refusal::Bad)
        }
    }
}
