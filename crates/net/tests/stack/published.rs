//! Connections of the host to ports of the guest.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::thread;
use std::time::Duration;

use firn_net::{GuestNetwork, NetworkState, Offloads, Proxy};
use proptest::collection::vec;
use proptest::prelude::*;
use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    EthernetAddress, EthernetFrame, EthernetProtocol, EthernetRepr, IpProtocol, IpRepr, TcpPacket,
    TcpSeqNumber,
};

use crate::guest::{Guest, Link, publishing};

const PORT: u16 = 8080;
/// A guest that returns what a client sends to it; what the client got.
fn transfer(link: Link, len: usize) -> bool {
    let (broker, address, _ports) = publishing(&format!("127.0.0.1:0:{PORT}"));
    let mut guest = Guest::with_broker(link, broker);
    let server = guest.listen(PORT);
    let client = thread::spawn(move || {
        let data: Vec<u8> =
            (0_u64..).flat_map(|n| n.wrapping_mul(0x9e37_79b9).to_le_bytes()).take(len).collect();
        let mut stream = TcpStream::connect(address).unwrap();
        let mut sending = stream.try_clone().unwrap();
        let sent = data.clone();
        let sender = thread::spawn(move || {
            sending.write_all(&sent).unwrap();
            sending.shutdown(Shutdown::Write).unwrap();
        });
        let mut received = Vec::new();
        stream.read_to_end(&mut received).unwrap();
        sender.join().unwrap();
        received == data
    });
    let mut queue = Vec::new();
    guest.run(|guest| {
        let socket = guest.tcp(server);
        while socket.can_recv() && queue.len() < 1 << 16 {
            socket
                .recv(|bytes| {
                    queue.extend_from_slice(bytes);
                    (bytes.len(), ())
                })
                .unwrap();
        }
        if socket.can_send() && !queue.is_empty() {
            let sent = socket.send_slice(&queue).unwrap();
            queue.drain(..sent);
        }
        if socket.state() == smoltcp::socket::tcp::State::CloseWait && queue.is_empty() {
            socket.close();
        }
        client.is_finished()
    });
    assert_eq!(guest.proxy.counters().flows_published, 1);
    client.join().unwrap()
}

#[test]
fn a_client_of_the_host_reaches_a_server_of_the_guest() {
    assert!(transfer(Link::default(), 3 << 20));
    let offloads = Offloads { checksum: true, tso4: true, tso6: true };
    assert!(transfer(Link { offloads, lose_every: 0 }, 3 << 20));
}

#[test]
fn a_lossy_guest_is_reached() {
    assert!(transfer(Link { offloads: Offloads::default(), lose_every: 20 }, 1 << 18));
}

#[test]
fn a_port_without_a_server_resets_the_client() {
    let (broker, address, _ports) = publishing(&format!("127.0.0.1:0:{PORT}"));
    let mut guest = Guest::with_broker(Link::default(), broker);
    let client = thread::spawn(move || {
        TcpStream::connect(address).unwrap().read(&mut [0]).unwrap_err().kind()
    });
    guest.run(|_| client.is_finished());
    assert_eq!(client.join().unwrap(), ErrorKind::ConnectionReset);
    assert_eq!((guest.proxy.counters().flows, guest.proxy.counters().flows_refused), (0, 1));
}

/// Other flows still find a place, and the host's connections do not wait for one.
#[test]
fn more_connections_than_the_limit_are_reset() {
    let (broker, address, _ports) = publishing(&format!("127.0.0.1:0:{PORT}"));
    let mut guest = Guest::with_broker(Link::default(), broker);
    // A reset may come before connect(2) returns.
    let clients = thread::spawn(move || {
        (0..600).map(|_| TcpStream::connect(address)).collect::<Vec<io::Result<TcpStream>>>()
    });
    // A guest that answers nothing: its frames are not looked at.
    while guest.proxy.counters().flows + guest.proxy.counters().flows_refused < 600 {
        guest.proxy.poll();
        while guest.proxy.receive(1514).is_some() {}
        thread::sleep(Duration::from_millis(1));
    }
    let counters = guest.proxy.counters();
    assert_eq!((counters.flows, counters.flows_refused), (512, 88), "{counters:?}");
    let mut clients = clients.join().unwrap();
    let last = clients.last_mut().unwrap();
    let reset = match last {
        Ok(client) => client.read(&mut [0]).unwrap_err().kind(),
        Err(error) => error.kind(),
    };
    assert_eq!(reset, ErrorKind::ConnectionReset);
    assert!(clients[..512].iter().all(Result::is_ok));
    // They end, and others take their places.
    guest.proxy.restore(&NetworkState::default());
    assert_eq!(guest.proxy.counters().flows, 0);
    let _next = TcpStream::connect(address).unwrap();
    let _server = guest.listen(PORT);
    guest.run(|guest| guest.proxy.counters().flows == 1);
}

/// A step of a hostile server.
#[derive(Clone, Debug)]
enum Step {
    Connect,
    Send(usize),
    Close,
    Answer(Answer),
    Receive(usize),
    Poll,
    Thaw,
}

/// A segment of the guest's port.
#[derive(Clone, Debug)]
struct Answer {
    /// Which connection; they are counted from the last one.
    connection: usize,
    flags: u8,
    /// Relative to what the proxy expects and has sent.
    seq: i32,
    ack: i32,
    window: u16,
    options: Vec<u8>,
    payload: usize,
}

