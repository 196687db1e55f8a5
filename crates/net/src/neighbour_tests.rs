use std::net::{IpAddr, Ipv6Addr};

use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    ArpOperation, ArpPacket, ArpRepr, EthernetAddress, EthernetFrame, Icmpv6Packet, Icmpv6Repr,
    IpProtocol, Ipv6Packet, NdiscRepr,
};

use super::{answer_arp, answer_ndp};
use crate::frame::{Frame, Link};
use crate::header::Offloads;
use crate::network::GuestNetwork;
use crate::packet::IpPacket;

fn link() -> Link {
    Link { network: GuestNetwork::default(), offloads: Offloads::default() }
}

fn request(target: [u8; 4]) -> ArpRepr {
    let network = GuestNetwork::default();
    ArpRepr::EthernetIpv4 {
        operation: ArpOperation::Request,
        source_hardware_addr: EthernetAddress(network.mac),
        source_protocol_addr: network.ipv4.address,
        target_hardware_addr: EthernetAddress([0; 6]),
        target_protocol_addr: target.into(),
    }
}

#[test]
fn arp_for_the_gateway_is_answered_and_no_other() {
    let (mut frame, link) = (Frame::default(), link());
    assert!(!answer_arp(&mut frame, &link, &request([100, 64, 0, 2])));
    assert!(!answer_arp(&mut frame, &link, &request([10, 0, 0, 1])));
    assert!(answer_arp(&mut frame, &link, &request([100, 64, 0, 1])));
    let ethernet = EthernetFrame::new_checked(frame.parts().1).unwrap();
    assert_eq!(ethernet.dst_addr(), EthernetAddress(link.network.mac));
    let reply = ArpRepr::parse(&ArpPacket::new_checked(ethernet.payload()).unwrap()).unwrap();
    let ArpRepr::EthernetIpv4 { operation, source_hardware_addr, source_protocol_addr, .. } = reply
    else {
        panic!("{reply:?}");
    };
    assert_eq!(operation, ArpOperation::Reply);
    assert_eq!(source_hardware_addr, EthernetAddress(link.network.gateway_mac));
    assert_eq!(source_protocol_addr, link.network.ipv4.gateway);
}

/// Sends a message of neighbour discovery and returns the answer: source, destination, message.
fn ask(
    source: Ipv6Addr,
    message: NdiscRepr<'_>,
    hop_limit: u8,
) -> Option<(Ipv6Addr, Ipv6Addr, String)> {
    let to: Ipv6Addr = "ff02::2".parse().unwrap();
    let repr = Icmpv6Repr::Ndisc(message);
    let mut payload = vec![0; repr.buffer_len()];
    let checksums = ChecksumCapabilities::default();
    repr.emit(&source, &to, &mut Icmpv6Packet::new_unchecked(&mut payload[..]), &checksums);
    let packet = IpPacket {
        source: IpAddr::V6(source),
        destination: IpAddr::V6(to),
        protocol: IpProtocol::Icmpv6,
        hop_limit,
        payload: &payload,
    };
    let mut frame = Frame::default();
    if !answer_ndp(&mut frame, &link(), &packet) {
        return None;
    }
    let ethernet = EthernetFrame::new_checked(frame.parts().1).unwrap();
    let ip = Ipv6Packet::new_checked(ethernet.payload()).unwrap();
    assert_eq!(ip.hop_limit(), 255);
    assert_eq!(ethernet.dst_addr().is_multicast(), ip.dst_addr().is_multicast());
    let (from, to) = (ip.src_addr(), ip.dst_addr());
    let icmp = Icmpv6Packet::new_checked(ip.payload()).unwrap();
    let answer = Icmpv6Repr::parse(&from, &to, &icmp, &checksums).unwrap();
    Some((from, to, format!("{answer:?}")))
}

#[test]
fn solicitations_for_the_gateway_are_answered_and_no_others() {
    let network = GuestNetwork::default();
    let guest = network.ipv6.address;
    let link_local = network.gateway_link_local();
    assert_eq!(link_local.to_string(), "fe80::66:69ff:fe72:6e01");
    for target_addr in [network.ipv6.gateway, link_local] {
        let solicit = NdiscRepr::NeighborSolicit { target_addr, lladdr: None };
        let (from, to, answer) = ask(guest, solicit, 255).unwrap();
        assert_eq!((from, to), (target_addr, guest));
        assert!(answer.contains("NeighborAdvert") && answer.contains("SOLICITED"), "{answer}");
        assert_eq!(ask(guest, solicit, 254), None, "from another network");
    }
    // The guest asks whether its own address is in use.
    let solicit = NdiscRepr::NeighborSolicit { target_addr: guest, lladdr: None };
    assert_eq!(ask(Ipv6Addr::UNSPECIFIED, solicit, 255), None);
    let solicit = NdiscRepr::RouterSolicit { lladdr: None };
    let (from, to, answer) = ask(Ipv6Addr::UNSPECIFIED, solicit, 255).unwrap();
    assert_eq!((from, to.to_string().as_str()), (link_local, "ff02::1"));
    assert!(answer.contains("RouterAdvert") && answer.contains("1500"), "{answer}");
}
