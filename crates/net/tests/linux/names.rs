//! Rules with host names, with a name server of the host and hosts behind it.

use std::fs::File;
use std::io::{ErrorKind, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::thread;
use std::time::Duration;

use firn_net::{GuestNetwork, PinTimes, Proxy};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recv, recvmsg, send,
};
use smoltcp::wire::DnsQueryType;

use crate::dns::{NameServer, query, resolve, resolve_over_tcp};
use crate::namespace::Namespace;
use crate::servers::{echo, serve};
use crate::world::{HOST_V4, Settings, World, is_possible, start_broker};

/// Each address of [`Internet`] has a server at this port and the next one.
const PORT: u16 = 7000;
/// Globally reachable addresses.
const API: &str = "9.9.9.1";
const API_V6: &str = "2606:4700::1";
const OTHER: &str = "9.9.9.2";
const THIRD: &str = "9.9.9.3";
/// One that is not, and a neighbour of the host.
const INNER: &str = "10.77.0.2";
const DENY_ALL: [&str; 2] = ["deny:0.0.0.0/0", "deny:::/0"];

/// What the host is connected to.
struct Internet {
    _namespace: Namespace,
}

impl Internet {
    fn new(world: &World) -> Self {
        let namespace = Namespace::new();
        let own = namespace.run(|| File::open("/proc/thread-self/ns/net").unwrap());
        let path = format!("/proc/{}/fd/{}", std::process::id(), own.as_raw_fd());
        world.host.sh(&format!(
            "ip link add wan0 type veth peer name wan1 netns {path}; ip link set wan0 up; \
             ip addr add 10.77.0.1/30 dev wan0; ip addr add fd77::1/64 dev wan0 nodad; \
             ip route add 9.9.9.0/24 via {INNER}; ip route add 2606:4700::/32 via fd77::2"
        ));
        namespace.sh(&format!(
            "ip link set lo up; ip link set wan1 up; \
             ip addr add {INNER}/30 dev wan1; ip addr add fd77::2/64 dev wan1 nodad; \
             for address in {API} {OTHER} {THIRD}; do ip addr add $address/32 dev lo; done; \
             ip addr add {API_V6}/128 dev lo nodad"
        ));
        namespace.run(|| {
            for port in [PORT, PORT + 1] {
                let listener = TcpListener::bind(("::", port)).unwrap();
                thread::spawn(move || {
                    for stream in listener.incoming() {
                        thread::spawn(move || echo(stream.unwrap()));
                    }
                });
            }
        });
        Self { _namespace: namespace }
    }
}

/// A world with a name server and an internet.
fn world(rules: &'static [&'static str], pin_times: PinTimes) -> (World, NameServer, Internet) {
    let world = World::new(Settings { rules, pin_times, ..Settings::default() });
    let (names, internet) = (NameServer::start(&world), Internet::new(&world));
    (world, names, internet)
}

/// Whether the guest reaches a server. What the policy denies is unreachable.
fn reaches(world: &World, address: &str, port: u16) -> bool {
    let to = SocketAddr::new(address.parse().unwrap(), port);
    world.guest.run(move || match TcpStream::connect(to) {
        Ok(mut stream) => {
            stream.write_all(b"x").unwrap();
            stream.read_exact(&mut [0]).unwrap();
            true
        }
        Err(error) => {
            let denied = [ErrorKind::HostUnreachable, ErrorKind::PermissionDenied];
            assert!(denied.contains(&error.kind()), "{to}: {error}");
            false
        }
    })
}

fn asks(world: &World, name: &'static str) -> Vec<String> {
    let found = world.guest.run(move || resolve(name));
    found.iter().map(IpAddr::to_string).collect()
}

fn matched(world: &World) -> Vec<u64> {
    world.policy.counts().iter().map(|count| count.matched).collect()
}

#[test]
fn a_name_is_allowed_at_its_addresses_and_nowhere_else() {
    if !is_possible() {
        return;
    }
    const RULES: &[&str] = &["allow:api.example.com:7000", "allow:*.cdn.net", "deny:0.0.0.0/0"];
    let (world, names, _internet) = world(RULES, PinTimes::default());
    names.set("api.example.com", 300, &[API, API_V6]);
    names.set("x.cdn.net", 300, &[THIRD]);
    names.set("evil.net", 300, &[OTHER]);
    assert_eq!(asks(&world, "api.example.com"), [API, API_V6]);
    assert_eq!(asks(&world, "evil.net"), [OTHER]);
    assert!(asks(&world, "no.example.com").is_empty());
    assert!(reaches(&world, API, PORT) && reaches(&world, API_V6, PORT));
    assert!(!reaches(&world, API, PORT + 1) && !reaches(&world, OTHER, PORT));
    // A name below one is known when the guest has asked for it, here over TCP.
    assert!(!reaches(&world, THIRD, PORT));
    let found = world.guest.run(|| resolve_over_tcp("x.cdn.net"));
    assert_eq!(found, [THIRD.parse::<IpAddr>().unwrap()]);
    assert!(reaches(&world, THIRD, PORT));
    assert_eq!(matched(&world), [2, 1, 3, 0, 0]);
}

