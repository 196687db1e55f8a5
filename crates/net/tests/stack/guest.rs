//! A guest with smoltcp's sockets.

use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::time::Duration;

use firn_net::{
    Broker, FrameHeader, GuestNetwork, Offloads, Policy, Proxy, PublishedAddress, PublishedPorts,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::phy::{Checksum, Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::socket::{tcp, udp};
use smoltcp::time::Instant;
use smoltcp::wire::{EthernetAddress, IpCidr};

/// How the guest's link is.
#[derive(Clone, Copy, Default)]
pub(crate) struct Link {
    pub(crate) offloads: Offloads,
    /// The guest drops each frame whose number is a multiple of this one.
    pub(crate) lose_every: u64,
}

pub(crate) struct Guest {
    pub(crate) proxy: Proxy,
    link: Link,
    interface: Interface,
    sockets: SocketSet<'static>,
    wire: Wire,
    frames: u64,
    /// Bytes of the buffers of connections that follow.
    pub(crate) buffer: usize,
    next_port: u16,
}

/// Frames in both directions.
struct Wire {
    to_guest: VecDeque<Vec<u8>>,
    from_guest: Vec<Vec<u8>>,
    offloads: Offloads,
}

pub(crate) fn broker() -> OwnedFd {
    Broker::start(Policy::parse(["allow:127.0.0.0/8"]).unwrap(), Vec::new()).unwrap()
}

/// A broker that publishes a port, and where.
pub(crate) fn publishing(port: &str) -> (OwnedFd, SocketAddr, PublishedPorts) {
    let mut ports = PublishedPorts::open([port]).unwrap();
    let (broker, begin) = Broker::prepare(Policy::default(), Vec::new, &mut ports, drop).unwrap();
    begin().unwrap();
    let PublishedAddress::Tcp(address) = ports.ports()[0].address else { panic!("{ports:?}") };
    (broker, address, ports)
}

fn new_proxy(link: Link, broker: OwnedFd) -> Proxy {
    let mut proxy = Proxy::new(GuestNetwork::default(), broker).unwrap();
    proxy.set_offloads(link.offloads);
    proxy
}

impl Guest {
    pub(crate) fn new(link: Link) -> Self {
        Self::with_broker(link, broker())
    }

    pub(crate) fn with_broker(link: Link, broker: OwnedFd) -> Self {
        let network = GuestNetwork::default();
        let mut wire =
            Wire { to_guest: VecDeque::new(), from_guest: Vec::new(), offloads: link.offloads };
        let config = Config::new(EthernetAddress(network.mac).into());
        let mut interface = Interface::new(config, &mut wire, Instant::now());
        let address = IpCidr::new(network.ipv4.address.into(), network.ipv4.prefix);
        interface.update_ip_addrs(|addresses| addresses.push(address).unwrap());
        interface.routes_mut().add_default_ipv4_route(network.ipv4.gateway).unwrap();
        let sockets = SocketSet::new(Vec::new());
        let proxy = new_proxy(link, broker);
        Self {
            proxy,
            link,
            interface,
            sockets,
            wire,
            frames: 0,
            buffer: 256 << 10,
            next_port: 40_000,
        }
    }

    /// A guest whose network is its metadata service alone.
    pub(crate) fn with_metadata(link: Link, proxy: Proxy) -> Self {
        let mut guest = Self::new(link);
        guest.proxy = proxy;
        guest.proxy.set_offloads(link.offloads);
        // The service is on the link.
        let address = IpCidr::new(Ipv4Addr::new(169, 254, 7, 7).into(), 16);
        guest.interface.update_ip_addrs(|addresses| addresses.push(address).unwrap());
        guest
    }

    /// Returns the old one.
    pub(crate) fn replace_proxy(&mut self) -> Proxy {
        self.wire.from_guest.clear();
        self.wire.to_guest.clear();
        std::mem::replace(&mut self.proxy, new_proxy(self.link, broker()))
    }

    pub(crate) fn listen(&mut self, port: u16) -> SocketHandle {
        let buffer = || tcp::SocketBuffer::new(vec![0; self.buffer]);
        let mut socket = tcp::Socket::new(buffer(), buffer());
        socket.listen(port).unwrap();
        self.sockets.add(socket)
    }

    pub(crate) fn connect(&mut self, address: Ipv4Addr, port: u16) -> SocketHandle {
        let buffer = || tcp::SocketBuffer::new(vec![0; self.buffer]);
        let mut socket = tcp::Socket::new(buffer(), buffer());
        self.next_port += 1;
        socket.connect(self.interface.context(), (address, port), self.next_port).unwrap();
        self.sockets.add(socket)
    }

    pub(crate) fn bind(&mut self, port: u16) -> SocketHandle {
        let buffer =
            || udp::PacketBuffer::new(vec![udp::PacketMetadata::EMPTY; 8], vec![0; 8 << 10]);
        let mut socket = udp::Socket::new(buffer(), buffer());
        socket.bind(port).unwrap();
        self.sockets.add(socket)
    }

    pub(crate) fn tcp(&mut self, handle: SocketHandle) -> &mut tcp::Socket<'static> {
        self.sockets.get_mut(handle)
    }

    pub(crate) fn udp(&mut self, handle: SocketHandle) -> &mut udp::Socket<'static> {
        self.sockets.get_mut(handle)
    }

    /// The guest's own work; its frames reach the proxy.
    pub(crate) fn poll_guest(&mut self) {
        self.interface.poll(Instant::now(), &mut self.wire, &mut self.sockets);
        for frame in self.wire.from_guest.drain(..) {
            self.proxy.transmit(&[&frame]);
        }
    }

    fn poll_proxy(&mut self) {
        self.proxy.poll();
        self.receive();
    }

    /// Takes the frames that the proxy has.
    pub(crate) fn receive(&mut self) {
        while self.wire.to_guest.len() < 64
            && let Some((header, frame)) = self.proxy.receive(65_550)
        {
            self.frames += 1;
            assert!(self.link.offloads.tso4 || frame.len() <= 1514, "{}", frame.len());
            let is_partial = header.flags & FrameHeader::NEEDS_CSUM != 0;
            assert!(self.link.offloads.checksum || !is_partial);
            // Spread irregularly: what repeats all of a window may have its length as a period.
            let spread = self.frames.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
            let is_lost = self.link.lose_every > 0 && spread.is_multiple_of(self.link.lose_every);
            if !is_lost {
                self.wire.to_guest.push_back(frame.to_vec());
            }
        }
    }

    /// Works on both sides until `is_done`.
    pub(crate) fn run(&mut self, mut is_done: impl FnMut(&mut Self) -> bool) {
        let limit = std::time::Instant::now() + Duration::from_secs(60);
        loop {
            self.poll_guest();
            self.poll_proxy();
            if is_done(self) {
                return;
            }
            assert!(std::time::Instant::now() < limit, "{:?}", self.proxy.counters());
            if self.wire.to_guest.is_empty() && !self.proxy.has_frames() {
                let mut fds = [PollFd::from_borrowed_fd(self.proxy.event_source(), PollFlags::IN)];
                let wait = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
                poll(&mut fds, Some(&wait)).unwrap();
            }
        }
    }
}

impl Device for Wire {
    type RxToken<'a> = Received;
    type TxToken<'a> = Sending<'a>;

    fn receive(&mut self, _: Instant) -> Option<(Received, Sending<'_>)> {
        let frame = self.to_guest.pop_front()?;
        Some((Received(frame), Sending(&mut self.from_guest)))
    }

    fn transmit(&mut self, _: Instant) -> Option<Sending<'_>> {
        Some(Sending(&mut self.from_guest))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ethernet;
        capabilities.max_transmission_unit = 1514;
        if self.offloads.checksum {
            capabilities.checksum.tcp = Checksum::None;
            capabilities.checksum.udp = Checksum::None;
        }
        capabilities
    }
}

struct Received(Vec<u8>);

impl RxToken for Received {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, read: F) -> R {
        read(&self.0)
    }
}

struct Sending<'a>(&'a mut Vec<Vec<u8>>);

impl TxToken for Sending<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, write: F) -> R {
        let mut frame = vec![0; len];
        let result = write(&mut frame);
        self.0.push(frame);
        result
    }
}
