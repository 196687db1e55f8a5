//! The monitor's end of the forwarder: it sends queries there, and receives answers, as if it were
//! a resolver's.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair,
};

use super::exchange::Transport;

/// Bytes of a query.
pub(super) const MAX_QUERY: usize = 4096;
const LENGTH: usize = 2;
/// How long an end without a query is kept. The proxy closes its side earlier.
pub(super) const IDLE: Duration = Duration::from_secs(10);

/// The forwarder's side of a pair of sockets.
#[derive(Debug)]
pub(super) struct End {
    pub(super) number: u64,
    pub(super) last_used: Instant,
    socket: OwnedFd,
    /// Over TCP.
    stream: Option<Stream>,
}

#[derive(Debug, Default)]
struct Stream {
    received: Vec<u8>,
    unsent: Vec<u8>,
    /// A query has no answer yet: the next one waits.
    is_busy: bool,
}

/// What an end has received.
pub(super) enum Received {
    Query(Vec<u8>),
    Nothing,
    /// The monitor has closed it, or breaks the protocol.
    Closed,
}

impl End {
    /// An end, and the monitor's.
    pub(super) fn pair(
        number: u64,
        transport: Transport,
        now: Instant,
    ) -> Result<(Self, OwnedFd), Errno> {
        let (kind, stream) = match transport {
            Transport::Udp => (SocketType::DGRAM, None),
            Transport::Tcp => (SocketType::STREAM, Some(Stream::default())),
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (socket, monitor) = socketpair(AddressFamily::UNIX, kind, flags, None)?;
        Ok((Self { number, last_used: now, socket, stream }, monitor))
    }

    pub(super) fn transport(&self) -> Transport {
        if self.stream.is_some() { Transport::Tcp } else { Transport::Udp }
    }

    /// What to wait for.
    pub(super) fn interest(&self) -> (BorrowedFd<'_>, PollFlags) {
        let flags = match &self.stream {
            Some(stream) if !stream.unsent.is_empty() => PollFlags::OUT,
            // Its end is reported all the same.
            Some(stream) if stream.is_busy => PollFlags::empty(),
            _ => PollFlags::IN,
        };
        (self.socket.as_fd(), flags)
    }

    /// Sends what waits, and receives the next query.
    pub(super) fn progress(&mut self, now: Instant) -> Received {
        if self.flush().is_err() {
            return Received::Closed;
        }
        let received = match &mut self.stream {
            Some(stream) if !stream.unsent.is_empty() => Ok(None),
            Some(stream) => stream.receive(&self.socket),
            None => receive_datagram(&self.socket),
        };
        match received {
            Ok(Some(query)) => {
                self.last_used = now;
                Received::Query(query)
            }
            Ok(None) => Received::Nothing,
            Err(_) => Received::Closed,
        }
    }

    /// Sends an answer. One that the monitor does not receive is lost, as a datagram may be.
    pub(super) fn answer(&mut self, message: &[u8], now: Instant) {
        self.last_used = now;
        match &mut self.stream {
            None => {
                let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                let _ = retry_on_intr(|| send(&self.socket, message, flags));
            }
            Some(stream) => {
                stream.is_busy = false;
                let len = u16::try_from(message.len()).unwrap_or(u16::MAX);
                stream.unsent.extend(len.to_be_bytes());
                stream.unsent.extend(message);
                // A socket that has failed is found by the next poll.
                let _ = self.flush();
            }
        }
    }

    fn flush(&mut self) -> Result<(), Errno> {
        let Some(stream) = &mut self.stream else { return Ok(()) };
        while !stream.unsent.is_empty() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match retry_on_intr(|| send(&self.socket, &stream.unsent, flags)) {
                Ok(sent) => drop(stream.unsent.drain(..sent)),
                Err(Errno::AGAIN) => break,
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }
}

/// A datagram that is longer than a query is dropped.
fn receive_datagram(socket: &OwnedFd) -> Result<Option<Vec<u8>>, Errno> {
    let mut query = vec![0; MAX_QUERY];
    let flags = RecvFlags::DONTWAIT | RecvFlags::TRUNC;
    match retry_on_intr(|| recv(socket, query.as_mut_slice(), flags)) {
        Ok((_, len)) => {
            query.truncate(if len > MAX_QUERY { 0 } else { len });
            Ok(Some(query))
        }
        Err(Errno::AGAIN) => Ok(None),
        Err(errno) => Err(errno),
    }
}

impl Stream {
    fn receive(&mut self, socket: &OwnedFd) -> Result<Option<Vec<u8>>, Errno> {
        if self.is_busy {
            // There was an event without one being waited for: the other side is closed.
            return Err(Errno::PIPE);
        }
        loop {
            let due = match self.received.first_chunk() {
                Some(length) => LENGTH + usize::from(u16::from_be_bytes(*length)),
                None => LENGTH,
            };
            if due > LENGTH + MAX_QUERY {
                return Err(Errno::MSGSIZE);
            }
            if due > LENGTH && self.received.len() == due {
                self.is_busy = true;
                let query = self.received.split_off(LENGTH);
                self.received.clear();
                return Ok(Some(query));
            }
            if due == LENGTH && self.received.len() == LENGTH {
                return Err(Errno::BADMSG);
            }
            let mut part = vec![0; due - self.received.len()];
            match retry_on_intr(|| recv(socket, part.as_mut_slice(), RecvFlags::DONTWAIT)) {
                Ok((_, 0)) => return Err(Errno::PIPE),
                Ok((_, len)) => self.received.extend(&part[..len]),
                Err(Errno::AGAIN) => return Ok(None),
                Err(errno) => return Err(errno),
            }
        }
    }
}