#[test]
fn an_address_is_allowed_for_its_life_only() {
    if !is_possible() {
        return;
    }
    const RULES: &[&str] = &["allow:api.example.com", DENY_ALL[0], DENY_ALL[1]];
    let second = Duration::from_secs(1);
    let (world, names, _internet) = world(RULES, PinTimes { least: second, most: 2 * second });
    names.set("api.example.com", 1, &[API]);
    assert_eq!(asks(&world, "api.example.com"), [API]);
    assert!(reaches(&world, API, PORT));
    names.set("api.example.com", 1, &[OTHER]);
    let is_denied = (0..100).any(|_| {
        thread::sleep(Duration::from_millis(100));
        !reaches(&world, API, PORT)
    });
    assert!(is_denied);
    // The broker resolves the name again, so it finds the new address without the guest.
    let asked = names.queries("api.example.com");
    assert!((0..200).any(|_| {
        thread::sleep(Duration::from_millis(100));
        reaches(&world, OTHER, PORT)
    }));
    assert!(asked > 2 && !reaches(&world, API, PORT));
}

/// Replaces the broker and the proxy, as a thaw does: the guest keeps the addresses that it knows.
fn thaw(world: &World) {
    let (broker, _ports) = start_broker(&world.host, &world.policy, &[]);
    world.with_proxy(move |proxy| {
        let state = proxy.save();
        let mut thawed = Proxy::new(GuestNetwork::default(), broker).unwrap();
        thawed.set_offloads(Settings::default().offloads);
        thawed.restore(&state);
        *proxy = thawed;
    });
}

#[test]
fn a_thawed_guest_uses_the_addresses_that_it_knows() {
    if !is_possible() {
        return;
    }
    const RULES: &[&str] = &["allow:api.example.com", DENY_ALL[0], DENY_ALL[1]];
    let (world, names, _internet) = world(RULES, PinTimes::default());
    names.set("api.example.com", 300, &[API, API_V6]);
    assert_eq!(asks(&world, "api.example.com"), [API, API_V6]);
    assert!(reaches(&world, API, PORT));
    let by_guest = names.queries("api.example.com");
    thaw(&world);
    // The guest does not ask again; the broker does, at the first connect.
    assert!(reaches(&world, API, PORT));
    let by_broker = names.queries("api.example.com");
    assert!(by_broker > by_guest);
    for _ in 0..5 {
        assert!(reaches(&world, API_V6, PORT) && !reaches(&world, OTHER, PORT));
    }
    assert_eq!(names.queries("api.example.com"), by_broker);
    // The name has moved while the guest was frozen.
    names.set("api.example.com", 300, &[THIRD]);
    thaw(&world);
    assert!(!reaches(&world, API, PORT) && reaches(&world, THIRD, PORT));
}

/// A name that has no answer keeps no connection from being made that does not depend on it.
#[test]
fn other_connections_do_not_wait_for_a_name() {
    if !is_possible() {
        return;
    }
    const RULES: &[&str] = &["allow:192.0.2.0/24", "allow:api.example.com", DENY_ALL[0]];
    let (world, names, _internet) = world(RULES, PinTimes::default());
    names.set("api.example.com", 300, &[API]);
    names.set_silent(true);
    let connect = world.guest.spawn(|| TcpStream::connect((API, PORT)).map(drop));
    while names.queries("api.example.com") == 0 {
        thread::sleep(Duration::from_millis(5));
    }
    let port = serve(&world, HOST_V4, echo);
    for _ in 0..50 {
        assert!(reaches(&world, HOST_V4, port));
    }
    assert!(!connect.is_finished());
    names.set_silent(false);
    // Its query is sent again.
    connect.join().unwrap().unwrap();
}

