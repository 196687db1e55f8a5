use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{Timespec, poll};
use smoltcp::wire::DnsQueryType;

use super::super::message::{id, parse_query, set_id};
use super::super::testing::{
    ANSWER, Data, Record, address, answer, name, query, question, resolver,
};
use super::{Forwarder, MAX_DATAGRAM_ENDS, MAX_OWN_QUERIES, MAX_QUERIES, MAX_STREAM_ENDS};
use crate::Policy;
use crate::broker::dns::Pins;

const A: DnsQueryType = DnsQueryType::A;
const LIMIT: Duration = Duration::from_secs(20);

/// A forwarder with pins, as a broker has it, in a world in which time can pass faster.
struct World {
    forwarder: Forwarder,
    pins: Pins,
    /// Time that has passed beside the clock's.
    ahead: Duration,
    admitted: usize,
}

impl World {
    fn new(rules: &[&str], resolvers: &[SocketAddr]) -> Self {
        let pins = Policy::parse(rules.iter().copied()).unwrap().pins();
        let forwarder = Forwarder::new(resolvers.to_vec());
        Self { forwarder, pins, ahead: Duration::ZERO, admitted: 0 }
    }

    fn now(&self) -> Instant {
        Instant::now() + self.ahead
    }

    /// One turn of the broker: waits for events at most a moment.
    fn turn(&mut self) -> bool {
        let mut polled: Vec<_> = self.forwarder.interests().collect();
        poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 5_000_000 })).unwrap();
        let events: Vec<_> = polled.iter().map(rustix::event::PollFd::revents).collect();
        let (now, admitted) = (self.now(), &mut self.admitted);
        self.forwarder.progress(&events, &mut self.pins, now, || *admitted += 1)
    }

    /// Takes turns until something has happened.
    fn until<T>(&mut self, what: &str, mut happens: impl FnMut(&mut Self, bool) -> Option<T>) -> T {
        let end = Instant::now() + LIMIT;
        loop {
            let is_resolved = self.turn();
            if let Some(found) = happens(self, is_resolved) {
                return found;
            }
            assert!(Instant::now() < end, "{what}");
        }
    }

    fn end(&mut self) -> UnixDatagram {
        let now = self.now();
        UnixDatagram::from(self.forwarder.connect(false, now).unwrap())
    }

    fn stream(&mut self) -> UnixStream {
        let now = self.now();
        UnixStream::from(self.forwarder.connect(true, now).unwrap())
    }

    /// The next datagram of an end.
    fn datagram(&mut self, end: &UnixDatagram) -> Vec<u8> {
        self.until("a datagram", |_, _| receive(end))
    }

    fn has(&self, rule: usize, ip: &str) -> bool {
        self.pins.has(rule, ip.parse().unwrap(), self.now())
    }
}

fn receive(end: &UnixDatagram) -> Option<Vec<u8>> {
    let mut message = vec![0; 70_000];
    let len = end.recv(&mut message).ok()?;
    message.truncate(len);
    Some(message)
}

/// A query that came to a resolver, if one did.
fn arrived(socket: &UdpSocket) -> Option<(Vec<u8>, SocketAddr)> {
    socket.set_nonblocking(true).unwrap();
    let mut message = vec![0; 4096];
    let (len, from) = socket.recv_from(&mut message).ok()?;
    message.truncate(len);
    Some((message, from))
}

/// The answer to a query.
fn answer_to(message: &[u8], records: &[Record]) -> Vec<u8> {
    answer(id(message), ANSWER, &parse_query(message).unwrap(), records)
}

#[test]
fn an_address_is_pinned_before_the_guest_has_the_answer() {
    let (socket, resolver) = resolver();
    let mut world = World::new(&["allow:api.example.com", "allow:*.other.com"], &[resolver]);
    let end = world.end();
    let asked = query(0x1234, "API.example.com", A);
    end.send(&asked).unwrap();
    let (message, from) = world.until("a query", |_, _| arrived(&socket));
    // The same, but for the id. The port is the kernel's choice.
    assert_eq!(message[2..], asked[2..]);
    let records = [address("api.example.com", 60, "1.2.3.4")];
    socket.send_to(&answer_to(&message, &records), from).unwrap();
    world.until("a pin", |world, _| world.has(0, "1.2.3.4").then_some(()));
    let passed = world.datagram(&end);
    assert_eq!(passed, answer(0x1234, ANSWER, &question("api.example.com", A), &records));
    assert!(!world.has(1, "1.2.3.4"));
    assert_eq!(world.admitted, 1);
    // A name without a rule is passed on without a pin.
    end.send(&query(1, "free.net", A)).unwrap();
    let (message, from) = world.until("a query", |_, _| arrived(&socket));
    socket.send_to(&answer_to(&message, &[address("free.net", 60, "1.2.3.5")]), from).unwrap();
    assert_eq!(id(&world.datagram(&end)), 1);
    assert!(!world.has(0, "1.2.3.5"));
}

