//! Messages on a `SOCK_SEQPACKET` socket.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::io::retry_on_intr;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, send,
    sendmsg, socketpair,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

use crate::descriptors::Descriptors;

/// Bytes of one packet: well below the smallest buffer that a socket may have by default.
const PACKET: usize = 32 << 10;
/// Bytes of the longest message. An event of a function can have 6 MiB, and JSON escapes take more.
const MAX_MESSAGE: usize = 32 << 20;
/// Descriptors that can go with one message.
const MAX_DESCRIPTORS: usize = 64;

/// The first byte of a packet that is followed by another of the same message.
const MORE: u8 = 1;
/// The first byte of the last packet of a message.
const LAST: u8 = 0;

/// Why no message was received.
#[derive(Debug, Error)]
pub(super) enum ReceiveError {
    /// The other end was closed.
    #[error("the connection to the monitor was closed")]
    Closed,
    /// No message came within the limit.
    #[error("no message came in time")]
    TimedOut,
    /// The socket failed.
    #[error("cannot receive from the monitor's connection")]
    Io(#[source] io::Error),
    /// The other end is not a firn of this version.
    #[error("the message on the monitor's connection is not valid")]
    Invalid(#[source] Option<serde_json::Error>),
}

/// One end of the connection. Both directions may be used at the same time by different threads.
#[derive(Debug)]
pub(super) struct Connection(OwnedFd);

impl Connection {
    /// Both ends of a new connection.
    pub(super) fn pair() -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok((Self(ours), theirs))
    }

    /// An end of a connection.
    #[cfg(test)]
    pub(super) fn of(end: OwnedFd) -> Self {
        Self(end)
    }

    /// The monitor's end, on its standard input.
    pub(super) fn of_stdin() -> io::Result<Self> {
        Ok(Self(io::stdin().as_fd().try_clone_to_owned()?))
    }

    /// Sends a message, with descriptors. Waits while the other end does not receive.
    pub(super) fn send(&self, message: &impl Serialize, with: &Descriptors) -> io::Result<()> {
        self.send_with(message, with, SendFlags::empty())
    }

    /// Sends a message, or fails if the other end does not receive.
    pub(super) fn send_now(&self, message: &impl Serialize) -> io::Result<()> {
        self.send_with(message, &Descriptors::default(), SendFlags::DONTWAIT)
    }

    fn send_with(
        &self,
        message: &impl Serialize,
        with: &Descriptors,
        flags: SendFlags,
    ) -> io::Result<()> {
        let body = serde_json::to_vec(message)?;
        let descriptors: Vec<BorrowedFd<'_>> = with.iter().map(AsFd::as_fd).collect();
        if descriptors.len() > MAX_DESCRIPTORS || body.len() > MAX_MESSAGE {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut chunks = body.chunks(PACKET).peekable();
        let flags = flags | SendFlags::NOSIGNAL;
        let mut with = descriptors.as_slice();
        while let Some(chunk) = chunks.next() {
            let packet = [&[if chunks.peek().is_some() { MORE } else { LAST }], chunk].concat();
            // A monitor sends none, and its jail denies it sendmsg(2).
            if with.is_empty() {
                retry_on_intr(|| send(&self.0, &packet, flags))?;
                continue;
            }
            let mut space =
                [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            control.push(SendAncillaryMessage::ScmRights(with));
            let bytes = [IoSlice::new(&packet)];
            retry_on_intr(|| sendmsg(&self.0, &bytes, &mut control, flags))?;
            with = &[];
        }
        Ok(())
    }

    /// Receives a message, with its descriptors. Waits for as long as `limit` between packets, if
    /// there is a limit.
    pub(super) fn receive<T: DeserializeOwned>(
        &self,
        limit: Option<Duration>,
    ) -> Result<(T, Descriptors), ReceiveError> {
        set_socket_timeout(&self.0, Timeout::Recv, limit)
            .map_err(|e| ReceiveError::Io(e.into()))?;
        let (mut body, mut descriptors) = (Vec::new(), Vec::new());
        loop {
            let (packet, more) = self.receive_packet(&mut descriptors)?;
            body.extend(packet);
            if body.len() > MAX_MESSAGE || descriptors.len() > MAX_DESCRIPTORS {
                return Err(ReceiveError::Invalid(None));
            }
            if !more {
                break;
            }
        }
        let message = serde_json::from_slice(&body).map_err(|e| ReceiveError::Invalid(Some(e)))?;
        Ok((message, descriptors.into()))
    }

    /// Receives one packet. Whether another one of the same message follows is returned with it.
    fn receive_packet(
        &self,
        descriptors: &mut Vec<OwnedFd>,
    ) -> Result<(Vec<u8>, bool), ReceiveError> {
        let mut packet = vec![0; PACKET + 1];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = retry_on_intr(|| {
            let buffer = &mut [IoSliceMut::new(&mut packet)];
            recvmsg(&self.0, buffer, &mut control, RecvFlags::CMSG_CLOEXEC)
        });
        let received = received.map_err(|errno| match io::Error::from(errno) {
            error if error.kind() == io::ErrorKind::WouldBlock => ReceiveError::TimedOut,
            error if error.kind() == io::ErrorKind::ConnectionReset => ReceiveError::Closed,
            error => ReceiveError::Io(error),
        })?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                descriptors.extend(rights);
            }
        }
        if received.bytes == 0 {
            return Err(ReceiveError::Closed);
        }
        if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
            return Err(ReceiveError::Invalid(None));
        }
        packet.truncate(received.bytes);
        let more = match packet.remove(0) {
            LAST => false,
            MORE => true,
            _ => return Err(ReceiveError::Invalid(None)),
        };
        Ok((packet, more))
    }
}