/// The owner of an allowed name points it to networks that only the host reaches.
#[test]
fn a_name_opens_no_inner_network() {
    if !is_possible() {
        return;
    }
    const RULES: &[&str] = &["allow:api.example.com", "allow:10.77.0.2:7001"];
    let (world, names, _internet) = world(RULES, PinTimes::default());
    names.set("api.example.com", 300, &[INNER, HOST_V4, "127.0.0.1", "fd77::2", API]);
    assert_eq!(asks(&world, "api.example.com").len(), 5);
    let port = serve(&world, HOST_V4, echo);
    assert!(!reaches(&world, INNER, PORT) && !reaches(&world, "fd77::2", PORT));
    assert!(!reaches(&world, HOST_V4, port));
    // A rule has the network, or the address is global.
    assert!(reaches(&world, INNER, PORT + 1) && reaches(&world, API, PORT));
    assert_eq!(matched(&world), [1, 1, 0, 3]);
}

#[test]
fn a_denied_name_is_denied_at_its_addresses() {
    if !is_possible() {
        return;
    }
    let (world, names, _internet) = world(&["deny:evil.net"], PinTimes::default());
    names.set("evil.net", 300, &[OTHER]);
    // Also for a guest that has never asked for it.
    assert!(!reaches(&world, OTHER, PORT) && reaches(&world, API, PORT));
    assert_eq!(asks(&world, "evil.net"), [OTHER]);
    assert!(!reaches(&world, OTHER, PORT));
    assert_eq!(matched(&world), [2, 1, 0]);
}

/// What a monitor sends that its guest has taken over.
struct Monitor(OwnedFd);

impl Monitor {
    /// Requests a socket: of TCP (0), or to a resolver over UDP (4).
    fn request(&self, kind: u8, to: SocketAddr) -> Option<OwnedFd> {
        let IpAddr::V4(address) = to.ip() else { panic!("{to}") };
        let address: Ipv6Addr = address.to_ipv6_mapped();
        let mut request = 7_u64.to_ne_bytes().to_vec();
        request.push(kind);
        request.extend(to.port().to_ne_bytes());
        request.extend(address.octets());
        send(&self.0, &request, SendFlags::empty()).unwrap();
        let mut answer = [0; 12];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC;
        recvmsg(&self.0, &mut [IoSliceMut::new(&mut answer)], &mut control, flags).unwrap();
        let socket = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut rights) => rights.next(),
            _ => None,
        });
        let errno = i32::from_ne_bytes(answer[8..].try_into().unwrap());
        assert_eq!(errno == 0, socket.is_some());
        assert!(errno == 0 || errno == libc::EACCES, "{errno}");
        socket
    }
}

#[test]
fn a_monitor_that_sends_its_own_dns_gets_nothing_more() {
    if !is_possible() {
        return;
    }
    const RULES: &[&str] = &["allow:api.example.com", DENY_ALL[0], DENY_ALL[1]];
    let (world, names, _internet) = world(RULES, PinTimes::default());
    names.set("api.example.com", 300, &[API]);
    names.set("evil.net", 300, &[OTHER]);
    let (monitor, _ports) = start_broker(&world.host, &world.policy, &[]);
    let monitor = Monitor(monitor);
    let to = |address: &str| SocketAddr::new(address.parse().unwrap(), PORT);
    let resolver = monitor.request(4, to(OTHER)).unwrap();
    // It is a pair of the broker's, which leads to no network.
    let domain = rustix::net::sockopt::socket_domain(&resolver).unwrap();
    assert_eq!(domain, rustix::net::AddressFamily::UNIX);
    // An answer of its own, with the address that it wants; the same after a query; any bytes.
    let mut claim = query("api.example.com", DnsQueryType::A);
    claim[2..4].copy_from_slice(&[0x81, 0x80]);
    claim[7] = 1;
    claim.extend(b"\xc0\x0c\0\x01\0\x01\0\0\x0f\0\0\x04\x09\x09\x09\x02");
    let asked = query("api.example.com", DnsQueryType::A);
    let mut with_record = asked.clone();
    with_record[11] = 1;
    with_record.extend(&claim[asked.len()..]);
    let evil = query("evil.net", DnsQueryType::A);
    for message in [&claim, &asked, &claim, &with_record, &evil, &vec![0xff; 512], &vec![]] {
        // The queue of a pair is short.
        while send(&resolver, message, SendFlags::DONTWAIT).is_err() {
            thread::yield_now();
        }
    }
    // The answers to the three queries have come, so whatever is pinned is pinned.
    let mut answered = 0;
    while answered < 3 {
        let mut answer = [0; 4096];
        match recv(&resolver, &mut answer, RecvFlags::DONTWAIT) {
            Ok(_) => answered += 1,
            Err(_) => thread::sleep(Duration::from_millis(5)),
        }
    }
    assert!(monitor.request(0, to(OTHER)).is_none() && monitor.request(0, to(THIRD)).is_none());
    let stream = TcpStream::from(monitor.request(0, to(API)).unwrap());
    assert_eq!(stream.peer_addr().unwrap(), to(API));
}