fn step() -> impl Strategy<Value = Step> {
    let offset = || prop_oneof![4 => Just(0), 1 => -3..3, 1 => any::<i32>()];
    // SYN and ACK, ACK, FIN and ACK, RST and ACK, SYN, and any others.
    let flags = prop_oneof![
        4 => Just(0x12), 4 => Just(0x10), 1 => Just(0x11), 1 => Just(0x14), 1 => Just(0x02), 2 => any::<u8>()
    ];
    let payload = prop_oneof![Just(0), 0..100_usize, 0..60_000_usize];
    let options = vec(any::<u8>(), 0..41);
    let answer = (0..3_usize, flags, offset(), offset(), any::<u16>(), options, payload);
    let answer = answer.prop_map(|(connection, flags, seq, ack, window, mut options, payload)| {
        options.resize(options.len().next_multiple_of(4).min(40), 0);
        Step::Answer(Answer { connection, flags, seq, ack, window, options, payload })
    });
    prop_oneof![
        2 => Just(Step::Connect),
        2 => (0..100_000_usize).prop_map(Step::Send),
        1 => Just(Step::Close),
        12 => answer,
        6 => (0..66_000_usize).prop_map(Step::Receive),
        6 => Just(Step::Poll),
        1 => Just(Step::Thaw),
    ]
}

/// What the hostile server knows of a connection.
#[derive(Clone, Copy, Default)]
struct Known {
    port: u16,
    seq: u32,
    ack: u32,
}

fn learn(known: &mut Vec<Known>, frame: &[u8]) {
    let Some(Ok(packet)) = frame.get(34..).map(TcpPacket::new_checked) else { return };
    if frame[23] != 6 || packet.dst_port() != PORT {
        return;
    }
    let port = packet.src_port();
    if packet.syn() && !packet.ack() && known.iter().all(|one| one.port != port) {
        known.push(Known { port, ..Known::default() });
    }
    let Some(one) = known.iter_mut().find(|one| one.port == port) else { return };
    let len = u32::try_from(packet.segment_len()).unwrap();
    one.ack = packet.seq_number().0.cast_unsigned().wrapping_add(len);
    if packet.ack() {
        one.seq = packet.ack_number().0.cast_unsigned();
    }
}

fn frame(known: &Known, answer: &Answer) -> Vec<u8> {
    let network = GuestNetwork::default();
    let (header, len) = (20 + answer.options.len(), 20 + answer.options.len() + answer.payload);
    let (from, to) = (network.ipv4.address.into(), network.ipv4.gateway.into());
    let ip = IpRepr::new(from, to, IpProtocol::Tcp, len, 64);
    let mut frame = vec![0; 34 + len];
    EthernetRepr {
        src_addr: EthernetAddress(network.mac),
        dst_addr: EthernetAddress(network.gateway_mac),
        ethertype: EthernetProtocol::Ipv4,
    }
    .emit(&mut EthernetFrame::new_unchecked(&mut frame[..]));
    ip.emit(&mut frame[14..], &ChecksumCapabilities::default());
    let mut packet = TcpPacket::new_unchecked(&mut frame[34..]);
    packet.set_src_port(PORT);
    packet.set_dst_port(known.port);
    let number = |base: u32, offset| TcpSeqNumber(base.wrapping_add_signed(offset).cast_signed());
    packet.set_seq_number(number(known.seq, answer.seq));
    packet.set_ack_number(number(known.ack, answer.ack));
    packet.set_header_len(u8::try_from(header).unwrap());
    packet.set_window_len(answer.window);
    packet.options_mut().copy_from_slice(&answer.options);
    packet.into_inner()[13] = answer.flags;
    frame
}

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_nonblocking(true).unwrap();
    stream
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn a_hostile_server_breaks_no_bound(steps in vec(step(), 1..150)) {
        let (broker, address, _ports) = publishing(&format!("127.0.0.1:0:{PORT}"));
        let mut proxy = Proxy::new(GuestNetwork::default(), broker).unwrap();
        let (mut clients, mut known) = (vec![connect(address)], Vec::new());
        for step in steps {
            match step {
                Step::Connect if clients.len() < 8 => clients.push(connect(address)),
                Step::Connect => {}
                // A connection may be reset, and its buffers may be full.
                Step::Send(len) => drop(clients.last_mut().map(|client| client.write(&vec![1; len]))),
                Step::Close => drop(clients.pop()),
                Step::Answer(answer) => {
                    let at = known.len().checked_sub(answer.connection + 1);
                    if let Some(known) = at.and_then(|at| known.get(at)) {
                        proxy.transmit(&[&frame(known, &answer)]);
                    }
                }
                Step::Receive(room) => {
                    for _ in 0..16 {
                        let Some((_, frame)) = proxy.receive(room) else { break };
                        assert!(frame.len() <= room);
                        learn(&mut known, frame);
                    }
                }
                Step::Poll => {
                    thread::sleep(Duration::from_micros(100));
                    proxy.poll();
                }
                Step::Thaw => {
                    let state = proxy.save_without_last();
                    proxy.restore(&state);
                }
            }
            let counters = proxy.counters();
            assert!(counters.flows <= counters.flows_published, "{counters:?}");
            assert!(counters.buffered <= counters.flows * 2 * (260 << 10), "{counters:?}");
        }
        proxy.restore(&NetworkState::default());
        assert_eq!((proxy.counters().flows, proxy.counters().buffered), (0, 0));
    }
}
