//! Connections of a guest to programs on the host.
//!
//! A monitor connects to nothing. It asks a broker, in a process outside its jail, over a
//! `SOCK_SEQPACKET` socket: a request is the port, 4 bytes in the host's order; the answer is the
//! same port, and with it the connected socket (`SCM_RIGHTS`) or, if no program serves the port,
//! nothing. Answers come in the order of the requests.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::thread;

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv,
    recvmsg, send, sendmsg, socket_with, socketpair,
};

use super::connection::Ports;

/// The most requests that wait for the broker, including those that the guest has dropped. Further
/// ones are refused.
pub(super) const MAX_WAITING: usize = 128;
/// Bytes of a message.
const MESSAGE: usize = 4;

/// Connects one guest to programs on the host: for port P, to the unix socket at its path with `_P`
/// appended, as in Firecracker. It belongs outside the monitor's jail, and trusts the monitor with
/// nothing but the ports of these sockets.
#[derive(Debug)]
pub struct VsockBroker {
    socket: OwnedFd,
    path: PathBuf,
}

impl VsockBroker {
    /// A broker in a thread of its own, which ends when the returned end, the monitor's, is closed.
    ///
    /// # Errors
    /// The socket or the thread cannot be made.
    pub fn start(path: PathBuf) -> io::Result<OwnedFd> {
        let (monitor, begin) = Self::prepare(path)?;
        begin()?;
        Ok(monitor)
    }

    /// The monitor's end, and what begins the broker: the end can be sent first, and a start does
    /// not wait for a thread.
    ///
    /// # Errors
    /// The socket cannot be made; what begins fails if the thread cannot.
    pub fn prepare(
        path: PathBuf,
    ) -> io::Result<(OwnedFd, impl FnOnce() -> io::Result<()> + Send + 'static)> {
        let (broker, monitor) = Self::pair(path)?;
        let serve = move || while broker.answer_next().is_ok() {};
        let thread = thread::Builder::new().name("vsock-broker".into());
        Ok((monitor, move || thread.spawn(serve).map(drop)))
    }

    pub(super) fn pair(path: PathBuf) -> io::Result<(Self, OwnedFd)> {
        let flags = SocketFlags::CLOEXEC;
        let (socket, monitor) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        Ok((Self { socket, path }, monitor))
    }

    /// Waits for a request and answers it. The error is that of the socket: the other end was
    /// closed, or breaks the protocol.
    pub(super) fn answer_next(&self) -> Result<(), Errno> {
        let mut request = [0; MESSAGE];
        // Descriptors that come with a message are not received.
        let (_, len) = retry_on_intr(|| recv(&self.socket, &mut request, RecvFlags::TRUNC))?;
        if len != MESSAGE {
            return Err(Errno::PROTO);
        }
        let stream = self.connect(u32::from_ne_bytes(request)).ok();
        let rights = stream.as_ref().map(AsFd::as_fd);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if rights.is_some() {
            control.push(SendAncillaryMessage::ScmRights(rights.as_slice()));
        }
        let answer = [IoSlice::new(&request)];
        retry_on_intr(|| sendmsg(&self.socket, &answer, &mut control, SendFlags::NOSIGNAL))?;
        Ok(())
    }

    /// A program that does not accept is treated as absent.
    fn connect(&self, port: u32) -> Result<OwnedFd, Errno> {
        let mut path = OsString::from(&self.path);
        path.push(format!("_{port}"));
        let address = SocketAddrUnix::new(path)?;
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let stream = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&stream, &address)?;
        Ok(stream)
    }
}

#[cfg(test)]
impl AsFd for VsockBroker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// The device's side: requests of the guest that wait for the broker.
#[derive(Debug)]
pub(super) struct Requests {
    /// `None` if there is no broker, or it has ended.
    broker: Option<OwnedFd>,
    /// Requests without an answer, the oldest first.
    waiting: VecDeque<Waiting>,
}

#[derive(Debug)]
struct Waiting {
    request: Request,
    /// The guest has ended the connection, and the answer is dropped.
    dropped: bool,
}

/// The guest's request for a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) ports: Ports,
    /// The guest's credit, as in [`Connection::set_credit`](super::connection::Connection).
    pub(super) buf_alloc: u32,
    pub(super) fwd_cnt: u32,
}

impl Requests {
    pub(super) fn new(broker: Option<OwnedFd>) -> Self {
        Self { broker, waiting: VecDeque::new() }
    }

    /// Readable when [`Requests::next_answer`] has something.
    pub(super) fn event_source(&self) -> Option<BorrowedFd<'_>> {
        self.broker.as_ref().map(AsFd::as_fd)
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Asks the broker. Returns whether the request waits for its answer; if not, it is refused.
    pub(super) fn ask(&mut self, request: Request) -> bool {
        let Some(broker) = &self.broker else { return false };
        if self.waiting.len() >= MAX_WAITING {
            return false;
        }
        let port = request.ports.host.to_ne_bytes();
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let asked = retry_on_intr(|| send(broker, &port, flags)) == Ok(MESSAGE);
        if asked {
            self.waiting.push_back(Waiting { request, dropped: false });
        }
        asked
    }

    /// The request that waits for a connection of these ports.
    pub(super) fn get_mut(&mut self, ports: Ports) -> Option<&mut Request> {
        let waiting = self.waiting.iter_mut().find(|waiting| waiting.is_of(ports))?;
        Some(&mut waiting.request)
    }

    pub(super) fn contains(&self, ports: Ports) -> bool {
        self.waiting.iter().any(|waiting| waiting.is_of(ports))
    }

    /// Drops the answer to the request for a connection of these ports, if there is one.
    pub(super) fn forget(&mut self, ports: Ports) {
        self.waiting.iter_mut().filter(|w| w.is_of(ports)).for_each(|w| w.dropped = true);
    }

    pub(super) fn forget_all(&mut self) {
        self.waiting.iter_mut().for_each(|waiting| waiting.dropped = true);
    }

    /// The next request that was answered, and its connection; `None` if it is refused.
    pub(super) fn next_answer(&mut self) -> Option<(Request, Option<OwnedFd>)> {
        loop {
            let port = self.waiting.front()?.request.ports.host;
            let stream = match self.broker.as_ref().map(|broker| receive(broker, port)) {
                Some(Ok(stream)) => stream,
                Some(Err(Errno::AGAIN)) => return None,
                // It has ended: it answers none of them.
                Some(Err(_)) | None => {
                    self.broker = None;
                    None
                }
            };
            let Waiting { request, dropped } = self.waiting.pop_front()?;
            if !dropped {
                return Some((request, stream));
            }
        }
    }
}

impl Waiting {
    fn is_of(&self, ports: Ports) -> bool {
        !self.dropped && self.request.ports == ports
    }
}

/// Receives the answer for `port`.
fn receive(broker: &OwnedFd, port: u32) -> Result<Option<OwnedFd>, Errno> {
    let mut answer = [0; MESSAGE];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = retry_on_intr(|| {
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        recvmsg(broker, &mut [IoSliceMut::new(&mut answer)], &mut control, flags)
    })?;
    if received.bytes != MESSAGE || u32::from_ne_bytes(answer) != port {
        return Err(Errno::PROTO);
    }
    // The system drops a socket for which this process has no descriptor left.
    let rights = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut rights) => rights.next(),
        _ => None,
    });
    Ok(rights)
}

#[cfg(test)]
#[path = "broker_tests.rs"]
mod tests;
