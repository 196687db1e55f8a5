//! Bytes that wait for the guest or for the host: queues of small chunks from one bounded pool.
//!
//! A queue has memory only while it has bytes. How much it may hold depends on what is left of the
//! pool, so many slow readers leave each other a share, and no flow is without one.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::AsFd;

use rustix::io::{Errno, readv, retry_on_intr, writev};

/// Bytes of a chunk, and of what a flow may hold when the pool is used up.
pub(crate) const CHUNK: usize = 4096;
/// The most bytes of the host that a flow holds.
pub(crate) const FLOW_LIMIT: usize = 2 << 20;
/// The bytes that all flows of a microVM hold in one direction, apart from a chunk for each flow.
pub(crate) const TOTAL_LIMIT: usize = 32 << 20;
/// Unused chunks that are kept while there are flows.
const SPARE: usize = FLOW_LIMIT / CHUNK;

type Chunk = Box<[u8; CHUNK]>;

/// The bytes that one flow may hold when all flows of its direction hold `used`: an eighth of what
/// is left, so that a share is left for the next one.
pub(crate) fn share(used: usize) -> usize {
    (TOTAL_LIMIT.saturating_sub(used) / 8).clamp(CHUNK, FLOW_LIMIT)
}

/// The chunks of all queues.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    spare: Vec<Chunk>,
    /// Chunks in queues.
    used: usize,
    peak: usize,
}

impl Pool {
    fn take(&mut self) -> Chunk {
        self.used += 1;
        self.spare.pop().unwrap_or_else(|| Box::new([0; CHUNK]))
    }

    fn give(&mut self, chunk: Chunk) {
        self.used -= 1;
        if self.spare.len() < SPARE {
            self.spare.push(chunk);
        }
    }

    /// Frees what no queue has.
    pub(crate) fn trim(&mut self) {
        self.spare = Vec::new();
    }

    const fn note_peak(&mut self) {
        if self.used > self.peak {
            self.peak = self.used;
        }
    }

    /// Bytes in use, and the most that ever were.
    pub(crate) const fn usage(&self) -> (usize, usize) {
        (self.used * CHUNK, self.peak * CHUNK)
    }
}

/// A queue of bytes. [`Queue::clear`] gives its chunks back before it is dropped.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    chunks: VecDeque<Chunk>,
    /// Where the first byte is in the first chunk.
    start: usize,
    len: usize,
}

impl Queue {
    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn push(&mut self, mut bytes: &[u8], pool: &mut Pool) {
        while !bytes.is_empty() {
            let at = self.start + self.len;
            if at == self.chunks.len() * CHUNK {
                self.chunks.push_back(pool.take());
            }
            let room = &mut self.chunks[at / CHUNK][at % CHUNK..];
            let part = room.len().min(bytes.len());
            room[..part].copy_from_slice(&bytes[..part]);
            self.len += part;
            bytes = &bytes[part..];
        }
        pool.note_peak();
    }

    /// Removes the first `count` bytes, of at least so many.
    pub(crate) fn consume(&mut self, count: usize, pool: &mut Pool) {
        debug_assert!(count <= self.len);
        self.start += count;
        self.len -= count;
        while self.start >= CHUNK || (self.len == 0 && !self.chunks.is_empty()) {
            if let Some(chunk) = self.chunks.pop_front() {
                pool.give(chunk);
            }
            self.start = self.start.saturating_sub(CHUNK);
        }
        if self.len == 0 {
            *self = Self::default();
        }
    }

    pub(crate) fn clear(&mut self, pool: &mut Pool) {
        self.consume(self.len, pool);
    }

    /// Copies bytes from `offset` on. There are at least that many.
    pub(crate) fn copy_to(&self, offset: usize, mut out: &mut [u8]) {
        let mut at = self.start + offset;
        while !out.is_empty() {
            let chunk = &self.chunks[at / CHUNK][at % CHUNK..];
            let part = chunk.len().min(out.len());
            let (head, tail) = out.split_at_mut(part);
            head.copy_from_slice(&chunk[..part]);
            out = tail;
            at += part;
        }
    }

    /// Appends what one read from `source` returns, at most `max` bytes, which is not 0.
    pub(crate) fn read_from(
        &mut self,
        source: impl AsFd,
        max: usize,
        pool: &mut Pool,
    ) -> Result<usize, Errno> {
        let end = self.start + self.len;
        while self.chunks.len() * CHUNK < end + max {
            self.chunks.push_back(pool.take());
        }
        let mut left = max;
        let mut slices = Vec::with_capacity(max / CHUNK + 2);
        for (index, chunk) in self.chunks.iter_mut().enumerate().skip(end / CHUNK) {
            let from = end.saturating_sub(index * CHUNK);
            let to = CHUNK.min(from + left);
            left -= to - from;
            slices.push(IoSliceMut::new(&mut chunk[from..to]));
        }
        let read = retry_on_intr(|| readv(&source, &mut slices));
        self.len += read.unwrap_or(0);
        let needed = (self.start + self.len).div_ceil(CHUNK);
        self.chunks.drain(needed..).for_each(|chunk| pool.give(chunk));
        pool.note_peak();
        if self.len == 0 {
            self.clear(pool);
        }
        read
    }

    /// Writes from the front, once, and removes what was written.
    pub(crate) fn write_to(&mut self, target: impl AsFd, pool: &mut Pool) -> Result<usize, Errno> {
        let mut left = self.len;
        let mut slices = Vec::with_capacity(self.chunks.len());
        for (index, chunk) in self.chunks.iter().enumerate() {
            let from = if index == 0 { self.start } else { 0 };
            let to = CHUNK.min(from + left);
            left -= to - from;
            slices.push(IoSlice::new(&chunk[from..to]));
        }
        let written = retry_on_intr(|| writev(&target, &slices))?;
        self.consume(written, pool);
        Ok(written)
    }
}

#[cfg(test)]
#[path = "buffer_tests.rs"]
mod tests;
