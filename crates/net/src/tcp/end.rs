//! The other end of a guest's connection.

use std::io::IoSlice;
use std::os::fd::OwnedFd;

use rustix::io::{Errno, retry_on_intr, writev};
use rustix::net::sockopt::socket_error;
use rustix::net::{Shutdown, shutdown};

use super::reset_socket;
use crate::buffer::{Pool, Queue};
use crate::metadata::Connection;

/// What a connection of the guest leads to. Nothing here waits.
#[derive(Debug)]
pub(super) enum End {
    /// A socket of the host.
    Socket(OwnedFd),
    /// The metadata service of this process, which has no events: it is ready as soon as it has
    /// got a request.
    Metadata(Box<Connection>),
}

impl End {
    /// Whether it has something to read, or ends, without an event of a socket.
    pub(super) fn is_ready(&self) -> bool {
        match self {
            Self::Socket(_) => false,
            Self::Metadata(connection) => connection.is_ready(),
        }
    }

    /// Takes bytes of the guest, and returns how many.
    pub(super) fn send_all(&mut self, slices: &[&[u8]]) -> Result<usize, Errno> {
        match self {
            Self::Socket(socket) => {
                let slices: Vec<IoSlice<'_>> =
                    slices.iter().map(|slice| IoSlice::new(slice)).collect();
                retry_on_intr(|| writev(&*socket, &slices))
            }
            // It takes all when they arrive.
            Self::Metadata(_) => Err(Errno::AGAIN),
        }
    }

    /// Takes bytes that wait, and removes them from their queue.
    pub(super) fn send_queued(&mut self, queue: &mut Queue, pool: &mut Pool) -> Result<(), Errno> {
        match self {
            Self::Socket(socket) => queue.write_to(&*socket, pool).map(drop),
            // It takes all or fails.
            Self::Metadata(_) => Err(Errno::AGAIN),
        }
    }

    /// Appends at most `room` bytes for the guest, and returns how many: 0 at the end.
    pub(super) fn receive(
        &mut self,
        queue: &mut Queue,
        room: usize,
        pool: &mut Pool,
    ) -> Result<usize, Errno> {
        match self {
            Self::Socket(socket) => queue.read_from(&*socket, room, pool),
            Self::Metadata(connection) => {
                let bytes = connection.read(room)?;
                queue.push(bytes, pool);
                Ok(bytes.len())
            }
        }
    }

    /// The guest has sent all.
    pub(super) fn shut(&mut self) {
        match self {
            // The other side may have reset the connection; reading finds that.
            Self::Socket(socket) => drop(shutdown(&*socket, Shutdown::Write)),
            Self::Metadata(connection) => connection.shut(),
        }
    }

    /// The error that an event was about.
    pub(super) fn error(&self) -> Result<(), Errno> {
        match self {
            Self::Socket(socket) => socket_error(socket).flatten(),
            Self::Metadata(_) => Ok(()),
        }
    }

    /// Makes the host's kernel reset the connection rather than close it.
    pub(super) fn reset(self) {
        if let Self::Socket(socket) = self {
            reset_socket(socket);
        }
    }
}
