//! The gateway as a neighbour: ARP (RFC 826), neighbour discovery and router advertisements
//! (RFC 4861).

use std::net::{IpAddr, Ipv6Addr};

use smoltcp::phy::ChecksumCapabilities;
use smoltcp::time::Duration;
use smoltcp::wire::{
    ArpOperation, ArpPacket, ArpRepr, EthernetAddress, EthernetProtocol, IPV6_LINK_LOCAL_ALL_NODES,
    Icmpv6Packet, Icmpv6Repr, IpProtocol, NdiscNeighborFlags, NdiscPrefixInfoFlags,
    NdiscPrefixInformation, NdiscRepr, NdiscRouterFlags,
};

use crate::frame::{Frame, Link};
use crate::packet::IpPacket;

/// The hop limit of neighbour discovery, which proves that no router has forwarded it.
const ND_HOP_LIMIT: u8 = 255;
/// How long a guest uses the gateway after an advertisement: the longest time that there is.
const ROUTER_LIFETIME: Duration = Duration::from_secs(9000);

/// Answers ARP for the gateway. Returns whether there is an answer.
pub(crate) fn answer_arp(frame: &mut Frame, link: &Link, arp: &ArpRepr) -> bool {
    let ArpRepr::EthernetIpv4 {
        operation: ArpOperation::Request,
        source_hardware_addr,
        source_protocol_addr,
        target_protocol_addr,
        ..
    } = *arp
    else {
        return false;
    };
    if target_protocol_addr != link.network.ipv4.gateway {
        return false;
    }
    let reply = ArpRepr::EthernetIpv4 {
        operation: ArpOperation::Reply,
        source_hardware_addr: EthernetAddress(link.network.gateway_mac),
        source_protocol_addr: target_protocol_addr,
        target_hardware_addr: source_hardware_addr,
        target_protocol_addr: source_protocol_addr,
    };
    let bytes = frame.ethernet(link, EthernetProtocol::Arp, reply.buffer_len());
    reply.emit(&mut ArpPacket::new_unchecked(bytes));
    true
}

/// Asks for the guest's Ethernet address.
pub(crate) fn ask_for_guest(frame: &mut Frame, link: &Link) {
    let request = ArpRepr::EthernetIpv4 {
        operation: ArpOperation::Request,
        source_hardware_addr: EthernetAddress(link.network.gateway_mac),
        source_protocol_addr: link.network.ipv4.gateway,
        target_hardware_addr: EthernetAddress([0; 6]),
        target_protocol_addr: link.network.ipv4.address,
    };
    let bytes = frame.ethernet(link, EthernetProtocol::Arp, request.buffer_len());
    request.emit(&mut ArpPacket::new_unchecked(bytes));
}

/// Whether it is the answer to [`ask_for_guest`].
pub(crate) fn is_guests_answer(link: &Link, arp: &ArpRepr) -> bool {
    matches!(
        *arp,
        ArpRepr::EthernetIpv4 { operation: ArpOperation::Reply, source_protocol_addr, .. }
            if source_protocol_addr == link.network.ipv4.address
    )
}

/// Answers neighbour and router solicitations. Returns whether there is an answer.
pub(crate) fn answer_ndp(frame: &mut Frame, link: &Link, packet: &IpPacket<'_>) -> bool {
    let (IpAddr::V6(source), IpAddr::V6(destination)) = (packet.source, packet.destination) else {
        return false;
    };
    let Ok(icmp) = Icmpv6Packet::new_checked(packet.payload) else { return false };
    let checksums = ChecksumCapabilities::default();
    let Ok(Icmpv6Repr::Ndisc(message)) =
        Icmpv6Repr::parse(&source, &destination, &icmp, &checksums)
    else {
        return false;
    };
    if packet.hop_limit != ND_HOP_LIMIT {
        return false;
    }
    let network = &link.network;
    let lladdr = Some(EthernetAddress(network.gateway_mac).into());
    let (from, answer) = match message {
        NdiscRepr::NeighborSolicit { target_addr, .. }
            if network.is_gateway(target_addr.into()) =>
        {
            let flags = NdiscNeighborFlags::ROUTER | NdiscNeighborFlags::OVERRIDE;
            let flags =
                if source.is_unspecified() { flags } else { flags | NdiscNeighborFlags::SOLICITED };
            (target_addr, NdiscRepr::NeighborAdvert { flags, target_addr, lladdr })
        }
        NdiscRepr::RouterSolicit { .. } => {
            // The guest has the one address that is the same in all clones, and makes no other.
            let prefix_info = NdiscPrefixInformation {
                prefix_len: network.ipv6.prefix,
                flags: NdiscPrefixInfoFlags::ON_LINK,
                valid_lifetime: ROUTER_LIFETIME,
                preferred_lifetime: ROUTER_LIFETIME,
                prefix: prefix_of(network.ipv6.gateway, network.ipv6.prefix),
            };
            let advert = NdiscRepr::RouterAdvert {
                hop_limit: crate::frame::HOP_LIMIT,
                flags: NdiscRouterFlags::empty(),
                router_lifetime: ROUTER_LIFETIME,
                reachable_time: Duration::ZERO,
                retrans_time: Duration::ZERO,
                lladdr,
                mtu: Some(network.mtu.into()),
                prefix_info: Some(prefix_info),
            };
            (network.gateway_link_local(), advert)
        }
        _ => return false,
    };
    let to = if source.is_unspecified() { IPV6_LINK_LOCAL_ALL_NODES } else { source };
    let repr = Icmpv6Repr::Ndisc(answer);
    let addresses = (from.into(), to.into());
    let bytes = frame.ip(link, addresses, IpProtocol::Icmpv6, repr.buffer_len(), ND_HOP_LIMIT);
    repr.emit(&from, &to, &mut Icmpv6Packet::new_unchecked(bytes), &checksums);
    if to.is_multicast() {
        frame.set_multicast(to);
    }
    true
}

fn prefix_of(address: Ipv6Addr, prefix: u8) -> Ipv6Addr {
    let host_bits = 128_u32.saturating_sub(prefix.into());
    let mask = u128::MAX.checked_shl(host_bits).unwrap_or(0);
    Ipv6Addr::from_bits(address.to_bits() & mask)
}

#[cfg(test)]
#[path = "neighbour_tests.rs"]
mod tests;
