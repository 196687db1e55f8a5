use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;

use tempfile::TempDir;

use super::super::device::VirtioDevice;
use super::super::testing::{Guest, STATUS};
use super::connection::BUFFER;
use super::muxer::FIRST_PORT;
use super::packet::{Op, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND};
use super::testing::{
    CID, Ends, GUEST, PORT, Peer, RX_BUFFER, device, expect_end, pattern, read_line,
};
use super::*;

#[test]
fn the_guest_reads_its_address() {
    let dir = TempDir::new().unwrap();
    assert_eq!(device(&dir).0.config(), CID.to_le_bytes());
}

#[test]
fn a_connection_carries_bytes_both_ways() {
    let mut peer = Peer::new();
    let (mut client, ends) = peer.connect();
    assert_eq!(ends.host, FIRST_PORT);
    client.write_all(b"question").unwrap();
    peer.guest.run();
    assert_eq!(peer.expect(ends, Op::Data, 0), b"question");
    peer.send(ends, Op::Data, 0, b"answer");
    let mut answer = [0; 6];
    client.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"answer");
    peer.expect_nothing();
    assert_eq!(peer.connections(), 1);
    peer.send(ends, Op::Reset, 0, &[]);
    let expected = VsockCounters {
        // The request and the data, and what the guest answered.
        packets_to_guest: 2,
        bytes_to_guest: 8,
        packets_from_guest: 3,
        bytes_from_guest: 6,
        opened: 1,
        closed: 1,
        ..VsockCounters::default()
    };
    assert_eq!(peer.guest.transport().device().counters(), expected);
}

#[test]
fn bytes_after_the_first_line_are_for_the_guest() {
    let mut peer = Peer::new();
    let mut client = peer.client();
    client.write_all(b"conn").unwrap();
    peer.guest.run();
    peer.expect_nothing();
    client.write_all(b"ect 1024\nfirst words\nand more").unwrap();
    peer.guest.run();
    let ends = peer.expect_request();
    peer.expect_nothing();
    peer.send(ends, Op::Response, 0, &[]);
    assert_eq!(peer.expect(ends, Op::Data, 0), b"first words\nand more");
    assert_eq!(read_line(&mut client), format!("OK {}\n", ends.host));
}

#[test]
fn this_process_connects_without_a_path() {
    let mut peer = Peer::new();
    let connector = peer.guest.transport().device().connector();
    fs::remove_file(peer.path()).unwrap();
    let mut clients = Vec::new();
    for _ in 0..2 {
        let mut client = connector.connect().unwrap();
        // The event of a connection that is accepted, and of each later one, wakes the device.
        peer.guest.run();
        client.write_all(b"CONNECT 1024\n").unwrap();
        peer.guest.run();
        let ends = peer.expect_request();
        peer.send(ends, Op::Response, 0, &[]);
        assert_eq!(read_line(&mut client), format!("OK {}\n", ends.host));
        client.write_all(b"question").unwrap();
        peer.guest.run();
        assert_eq!(peer.expect(ends, Op::Data, 0), b"question");
        clients.push(client);
    }
    clients.push(connector.connect().unwrap());
    drop(peer);
    clients.iter_mut().for_each(expect_end);
    let error = connector.connect().unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
}

#[test]
fn an_invalid_first_line_ends_the_connection() {
    let mut peer = Peer::new();
    let lines: [&[u8]; 8] = [
        b"CONNECT\n",
        b"CONNECT x\n",
        b"CONNECT 4294967296\n",
        b"CONNECT 1 2\n",
        b"GET / HTTP/1.1\n",
        b"\xff\xff\n",
        b"\n",
        b"CONNECT 00000000000000000000000000000001024\n",
    ];
    for line in lines {
        let mut client = peer.client();
        client.write_all(line).unwrap();
        peer.guest.run();
        // Closing a socket with unread bytes resets the connection.
        let mut rest = Vec::new();
        let end = client.read_to_end(&mut rest);
        assert!(rest.is_empty(), "{line:?} {end:?}");
    }
    peer.expect_nothing();
    assert_eq!(peer.connections(), 0);
}

#[test]
fn a_guest_that_does_not_listen_ends_the_connection() {
    let mut peer = Peer::new();
    let mut client = peer.client();
    client.write_all(b"CONNECT 1024\n").unwrap();
    peer.guest.run();
    let ends = peer.expect_request();
    peer.send(ends, Op::Reset, 0, &[]);
    expect_end(&mut client);
    assert_eq!(peer.connections(), 0);
}