#[test]
fn what_is_not_the_answer_is_passed_over() {
    let (socket, resolver) = resolver();
    let mut world = World::new(&["allow:api.example.com"], &[resolver]);
    let end = world.end();
    end.send(&query(7, "api.example.com", A)).unwrap();
    let (message, from) = world.until("a query", |_, _| arrived(&socket));
    let evil = [address("api.example.com", 60, "6.6.6.6")];
    let mut other_id = answer_to(&message, &evil);
    set_id(&mut other_id, id(&message).wrapping_add(1));
    let other_question = answer(id(&message), ANSWER, &question("evil.com", A), &evil);
    for foreign in [other_id, other_question, message.clone(), vec![], vec![0; 12]] {
        socket.send_to(&foreign, from).unwrap();
    }
    // From another port it does not arrive at all.
    let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
    stranger.send_to(&answer_to(&message, &evil), from).unwrap();
    let right = [address("api.example.com", 60, "1.2.3.4")];
    socket.send_to(&answer_to(&message, &right), from).unwrap();
    let passed = world.datagram(&end);
    assert_eq!(passed, answer(7, ANSWER, &question("api.example.com", A), &right));
    assert!(world.has(0, "1.2.3.4") && !world.has(0, "6.6.6.6"));
}

#[test]
fn a_malformed_answer_becomes_an_error() {
    let (socket, resolver) = resolver();
    let mut world = World::new(&["allow:a.b"], &[resolver]);
    let end = world.end();
    end.send(&query(7, "a.b", A)).unwrap();
    let (message, from) = world.until("a query", |_, _| arrived(&socket));
    let records = [address("a.b", 60, "6.6.6.6"), ("a.b", 60, Data::Other(1, vec![1, 2]))];
    socket.send_to(&answer_to(&message, &records), from).unwrap();
    let passed = world.datagram(&end);
    assert_eq!((id(&passed), passed[3] & 0xf, passed.len()), (7, 2, query(7, "a.b", A).len()));
    assert!(!world.has(0, "6.6.6.6"));
}

/// What a monitor that is taken over may send.
#[test]
fn bytes_that_are_no_query_reach_no_resolver() {
    let (socket, resolver) = resolver();
    let mut world = World::new(&["allow:a.b"], &[resolver]);
    let end = world.end();
    let claim = answer(1, ANSWER, &question("a.b", A), &[address("a.b", 60, "6.6.6.6")]);
    let update = answer(2, 5 << 11, &question("a.b", A), &[]);
    let long = [query(3, "a.b", A), vec![0; 5000]].concat();
    for bytes in [&claim, &update, &long, &vec![0xff; 40], &vec![]] {
        end.send(bytes).unwrap();
    }
    // The update has an error as its answer.
    let passed = world.datagram(&end);
    assert_eq!((id(&passed), passed[3] & 0xf), (2, 4));
    end.send(&query(9, "a.b", A)).unwrap();
    let (message, _) = world.until("a query", |_, _| arrived(&socket));
    assert_eq!(parse_query(&message).unwrap(), question("a.b", A));
    assert!(!world.has(0, "6.6.6.6"));
    assert_eq!(world.admitted, 6, "each costs the monitor its rate");
    assert!(receive(&end).is_none());
}

#[test]
fn queries_of_a_guest_are_bounded_and_end() {
    let (socket, resolver) = resolver();
    let mut world = World::new(&["allow:a.b"], &[resolver]);
    let end = world.end();
    for number in 0..MAX_QUERIES + 10 {
        end.send(&query(u16::try_from(number).unwrap(), "a.b", A)).unwrap();
        world.until("a taken query", |world, _| (world.admitted == number + 1).then_some(()));
    }
    assert_eq!(world.forwarder.exchanges.len(), MAX_QUERIES);
    // The resolver is silent until the last attempt has ended.
    for _ in 0..4 {
        world.ahead += Duration::from_millis(1600);
        world.turn();
    }
    assert_eq!(world.forwarder.exchanges.len(), 0);
    let errors: Vec<_> = std::iter::from_fn(|| receive(&end)).collect();
    assert!(!errors.is_empty() && errors.iter().all(|error| error[3] & 0xf == 2));
    let mut asked = 0;
    while arrived(&socket).is_some() {
        asked += 1;
    }
    assert!(asked > MAX_QUERIES, "{asked}: each is sent again");
}

