//! A scripted guest's side of the sockets.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;
use tempfile::TempDir;

use super::super::testing::Guest;
use super::packet::{HEADER_LEN, HOST_CID, Header, Op, TYPE_STREAM};
use super::{EVENT, RX, TX, Vsock, VsockBroker, VsockListener};

pub(super) const CID: u64 = 3;
/// The same, as the device takes it.
pub(super) const GUEST: u32 = 3;
/// The port that the scripted guest listens on.
pub(super) const PORT: u32 = 1024;
/// Bytes of a buffer for packets to the guest, as in Linux.
pub(super) const RX_BUFFER: u32 = 4096;
/// Longer than any test; only a failing test waits for it.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A guest whose driver is a test.
pub(super) struct Peer {
    pub(super) guest: Guest<Vsock>,
    pub(super) broker: VsockBroker,
    pub(super) dir: TempDir,
    /// The size of the guest's buffer.
    pub(super) buf_alloc: u32,
    pub(super) fwd_cnt: u32,
}

/// The ports of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ends {
    pub(super) host: u32,
    pub(super) guest: u32,
}

/// A device, and the broker of its guest.
pub(super) fn device(dir: &TempDir) -> (Vsock, VsockBroker) {
    let path = dir.path().join("v");
    let (broker, end) = VsockBroker::pair(path.clone()).unwrap();
    let listener = VsockListener::bind(&path).unwrap().with_broker(Some(end));
    (Vsock::new(GUEST, listener).unwrap(), broker)
}

impl Peer {
    /// A started guest with buffers for packets and for events.
    pub(super) fn new() -> Self {
        let mut peer = Self::without_buffers();
        peer.fill(64);
        for _ in 0..8 {
            peer.guest.add(EVENT, &[], &[4]);
        }
        peer.guest.kick(EVENT);
        peer
    }

    pub(super) fn without_buffers() -> Self {
        let dir = TempDir::new().unwrap();
        let (device, broker) = device(&dir);
        let guest = Guest::started(device);
        Self { guest, broker, dir, buf_alloc: 256 << 10, fwd_cnt: 0 }
    }

    /// The guest thawed, with the same memory and a new socket.
    pub(super) fn thawed(&self) -> Self {
        let dir = TempDir::new().unwrap();
        let (device, broker) = device(&dir);
        let guest = self.guest.restored(device, &self.guest.save());
        Self { guest, broker, dir, buf_alloc: self.buf_alloc, fwd_cnt: 0 }
    }

    pub(super) fn path(&self) -> PathBuf {
        self.dir.path().join("v")
    }

    /// A program on the host serves `port` of the host.
    pub(super) fn listen(&self, port: u32) -> UnixListener {
        UnixListener::bind(self.dir.path().join(format!("v_{port}"))).unwrap()
    }

    /// The broker answers all requests, and the device handles the answers.
    pub(super) fn answer(&mut self) {
        while is_readable(&self.broker) {
            self.broker.answer_next().unwrap();
        }
        self.guest.run();
    }

    /// Gives the device `count` buffers for packets.
    pub(super) fn fill(&mut self, count: usize) {
        for _ in 0..count {
            self.guest.add(RX, &[], &[RX_BUFFER]);
        }
        self.guest.kick(RX);
    }

    /// A program on the host connects.
    pub(super) fn client(&mut self) -> UnixStream {
        let client = UnixStream::connect(self.path()).unwrap();
        client.set_read_timeout(Some(TIMEOUT)).unwrap();
        client.set_write_timeout(Some(TIMEOUT)).unwrap();
        client
    }

    /// A program on the host requests [`PORT`], and the guest accepts.
    pub(super) fn connect(&mut self) -> (UnixStream, Ends) {
        let mut client = self.client();
        client.write_all(format!("CONNECT {PORT}\n").as_bytes()).unwrap();
        self.guest.run();
        let ends = self.expect_request();
        self.send(ends, Op::Response, 0, &[]);
        assert_eq!(read_line(&mut client), format!("OK {}\n", ends.host));
        (client, ends)
    }

    pub(super) fn expect_request(&mut self) -> Ends {
        let (header, data) = self.receive().expect("a request for the guest");
        assert_eq!((header.op, header.dst_port), (Op::Request.number(), PORT));
        assert_eq!((header.src_cid, header.dst_cid, header.kind), (HOST_CID, CID, TYPE_STREAM));
        assert!(data.is_empty());
        Ends { host: header.src_port, guest: header.dst_port }
    }

    pub(super) fn header(&self, ends: Ends, op: Op, flags: u32, len: usize) -> Header {
        Header {
            src_cid: CID,
            dst_cid: HOST_CID,
            src_port: ends.guest,
            dst_port: ends.host,
            len: u32::try_from(len).unwrap(),
            kind: TYPE_STREAM,
            op: op.number(),
            flags,
            buf_alloc: self.buf_alloc,
            fwd_cnt: self.fwd_cnt,
        }
    }

    pub(super) fn send(&mut self, ends: Ends, op: Op, flags: u32, data: &[u8]) {
        self.send_raw(&self.header(ends, op, flags, data.len()), data);
    }

    pub(super) fn send_raw(&mut self, header: &Header, data: &[u8]) {
        let header = header.to_bytes();
        let parts: Vec<&[u8]> = std::iter::once(&header[..]).chain(data.chunks(8192)).collect();
        self.guest.add(TX, &parts, &[]);
        self.guest.kick(TX);
        while self.guest.used(TX).is_some() {}
    }

    /// The next packet; its buffer is returned to the device.
    pub(super) fn receive(&mut self) -> Option<(Header, Vec<u8>)> {
        let packet = self.take()?;
        self.fill(1);
        Some(packet)
    }

    /// The next packet; its buffer is not returned to the device.
    pub(super) fn take(&mut self) -> Option<(Header, Vec<u8>)> {
        let mut bytes = self.guest.used(RX)?.data;
        let data = bytes.split_off(HEADER_LEN);
        let header = Header::from_bytes(&bytes.try_into().unwrap());
        assert_eq!(data.len(), usize::try_from(header.len).unwrap());
        Some((header, data))
    }

    /// Checks the next packet, and returns its data.
    pub(super) fn expect(&mut self, ends: Ends, op: Op, flags: u32) -> Vec<u8> {
        let (header, data) = self.receive().unwrap_or_else(|| panic!("a packet {op:?}"));
        assert_eq!(Op::from_number(header.op), Some(op));
        assert_eq!((header.src_port, header.dst_port), (ends.host, ends.guest));
        assert_eq!(header.flags, flags);
        data
    }

    pub(super) fn expect_nothing(&mut self) {
        assert_eq!(self.receive(), None);
    }

    pub(super) fn connections(&self) -> usize {
        self.guest.transport().device().connections()
    }
}

fn is_readable(socket: impl AsFd) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&now)).unwrap() > 0
}

pub(super) fn read_line(client: &mut UnixStream) -> String {
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        let mut byte = [0];
        client.read_exact(&mut byte).unwrap();
        line.extend(byte);
    }
    String::from_utf8(line).unwrap()
}

/// Checks that the other side has ended without more data.
pub(super) fn expect_end(client: &mut UnixStream) {
    let mut rest = Vec::new();
    client.read_to_end(&mut rest).unwrap();
    assert_eq!(rest, b"");
}

/// Bytes that depend on their position.
pub(super) fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| u8::try_from(at * 31 % 251).unwrap()).collect()
}
