use std::fs;
use std::net::{IpAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};

use super::wire::{Message, Request, SocketKind};
use super::{
    BURST, Broker, BrokerError, MAX_PARKED, Policy, PublishedPorts, RATE, Rate, Routes,
    host_resolvers, retry_when_short,
};

/// Asks a broker and waits for the answer.
fn ask(monitor: &OwnedFd, kind: SocketKind, to: &str) -> Result<OwnedFd, Errno> {
    Request { id: 1, kind, to: to.parse().unwrap() }.send(monitor)?;
    poll(&mut [PollFd::new(monitor, PollFlags::IN)], None)?;
    match Message::receive(monitor)? {
        Message::Answer(answer) => answer.socket,
        Message::Connection(connection) => panic!("{connection:?}"),
    }
}

#[test]
fn only_allowed_addresses_are_connected() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let rule = format!("allow:127.0.0.1:{}", address.port());
    let policy = Policy::parse([rule.as_str()]).unwrap();
    let monitor = Broker::start(policy.clone(), vec![address]).unwrap();
    let socket = ask(&monitor, SocketKind::Tcp, &address.to_string()).unwrap();
    assert_eq!(TcpStream::from(socket).peer_addr().unwrap(), address);
    for to in ["127.0.0.1:1", "127.0.0.2:80", "[::1]:80", "169.254.169.254:80", "0.0.0.0:80"] {
        for kind in [SocketKind::Tcp, SocketKind::Udp, SocketKind::Ping] {
            assert_eq!(ask(&monitor, kind, to).unwrap_err(), Errno::ACCESS, "{kind:?} {to}");
        }
    }
    // Resolvers are the host's, whatever address a monitor sends.
    let socket = ask(&monitor, SocketKind::ResolverTcp, "10.0.0.1:7").unwrap();
    assert_eq!(TcpStream::from(socket).peer_addr().unwrap(), address);
    assert_eq!(policy.counts()[0].matched, 1);
}

#[test]
fn a_host_without_resolvers_has_none() {
    let monitor = Broker::start(Policy::default(), Vec::new()).unwrap();
    let answer = ask(&monitor, SocketKind::ResolverUdp, "10.0.0.1:0");
    assert_eq!(answer.unwrap_err(), Errno::NETUNREACH);
}

/// A monitor that asks and never receives stops its broker, not the daemon: what waits is bounded.
#[test]
fn answers_that_are_not_received_are_bounded() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap();
    let policy = Policy::parse(["allow:127.0.0.1"]).unwrap();
    let monitor = Broker::start(policy.clone(), Vec::new()).unwrap();
    let mut last = 0;
    for _ in 0..50 {
        let request = Request { id: 1, kind: SocketKind::Tcp, to };
        while request.send(&monitor).is_ok() {}
        std::thread::sleep(Duration::from_millis(10));
        let opened = policy.counts()[0].matched;
        if opened == last && opened > 0 {
            break;
        }
        last = opened;
    }
    assert!((4..=32).contains(&last), "{last} sockets in flight");
}

/// The errors of a broker, which are complete when it has ended.
fn errors_after(act: impl FnOnce(OwnedFd)) -> Vec<BrokerError> {
    let (sender, errors) = mpsc::channel();
    let mut ports = PublishedPorts::open(["127.0.0.1:0:80"]).unwrap();
    let report = move |error| sender.send(error).unwrap();
    let (monitor, begin) =
        Broker::prepare(Policy::default(), Vec::new, &mut ports, report).unwrap();
    begin().unwrap();
    act(monitor);
    errors.iter().collect()
}

/// The threads of a broker end together, even if the monitor keeps its end.
#[test]
fn a_broker_that_ends_before_its_monitor_reports_why() {
    assert!(errors_after(drop).is_empty());
    let mut kept = None;
    let errors = errors_after(|monitor| {
        send(&monitor, &[7; 5], SendFlags::empty()).unwrap();
        kept = Some(monitor);
    });
    assert!(matches!(errors[..], [BrokerError::Protocol]), "{errors:?}");
    let monitor = kept.unwrap();
    poll(&mut [PollFd::new(&monitor, PollFlags::IN)], None).unwrap();
    assert!(Message::receive(&monitor).is_err(), "the monitor sees the end");
}