#[test]
fn the_next_resolver_is_asked_when_one_is_silent() {
    let (silent, first) = resolver();
    let (socket, second) = resolver();
    let mut world = World::new(&["allow:a.b"], &[first, second]);
    let end = world.end();
    end.send(&query(1, "a.b", A)).unwrap();
    world.until("a query", |_, _| arrived(&silent));
    world.ahead += Duration::from_millis(1600);
    let (message, from) = world.until("a query", |_, _| arrived(&socket));
    socket.send_to(&answer_to(&message, &[]), from).unwrap();
    assert_eq!(id(&world.datagram(&end)), 1);
    // From then on it is the first one to be asked.
    end.send(&query(2, "a.b", A)).unwrap();
    world.until("a query", |_, _| arrived(&socket));
    assert!(arrived(&silent).is_none());
    // One that refuses is left at once.
    drop(socket);
    end.send(&query(3, "a.b", A)).unwrap();
    let (message, _) = world.until("a query", |_, _| arrived(&silent));
    assert_eq!(parse_query(&message).unwrap(), question("a.b", A));
}

#[test]
fn the_next_resolver_is_asked_when_one_has_an_error() {
    let sockets = [resolver(), resolver()];
    let mut world = World::new(&["allow:a.b"], &sockets.each_ref().map(|socket| socket.1));
    let end = world.end();
    for number in [1, 2] {
        end.send(&query(number, "a.b", A)).unwrap();
        for (socket, _) in &sockets {
            let (message, from) = world.until("a query", |_, _| arrived(socket));
            let asked = parse_query(&message).unwrap();
            let failed = answer(id(&message), ANSWER | 2, &asked, &[]);
            socket.send_to(&failed, from).unwrap();
        }
        // The last one's error is the answer, and the first one is asked first again.
        let passed = world.datagram(&end);
        assert_eq!((id(&passed), passed[3] & 0xf), (number, 2));
    }
}

#[test]
fn ends_are_bounded() {
    let (_socket, resolver) = resolver();
    let mut world = World::new(&["allow:a.b"], &[resolver]);
    let ends: Vec<UnixDatagram> = (0..=MAX_DATAGRAM_ENDS).map(|_| world.end()).collect();
    let streams: Vec<UnixStream> = (0..=MAX_STREAM_ENDS).map(|_| world.stream()).collect();
    assert_eq!(world.forwarder.ends.len(), MAX_DATAGRAM_ENDS + MAX_STREAM_ENDS);
    let is_closed = |end: &UnixDatagram| end.send(b"x").is_err();
    assert!(is_closed(&ends[0]) && !is_closed(&ends[1]));
    assert_eq!((&streams[0]).read(&mut [0]).unwrap(), 0);
    world.turn();
    // Those that are not used end.
    world.ahead += Duration::from_secs(11);
    world.turn();
    assert!(world.forwarder.ends.is_empty() && ends.iter().all(is_closed));
    // A stream that its owner closes ends at once.
    drop(world.stream());
    world.until("an end", |world, _| world.forwarder.ends.is_empty().then_some(()));
}

/// A resolver over TCP that answers each query with these records.
fn serve_tcp(address: SocketAddr, records: Vec<Record>) {
    let listener = TcpListener::bind(address).unwrap();
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut len = [0; 2];
            stream.read_exact(&mut len).unwrap();
            let mut message = vec![0; usize::from(u16::from_be_bytes(len))];
            stream.read_exact(&mut message).unwrap();
            let answer = answer_to(&message, &records);
            let len = u16::try_from(answer.len()).unwrap().to_be_bytes();
            // In two parts.
            stream.write_all(&[&len[..], &answer[..5]].concat()).unwrap();
            thread::sleep(Duration::from_millis(20));
            stream.write_all(&answer[5..]).unwrap();
        }
    });
}

/// What a stream has received, as soon as it is a message.
fn stream_message(world: &mut World, stream: &UnixStream) -> Vec<u8> {
    stream.set_nonblocking(true).unwrap();
    let mut received = Vec::new();
    world.until("a message", |_, _| {
        let mut part = [0; 4096];
        if let Ok(len) = { stream }.read(&mut part) {
            assert!(len > 0, "the stream is closed");
            received.extend(&part[..len]);
        }
        let len = usize::from(u16::from_be_bytes(*received.first_chunk()?));
        (received.len() == len + 2).then(|| received[2..].to_vec())
    })
}

