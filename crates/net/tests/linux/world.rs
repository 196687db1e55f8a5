//! Two hosts in network namespaces of their own: in one are the servers and the broker, the other
//! is the guest, a Linux kernel whose only link is a tap device with a proxy behind it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use firn_net::{Broker, Counters, GuestNetwork, Offloads, PinTimes, Policy, Proxy, PublishedPorts};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

use crate::namespace::Namespace;
use crate::tap::{VNET_HEADER, encode, open_tap};

/// The host's addresses.
pub(crate) const HOST_V4: &str = "192.0.2.1";
pub(crate) const HOST_V6: &str = "2001:db8::1";
/// An address without a host.
pub(crate) const NOWHERE: &str = "198.51.100.7";

type Order = Box<dyn FnOnce(&mut Proxy) + Send>;

/// How the guest's link is.
#[derive(Clone, Copy)]
pub(crate) struct Settings {
    pub(crate) offloads: Offloads,
    pub(crate) mtu: u16,
    pub(crate) rules: &'static [&'static str],
    pub(crate) pin_times: PinTimes,
    /// Ports of the guest that the host's programs reach.
    pub(crate) publish: &'static [&'static str],
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            offloads: Offloads { checksum: true, tso4: true, tso6: true },
            mtu: GuestNetwork::DEFAULT_MTU,
            rules: &["allow:192.0.2.0/24", "allow:2001:db8::/32", "allow:198.51.100.0/24"],
            pin_times: PinTimes::default(),
            publish: &[],
        }
    }
}

/// Host, guest, and the proxy between them, which a thread drives.
pub(crate) struct World {
    pub(crate) host: Namespace,
    pub(crate) guest: Namespace,
    pub(crate) policy: Policy,
    pub(crate) ports: PublishedPorts,
    orders: Sender<Order>,
    wake: File,
}

/// Whether this process may make namespaces and tap devices.
pub(crate) fn is_possible() -> bool {
    let root = firn_required::has("root", rustix::process::geteuid().is_root());
    root && Path::new("/dev/net/tun").exists() && Command::new("ip").arg("-V").output().is_ok()
}

impl World {
    pub(crate) fn new(settings: Settings) -> Self {
        let (host, guest) = (Namespace::new(), Namespace::new());
        host.sh(&format!(
            "ip link set lo up; ip addr add {HOST_V4}/24 dev lo; \
             ip addr add {HOST_V6}/64 dev lo nodad; \
             echo '0 2147483647' > /proc/sys/net/ipv4/ping_group_range"
        ));
        let tap = guest.run(move || open_tap(settings.offloads));
        guest.sh(&format!(
            "ip link set lo up; \
             echo 0 > /proc/sys/net/ipv6/conf/tap0/accept_dad; \
             ip link set tap0 address 02:66:69:72:6e:02 mtu {mtu} up; \
             ip addr add 100.64.0.2/30 dev tap0; ip route add default via 100.64.0.1; \
             ip addr add fd00:6669:726e::2/64 dev tap0 nodad; \
             ip route add default via fd00:6669:726e::1",
            mtu = settings.mtu
        ));
        let policy = Policy::parse(settings.rules.iter().copied()).unwrap();
        let policy = policy.with_pin_times(settings.pin_times);
        let (broker, ports) = start_broker(&host, &policy, settings.publish);
        let network = GuestNetwork { mtu: settings.mtu, ..GuestNetwork::default() };
        let mut proxy = Proxy::new(network, broker).unwrap();
        proxy.set_offloads(settings.offloads);
        let (orders, queue) = channel();
        let wake = File::from(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let woken = wake.try_clone().unwrap();
        thread::spawn(move || {
            deny_sockets();
            drive(proxy, tap, &queue, woken);
        });
        Self { host, guest, policy, ports, orders, wake }
    }

    /// Runs with the proxy, between two frames.
    pub(crate) fn with_proxy<T: Send + 'static>(
        &self,
        run: impl FnOnce(&mut Proxy) -> T + Send + 'static,
    ) -> T {
        let (send, receive) = channel();
        self.orders.send(Box::new(move |proxy| send.send(run(proxy)).unwrap())).unwrap();
        (&self.wake).write_all(&1_u64.to_ne_bytes()).unwrap();
        receive.recv().unwrap()
    }

