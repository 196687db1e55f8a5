use std::io::Write;
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use smoltcp::wire::{ArpOperation, ArpPacket, ArpRepr, EthernetAddress, EthernetFrame, TcpPacket};

use super::*;
use crate::burst::Burst;
use crate::frame::Frame;
use crate::network::GuestNetwork;
use crate::packet::Segment;
use crate::seq::Seq;
use crate::tcp::TcpFlow;

const ROOM: usize = 1514;

fn proxy(pending: &PendingResets) -> Proxy {
    let (_, broker) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    Proxy::new(GuestNetwork::default(), broker).unwrap().with_resets(pending.clone())
}

fn key(port: u16) -> FlowKey {
    let guest: IpAddr = GuestNetwork::default().ipv4.address.into();
    FlowKey::new(FlowProtocol::Tcp, (guest, port), ([192, 0, 2, 1].into(), 80))
}

fn saved(port: u16) -> SavedFlow {
    SavedFlow { key: key(port), next_to_guest: Some(Seq(7)), next_from_guest: Seq(9) }
}

fn state(ports: std::ops::Range<u16>) -> NetworkState {
    NetworkState { flows: ports.map(saved).collect() }
}

/// An answer of the guest to a question for its address.
fn answer() -> Vec<u8> {
    let network = GuestNetwork::default();
    let reply = ArpRepr::EthernetIpv4 {
        operation: ArpOperation::Reply,
        source_hardware_addr: EthernetAddress(network.mac),
        source_protocol_addr: network.ipv4.address,
        target_hardware_addr: EthernetAddress(network.gateway_mac),
        target_protocol_addr: network.ipv4.gateway,
    };
    let mut frame = vec![0; 14 + reply.buffer_len()];
    let mut ethernet = EthernetFrame::new_unchecked(&mut frame[..]);
    ethernet.set_dst_addr(EthernetAddress(network.gateway_mac));
    ethernet.set_src_addr(EthernetAddress(network.mac));
    ethernet.set_ethertype(smoltcp::wire::EthernetProtocol::Arp);
    reply.emit(&mut ArpPacket::new_unchecked(ethernet.payload_mut()));
    frame
}

#[test]
fn the_guest_has_handled_the_resets_when_it_answers_the_question_after_them() {
    let pending = PendingResets::default();
    assert_eq!(pending.wait(Duration::ZERO), Ok(()));
    let mut proxy = proxy(&pending);
    proxy.restore(&state(1..3));
    for port in 1..3 {
        assert_eq!(pending.wait(Duration::ZERO), Err(2));
        // Not an answer to a question that was not sent.
        proxy.transmit(&[&answer()]);
        let (_, frame) = proxy.receive(ROOM).unwrap();
        let reset = TcpPacket::new_checked(&frame[34..]).unwrap();
        assert!(reset.rst() && reset.dst_port() == port);
    }
    assert_eq!((proxy.resets_left(), proxy.has_frames()), (0, true));
    let (_, question) = proxy.receive(ROOM).unwrap();
    let question = ArpRepr::parse(&ArpPacket::new_checked(&question[14..]).unwrap()).unwrap();
    let ArpRepr::EthernetIpv4 { operation, target_protocol_addr, .. } = question else {
        panic!("{question:?}");
    };
    assert_eq!(operation, ArpOperation::Request);
    assert_eq!(target_protocol_addr, GuestNetwork::default().ipv4.address);
    assert!(!proxy.has_frames() && proxy.receive(ROOM).is_none());
    assert_eq!(pending.wait(Duration::ZERO), Err(2));
    let waiting = thread::spawn({
        let pending = pending.clone();
        move || pending.wait(Duration::from_secs(60))
    });
    proxy.transmit(&[&answer()]);
    assert_eq!(waiting.join().unwrap(), Ok(()));
    // An answer without a question is dropped like any other frame that nothing asked for.
    proxy.transmit(&[&answer()]);
    assert!(!proxy.has_frames());
}

#[test]
fn a_guest_without_connections_is_asked_nothing() {
    let pending = PendingResets::default();
    let mut proxy = proxy(&pending);
    proxy.restore(&NetworkState::default());
    assert!(!proxy.has_frames());
    assert_eq!(pending.wait(Duration::ZERO), Ok(()));
}

#[test]
fn a_reset_that_did_not_reach_the_guest_is_saved() {
    let mut proxy = proxy(&PendingResets::default());
    proxy.restore(&state(1..3));
    proxy.receive(ROOM).unwrap();
    assert_eq!(proxy.save(), state(2..3));
    let mut all = proxy.save_without_last().flows;
    all.sort_by_key(|flow| flow.key.guest.port());
    assert_eq!(all, state(1..3).flows);
    // The next frame replaces it.
    proxy.receive(ROOM).unwrap();
    assert_eq!(proxy.save_without_last(), state(2..3));
    proxy.receive(ROOM).unwrap();
    assert_eq!(proxy.save_without_last(), NetworkState::default());
}

/// The guest expects the number of data that it did not get.
#[test]
fn data_that_did_not_reach_the_guest_is_not_counted() {
    let mut proxy = proxy(&PendingResets::default());
    let (mut host, socket) = UnixStream::pair().unwrap();
    socket.set_nonblocking(true).unwrap();
    let (key, now) = (key(80), Instant::now());
    let mut flow = TcpFlow::call(key, Seq(100), now, &mut proxy.shared);
    assert!(flow.next_frame(&mut Frame::default(), ROOM, now, &mut proxy.shared));
    flow.set_socket(socket.into());
    let answer = Segment {
        syn: true,
        fin: false,
        rst: false,
        ack: Some(Seq(101)),
        seq: Seq(500),
        window: 1000,
        mss: Some(1460),
        window_shift: None,
        payload: b"",
    };
    flow.segment(&answer, Burst::new(&[], 0), now, &mut proxy.shared);
    let id = proxy.table.insert(key, Flow::Tcp(Box::new(flow)), now);
    proxy.table.changed(id, now, &mut proxy.shared);
    host.write_all(b"data").unwrap();
    proxy.receive(ROOM).unwrap();
    let number = |state: NetworkState| state.flows[0].next_to_guest;
    assert_eq!(number(proxy.save()), Some(Seq(105)));
    assert_eq!(number(proxy.save_without_last()), Some(Seq(101)));
}