/// Sends `data` from the guest as far as its credit allows; `read` consumes data on the host.
struct Sender {
    data: Vec<u8>,
    sent: usize,
    allowed: usize,
}

impl Sender {
    fn push(&mut self, peer: &mut Peer, ends: Ends, header: Option<Header>) {
        if let Some(header) = header {
            let forwarded = usize::try_from(header.fwd_cnt).unwrap();
            self.allowed = forwarded + usize::try_from(header.buf_alloc).unwrap();
        }
        while self.sent < self.allowed.min(self.data.len()) {
            let len = (self.allowed.min(self.data.len()) - self.sent).min(60_000);
            let data = self.data[self.sent..self.sent + len].to_vec();
            peer.send(ends, Op::Data, 0, &data);
            self.sent += len;
        }
    }
}

#[test]
fn megabytes_pass_both_ways_through_small_buffers() {
    const LEN: usize = 3 << 20;
    let mut peer = Peer::new();
    peer.buf_alloc = 10_000;
    let (mut client, ends) = peer.connect();
    let mut writer = client.try_clone().unwrap();
    let writer = thread::spawn(move || {
        writer.write_all(&pattern(LEN)).unwrap();
        writer.shutdown(Shutdown::Write).unwrap();
    });
    let reader = thread::spawn(move || {
        let mut all = Vec::new();
        client.read_to_end(&mut all).unwrap();
        all
    });

    let mut sender = Sender { data: pattern(LEN + 1), sent: 0, allowed: 0 };
    let allowed = usize::try_from(BUFFER).unwrap();
    sender.allowed = allowed;
    sender.push(&mut peer, ends, None);
    let mut received = Vec::new();
    let mut ended = false;
    while !ended || sender.sent < sender.data.len() {
        peer.guest.run();
        let Some((header, data)) = peer.receive() else {
            thread::yield_now();
            continue;
        };
        received.extend(data);
        let outstanding = received.len() - usize::try_from(peer.fwd_cnt).unwrap();
        assert!(outstanding <= 10_000, "the guest's credit is exceeded");
        ended |= header.op == Op::Shutdown.number() && header.flags & SHUTDOWN_SEND != 0;
        if outstanding >= 7_000 {
            peer.fwd_cnt = u32::try_from(received.len()).unwrap();
            peer.send(ends, Op::CreditUpdate, 0, &[]);
        }
        if header.op == Op::CreditRequest.number() {
            peer.send(ends, Op::CreditUpdate, 0, &[]);
        }
        sender.push(&mut peer, ends, Some(header));
    }
    writer.join().unwrap();
    assert!(received == pattern(LEN));
    peer.send(ends, Op::Shutdown, SHUTDOWN_BOTH, &[]);
    while peer.connections() > 0 {
        peer.guest.run();
        peer.receive();
    }
    assert!(reader.join().unwrap() == sender.data);
}

#[test]
fn credit_is_requested_once() {
    let mut peer = Peer::new();
    peer.buf_alloc = 3;
    let (mut client, ends) = peer.connect();
    client.write_all(b"abcdef").unwrap();
    peer.guest.run();
    assert_eq!(peer.expect(ends, Op::Data, 0), b"abc");
    peer.expect(ends, Op::CreditRequest, 0);
    peer.send(ends, Op::CreditUpdate, 0, &[]);
    peer.expect_nothing();
    peer.fwd_cnt = 2;
    peer.send(ends, Op::CreditUpdate, 0, &[]);
    assert_eq!(peer.expect(ends, Op::Data, 0), b"de");
    peer.expect(ends, Op::CreditRequest, 0);
    // The guest reports more forwarded bytes than were sent: the device sees no credit.
    peer.fwd_cnt = 1 << 31;
    peer.send(ends, Op::CreditUpdate, 0, &[]);
    peer.expect(ends, Op::CreditRequest, 0);
    peer.fwd_cnt = 5;
    peer.send(ends, Op::CreditUpdate, 0, &[]);
    assert_eq!(peer.expect(ends, Op::Data, 0), b"f");
}

#[test]
fn the_device_answers_a_credit_request() {
    let mut peer = Peer::new();
    let (_client, ends) = peer.connect();
    peer.send(ends, Op::Data, 0, &[1; 1000]);
    peer.expect_nothing();
    peer.send(ends, Op::CreditRequest, 0, &[]);
    let (header, _) = peer.receive().unwrap();
    assert_eq!(header.op, Op::CreditUpdate.number());
    assert_eq!((header.buf_alloc, header.fwd_cnt), (BUFFER, 1000));
}

