//! The host's bytes that the guest has not acknowledged.

use std::os::fd::{AsFd, AsRawFd};

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{RecvFlags, recv};

use super::Shared;
use super::end::End;
use crate::buffer::{Queue, share};

/// The most that one read takes ahead of the guest.
const READ_AHEAD: usize = 256 << 10;
/// Payload of segments that are read from the socket one by one.
const LARGE: usize = 16 << 10;
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
    },
}

impl Default for Unacked {
    fn default() -> Self {
        Self::Queue(Queue::default())
    }
}

impl Unacked {
    /// Those of a connected socket, of which segments have up to `most` bytes.
    ///
    /// Small ones are read ahead, and so are all before Linux 6.9 (IPv6: 6.11), which knows no
    /// offset in a TCP socket.
    pub(super) fn of_socket(socket: impl AsFd, most: usize) -> Self {
        if most >= LARGE && set_peek_offset(socket, 0).is_ok() {
            Self::Socket { acked: 0 }
        } else {
            Self::default()
        }
    }

    /// The most of them that the guest may be sent.
    pub(super) fn limit(&self, shared: &Shared) -> usize {
        match self {
            Self::Queue(_) => share(shared.pool.usage().0),
            Self::Socket { .. } => usize::MAX,
        }
    }

    /// Copies those from `offset` on to `out`, which is not empty, and returns how many: 0 at the
    /// end of what the host sends. In a socket, `offset` is where the last read ended.
    pub(super) fn read(
        &mut self,
        end: &mut End,
        offset: usize,
        out: &mut [u8],
        shared: &mut Shared,
    ) -> Result<usize, Errno> {
        let queue = match (self, &mut *end) {
            (Self::Queue(queue), _) => queue,
            (Self::Socket { .. }, End::Socket(socket)) => {
                let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
                return retry_on_intr(|| recv(&*socket, &mut *out, flags)).map(|(read, _)| read);
            }
            (Self::Socket { .. }, End::Metadata(_)) => return Err(Errno::AGAIN),
        };
        let mut held = queue.len().saturating_sub(offset);
        if held < out.len() {
            let room = share(shared.pool.usage().0).saturating_sub(queue.len());
            match end.receive(queue, room.clamp(1, READ_AHEAD), &mut shared.pool) {
                Err(Errno::AGAIN) if held > 0 => {}
                read => held += read?,
            }
        }
        let count = held.min(out.len());
        queue.copy_to(offset, &mut out[..count]);
        Ok(count)
    }

    /// Removes the first `count`, after which `rest` are with the guest.
    pub(super) fn consume(
        &mut self,
        end: Option<&End>,
        count: usize,
        rest: usize,
        shared: &mut Shared,
    ) -> Result<(), Errno> {
        match (self, end) {
            (Self::Queue(queue), _) => queue.consume(count.min(queue.len()), &mut shared.pool),
            (Self::Socket { acked }, Some(End::Socket(socket))) => {
                *acked += count;
                // Each removal can wake the host's sender, so they are few.
                let is_due = rest == 0 || (*acked >= rest && *acked >= LEAST);
                while is_due && *acked > 0 {
                    // A TCP socket writes nothing to it, so it has no memory.
                    shared.discarded.resize(DISCARD, 0);
                    let part = &mut shared.discarded[..DISCARD.min(*acked)];
                    let flags = RecvFlags::TRUNC | RecvFlags::DONTWAIT;
                    match retry_on_intr(|| recv(socket, &mut *part, flags))?.0 {
                        // They were there.
                        0 => return Err(Errno::CONNRESET),
                        removed => *acked -= removed,
                    }
                }
            }
            (Self::Socket { .. }, _) => {}
        }
        Ok(())
    }

    /// Begins again with the first one.
    pub(super) fn rewind(&self, end: Option<&End>) -> Result<(), Errno> {
        match (self, end) {
            (Self::Socket { acked }, Some(End::Socket(socket))) => {
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
fn set_peek_offset(socket: impl AsFd, offset: libc::c_int) -> Result<(), Errno> {
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