#[test]
fn a_call_is_made_again_while_the_system_is_short_of_memory() {
    let mut answers = [Err(Errno::NOMEM), Err(Errno::NOBUFS), Ok(7)].into_iter();
    assert_eq!(retry_when_short(|| answers.next().unwrap()), Ok(7));
    assert_eq!(retry_when_short(|| Err::<(), _>(Errno::PIPE)), Err(Errno::PIPE));
}

/// Requests that depend on a name wait for it, as many as a monitor may have, and in vain no longer
/// than its resolvers take.
#[test]
fn requests_that_wait_for_a_name_are_bounded() {
    let resolver = UdpSocket::bind("127.0.0.1:0").unwrap();
    let policy = Policy::parse(["allow:api.example.com", "deny:0.0.0.0/0"]).unwrap();
    let resolvers = vec![resolver.local_addr().unwrap()];
    let monitor = Broker::start(policy.clone(), resolvers).unwrap();
    let answer = || {
        poll(&mut [PollFd::new(&monitor, PollFlags::IN)], None).unwrap();
        let Message::Answer(answer) = Message::receive(&monitor).unwrap() else { panic!() };
        assert_eq!(answer.socket.unwrap_err(), Errno::ACCESS);
        answer.id
    };
    let most = u64::try_from(MAX_PARKED).unwrap();
    for id in 0..=most {
        let request = Request { id, kind: SocketKind::Tcp, to: "8.8.8.8:443".parse().unwrap() };
        while request.send(&monitor) == Err(Errno::AGAIN) {
            std::thread::yield_now();
        }
    }
    assert_eq!(answer(), most, "the last one does not wait");
    assert_eq!(Message::receive(&monitor).unwrap_err(), Errno::AGAIN);
    // There is no such name.
    for _ in 0..2 {
        let mut message = [0; 512];
        let (len, from) = resolver.recv_from(&mut message).unwrap();
        message[2..4].copy_from_slice(&[0x81, 0x83]);
        resolver.send_to(&message[..len], from).unwrap();
    }
    assert!((0..most).eq((0..most).map(|_| answer())));
    assert_eq!(policy.counts()[1].matched, most + 1);
}

#[test]
fn sockets_are_opened_at_a_bounded_rate() {
    let mut rate = Rate::new();
    let start = Instant::now();
    let waits: Vec<Duration> = (0..BURST + RATE).map(|_| rate.wait(start)).collect();
    assert!(waits[..usize::try_from(BURST).unwrap()].iter().all(Duration::is_zero));
    let last = *waits.last().unwrap();
    assert!((990..=1010).contains(&last.as_millis()), "{last:?}");
    // After a pause the burst is there again.
    assert_eq!(rate.wait(start + Duration::from_secs(10)), Duration::ZERO);
}

#[test]
fn the_kernel_tells_which_addresses_are_the_hosts() {
    let routes = Routes::default();
    let is_local = |address: &str| routes.is_local(address.parse::<IpAddr>().unwrap());
    assert!(is_local("127.0.0.1") && is_local("127.9.9.9"));
    assert!(is_local("255.255.255.255"));
    assert!(!is_local("8.8.8.8"), "without a route too");
}

#[test]
fn resolvers_are_read_from_resolv_conf() {
    let path = std::env::temp_dir().join(format!("firn-resolv-{}", std::process::id()));
    let text = "# nameserver 9.9.9.9\nsearch example.org\nnameserver 1.1.1.1\n\
                nameserver\t2001:db8::1\nnameserver fe80::1%eth0\nnameserver\n";
    fs::write(&path, text).unwrap();
    let resolvers = host_resolvers(&path).unwrap();
    fs::remove_file(&path).unwrap();
    assert_eq!(resolvers, ["1.1.1.1:53", "[2001:db8::1]:53"].map(|text| text.parse().unwrap()));
    assert!(host_resolvers(&path).is_err());
}
