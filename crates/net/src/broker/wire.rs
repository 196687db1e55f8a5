//! What the monitor and its broker send each other: messages of fixed size over a socket that keeps
//! their boundaries. Both ends are the same program, so the messages have no version.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recv, recvmsg, send, sendmsg,
};

const REQUEST: usize = 27;
const ANSWER: usize = 12;
const CONNECTION: usize = 2;

/// The kind of socket that a request is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SocketKind {
    Tcp,
    Udp,
    /// An unprivileged ICMP socket (icmp(7)); the port is 0.
    Ping,
    /// TCP to a DNS resolver of the host; the request's port counts the attempts.
    ResolverTcp,
    /// UDP to a DNS resolver of the host; the request's port counts the attempts.
    ResolverUdp,
}

impl SocketKind {
    const ALL: [Self; 5] = [Self::Tcp, Self::Udp, Self::Ping, Self::ResolverTcp, Self::ResolverUdp];

    fn code(self) -> u8 {
        match self {
            Self::Tcp => 0,
            Self::Udp => 1,
            Self::Ping => 2,
            Self::ResolverTcp => 3,
            Self::ResolverUdp => 4,
        }
    }
}

/// A monitor's request for a connected socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) id: u64,
    pub(crate) kind: SocketKind,
    pub(crate) to: SocketAddr,
}

/// The broker's answer: a socket that is connected, or will be, or an error.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) id: u64,
    pub(crate) socket: Result<OwnedFd, Errno>,
}

/// A connection that the broker has accepted for a published port.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) guest_port: u16,
    pub(crate) socket: OwnedFd,
}

/// What the broker sends. The kinds differ in their lengths.
#[derive(Debug)]
pub(crate) enum Message {
    Answer(Answer),
    Connection(Connection),
}

impl Request {
    fn encode(&self) -> [u8; REQUEST] {
        let mut bytes = [0; REQUEST];
        bytes[..8].copy_from_slice(&self.id.to_ne_bytes());
        bytes[8] = self.kind.code();
        bytes[9..11].copy_from_slice(&self.to.port().to_ne_bytes());
        let address = match self.to.ip() {
            IpAddr::V4(address) => address.to_ipv6_mapped(),
            IpAddr::V6(address) => address,
        };
        bytes[11..].copy_from_slice(&address.octets());
        bytes
    }

    /// An IPv4-mapped address is the IPv4 address: the system connects to that one.
    fn decode(bytes: &[u8; REQUEST]) -> Option<Self> {
        let (id, rest) = bytes.split_first_chunk()?;
        let (&[kind, port_0, port_1], address) = rest.split_first_chunk()?;
        let address: [u8; 16] = address.try_into().ok()?;
        Some(Self {
            id: u64::from_ne_bytes(*id),
            kind: SocketKind::ALL.into_iter().find(|known| known.code() == kind)?,
            to: SocketAddr::new(
                Ipv6Addr::from(address).to_canonical(),
                u16::from_ne_bytes([port_0, port_1]),
            ),
        })
    }

    /// Sends it without waiting; [`Errno::AGAIN`] if the broker is busy.
    pub(crate) fn send(&self, broker: impl AsFd) -> Result<(), Errno> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        retry_on_intr(|| send(&broker, &self.encode(), flags)).map(|_| ())
    }

    /// Waits for the next one. [`Errno::CONNRESET`] if the monitor has closed its end, and
    /// [`Errno::PROTO`] if it breaks the protocol.
    pub(crate) fn receive(socket: impl AsFd) -> Result<Self, Errno> {
        let mut bytes = [0; REQUEST];
        // Descriptors that come with a message are not received.
        let (_, len) = retry_on_intr(|| recv(&socket, &mut bytes, RecvFlags::TRUNC))?;
        match len {
            REQUEST => {}
            0 => return Err(Errno::CONNRESET),
            _ => return Err(Errno::PROTO),
        }
        Self::decode(&bytes).ok_or(Errno::PROTO)
    }
}

impl Answer {
    /// Waits for room in the socket.
    pub(crate) fn send(&self, socket: impl AsFd) -> Result<(), Errno> {
        let mut bytes = [0; ANSWER];
        bytes[..8].copy_from_slice(&self.id.to_ne_bytes());
        let errno = self.socket.as_ref().err().map_or(0, |errno| errno.raw_os_error());
        bytes[8..].copy_from_slice(&errno.to_ne_bytes());
        let passed = self.socket.as_ref().ok().map(AsFd::as_fd);
        send_with(socket, &bytes, passed)
    }

    fn decode(bytes: &[u8; ANSWER], socket: Option<OwnedFd>) -> Self {
        let [id @ .., a, b, c, d] = *bytes;
        // The system drops a socket for which this process has no descriptor left.
        let socket = match i32::from_ne_bytes([a, b, c, d]) {
            0 => socket.ok_or(Errno::MFILE),
            errno => Err(Errno::from_raw_os_error(errno)),
        };
        Self { id: u64::from_ne_bytes(id), socket }
    }
}

impl Connection {
    /// Waits for room in the socket.
    pub(crate) fn send(&self, socket: impl AsFd) -> Result<(), Errno> {
        send_with(socket, &self.guest_port.to_ne_bytes(), Some(self.socket.as_fd()))
    }
}

impl Message {
    /// The next one; [`Errno::AGAIN`] if there is none, and [`Errno::MFILE`] for a connection for
    /// which this process has no descriptor left, which the system has closed.
    pub(crate) fn receive(broker: impl AsFd) -> Result<Self, Errno> {
        let mut bytes = [0; ANSWER];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = retry_on_intr(|| {
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            recvmsg(&broker, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)
        })?;
        let socket = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut rights) => rights.next(),
            _ => None,
        });
        match received.bytes {
            ANSWER => Ok(Self::Answer(Answer::decode(&bytes, socket))),
            CONNECTION => {
                let guest_port = u16::from_ne_bytes([bytes[0], bytes[1]]);
                let socket = socket.ok_or(Errno::MFILE)?;
                Ok(Self::Connection(Connection { guest_port, socket }))
            }
            _ => Err(Errno::PROTO),
        }
    }
}

/// Sends a message, with a descriptor if there is one.
fn send_with(socket: impl AsFd, bytes: &[u8], passed: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if passed.is_some() {
        control.push(SendAncillaryMessage::ScmRights(passed.as_slice()));
    }
    let message = [IoSlice::new(bytes)];
    retry_on_intr(|| sendmsg(&socket, &message, &mut control, SendFlags::NOSIGNAL))?;
    Ok(())
}

#[cfg(test)]
#[path = "wire_tests.rs"]
mod tests;
