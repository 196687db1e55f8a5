//! Frames to the guest.

use std::net::{IpAddr, Ipv6Addr};

use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    ETHERNET_HEADER_LEN, EthernetAddress, EthernetFrame, EthernetProtocol, EthernetRepr, IpAddress,
    IpProtocol, IpRepr, TcpPacket, TcpRepr, UDP_HEADER_LEN, UdpPacket, checksum,
};

use crate::checksum::sum;
use crate::flow::FlowKey;
use crate::header::{FrameHeader, Offloads};
use crate::network::{GuestNetwork, ip_header, link_headers};

/// Hop limit of packets to the guest, which is the next hop.
pub(crate) const HOP_LIMIT: u8 = 64;
/// Bytes before a frame in the memory of a packet. They are the caller's, for a header of its own.
pub const HEADROOM: usize = 16;
/// Where TCP and UDP have their checksums, in bytes of their headers.
const TCP_CHECKSUM: u16 = 16;
const UDP_CHECKSUM: u16 = 6;

/// The guest's side of the link.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Link {
    pub(crate) network: GuestNetwork,
    pub(crate) offloads: Offloads,
}

impl Link {
    /// Whether the guest takes segments that are larger than its MTU.
    pub(crate) const fn has_tso(&self, address: IpAddr) -> bool {
        let tso = if address.is_ipv4() { self.offloads.tso4 } else { self.offloads.tso6 };
        tso && self.offloads.checksum
    }
}

/// A buffer for one frame, used for one after the other.
#[derive(Debug, Default)]
pub(crate) struct Frame {
    header: FrameHeader,
    /// It begins after [`HEADROOM`].
    memory: Vec<u8>,
    len: usize,
}

impl Frame {
    pub(crate) fn parts(&self) -> (FrameHeader, &[u8]) {
        (self.header, &self.memory[HEADROOM..HEADROOM + self.len])
    }

    /// Room of `len` bytes at `offset`, for a payload that is known before its headers.
    pub(crate) fn payload_mut(&mut self, offset: usize, len: usize) -> &mut [u8] {
        self.set_len(offset + len);
        &mut self.bytes()[offset..]
    }

    /// A frame that another [`Frame`] has made.
    pub(crate) fn copy_from(&mut self, header: FrameHeader, bytes: &[u8]) {
        self.set_len(bytes.len());
        self.header = header;
        self.bytes().copy_from_slice(bytes);
    }

    /// Begins a frame of `payload` bytes after the Ethernet header, and returns these.
    pub(crate) fn ethernet(
        &mut self,
        link: &Link,
        ethertype: EthernetProtocol,
        payload: usize,
    ) -> &mut [u8] {
        self.header = FrameHeader::default();
        self.set_len(ETHERNET_HEADER_LEN + payload);
        let repr = EthernetRepr {
            src_addr: EthernetAddress(link.network.gateway_mac),
            dst_addr: EthernetAddress(link.network.mac),
            ethertype,
        };
        repr.emit(&mut EthernetFrame::new_unchecked(self.bytes()));
        &mut self.bytes()[ETHERNET_HEADER_LEN..]
    }

    /// Begins a packet of `payload` bytes after the IP header, and returns these.
    pub(crate) fn ip(
        &mut self,
        link: &Link,
        addresses: (IpAddr, IpAddr),
        protocol: IpProtocol,
        payload: usize,
        hop_limit: u8,
    ) -> &mut [u8] {
        let (source, destination) = addresses;
        let ethertype =
            if source.is_ipv4() { EthernetProtocol::Ipv4 } else { EthernetProtocol::Ipv6 };
        let packet = self.ethernet(link, ethertype, ip_header(source) + payload);
        let repr = IpRepr::new(source.into(), destination.into(), protocol, payload, hop_limit);
        repr.emit(&mut *packet, &ChecksumCapabilities::default());
        &mut packet[ip_header(source)..]
    }

