//! Frames that no guest sends.

use std::net::{Ipv4Addr, SocketAddrV4, TcpListener};
use std::time::Duration;

use firn_net::{Counters, GuestNetwork, MetadataConfig, MetadataVersion, NetworkState, Proxy};
use proptest::collection::vec;
use proptest::prelude::*;
use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    EthernetAddress, EthernetFrame, EthernetProtocol, EthernetRepr, IpProtocol, IpRepr, TcpPacket,
    UdpPacket,
};

use crate::LOCALHOST;
use crate::guest::broker;
use crate::metadata::store;

/// A step of a hostile guest.
#[derive(Clone, Debug)]
enum Step {
    Bytes(Vec<u8>),
    Tcp(Tcp),
    Udp { port: u16, payload: Vec<u8> },
    Receive(usize),
    Poll,
    Thaw,
}

#[derive(Clone, Debug)]
struct Tcp {
    port: u16,
    flags: u8,
    /// Relative to what the proxy sent and expects.
    seq: i32,
    ack: i32,
    window: u16,
    options: Vec<u8>,
    /// Bytes of requests.
    payload: usize,
}

/// What a guest's connections repeat. The second has no end.
const REQUESTS: [&[u8]; 2] = [
    b"GET /long HTTP/1.1\r\n\r\nPUT /latest/api/token HTTP/1.1\r\n\
      X-metadata-token-ttl-seconds: 60\r\n\r\n",
    b"GET / HTTP/1.1\r\nContent-Length: 999",
];

/// Half of the numbers are close to the expected ones.
fn offset() -> impl Strategy<Value = i32> {
    prop_oneof![Just(0), -3..3, any::<i32>()]
}

fn step() -> impl Strategy<Value = Step> {
    let flags = prop_oneof![Just(0x02), Just(0x10), Just(0x10), Just(0x11), any::<u8>()];
    let payload = prop_oneof![Just(0), 0..100_usize, 0..60_000_usize];
    let tcp = (0..3_u16, flags, offset(), offset(), any::<u16>(), vec(any::<u8>(), 0..41), payload);
    let tcp = tcp.prop_map(|(port, flags, seq, ack, window, mut options, payload)| {
        options.resize(options.len().next_multiple_of(4).min(40), 0);
        Step::Tcp(Tcp { port, flags, seq, ack, window, options, payload })
    });
    let port = prop_oneof![Just(53), Just(1), any::<u16>()];
    prop_oneof![
        2 => vec(any::<u8>(), 0..200).prop_map(Step::Bytes),
        12 => tcp,
        2 => (port, vec(any::<u8>(), 0..50)).prop_map(|(port, payload)| Step::Udp { port, payload }),
        6 => (0..66_000_usize).prop_map(Step::Receive),
        6 => Just(Step::Poll),
        1 => Just(Step::Thaw),
    ]
}

/// A frame with a TCP or UDP packet of `len` bytes to a server of the host.
pub(crate) fn frame(protocol: IpProtocol, len: usize, fill: impl FnOnce(&mut [u8])) -> Vec<u8> {
    frame_to(LOCALHOST, protocol, len, fill)
}

fn frame_to(
    to: Ipv4Addr,
    protocol: IpProtocol,
    len: usize,
    fill: impl FnOnce(&mut [u8]),
) -> Vec<u8> {
    let network = GuestNetwork::default();
    let ip = IpRepr::new(network.ipv4.address.into(), to.into(), protocol, len, 64);
    let mut frame = vec![0; 14 + 20 + len];
    EthernetRepr {
        src_addr: EthernetAddress(network.mac),
        dst_addr: EthernetAddress(network.gateway_mac),
        ethertype: EthernetProtocol::Ipv4,
    }
    .emit(&mut EthernetFrame::new_unchecked(&mut frame[..]));
    ip.emit(&mut frame[14..], &ChecksumCapabilities::default());
    fill(&mut frame[34..]);
    frame
}

