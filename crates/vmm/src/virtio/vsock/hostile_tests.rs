//! Guests and programs that keep to no protocol, and limits.

use proptest::prelude::*;
use rustix::process::{Resource, getrlimit, setrlimit};

use super::super::super::error::DeviceError;
use super::super::super::testing::NEEDS_RESET;
use super::super::muxer::MAX_CONNECTIONS;
use super::*;

#[test]
fn packets_without_a_connection_cause_resets() {
    let mut peer = Peer::new();
    let ends = Ends { host: 1, guest: 2 };
    for op in [Op::Response, Op::Data, Op::Shutdown, Op::CreditUpdate, Op::CreditRequest] {
        peer.send(ends, op, 0, &[]);
        peer.expect(ends, Op::Reset, 0);
    }
    let good = peer.header(ends, Op::Request, 0, 0);
    peer.send_raw(&Header { kind: 2, ..good }, &[]);
    peer.expect(ends, Op::Reset, 0);
    peer.send_raw(&Header { dst_cid: 99, ..good }, &[]);
    assert_eq!(peer.receive().unwrap().0.src_cid, 99);
    peer.send(ends, Op::Reset, 0, &[]);
    peer.send_raw(&Header { kind: 2, op: Op::Reset.number(), ..good }, &[]);
    peer.send_raw(&Header { src_cid: 4, ..good }, &[]);
    peer.expect_nothing();
}

#[test]
fn unexpected_packets_end_a_connection() {
    let wrong: [(u16, u32, &[u8]); 4] = [
        (Op::Response.number(), 0, &[]),
        (Op::Request.number(), 0, &[]),
        (0, 0, &[]),
        (99, 0, b"data"),
    ];
    for (op, flags, data) in wrong {
        let mut peer = Peer::new();
        let (mut client, ends) = peer.connect();
        let header = peer.header(ends, Op::Data, flags, data.len());
        peer.send_raw(&Header { op, ..header }, data);
        peer.expect(ends, Op::Reset, 0);
        expect_end(&mut client);
        assert_eq!(peer.connections(), 0);
    }
    // Before the guest's response, and after its shutdown.
    for op in [Op::Data, Op::Shutdown] {
        let mut peer = Peer::new();
        let mut client = peer.client();
        client.write_all(b"CONNECT 1024\n").unwrap();
        peer.guest.run();
        let ends = peer.expect_request();
        peer.send(ends, op, 0, &[]);
        peer.expect(ends, Op::Reset, 0);
    }
    let mut peer = Peer::new();
    let (_client, ends) = peer.connect();
    peer.send(ends, Op::Shutdown, SHUTDOWN_SEND, &[]);
    peer.send(ends, Op::Data, 0, b"one more thing");
    peer.expect(ends, Op::Reset, 0);
}

#[test]
fn the_number_of_pending_resets_is_limited() {
    let mut peer = Peer::without_buffers();
    for port in 0..2000 {
        peer.send(Ends { host: 1, guest: port }, Op::Data, 0, &[]);
    }
    peer.fill(200);
    let mut resets = 0;
    while peer.receive().is_some() {
        resets += 1;
    }
    assert_eq!(resets, 256);
}

#[test]
fn invalid_packets_stop_the_device() {
    let headers = Header::from_bytes(&[0; HEADER_LEN]).to_bytes();
    let mut too_long = headers;
    too_long[24..28].copy_from_slice(&5_u32.to_le_bytes());
    let mut huge = headers;
    huge[24..28].copy_from_slice(&u32::MAX.to_le_bytes());
    let packets: [&[&[u8]]; 4] = [&[&headers[..43]], &[], &[&too_long, b"data"], &[&huge, b"data"]];
    for packet in packets {
        let mut peer = Peer::new();
        peer.guest.add(TX, packet, &[1]);
        peer.guest.kick(TX);
        assert_eq!(peer.guest.get(STATUS) & NEEDS_RESET, NEEDS_RESET);
    }
    // A buffer without room for a byte of data.
    let mut peer = Peer::without_buffers();
    peer.guest.add(RX, &[], &[44]);
    peer.send(Ends { host: 1, guest: 1 }, Op::Data, 0, &[]);
    assert!(matches!(
        peer.guest.transport().error(),
        Some(DeviceError::Chain {
            queue: 0,
            fault: ChainFault::TooShort { needed: 45, found: 44 }
        })
    ));
}

#[test]
fn the_number_of_connections_is_limited() {
    // This process holds both ends of every connection.
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).unwrap();

    let mut peer = Peer::new();
    let _listener = peer.listen(9);
    let mut clients = Vec::new();
    while clients.len() < MAX_CONNECTIONS {
        if clients.len() % 2 == 0 {
            clients.push(peer.connect().0);
        } else {
            // Programs that have not named a port count too.
            clients.push(peer.client());
            peer.guest.run();
        }
    }
    let mut refused = peer.client();
    peer.guest.run();
    expect_end(&mut refused);
    let ends = Ends { host: 9, guest: 1 };
    peer.send(ends, Op::Request, 0, &[]);
    peer.expect(ends, Op::Reset, 0);

    drop(clients.pop());
    peer.guest.run();
    clients.push(peer.connect().0);

    // Programs that disconnected within their first line do not count.
    drop(clients);
    for _ in 0..=MAX_CONNECTIONS {
        peer.client().write_all(b"CONN").unwrap();
        peer.guest.run();
    }
    let mut client = peer.client();
    client.write_all(b"CONNECT 7777\n").unwrap();
    peer.guest.run();
    while peer.receive().unwrap().0.dst_port != 7777 {}
}

