//! ICMP: echo, and errors to the guest (RFC 792, RFC 4443).

use std::net::IpAddr;

use rustix::io::Errno;
use smoltcp::wire::{
    Icmpv4Message, Icmpv4Packet, Icmpv6Message, Icmpv6Packet, IpAddress, IpProtocol, IpRepr,
};

use crate::flow::FlowKey;
use crate::frame::{Frame, HOP_LIMIT, Link};
use crate::packet::IpPacket;

/// Bytes before the data of a message.
const HEADER: usize = 8;
/// Bytes of the rejected packet after its IP header: ports and sequence number.
const QUOTED: usize = 8;

/// An echo request of the guest.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Echo<'a> {
    pub(crate) ident: u16,
    /// The whole message.
    pub(crate) message: &'a [u8],
}

/// The echo request in `packet`, if it is one and valid.
pub(crate) fn echo_request<'a>(packet: &IpPacket<'a>) -> Option<Echo<'a>> {
    let message = packet.payload;
    if message.len() < HEADER {
        return None;
    }
    match (packet.source, packet.destination) {
        (IpAddr::V4(_), IpAddr::V4(_)) => {
            let icmp = Icmpv4Packet::new_checked(message).ok()?;
            let valid = icmp.msg_type() == Icmpv4Message::EchoRequest && icmp.verify_checksum();
            valid.then(|| Echo { ident: icmp.echo_ident(), message })
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let icmp = Icmpv6Packet::new_checked(message).ok()?;
            let valid =
                icmp.msg_type() == Icmpv6Message::EchoRequest && icmp.verify_checksum(&from, &to);
            valid.then(|| Echo { ident: icmp.echo_ident(), message })
        }
        _ => None,
    }
}

/// The gateway's reply.
pub(crate) fn gateway_reply(frame: &mut Frame, link: &Link, packet: &IpPacket<'_>) {
    let (from, to) = (packet.destination, packet.source);
    let protocol = packet.protocol;
    let reply = frame.ip(link, (from, to), protocol, packet.payload.len(), HOP_LIMIT);
    reply.copy_from_slice(packet.payload);
    set_reply(reply, from, to, None);
}

/// Puts the headers before a reply of a ping socket, `len` bytes that are in place, with the
/// guest's identifier instead of the host's. Returns whether it is a reply.
pub(crate) fn echo_reply(frame: &mut Frame, link: &Link, key: &FlowKey, len: usize) -> bool {
    let (from, to) = (key.remote.ip(), key.guest.ip());
    if len < HEADER {
        return false;
    }
    let protocol = if from.is_ipv4() { IpProtocol::Icmp } else { IpProtocol::Icmpv6 };
    let reply = frame.ip(link, (from, to), protocol, len, HOP_LIMIT);
    set_reply(reply, from, to, Some(key.guest.port()));
    true
}

fn set_reply(message: &mut [u8], from: IpAddr, to: IpAddr, ident: Option<u16>) {
    if let (IpAddr::V6(from), IpAddr::V6(to)) = (from, to) {
        let mut icmp = Icmpv6Packet::new_unchecked(message);
        icmp.set_msg_type(Icmpv6Message::EchoReply);
        if let Some(ident) = ident {
            icmp.set_echo_ident(ident);
        }
        icmp.fill_checksum(&from, &to);
    } else {
        let mut icmp = Icmpv4Packet::new_unchecked(message);
        icmp.set_msg_type(Icmpv4Message::EchoReply);
        if let Some(ident) = ident {
            icmp.set_echo_ident(ident);
        }
        icmp.fill_checksum();
    }
}

/// Why a packet of the guest does not arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unreachable {
    Network,
    Host,
    Port,
    /// By the policy.
    Prohibited,
}

impl Unreachable {
    /// What an errno of a connect or of a datagram socket means.
    pub(crate) const fn from_errno(errno: Errno) -> Self {
        match errno {
            Errno::CONNREFUSED => Self::Port,
            Errno::NETUNREACH => Self::Network,
            Errno::ACCESS | Errno::PERM => Self::Prohibited,
            _ => Self::Host,
        }
    }

    /// Type and code for ICMP and for ICMPv6.
    const fn codes(self) -> ((u8, u8), (u8, u8)) {
        match self {
            Self::Network => ((3, 0), (1, 0)),
            Self::Host => ((3, 1), (1, 3)),
            Self::Port => ((3, 3), (1, 4)),
            Self::Prohibited => ((3, 13), (1, 1)),
        }
    }
}

/// An error about a packet of the guest, of which `start` are the first bytes after the IP header
/// and `len` their number in the packet.
pub(crate) fn unreachable(
    frame: &mut Frame,
    link: &Link,
    key: &FlowKey,
    (start, len): (&[u8], usize),
    reason: Unreachable,
) {
    let (guest, remote) = (key.guest.ip(), key.remote.ip());
    let v4 = guest.is_ipv4();
    let quoted = &start[..start.len().min(QUOTED)];
    let protocol = match key.protocol {
        crate::flow::FlowProtocol::Tcp => IpProtocol::Tcp,
        crate::flow::FlowProtocol::Udp => IpProtocol::Udp,
        crate::flow::FlowProtocol::Ping if v4 => IpProtocol::Icmp,
        crate::flow::FlowProtocol::Ping => IpProtocol::Icmpv6,
    };
    let original = IpRepr::new(guest.into(), remote.into(), protocol, len, HOP_LIMIT);
    let ip_len = original.header_len();
    let icmp = if v4 { IpProtocol::Icmp } else { IpProtocol::Icmpv6 };
    let gateway: IpAddr =
        if v4 { link.network.ipv4.gateway.into() } else { link.network.ipv6.gateway.into() };
    let total = HEADER + ip_len + quoted.len();
    let message = frame.ip(link, (gateway, guest), icmp, total, HOP_LIMIT);
    message.fill(0);
    let ((type_4, code_4), (type_6, code_6)) = reason.codes();
    let (kind, code) = if v4 { (type_4, code_4) } else { (type_6, code_6) };
    message[0] = kind;
    message[1] = code;
    original.emit(&mut message[HEADER..HEADER + ip_len], &Default::default());
    message[HEADER + ip_len..].copy_from_slice(quoted);
    match (IpAddress::from(gateway), IpAddress::from(guest)) {
        (IpAddress::Ipv6(from), IpAddress::Ipv6(to)) => {
            Icmpv6Packet::new_unchecked(message).fill_checksum(&from, &to);
        }
        _ => Icmpv4Packet::new_unchecked(message).fill_checksum(),
    }
}