#[test]
fn queries_over_tcp_are_answered_one_by_one() {
    let (_socket, resolver) = resolver();
    serve_tcp(resolver, vec![address("a.b", 60, "1.2.3.4")]);
    let mut world = World::new(&["allow:a.b"], &[resolver]);
    let stream = world.stream();
    let framed = |message: Vec<u8>| {
        [u16::try_from(message.len()).unwrap().to_be_bytes().to_vec(), message].concat()
    };
    // Two at once, the second one in parts.
    let second = framed(query(2, "a.b", A));
    (&stream).write_all(&[framed(query(1, "a.b", A)), second[..7].to_vec()].concat()).unwrap();
    let expected = |id| answer(id, ANSWER, &question("a.b", A), &[address("a.b", 60, "1.2.3.4")]);
    assert_eq!(stream_message(&mut world, &stream), expected(1));
    assert!(world.has(0, "1.2.3.4"));
    (&stream).write_all(&second[7..]).unwrap();
    assert_eq!(stream_message(&mut world, &stream), expected(2));
    // What is too long, empty or no query ends the stream.
    for bytes in [vec![0x20, 0], vec![0, 0], framed(vec![0xff; 20])] {
        let stream = world.stream();
        (&stream).write_all(&bytes).unwrap();
        stream.set_nonblocking(true).unwrap();
        world.until("an end", |_, _| ({ &stream }.read(&mut [0]).ok() == Some(0)).then_some(()));
    }
}

#[test]
fn a_name_is_resolved_without_the_guest() {
    let (socket, resolver) = resolver();
    let mut world = World::new(&["allow:api.example.com"], &[resolver]);
    world.forwarder.resolve(0);
    // Twice is once.
    world.forwarder.resolve(0);
    for ip in ["1.2.3.4", "2606:4700::1"] {
        let (message, from) = world.until("a query", |_, is_resolved| {
            assert!(!is_resolved);
            arrived(&socket)
        });
        assert_eq!(parse_query(&message).unwrap().name, name("api.example.com"));
        let records = [address("api.example.com", 600, ip)];
        socket.send_to(&answer_to(&message, &records), from).unwrap();
    }
    world.until("the addresses", |_, is_resolved| is_resolved.then_some(()));
    assert!(world.has(0, "1.2.3.4") && world.has(0, "2606:4700::1"));
    assert_eq!(world.pins.unresolved(0, world.now()), None);
    assert!(arrived(&socket).is_none());
    // After the life of the record it is unresolved again.
    world.ahead += Duration::from_secs(600);
    assert_eq!(world.pins.unresolved(0, world.now()), Some(0));
    assert!(!world.has(0, "1.2.3.4"));
}

#[test]
fn an_answer_that_was_cut_is_fetched_over_tcp() {
    let (socket, resolver) = resolver();
    serve_tcp(resolver, vec![address("a.b", 60, "1.2.3.4")]);
    let mut world = World::new(&["allow:a.b"], &[resolver]);
    world.forwarder.resolve(0);
    world.until("the addresses", |_, is_resolved| {
        while let Some((message, from)) = arrived(&socket) {
            let asked = parse_query(&message).unwrap();
            let cut = answer(id(&message), ANSWER | 0x200, &asked, &[]);
            socket.send_to(&cut, from).unwrap();
        }
        is_resolved.then_some(())
    });
    assert!(world.has(0, "1.2.3.4"));
}

#[test]
fn names_that_cannot_be_resolved_end_too() {
    let rules: Vec<String> = (0..20).map(|number| format!("allow:n{number}.b")).collect();
    let rules: Vec<&str> = rules.iter().map(String::as_str).collect();
    let (socket, silent) = resolver();
    let mut world = World::new(&rules, &[silent]);
    (0..20).for_each(|exact| world.forwarder.resolve(exact));
    world.until("a query", |_, _| arrived(&socket));
    assert_eq!(world.forwarder.exchanges.len(), MAX_OWN_QUERIES);
    let mut resolved = 0;
    while resolved < 20 {
        world.ahead += Duration::from_millis(500);
        world.turn();
        resolved = 20 - world.forwarder.resolving.len();
    }
    assert!(world.forwarder.exchanges.is_empty() && world.forwarder.waiting.is_empty());
    assert_eq!(world.pins.unresolved(19, world.now()), None, "it was tried just now");
    // Without a resolver there is no reason to wait.
    let mut world = World::new(&["deny:a.b"], &[]);
    assert!(world.forwarder.connect(false, world.now()).is_err());
    world.forwarder.resolve(0);
    assert!(world.turn());
}

#[test]
fn a_pair_is_of_the_monitor_alone() {
    let (_socket, resolver) = resolver();
    let mut world = World::new(&["allow:a.b"], &[resolver]);
    let now = world.now();
    let monitor: OwnedFd = world.forwarder.connect(false, now).unwrap();
    let flags = rustix::io::fcntl_getfd(&monitor).unwrap();
    assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
}
