//! Segments that are read from a socket together.

use std::io::IoSliceMut;
use std::ops::Range;
use std::os::fd::AsFd;

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{RecvAncillaryBuffer, RecvFlags, recvmsg};

use super::unacked::set_peek_offset;
use crate::frame::{Frame, HEADROOM};

/// The most bytes and segments of a [`Stage`].
const MAX_BYTES: usize = 1 << 20;
const MAX_SEGMENTS: usize = 64;

/// Where the payload of a segment is in its frame, and what is known about the next ones.
#[derive(Clone, Copy, Debug)]
pub(super) struct Payload {
    /// Bytes of the headers before it.
    pub(super) start: usize,
    /// Bytes of it that are there already.
    pub(super) filled: usize,
    /// All bytes of it: more than `filled`.
    pub(super) len: usize,
    /// Bytes that the guest takes after them, in segments of at most `most`.
    pub(super) more: usize,
    pub(super) most: usize,
}

impl Payload {
    /// The part that is missing.
    pub(super) fn rest_mut(self, frame: &mut Frame) -> &mut [u8] {
        &mut frame.payload_mut(self.start, self.len)[self.filled..]
    }
}

/// A segment without its headers.
#[derive(Debug, Default)]
struct Staged {
    /// Memory of a frame.
    memory: Vec<u8>,
    /// Bytes of the payload, which is in its place.
    len: usize,
}

/// Segments of one flow that one call has read, each in memory of its own frame, so no byte is
/// copied again. Flows take turns on it.
#[derive(Debug, Default)]
pub(crate) struct Stage {
    segments: Vec<Staged>,
    /// Those of `segments` that are next. All but the last are as large as segments were to be.
    next: Range<usize>,
    turn: u64,
}

impl Stage {
    /// Reads from a socket without removing anything, as [`Unacked::read`](super::unacked::Unacked)
    /// does. `turn` is the flow's last one here; 0 is none.
    pub(super) fn read(
        &mut self,
        socket: impl AsFd,
        turn: &mut u64,
        offset: usize,
        (frame, payload): (&mut Frame, &mut Payload),
    ) -> Result<bool, Errno> {
        let has_turn = *turn == self.turn;
        if has_turn && let Some(len) = self.take(frame, *payload) {
            payload.filled = len;
            if len == payload.len {
                return Ok(false);
            }
        } else if *turn != 0 && !(has_turn && self.next.is_empty()) {
            // Another flow has taken its place, or the guest takes other segments.
            set_peek_offset(&socket, i32::try_from(offset).unwrap_or(i32::MAX))?;
        }
        *turn = 0;
        let read = self.peek(socket, turn, frame, *payload)?;
        payload.filled += read;
        Ok(read == 0)
    }

    /// Puts the next segment into `frame` if it is the one that is wanted, or its beginning, and
    /// returns its bytes.
    fn take(&mut self, frame: &mut Frame, payload: Payload) -> Option<usize> {
        let is_last = self.next.len() == 1;
        let staged = self.segments.get_mut(self.next.clone())?.first_mut()?;
        let is_wanted = staged.len == payload.len || (is_last && staged.len < payload.len);
        if payload.filled > 0 || !is_wanted {
            return None;
        }
        frame.swap_memory(&mut staged.memory);
        self.next.start += 1;
        Some(staged.len)
    }

    /// Reads what `payload` lacks into `frame`, and what is after it into the stage: `turn` is the
    /// flow's if there is something.
    fn peek(
        &mut self,
        socket: impl AsFd,
        turn: &mut u64,
        frame: &mut Frame,
        payload: Payload,
    ) -> Result<usize, Errno> {
        let Payload { start, most, .. } = payload;
        let mut more = payload.more.min(MAX_BYTES);
        let count = more.div_ceil(most).min(MAX_SEGMENTS);
        if count > 0 {
            self.turn += 1;
            self.next = 0..0;
            self.segments.resize_with(count.max(self.segments.len()), Staged::default);
        }
        let out = payload.rest_mut(frame);
        let wanted = out.len();
        let mut slices = Vec::with_capacity(1 + count);
        slices.push(IoSliceMut::new(out));
        for staged in self.segments.iter_mut().take(count) {
            staged.len = more.min(most);
            more -= staged.len;
            let place = HEADROOM + start..HEADROOM + start + staged.len;
            if staged.memory.len() < place.end {
                staged.memory.resize(place.end, 0);
            }
            slices.push(IoSliceMut::new(&mut staged.memory[place]));
        }
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let mut control = RecvAncillaryBuffer::default();
        let read = retry_on_intr(|| recvmsg(&socket, &mut slices, &mut control, flags))?.bytes;
        let staged = read.saturating_sub(wanted);
        if staged > 0 {
            *turn = self.turn;
            self.next = 0..staged.div_ceil(most);
            let last = &mut self.segments[self.next.end - 1].len;
            *last = (*last).min(staged - (self.next.end - 1) * most);
        }
        Ok(read.min(wanted))
    }

    /// Frees its memory.
    pub(crate) fn trim(&mut self) {
        self.segments = Vec::new();
        self.next = 0..0;
    }
}

#[cfg(test)]
#[path = "stage_tests.rs"]
mod tests;