    /// Puts the headers of a TCP segment to the guest before `payload` bytes, which are in place;
    /// `segment` has none. The guest gets packets with at most `mss` bytes of them.
    pub(crate) fn tcp(
        &mut self,
        link: &Link,
        key: &FlowKey,
        segment: &TcpRepr<'_>,
        (payload, mss): (usize, u16),
    ) {
        let (source, destination) = (key.remote.ip(), key.guest.ip());
        let tcp_header = segment.header_len();
        let len = tcp_header + payload;
        let packet = self.ip(link, (source, destination), IpProtocol::Tcp, len, HOP_LIMIT);
        let ignored = ChecksumCapabilities::ignored();
        let (from, to) = (IpAddress::from(source), IpAddress::from(destination));
        segment.emit(
            &mut TcpPacket::new_unchecked(&mut packet[..tcp_header]),
            &from,
            &to,
            &ignored,
        );
        let mut tcp = TcpPacket::new_unchecked(&mut *packet);
        if link.offloads.checksum {
            tcp.set_checksum(pseudo_header(&from, &to, IpProtocol::Tcp, len));
        } else {
            tcp.set_checksum(0);
            let sums = [pseudo_header(&from, &to, IpProtocol::Tcp, len), sum(packet)];
            TcpPacket::new_unchecked(packet).set_checksum(!checksum::combine(&sums));
        }
        self.header = transport_header(link, source, TCP_CHECKSUM);
        if payload > usize::from(mss) {
            let v4 = source.is_ipv4();
            self.header.gso_type = if v4 { FrameHeader::GSO_TCPV4 } else { FrameHeader::GSO_TCPV6 };
            self.header.gso_size = mss;
            self.header.hdr_len = narrow(link_headers(source) + tcp_header);
        }
    }

    /// Puts the headers of a datagram to the guest before `payload` bytes, which are in place.
    pub(crate) fn udp(&mut self, link: &Link, key: &FlowKey, payload: usize) {
        let (source, destination) = (key.remote.ip(), key.guest.ip());
        let len = UDP_HEADER_LEN + payload;
        let packet = self.ip(link, (source, destination), IpProtocol::Udp, len, HOP_LIMIT);
        let (from, to) = (IpAddress::from(source), IpAddress::from(destination));
        let mut udp = UdpPacket::new_unchecked(packet);
        udp.set_src_port(key.remote.port());
        udp.set_dst_port(key.guest.port());
        udp.set_len(narrow(len));
        if link.offloads.checksum {
            udp.set_checksum(pseudo_header(&from, &to, IpProtocol::Udp, len));
        } else {
            udp.fill_checksum(&from, &to);
        }
        self.header = transport_header(link, source, UDP_CHECKSUM);
    }

    /// Makes the frame one to all nodes of the link.
    pub(crate) fn set_multicast(&mut self, group: Ipv6Addr) {
        let [.., a, b, c, d] = group.octets();
        let mut frame = EthernetFrame::new_unchecked(self.bytes());
        frame.set_dst_addr(EthernetAddress([0x33, 0x33, a, b, c, d]));
    }

    /// Exchanges its memory for that of another frame.
    pub(crate) fn swap_memory(&mut self, memory: &mut Vec<u8>) {
        std::mem::swap(&mut self.memory, memory);
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[HEADROOM..HEADROOM + self.len]
    }

    fn set_len(&mut self, len: usize) {
        let end = HEADROOM + len;
        if self.memory.len() < end {
            self.memory.resize(end, 0);
        }
        self.len = len;
    }
}

/// The header of a frame with TCP or UDP in it.
fn transport_header(link: &Link, address: IpAddr, csum_offset: u16) -> FrameHeader {
    if !link.offloads.checksum {
        return FrameHeader::default();
    }
    FrameHeader {
        flags: FrameHeader::NEEDS_CSUM,
        csum_start: narrow(link_headers(address)),
        csum_offset,
        ..FrameHeader::default()
    }
}

/// The sum of the pseudo header, which is the checksum that the guest's driver completes.
pub(crate) fn pseudo_header(
    from: &IpAddress,
    to: &IpAddress,
    protocol: IpProtocol,
    len: usize,
) -> u16 {
    checksum::pseudo_header(from, to, protocol, u32::from(narrow(len)))
}

/// A length in a packet, which is below 64 KiB.
pub(crate) fn narrow(len: usize) -> u16 {
    u16::try_from(len).unwrap_or(u16::MAX)
}
