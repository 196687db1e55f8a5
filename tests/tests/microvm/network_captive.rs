//! What a monitor with a network gets from its broker once its guest has taken it over. Requires
//! root.

use std::fs::{read_dir, read_to_string};
use std::io::{IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};

use firn_captive::{Answer, Held, Hostile};
use firn_tests::{World, workshop_folder};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recv, recvmsg, send,
};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use serde_json::json;

use crate::jail::THREADS;
use crate::network::with_taps;

/// Bytes of a request and of an answer (`crates/net/src/broker/wire.rs`).
const REQUEST: usize = 27;
const ANSWER: usize = 12;
/// The kinds of requests.
const TCP: u8 = 0;
const UDP: u8 = 1;
/// The number of a request that the proxy has not made.
const ID: u64 = u64::MAX;

fn request(kind: u8, to: SocketAddr) -> [u8; REQUEST] {
    let mut bytes = [0; REQUEST];
    bytes[..8].copy_from_slice(&ID.to_ne_bytes());
    bytes[8] = kind;
    bytes[9..11].copy_from_slice(&to.port().to_ne_bytes());
    let address = match to.ip() {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    };
    bytes[11..].copy_from_slice(&address.octets());
    bytes
}

/// A descriptor of another process, for this one too.
fn descriptor_of(process: Pid, number: i32) -> OwnedFd {
    let process = pidfd_open(process, PidfdFlags::empty()).unwrap();
    pidfd_getfd(process, number, PidfdGetfdFlags::empty()).unwrap()
}

/// The broker's end: what its thread in the process that started the monitor waits for.
fn end_of_broker(owner: Pid) -> OwnedFd {
    let tasks = format!("/proc/{}/task", owner.as_raw_nonzero());
    let tasks = read_dir(tasks).unwrap().map(|task| task.unwrap().path());
    let is_broker = |name: &str| name.trim() == "net-broker";
    let task = tasks
        .into_iter()
        .find(|task| is_broker(&read_to_string(task.join("comm")).unwrap_or_default()))
        .unwrap();
    loop {
        let call = read_to_string(task.join("syscall")).unwrap();
        let mut words = call.split_ascii_whitespace();
        if words.next() == Some(&libc::SYS_recvfrom.to_string()) {
            let number = words.next().unwrap().trim_start_matches("0x");
            return descriptor_of(owner, i32::from_str_radix(number, 16).unwrap());
        }
        // It has not begun to wait.
        std::thread::yield_now();
    }
}

/// A monitor whose threads are stopped, and its descriptor of the broker.
struct Captured<'a> {
    held: Held<'a>,
    number: u64,
    /// The same descriptor for the test, because the monitor does not run.
    end: OwnedFd,
}

impl<'a> Captured<'a> {
    /// Finds the descriptor by what comes from `broker`, the other end.
    fn new(hostile: &'a Hostile, process: Pid, broker: &OwnedFd) -> Self {
        let held = hostile.hold();
        let marker = [0xa5; ANSWER];
        send(broker, &marker, SendFlags::empty()).unwrap();
        let descriptors = hostile.descriptors();
        let is_socket = |path: &std::path::Path| path.to_string_lossy().starts_with("socket:");
        let sockets = descriptors.iter().filter(|(_, path)| is_socket(path));
        let mut sockets = sockets
            .map(|(number, _)| (*number, descriptor_of(process, i32::try_from(*number).unwrap())));
        let has_marker = |end: &OwnedFd| {
            let mut bytes = [0; ANSWER];
            let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
            recv(end, &mut bytes, flags).is_ok() && bytes == marker
        };
        let (number, end) = sockets.find(|(_, end)| has_marker(end)).unwrap();
        recv(&end, &mut [0; ANSWER], RecvFlags::DONTWAIT).unwrap();
        Self { held, number, end }
    }

    /// The monitor sends a request by send(2), through its filter. Returns the broker's answer.
    #[track_caller]
    fn ask(&self, kind: u8, to: &str) -> Result<OwnedFd, Errno> {
        let request = request(kind, to.parse().unwrap());
        let flags = u64::from((SendFlags::DONTWAIT | SendFlags::NOSIGNAL).bits());
        let arguments = [self.number, 0, REQUEST as u64, flags, 0, 0];
        let sent = self.held.call(libc::SYS_sendto, arguments, Some((1, &request)));
        assert_eq!(sent, Answer::Returned(REQUEST as i64), "{to}");
        self.answer()
    }

    fn answer(&self) -> Result<OwnedFd, Errno> {
        poll(&mut [PollFd::new(&self.end, PollFlags::IN)], None).unwrap();
        let mut bytes = [0; ANSWER];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received = recvmsg(self.end.as_fd(), &mut parts, &mut control, flags).unwrap();
        assert_eq!(received.bytes, ANSWER);
        let passed = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut rights) => rights.next(),
            _ => None,
        });
        let (id, errno) = bytes.split_first_chunk().unwrap();
        assert_eq!(u64::from_ne_bytes(*id), ID);
        match (i32::from_ne_bytes(errno.try_into().unwrap()), passed) {
            (0, Some(socket)) => Ok(socket),
            (errno, None) => Err(Errno::from_raw_os_error(errno)),
            (errno, Some(_)) => panic!("a socket with error {errno}"),
        }
    }
}

/// The filter lets it ask its broker, which gives it nothing but what the guest's rules allow.
#[test]
fn a_hostile_monitor_gets_only_the_sockets_that_its_rules_allow() {
    with_taps(1, |port| {
        let world = World::default();
        let allowed = format!("10.9.0.1:{port}");
        let rule = format!("allow:{allowed}");
        let boot = world.firn(["boot", "--name", "it", "--net", "proxy", "--egress", &rule]);
        let booted = boot.arg(workshop_folder(&world.work())).start().ready();
        let process = booted.monitor();
        let hostile = Hostile::of(process.as_raw_nonzero().get().cast_unsigned(), THREADS);
        hostile.reaches_no_other_process_and_no_network();

        let broker = end_of_broker(booted.pid());
        let captured = Captured::new(&hostile, process, &broker);
        // The server is on all addresses of the host.
        let denied = [
            format!("127.0.0.1:{port}"),
            format!("[::ffff:127.0.0.1]:{port}"),
            format!("[64:ff9b::7f00:1]:{port}"),
            format!("[::1]:{port}"),
            format!("10.9.0.1:{}", port ^ 1),
            format!("10.9.0.2:{port}"),
            "169.254.169.254:80".into(),
            "168.63.129.16:80".into(),
        ];
        for to in denied {
            for kind in [TCP, UDP] {
                assert_eq!(captured.ask(kind, &to).unwrap_err(), Errno::ACCESS, "{kind} {to}");
            }
        }
        let mut stream = TcpStream::from(captured.ask(TCP, &allowed).unwrap());
        // Until it is connected, too.
        stream.set_nonblocking(false).unwrap();
        stream.write_all(b"x").unwrap();
        stream.read_exact(&mut [0]).unwrap();
        assert_eq!(stream.peer_addr().unwrap().to_string(), allowed);
        drop(captured);

        // The monitor runs on.
        let event = json!({"do": "echo", "address": "10.9.0.1", "port": port, "mebibytes": 1});
        assert_eq!(world.ask("it", "machine", &event), json!(true));
    });
}