#[test]
fn data_for_a_program_that_does_not_read_is_limited_by_the_buffer() {
    let mut peer = Peer::new();
    let (mut client, ends) = peer.connect();
    let mut sender = Sender { data: pattern(4 << 20), sent: 0, allowed: 0 };
    sender.allowed = usize::try_from(BUFFER).unwrap();
    sender.push(&mut peer, ends, None);
    while let Some((header, _)) = peer.receive() {
        sender.push(&mut peer, ends, Some(header));
    }
    // The socket also buffers data; the kernel decides how much.
    assert!(sender.sent < sender.data.len());
    peer.send(ends, Op::CreditRequest, 0, &[]);
    let (header, _) = peer.receive().unwrap();
    let forwarded = usize::try_from(header.fwd_cnt).unwrap();
    assert!(sender.sent - forwarded > usize::try_from(BUFFER / 2).unwrap());

    // When the program reads, all data arrives.
    let expected = sender.data.clone();
    let reader = thread::spawn(move || {
        let mut all = vec![0; expected.len()];
        client.read_exact(&mut all).unwrap();
        assert!(all == expected);
    });
    while sender.sent < sender.data.len() {
        peer.guest.run();
        let header = peer.receive().map(|(header, _)| header);
        sender.push(&mut peer, ends, header);
    }
    while !reader.is_finished() {
        peer.guest.run();
    }
    reader.join().unwrap();
}

#[test]
fn a_guest_that_exceeds_its_credit_is_disconnected() {
    let mut peer = Peer::new();
    let (mut client, ends) = peer.connect();
    let mut left = usize::try_from(BUFFER).unwrap();
    // The program does not read, so the socket's buffer fills up, and then the device's.
    let mut sent = 0;
    loop {
        peer.send(ends, Op::Data, 0, &[7; 8192]);
        sent += 8192;
        if let Some((header, _)) = peer.receive() {
            if header.op == Op::Reset.number() {
                break;
            }
            left = usize::try_from(header.fwd_cnt + header.buf_alloc).unwrap();
        }
        assert!(sent <= left, "data beyond the credit causes a reset");
    }
    assert_eq!(peer.connections(), 0);
    let mut rest = Vec::new();
    client.read_to_end(&mut rest).unwrap();
    assert!(rest.len() < sent);
}

#[test]
fn a_program_may_shut_down_its_direction_and_still_receive() {
    let mut peer = Peer::new();
    let (mut client, ends) = peer.connect();
    client.write_all(b"all I have to say").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    peer.guest.run();
    assert_eq!(peer.expect(ends, Op::Data, 0), b"all I have to say");
    peer.expect(ends, Op::Shutdown, SHUTDOWN_SEND);
    peer.send(ends, Op::Data, 0, b"understood");
    peer.send(ends, Op::Shutdown, SHUTDOWN_BOTH, &[]);
    peer.expect(ends, Op::Reset, 0);
    peer.expect_nothing();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    assert_eq!(answer, "understood");
    assert_eq!(peer.connections(), 0);
}

#[test]
fn the_guest_may_shut_down_its_direction_and_still_receive() {
    let mut peer = Peer::new();
    let (mut client, ends) = peer.connect();
    peer.send(ends, Op::Data, 0, b"last words");
    peer.send(ends, Op::Shutdown, SHUTDOWN_SEND, &[]);
    let mut words = String::new();
    client.read_to_string(&mut words).unwrap();
    assert_eq!(words, "last words");
    client.write_all(b"noted").unwrap();
    peer.guest.run();
    assert_eq!(peer.expect(ends, Op::Data, 0), b"noted");
    drop(client);
    peer.guest.run();
    peer.expect(ends, Op::Shutdown, SHUTDOWN_BOTH);
    peer.send(ends, Op::Reset, 0, &[]);
    assert_eq!(peer.connections(), 0);
}

#[test]
fn a_guest_that_receives_no_more_gets_no_more_data() {
    let mut peer = Peer::new();
    let (mut client, ends) = peer.connect();
    peer.send(ends, Op::Shutdown, SHUTDOWN_RECEIVE, &[]);
    let refused = client.write_all(b"no reader").unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::BrokenPipe);
    peer.guest.run();
    peer.send(ends, Op::Data, 0, b"yes");
    let mut words = [0; 3];
    client.read_exact(&mut words).unwrap();
    assert_eq!(&words, b"yes");
}

