//! Frames from the guest, which are hostile: what is parsed here is checked here.
//!
//! Checksums of TCP and UDP are not: they protect from a link that damages frames, and this one is
//! memory. The host's kernel makes those of its own packets.

use std::net::IpAddr;

use smoltcp::wire::{
    ArpPacket, ArpRepr, EthernetAddress, EthernetFrame, EthernetProtocol, IpProtocol, Ipv4Packet,
    Ipv6Packet, TcpPacket, UdpPacket,
};

use crate::seq::Seq;

/// Why a frame from the guest is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dropped {
    /// Its bytes are not a valid packet.
    Invalid,
    /// A fragment of a packet.
    Fragment,
    /// A valid packet that this network does not carry: another protocol, another source address,
    /// multicast.
    Unsupported,
}

/// A frame, parsed up to the transport header.
#[derive(Debug)]
pub(crate) enum Parsed<'a> {
    Arp(ArpRepr),
    Ip(IpPacket<'a>),
}

/// An IP packet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IpPacket<'a> {
    pub(crate) source: IpAddr,
    pub(crate) destination: IpAddr,
    pub(crate) protocol: IpProtocol,
    pub(crate) hop_limit: u8,
    pub(crate) payload: &'a [u8],
}

/// A TCP segment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment<'a> {
    pub(crate) syn: bool,
    pub(crate) fin: bool,
    pub(crate) rst: bool,
    /// `None` without the ACK flag.
    pub(crate) ack: Option<Seq>,
    pub(crate) seq: Seq,
    pub(crate) window: u16,
    /// Options, of which those of a SYN matter.
    pub(crate) mss: Option<u16>,
    pub(crate) window_shift: Option<u8>,
    pub(crate) payload: &'a [u8],
}

impl Segment<'_> {
    /// What it takes of the sequence space.
    pub(crate) fn len(&self) -> usize {
        self.payload.len() + usize::from(self.syn) + usize::from(self.fin)
    }
}

/// Parses a frame to a `station` or to a group; to any station without one.
pub(crate) fn parse(station: Option<[u8; 6]>, frame: &[u8]) -> Result<Parsed<'_>, Dropped> {
    let frame = EthernetFrame::new_checked(frame).map_err(|_| Dropped::Invalid)?;
    let to = frame.dst_addr();
    if to.is_unicast() && station.is_some_and(|station| to != EthernetAddress(station)) {
        return Err(Dropped::Unsupported);
    }
    match frame.ethertype() {
        EthernetProtocol::Arp => {
            let packet = ArpPacket::new_checked(frame.payload()).map_err(|_| Dropped::Invalid)?;
            ArpRepr::parse(&packet).map(Parsed::Arp).map_err(|_| Dropped::Invalid)
        }
        EthernetProtocol::Ipv4 => parse_ipv4(frame.payload()).map(Parsed::Ip),
        EthernetProtocol::Ipv6 => parse_ipv6(frame.payload()).map(Parsed::Ip),
        EthernetProtocol::Unknown(_) => Err(Dropped::Unsupported),
    }
}

fn parse_ipv4(bytes: &[u8]) -> Result<IpPacket<'_>, Dropped> {
    let packet = Ipv4Packet::new_checked(bytes).map_err(|_| Dropped::Invalid)?;
    if packet.version() != 4 || !packet.verify_checksum() {
        return Err(Dropped::Invalid);
    }
    if packet.more_frags() || packet.frag_offset() != 0 {
        return Err(Dropped::Fragment);
    }
    Ok(IpPacket {
        source: packet.src_addr().into(),
        destination: packet.dst_addr().into(),
        protocol: packet.next_header(),
        hop_limit: packet.hop_limit(),
        payload: packet.payload(),
    })
}

fn parse_ipv6(bytes: &[u8]) -> Result<IpPacket<'_>, Dropped> {
    let packet = Ipv6Packet::new_checked(bytes).map_err(|_| Dropped::Invalid)?;
    if packet.version() != 6 {
        return Err(Dropped::Invalid);
    }
    if packet.next_header() == IpProtocol::Ipv6Frag {
        return Err(Dropped::Fragment);
    }
    Ok(IpPacket {
        source: packet.src_addr().into(),
        destination: packet.dst_addr().into(),
        protocol: packet.next_header(),
        hop_limit: packet.hop_limit(),
        payload: packet.payload(),
    })
}

impl<'a> IpPacket<'a> {
    /// The ports and the segment.
    pub(crate) fn tcp(&self) -> Result<((u16, u16), Segment<'a>), Dropped> {
        let packet = TcpPacket::new_checked(self.payload).map_err(|_| Dropped::Invalid)?;
        let (mut mss, mut window_shift) = (None, None);
        if packet.syn() {
            let options = packet.options_summary().map_err(|_| Dropped::Invalid)?;
            (mss, window_shift) = (options.max_segment_size, options.window_scale);
        }
        let segment = Segment {
            syn: packet.syn(),
            fin: packet.fin(),
            rst: packet.rst(),
            ack: packet.ack().then(|| packet.ack_number().into()),
            seq: packet.seq_number().into(),
            window: packet.window_len(),
            mss,
            window_shift,
            payload: packet.payload(),
        };
        let ports = (packet.src_port(), packet.dst_port());
        if ports.0 == 0 || ports.1 == 0 || (segment.syn && (segment.fin || segment.rst)) {
            return Err(Dropped::Invalid);
        }
        Ok((ports, segment))
    }

    /// The ports and the payload of a datagram.
    pub(crate) fn udp(&self) -> Result<((u16, u16), &'a [u8]), Dropped> {
        let packet = UdpPacket::new_checked(self.payload).map_err(|_| Dropped::Invalid)?;
        let ports = (packet.src_port(), packet.dst_port());
        if ports.0 == 0 || ports.1 == 0 {
            return Err(Dropped::Invalid);
        }
        Ok((ports, packet.payload()))
    }
}