/// The hostile guest's view of its flows: what the proxy sent last.
#[derive(Default)]
struct View {
    seq: [u32; 3],
    ack: [u32; 3],
}

impl View {
    fn tcp(&mut self, tcp: &Tcp, server: SocketAddrV4) -> Vec<u8> {
        let header = 20 + tcp.options.len();
        let index = usize::from(tcp.port);
        frame_to(*server.ip(), IpProtocol::Tcp, header + tcp.payload, |bytes| {
            let mut packet = TcpPacket::new_unchecked(bytes);
            packet.set_src_port(1000 + tcp.port);
            packet.set_dst_port(server.port());
            let seq = self.seq[index].wrapping_add_signed(tcp.seq);
            let ack = self.ack[index].wrapping_add_signed(tcp.ack);
            packet.set_seq_number(smoltcp::wire::TcpSeqNumber(seq.cast_signed()));
            packet.set_ack_number(smoltcp::wire::TcpSeqNumber(ack.cast_signed()));
            packet.set_header_len(u8::try_from(header).unwrap());
            packet.set_window_len(tcp.window);
            packet.options_mut().copy_from_slice(&tcp.options);
            let requests = REQUESTS[usize::from(tcp.port % 2)].iter().cycle();
            packet.payload_mut().iter_mut().zip(requests).for_each(|(byte, next)| *byte = *next);
            let bytes = packet.into_inner();
            bytes[13] = tcp.flags;
        })
    }

    /// Learns what the proxy expects from a frame of it.
    fn learn(&mut self, frame: &[u8]) {
        let Some(Ok(packet)) = frame.get(34..).map(TcpPacket::new_checked) else { return };
        if frame[23] != 6 || !(1000..1003).contains(&packet.dst_port()) {
            return;
        }
        let index = usize::from(packet.dst_port() - 1000);
        self.seq[index] = packet.ack_number().0.cast_unsigned();
        let end = packet.seq_number().0.cast_unsigned();
        let len = u32::try_from(packet.segment_len()).unwrap();
        self.ack[index] = end.wrapping_add(len);
    }
}

fn check(counters: &Counters) {
    // Three flows: 512 KiB from the guest, and parts of chunks. The servers send less than that.
    assert!(counters.buffered_peak <= 3 * (520 << 10), "{counters:?}");
    assert!(counters.flows <= 16_384, "{counters:?}");
}