#[test]
fn data_before_a_shutdown_arrives_even_if_it_is_read_late() {
    let mut peer = Peer::new();
    let (mut client, ends) = peer.connect();
    let mut sender = Sender { data: pattern(2 << 20), sent: 0, allowed: 0 };
    sender.allowed = usize::try_from(BUFFER).unwrap();
    sender.push(&mut peer, ends, None);
    while let Some((header, _)) = peer.receive() {
        sender.push(&mut peer, ends, Some(header));
    }
    peer.send(ends, Op::Shutdown, SHUTDOWN_BOTH, &[]);
    peer.expect_nothing();
    // Linux resets the connection after 8 seconds.
    peer.send(ends, Op::Reset, 0, &[]);
    let sent = sender.sent;
    let reader = thread::spawn(move || {
        let mut all = Vec::new();
        client.read_to_end(&mut all).unwrap();
        assert_eq!(all.len(), sent);
        assert!(all == pattern(sent));
    });
    while peer.connections() > 0 {
        peer.guest.run();
    }
    reader.join().unwrap();
    peer.expect_nothing();
}

#[test]
fn a_reset_without_a_shutdown_drops_unread_data() {
    let mut peer = Peer::new();
    let (client, ends) = peer.connect();
    let mut sender = Sender { data: pattern(2 << 20), sent: 0, allowed: 0 };
    sender.allowed = usize::try_from(BUFFER).unwrap();
    sender.push(&mut peer, ends, None);
    peer.send(ends, Op::Reset, 0, &[]);
    assert_eq!(peer.connections(), 0);
    drop(client);
}

#[test]
fn programs_may_disconnect_at_any_time() {
    let mut peer = Peer::new();
    // Before their first line, within it, and before the request is sent.
    drop(peer.client());
    peer.guest.run();
    peer.client().write_all(b"CONN").unwrap();
    peer.guest.run();
    peer.client().write_all(b"CONNECT 1024\n").unwrap();
    peer.guest.run();
    while let Some((header, _)) = peer.receive() {
        // A request that was sent is followed by a reset.
        assert!([Op::Request.number(), Op::Reset.number()].contains(&header.op));
    }
    assert_eq!(peer.connections(), 0);

    // Before the guest's response.
    let mut client = peer.client();
    client.write_all(b"CONNECT 1024\n").unwrap();
    peer.guest.run();
    let ends = peer.expect_request();
    drop(client);
    peer.guest.run();
    peer.expect(ends, Op::Reset, 0);
    peer.send(ends, Op::Response, 0, &[]);
    peer.expect(ends, Op::Reset, 0);

    // While the connection is open.
    let (mut client, ends) = peer.connect();
    client.write_all(b"by the way").unwrap();
    drop(client);
    peer.guest.run();
    assert_eq!(peer.expect(ends, Op::Data, 0), b"by the way");
    peer.expect(ends, Op::Shutdown, SHUTDOWN_BOTH);
    peer.send(ends, Op::Data, 0, b"on its way before the guest knew");
    peer.expect_nothing();
    peer.send(ends, Op::Reset, 0, &[]);
    assert_eq!(peer.connections(), 0);
}

#[test]
fn packets_are_queued_until_the_guest_has_buffers() {
    let mut peer = Peer::without_buffers();
    let mut client = peer.client();
    client.write_all(b"CONNECT 1024\nhello").unwrap();
    peer.guest.run();
    assert_eq!(peer.take(), None);
    peer.fill(1);
    let (header, _) = peer.take().unwrap();
    let ends = Ends { host: header.src_port, guest: header.dst_port };
    peer.send(ends, Op::Response, 0, &[]);
    assert_eq!(peer.take(), None);
    peer.fill(1);
    assert_eq!(peer.take().unwrap().1, b"hello");
}

#[test]
fn a_program_that_connects_before_the_driver_starts_waits() {
    let dir = TempDir::new().unwrap();
    let (device, broker) = device(&dir);
    let mut guest = Guest::new(device);
    let mut client = UnixStream::connect(dir.path().join("v")).unwrap();
    client.write_all(b"CONNECT 1024\n").unwrap();
    guest.run();
    guest.set(STATUS, 0);
    guest.negotiate(0);
    guest.set_up_queues();
    guest.set(STATUS, 15);
    let mut peer = Peer { guest, broker, dir, buf_alloc: 1000, fwd_cnt: 0 };
    peer.fill(2);
    let ends = peer.expect_request();
    peer.send(ends, Op::Response, 0, &[]);
    assert_eq!(read_line(&mut client), format!("OK {}\n", ends.host));
    // A reset of the driver ends its connections.
    peer.guest.set(STATUS, 0);
    expect_end(&mut client);
}

