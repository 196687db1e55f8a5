//! The host's bytes that the guest has not acknowledged.

use std::os::fd::{AsFd, AsRawFd};

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{RecvFlags, recv};

use super::Shared;
use super::end::End;
use super::stage::Payload;
use crate::buffer::{Queue, share};
use crate::frame::Frame;

/// The most that one read takes ahead of the guest.
const READ_AHEAD: usize = 256 << 10;
/// Bytes that one call removes from a socket.
const DISCARD: usize = 4 << 20;
/// Bytes for which that call is made while others are with the guest: fewer than the smallest
/// receive buffer has.
const LEAST: usize = 64 << 10;

/// Where these bytes wait. Offsets are bytes after the first one.
#[derive(Debug)]
pub(super) enum Unacked {
    /// Here, with some that were not sent.
    Queue(Queue),
    /// In the socket, from which a segment is read without removing it: no byte is copied twice,
    /// and a guest that does not read costs no memory of this process.
    Socket {
        /// Those that the guest has acknowledged and the socket still has.
        acked: usize,
        /// The flow's turn on the stage. The bytes there are in the socket, too, and reads of the
        /// socket go on after them.
        turn: u64,
    },
}

impl Default for Unacked {
    fn default() -> Self {
        Self::Queue(Queue::default())
    }
}

impl Unacked {
    /// Those of a connected socket. Before Linux 6.9 (IPv6: 6.11), which knows no offset in a TCP
    /// socket, they are read ahead.
    pub(super) fn of_socket(socket: impl AsFd) -> Self {
        match set_peek_offset(socket, 0) {
            Ok(()) => Self::Socket { acked: 0, turn: 0 },
            Err(_) => Self::default(),
        }
    }

    /// The most of them that the guest may be sent.
    pub(super) fn limit(&self, shared: &Shared) -> usize {
        match self {
            Self::Queue(_) => share(shared.pool.usage().0),
            Self::Socket { .. } => usize::MAX,
        }
    }

    /// Copies those from `offset` on to where `payload` is in `frame`, and counts them there: fewer
    /// than there is room for if there are no more now, also before an error. Returns whether the
    /// host's end is next. In a socket, `offset` is where the last read ended.
    pub(super) fn read(
        &mut self,
        end: &mut End,
        offset: usize,
        (frame, payload): (&mut Frame, &mut Payload),
        shared: &mut Shared,
    ) -> Result<bool, Errno> {
        let queue = match (self, &mut *end) {
            (Self::Queue(queue), _) => queue,
            (Self::Socket { acked, turn }, End::Socket(socket)) => {
                return shared.stage.read(&*socket, turn, *acked + offset, (frame, payload));
            }
            (Self::Socket { .. }, End::Metadata(_)) => return Err(Errno::AGAIN),
        };
        let out = payload.rest_mut(frame);
        let mut read = Ok(false);
        if queue.len().saturating_sub(offset) < out.len() {
            let room = share(shared.pool.usage().0).saturating_sub(queue.len());
            let count = end.receive(queue, room.clamp(1, READ_AHEAD), &mut shared.pool);
            read = count.map(|count| count == 0);
        }
        let count = queue.len().saturating_sub(offset).min(out.len());
        queue.copy_to(offset, &mut out[..count]);
        payload.filled += count;
        read
    }

    /// The guest has acknowledged the first `count`. A socket has them until [`Unacked::discard`],
    /// and reads go on where they were: after fewer than `count`, a [`Unacked::rewind`] follows.
    pub(super) fn consume(&mut self, count: usize, shared: &mut Shared) {
        match self {
            Self::Queue(queue) => queue.consume(count.min(queue.len()), &mut shared.pool),
            Self::Socket { acked, .. } => *acked += count,
        }
    }

    /// Removes from the socket what the guest has acknowledged, after which `rest` are with the
    /// guest.
    pub(super) fn discard(
        &mut self,
        end: Option<&End>,
        rest: usize,
        shared: &mut Shared,
    ) -> Result<(), Errno> {
        let (Self::Socket { acked, .. }, Some(End::Socket(socket))) = (self, end) else {
            return Ok(());
        };
        // Each removal can wake the host's sender, so they are few.
        let is_due = rest == 0 || (*acked >= rest && *acked >= LEAST);
        while is_due && *acked > 0 {
            // A TCP socket writes nothing to it, so it has no memory.
            if shared.discarded.is_empty() {
                shared.discarded = vec![0; DISCARD];
            }
            let part = &mut shared.discarded[..DISCARD.min(*acked)];
            let flags = RecvFlags::TRUNC | RecvFlags::DONTWAIT;
            match retry_on_intr(|| recv(socket, &mut *part, flags))?.0 {
                // They were there.
                0 => return Err(Errno::CONNRESET),
                removed => *acked -= removed,
            }
        }
        Ok(())
    }

    /// Begins again with the first one.
    pub(super) fn rewind(&mut self, end: Option<&End>) -> Result<(), Errno> {
        match (self, end) {
            (Self::Socket { acked, turn }, Some(End::Socket(socket))) => {
                *turn = 0;
                set_peek_offset(socket, i32::try_from(*acked).unwrap_or(i32::MAX))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn clear(&mut self, shared: &mut Shared) {
        if let Self::Queue(queue) = self {
            queue.clear(&mut shared.pool);
        }
    }
}

/// Sets where the next read with `MSG_PEEK` begins (socket(7), `SO_PEEK_OFF`). Reads move it.
pub(super) fn set_peek_offset(socket: impl AsFd, offset: libc::c_int) -> Result<(), Errno> {
    let socket = socket.as_fd().as_raw_fd();
    let size = libc::socklen_t::try_from(size_of_val(&offset)).unwrap_or_default();
    let value = (&raw const offset).cast();
    // SAFETY: the kernel reads an integer, which outlives the call.
    let result =
        unsafe { libc::setsockopt(socket, libc::SOL_SOCKET, libc::SO_PEEK_OFF, value, size) };
    if result == 0 {
        Ok(())
    } else {
        Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL))
    }
}

#[cfg(test)]
#[path = "unacked_tests.rs"]
mod tests;