    /// Runs something in another thread while the proxy does nothing.
    pub(crate) fn while_stopped<T: Send + 'static>(
        &self,
        run: impl FnOnce() -> T + Send + 'static,
    ) -> T {
        let (begin, begun) = channel();
        let (send, done) = channel();
        let thread = thread::spawn(move || {
            begun.recv().unwrap();
            let result = run();
            send.send(()).unwrap();
            result
        });
        self.with_proxy(move |_| {
            begin.send(()).unwrap();
            done.recv().unwrap();
        });
        thread.join().unwrap()
    }

    pub(crate) fn counters(&self) -> Counters {
        self.with_proxy(|proxy| proxy.counters())
    }

    /// Waits until the counters are as expected.
    pub(crate) fn wait_for(&self, what: &str, is_so: impl Fn(&Counters) -> bool) {
        for _ in 0..500 {
            if is_so(&self.counters()) {
                return;
            }
            thread::sleep(Duration::from_millis(20));
        }
        panic!("not {what}: {:?}", self.counters());
    }
}

/// A broker of the host with published ports; returns the monitor's end.
pub(crate) fn start_broker(
    host: &Namespace,
    policy: &Policy,
    publish: &'static [&'static str],
) -> (OwnedFd, PublishedPorts) {
    let policy = policy.clone();
    let resolvers = vec![format!("{HOST_V4}:5353").parse().unwrap(), dns_address()];
    host.run(move || {
        let mut ports = PublishedPorts::open(publish.iter().copied()).unwrap();
        let (broker, begin) = Broker::prepare(policy, move || resolvers, &mut ports, drop).unwrap();
        begin().unwrap();
        (broker, ports)
    })
}

/// The second resolver: the first one does not exist.
pub(crate) fn dns_address() -> std::net::SocketAddr {
    format!("{HOST_V4}:53").parse().unwrap()
}

/// Ends the process when this thread, in which the proxy is, does what a monitor's jail denies:
/// it makes or connects a socket, sends to another address, or changes a socket's options beyond
/// the two that a proxy needs.
fn deny_sockets() {
    use SeccompCmpArgLen::{Dword, Qword};
    let differ = |conditions: &[(u8, SeccompCmpArgLen, i32)]| {
        let conditions = conditions.iter().map(|(argument, len, value)| {
            let value = u64::try_from(*value).unwrap();
            SeccompCondition::new(*argument, len.clone(), SeccompCmpOp::Ne, value).unwrap()
        });
        SeccompRule::new(conditions.collect()).unwrap()
    };
    let calls = [
        libc::SYS_socket,
        libc::SYS_connect,
        libc::SYS_bind,
        libc::SYS_listen,
        libc::SYS_sendmsg,
        libc::SYS_sendmmsg,
    ];
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        calls.into_iter().map(|call| (call, Vec::new())).collect();
    rules.insert(libc::SYS_sendto, vec![differ(&[(4, Qword, 0)])]);
    let other_level = differ(&[(1, Dword, libc::SOL_SOCKET)]);
    let other_option = differ(&[(2, Dword, libc::SO_LINGER), (2, Dword, libc::SO_PEEK_OFF)]);
    rules.insert(libc::SYS_setsockopt, vec![other_level, other_option]);
    let (other, matching) = (SeccompAction::Allow, SeccompAction::KillProcess);
    let filter = SeccompFilter::new(rules, other, matching, TargetArch::x86_64).unwrap();
    let program: BpfProgram = filter.try_into().unwrap();
    seccompiler::apply_filter(&program).unwrap();
}

/// Does what a device does: frames of the guest to the proxy, and back.
fn drive(mut proxy: Proxy, mut tap: File, orders: &Receiver<Order>, mut wake: File) {
    let mut buffer = vec![0; VNET_HEADER + 65_550];
    loop {
        let mut count = [0; 8];
        let _ = wake.read(&mut count);
        loop {
            match orders.try_recv() {
                Ok(order) => order(&mut proxy),
                Err(std::sync::mpsc::TryRecvError::Empty) => break,
                Err(std::sync::mpsc::TryRecvError::Disconnected) => return,
            }
        }
        for _ in 0..64 {
            let Ok(len) = tap.read(&mut buffer) else { break };
            proxy.transmit(&[&buffer[VNET_HEADER..len]]);
        }
        proxy.poll();
        for _ in 0..64 {
            let Some((header, frame)) = proxy.receive(65_550) else { break };
            let header = encode(header);
            let slices = [std::io::IoSlice::new(&header), std::io::IoSlice::new(frame)];
            assert_eq!(tap.write_vectored(&slices).unwrap(), VNET_HEADER + frame.len());
        }
        if proxy.has_frames() {
            continue;
        }
        let events = proxy.event_source();
        let mut fds = [tap.as_fd(), events, wake.as_fd()]
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        let second = Timespec { tv_sec: 1, tv_nsec: 0 };
        poll(&mut fds, Some(&second)).unwrap();
    }
}