#[test]
fn a_guest_connects_to_a_program_on_the_host() {
    let mut peer = Peer::new();
    let listener = peer.listen(52);
    let ends = Ends { host: 52, guest: 5000 };
    peer.send(ends, Op::Request, 0, &[]);
    peer.expect_nothing();
    peer.answer();
    peer.expect(ends, Op::Response, 0);
    let (mut program, _) = listener.accept().unwrap();
    peer.send(ends, Op::Data, 0, b"to the host");
    let mut words = [0; 11];
    program.read_exact(&mut words).unwrap();
    assert_eq!(&words, b"to the host");
    program.write_all(b"to the guest").unwrap();
    peer.guest.run();
    assert_eq!(peer.expect(ends, Op::Data, 0), b"to the guest");
    // The same pair of ports is refused.
    peer.send(ends, Op::Request, 0, &[]);
    peer.expect(ends, Op::Reset, 0);
    assert_eq!(peer.connections(), 0);
}

#[test]
fn a_guest_that_connects_to_no_listener_is_refused() {
    let mut peer = Peer::new();
    fs::write(peer.dir.path().join("v_53"), "no socket").unwrap();
    for host in [52, 53, u32::MAX] {
        let ends = Ends { host, guest: 5000 };
        peer.send(ends, Op::Request, 0, &[]);
        peer.answer();
        peer.expect(ends, Op::Reset, 0);
    }
    assert_eq!(peer.connections(), 0);
}

#[test]
fn buffers_of_a_packet_may_have_any_boundaries() {
    let mut peer = Peer::new();
    let (mut client, ends) = peer.connect();
    let header = peer.header(ends, Op::Data, 0, 5).to_bytes();
    peer.guest.add(TX, &[&header[..1], &header[1..44], b"ab", b"cde", b"not counted"], &[]);
    peer.guest.kick(TX);
    let mut words = [0; 5];
    client.read_exact(&mut words).unwrap();
    assert_eq!(&words, b"abcde");
    let joined = [&header[..], b"fghij"].concat();
    peer.guest.add(TX, &[&joined], &[]);
    peer.guest.kick(TX);
    client.read_exact(&mut words).unwrap();
    assert_eq!(&words, b"fghij");
}

#[test]
fn a_busy_connection_does_not_block_others() {
    let mut peer = Peer::new();
    let (mut busy, busy_ends) = peer.connect();
    let (mut quiet, quiet_ends) = peer.connect();
    busy.write_all(&pattern(100_000)).unwrap();
    quiet.write_all(b"excuse me").unwrap();
    peer.guest.run();
    let mut before = 0;
    loop {
        let (header, data) = peer.receive().unwrap();
        if header.src_port == quiet_ends.host {
            assert_eq!(data, b"excuse me");
            break;
        }
        assert_eq!(header.src_port, busy_ends.host);
        before += data.len();
    }
    assert!(before <= 2 * usize::try_from(RX_BUFFER).unwrap(), "{before}");
}

#[test]
fn only_the_device_s_own_socket_is_removed() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("v");
    let first = device(&dir);
    assert!(path.exists());
    let error = VsockListener::bind(&path).unwrap_err();
    assert!(matches!(error, BindVsockError::Exists { .. }), "{error}");
    assert!(path.exists());
    drop(first);
    assert!(!path.exists());

    let second = device(&dir);
    fs::remove_file(&path).unwrap();
    fs::write(&path, "another file").unwrap();
    drop(second);
    assert!(path.exists());

    let long = dir.path().join("x".repeat(200));
    assert!(matches!(VsockListener::bind(&long), Err(BindVsockError::Bind { .. })));
}

#[test]
fn a_socket_that_the_caller_bound_is_used_and_not_removed() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("v");
    let bound = UnixListener::bind(&path).unwrap();
    let mut guest = Guest::started(Vsock::new(GUEST, VsockListener::new(bound).unwrap()).unwrap());
    let mut client = UnixStream::connect(&path).unwrap();
    client.write_all(b"CONNECT 1024\n").unwrap();
    guest.run();
    assert_eq!(guest.transport().device().connections(), 1);
    drop(guest);
    assert!(path.exists());
}

#[path = "hostile_tests.rs"]
mod hostile;
#[path = "thaw_tests.rs"]
mod thaw;