/// A server whose connections are never read: it has the most to buffer.
fn silent_server() -> u16 {
    let listener = TcpListener::bind((LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || listener.incoming().map(Result::unwrap).collect::<Vec<_>>());
    port
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn a_hostile_guest_breaks_no_bound(steps in vec(step(), 1..150)) {
        let proxy = Proxy::new(GuestNetwork::default(), broker()).unwrap();
        run(proxy, SocketAddrV4::new(LOCALHOST, silent_server()), steps);
    }

    #[test]
    fn a_hostile_guest_breaks_no_bound_of_its_metadata(steps in vec(step(), 1..150)) {
        let config = MetadataConfig { version: MetadataVersion::V1, ..MetadataConfig::default() };
        let proxy = Proxy::metadata([2, 0, 0, 0, 0, 7], 1500, config, store()).unwrap();
        run(proxy, SocketAddrV4::new(config.address, 80), steps);
    }

    /// A whole guest's memory may be anything, and so is each frame.
    #[test]
    fn arbitrary_bytes_are_dropped(start in vec(any::<u8>(), 0..100), kind in 0..4_usize) {
        let mut proxy = Proxy::new(GuestNetwork::default(), broker()).unwrap();
        let mut frame = vec![0x02, 0x66, 0x69, 0x72, 0x6e, 0x01, 0, 0, 0, 0, 0, 0];
        let types: [&[u8]; 4] = [&[8, 6], &[8, 0, 0x45], &[0x86, 0xdd, 0x60], &[]];
        frame.extend(types[kind]);
        frame.extend(start);
        proxy.transmit(&[&frame]);
        proxy.poll();
        while proxy.receive(1514).is_some() {}
    }
}

fn run(mut proxy: Proxy, server: SocketAddrV4, steps: Vec<Step>) {
    let mut view = View::default();
    for step in steps {
        match step {
            Step::Bytes(bytes) => proxy.transmit(&[&bytes]),
            Step::Tcp(tcp) => {
                let frame = view.tcp(&tcp, server);
                proxy.transmit(&[&frame]);
            }
            Step::Udp { port, payload } => {
                proxy.transmit(&[&udp_to(*server.ip(), port, &payload)]);
            }
            Step::Receive(room) => {
                for _ in 0..16 {
                    let Some((_, frame)) = proxy.receive(room) else { break };
                    assert!(frame.len() <= room);
                    view.learn(frame);
                }
            }
            Step::Poll => {
                std::thread::sleep(Duration::from_micros(100));
                proxy.poll();
            }
            Step::Thaw => {
                let state = proxy.save();
                proxy.restore(&state);
            }
        }
        check(&proxy.counters());
    }
    proxy.restore(&NetworkState::default());
    assert_eq!((proxy.counters().flows, proxy.counters().buffered), (0, 0));
}

pub(crate) fn udp(port: u16, payload: &[u8]) -> Vec<u8> {
    udp_to(LOCALHOST, port, payload)
}

fn udp_to(to: Ipv4Addr, port: u16, payload: &[u8]) -> Vec<u8> {
    let len = 8 + payload.len();
    frame_to(to, IpProtocol::Udp, len, |bytes| {
        let mut packet = UdpPacket::new_unchecked(bytes);
        packet.set_src_port(port);
        packet.set_dst_port(port);
        packet.set_len(u16::try_from(len).unwrap());
        packet.payload_mut().copy_from_slice(payload);
    })
}

/// The broker is slower than the guest.
#[test]
fn datagrams_that_wait_for_their_sockets_are_bounded() {
    let mut proxy = Proxy::new(GuestNetwork::default(), broker()).unwrap();
    for port in 1..4000 {
        proxy.transmit(&[&udp(port, &[1; 1400])]);
    }
    let counters = proxy.counters();
    assert_eq!((counters.flows, counters.flows_opened), (1024, 3999), "{counters:?}");
    assert!((1 << 19..=1 << 20).contains(&counters.buffered), "{counters:?}");
    assert!(counters.dropped_full > 200, "{counters:?}");
    proxy.restore(&NetworkState::default());
    assert_eq!(proxy.counters().buffered, 0);
}

/// A flow that is used stays when others are idle.
#[test]
fn the_idle_flow_of_datagrams_ends_first() {
    let mut proxy = Proxy::new(GuestNetwork::default(), broker()).unwrap();
    for port in 2..3000 {
        proxy.transmit(&[&udp(1, b"used")]);
        proxy.transmit(&[&udp(port, b"once")]);
    }
    let counters = proxy.counters();
    // The used one was opened once.
    assert_eq!((counters.flows, counters.flows_opened), (1024, 2999), "{counters:?}");
}

/// Connections beyond the limit are refused, and the first ones stay.
#[test]
fn a_guest_that_opens_too_many_connections_is_refused() {
    let mut proxy = Proxy::new(GuestNetwork::default(), broker()).unwrap();
    let mut resets = 0;
    for number in 0..17_000_u16 {
        let syn = frame(IpProtocol::Tcp, 20, |bytes| {
            let mut packet = TcpPacket::new_unchecked(bytes);
            packet.set_src_port(20_000 + number);
            packet.set_dst_port(9);
            packet.set_header_len(20);
            packet.set_syn(true);
        });
        proxy.transmit(&[&syn]);
        while proxy.receive(1514).is_some() {
            resets += 1;
        }
    }
    let counters = proxy.counters();
    assert_eq!((counters.flows, resets), (16_384, 17_000 - 16_384), "{counters:?}");
}