/// Without buffers for packets nothing leaves the queue of connections that have one.
#[test]
fn the_queue_of_ready_connections_is_limited() {
    let mut peer = Peer::without_buffers();
    let _listener = peer.listen(52);
    // The guest requests a connection, which owes it a response, and drops it.
    let ends = Ends { host: 52, guest: 5000 };
    let _first = peer.listen(53);
    peer.send(Ends { host: 53, guest: 5000 }, Op::Request, 0, &[]);
    for _ in 0..50 {
        peer.send(ends, Op::Request, 0, &[]);
        peer.answer();
        peer.send(ends, Op::Reset, 0, &[]);
    }
    assert_eq!(peer.connections(), 1);
    assert_eq!(peer.guest.transport().device().ready(), 1);
    // Programs on the host connect and leave before the request is sent.
    for _ in 0..50 {
        let mut client = peer.client();
        client.write_all(b"CONNECT 1024\n").unwrap();
        peer.guest.run();
        drop(client);
        peer.guest.run();
    }
    assert_eq!(peer.connections(), 1);
    assert_eq!(peer.guest.transport().device().ready(), 1);
    // The connection that remains is served.
    peer.fill(4);
    peer.expect(Ends { host: 53, guest: 5000 }, Op::Response, 0);
    peer.expect_nothing();
}

#[derive(Clone, Debug)]
enum Step {
    Client,
    Write(usize, Vec<u8>),
    Read(usize),
    Shutdown(usize, bool),
    Drop(usize),
    Packet { host: u32, guest: u32, op: u16, flags: u32, data: usize, credit: (u32, u32) },
    Receive,
    Answer,
    Thaw,
}

fn step() -> impl Strategy<Value = Step> {
    let client = || 0..4_usize;
    let host = prop_oneof![Just(FIRST_PORT), Just(FIRST_PORT + 1), Just(52), any::<u32>()];
    let guest = prop_oneof![3 => Just(PORT), 1 => 0..3_u32];
    let credit =
        prop_oneof![Just((100_000, 0)), (any::<u32>(), any::<u32>()), (0..50_u32, 0..50_u32)];
    let packet = (host, guest, 0..9_u16, 0..5_u32, 0..3000_usize, credit).prop_map(
        |(host, guest, op, flags, data, credit)| Step::Packet {
            host,
            guest,
            op,
            flags,
            data,
            credit,
        },
    );
    let line =
        prop_oneof![Just(b"CONNECT 1024\n".to_vec()), prop::collection::vec(any::<u8>(), 0..40)];
    prop_oneof![
        2 => Just(Step::Client),
        3 => (client(), line).prop_map(|(client, data)| Step::Write(client, data)),
        1 => client().prop_map(Step::Read),
        1 => (client(), any::<bool>()).prop_map(|(client, read)| Step::Shutdown(client, read)),
        1 => client().prop_map(Step::Drop),
        6 => packet,
        3 => Just(Step::Receive),
        2 => Just(Step::Answer),
        1 => Just(Step::Thaw),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    /// For any actions of programs and guest in any order, nothing panics or hangs, and no
    /// connection is left at the end.
    #[test]
    fn any_sequence_of_actions_ends(steps in prop::collection::vec(step(), 1..60)) {
        let mut peer = Peer::new();
        let mut _program = peer.listen(52);
        let mut clients: Vec<Option<UnixStream>> = vec![None, None, None, None];
        for step in steps {
            match step {
                Step::Client => {
                    if let Some(place) = clients.iter_mut().find(|client| client.is_none()) {
                        let client = peer.client();
                        client.set_nonblocking(true).unwrap();
                        *place = Some(client);
                    }
                }
                // Each action may fail; only the device's behaviour is checked.
                Step::Write(client, data) => {
                    let _ = clients[client].as_mut().map(|client| client.write(&data));
                }
                Step::Read(client) => {
                    let _ = clients[client].as_mut().map(|client| client.read(&mut [0; 1000]));
                }
                Step::Shutdown(client, read) => {
                    let how = if read { Shutdown::Read } else { Shutdown::Write };
                    let _ = clients[client].as_mut().map(|client| client.shutdown(how));
                }
                Step::Drop(client) => clients[client] = None,
                Step::Packet { host, guest, op, flags, data, credit } => {
                    (peer.buf_alloc, peer.fwd_cnt) = credit;
                    let header = peer.header(Ends { host, guest }, Op::Data, flags, data);
                    peer.send_raw(&Header { op, ..header }, &vec![1; data]);
                }
                Step::Receive => {
                    peer.receive();
                }
                Step::Answer => peer.answer(),
                Step::Thaw => {
                    peer = peer.thawed();
                    _program = peer.listen(52);
                    while peer.guest.used(TX).is_some() {}
                }
            }
            peer.guest.run();
        }
        prop_assert_eq!(peer.guest.get(STATUS), 15);
        clients.clear();
        peer.guest.run();
        peer.guest.set(STATUS, 0);
        peer.answer();
        prop_assert_eq!(peer.connections(), 0);
        prop_assert_eq!(peer.guest.transport().device().requests(), 0);
    }
}
