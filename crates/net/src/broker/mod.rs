//! The broker: it opens the sockets of one guest, outside the jail of the guest's monitor.
//!
//! A monitor sends the address that its guest connects to; the broker checks it, connects without
//! waiting, and passes the descriptor. The monitor may be taken over: what it sends is checked,
//! and it gets no socket that is not connected to an allowed address. Such a socket cannot be
//! connected elsewhere, because the jail denies connect(2).
//!
//! Rules may have names of hosts. The broker then answers the guest's DNS queries, as [`dns`] has
//! it. It also has the listeners of published ports, and passes the connections that it accepts.

mod dns;
mod policy;
mod publish;
mod route;
mod rule;
mod special;
pub(crate) mod wire;

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{
    set_socket_keepalive, set_socket_oobinline, set_socket_send_buffer_size, set_tcp_keepidle,
    set_tcp_nodelay,
};
use rustix::net::{
    AddressFamily, Shutdown, SocketFlags, SocketType, connect, ipproto, shutdown, socket_with,
    socketpair,
};

use dns::{Forwarder, Pins};
pub use dns::{NameError, PinTimes};
use policy::Decision;
pub use policy::{Policy, RuleCount};
pub use publish::{PublishError, PublishedAddress, PublishedPort, PublishedPorts};
use route::Routes;
pub use rule::ParseRuleError;
use wire::{Answer, Request, SocketKind};

/// The port of DNS.
const DNS_PORT: u16 = 53;
/// Bytes of answers that the monitor has not received, with the kernel's own. Each has a socket,
/// which counts as one of the broker's user until then.
const ANSWERS: usize = 8 << 10;
/// The sockets that a guest may open at once, and for each second that follows.
const BURST: u32 = 4096;
const RATE: u32 = 2048;
/// When the host's kernel begins to probe an idle peer.
const KEEPALIVE: Duration = Duration::from_secs(120);
/// Requests that wait until names are resolved, and how long each does. Further ones are decided
/// with the addresses that are known.
const MAX_PARKED: usize = 64;
const PARKED_LIMIT: Duration = Duration::from_secs(5);

/// How long a broker waits for memory or descriptors of the system before it tries again.
const PAUSE: Duration = Duration::from_millis(100);

/// Why a broker has ended before its monitor.
#[derive(Debug, thiserror::Error)]
pub enum BrokerError {
    /// The monitor has sent what no monitor sends.
    #[error(
        "a guest's network has ended, because its monitor broke the protocol: the guest may have \
         taken it over; end the microVM"
    )]
    Protocol,
    /// The socket to the monitor fails.
    #[error("a guest's network has ended, because its socket failed; start the microVM again")]
    Socket(#[source] io::Error),
    /// The listeners, or the socket to the monitor, fail.
    #[error("published ports are closed, because their sockets failed; start the microVM again")]
    Listeners(#[source] io::Error),
}

/// Opens sockets for one guest.
#[derive(Debug)]
pub struct Broker {
    socket: OwnedFd,
    policy: Policy,
    resolvers: Vec<SocketAddr>,
    routes: Routes,
    rate: Rate,
    pins: Pins,
    /// The guest's DNS, if a rule has a name.
    forwarder: Option<Forwarder>,
    /// In the order of their ends.
    parked: VecDeque<Parked>,
}

/// A request whose decision depends on the addresses of names.
#[derive(Debug)]
struct Parked {
    request: Request,
    /// When it is decided in any case.
    until: Instant,
}

impl Broker {
    /// A broker in a thread of its own, which ends when the returned end, the monitor's, is closed.
    /// DNS queries go to the first of `resolvers`, and to the others when one does not answer.
    ///
    /// # Errors
    /// The sockets or the thread cannot be made.
    pub fn start(policy: Policy, resolvers: Vec<SocketAddr>) -> io::Result<OwnedFd> {
        let mut ports = PublishedPorts::default();
        let (monitor, begin) = Self::prepare(policy, move || resolvers, &mut ports, drop)?;
        begin()?;
        Ok(monitor)
    }

    /// The monitor's end, and what begins the broker, which passes the connections to published
    /// ports too: the end can be sent first, and a start does not wait for a thread. The listeners
    /// are closed with the broker. Its thread looks up the resolvers. `report` gets the error of a
    /// thread that ends before the monitor.
    ///
    /// # Errors
    /// The sockets cannot be made; what begins fails if the threads cannot.
    pub fn prepare(
        policy: Policy,
        resolvers: impl FnOnce() -> Vec<SocketAddr> + Send + 'static,
        ports: &mut PublishedPorts,
        report: impl Fn(BrokerError) + Clone + Send + 'static,
    ) -> io::Result<(OwnedFd, impl FnOnce() -> io::Result<()> + Send + 'static)> {
        let (socket, monitor) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        set_socket_send_buffer_size(&socket, ANSWERS)?;
        let listeners = ports.take_listeners();
        let listener = if listeners.is_empty() { None } else { Some(socket.try_clone()?) };
        let accept = listener.map(|socket| {
            let report = report.clone();
            move || match publish::accept_all(&socket, &listeners) {
                Ok(()) => {}
                Err(errno) if is_end(errno) => {}
                Err(errno) => report(BrokerError::Listeners(errno.into())),
            }
        });
        let serve = move || {
            let resolvers = resolvers();
            let forwarder = policy.has_names().then(|| Forwarder::new(resolvers.clone()));
            let (pins, parked, rate) = (policy.pins(), VecDeque::new(), Rate::new());
            let routes = Routes::default();
            let mut broker =
                Self { socket, policy, resolvers, routes, rate, pins, forwarder, parked };
            let errno = loop {
                if let Err(errno) = broker.serve_next() {
                    break errno;
                }
            };
            // The listeners have the socket, too. The monitor refuses the guest's connections.
            let _ = shutdown(&broker.socket, Shutdown::Both);
            match errno {
                errno if is_end(errno) => {}
                Errno::PROTO => report(BrokerError::Protocol),
                errno => report(BrokerError::Socket(errno.into())),
            }
        };
        let begin = move || {
            if let Some(accept) = accept {
                thread::Builder::new().name("net-listener".into()).spawn(accept)?;
            }
            thread::Builder::new().name("net-broker".into()).spawn(serve)?;
            Ok(())
        };
        Ok((monitor, begin))
    }

    fn serve_next(&mut self) -> Result<(), Errno> {
        let Some(forwarder) = &self.forwarder else { return self.answer_next() };
        let parked_until = self.parked.front().map(|parked| parked.until);
        let now = Instant::now();
        let deadline = forwarder.deadline(now).into_iter().chain(parked_until).min();
        let timeout = deadline.map(|deadline| deadline.saturating_duration_since(now));
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let monitor = PollFd::new(&self.socket, PollFlags::IN);
        let mut polled: Vec<PollFd<'_>> =
            [monitor].into_iter().chain(forwarder.interests()).collect();
        match retry_when_short(|| poll(&mut polled, timeout.as_ref())) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
        let events: Vec<PollFlags> = polled.iter().map(PollFd::revents).collect();
        let Some((monitor, events)) = events.split_first() else { return Ok(()) };
        let now = Instant::now();
        let Self { forwarder: Some(forwarder), pins, rate, .. } = self else { return Ok(()) };
        let admit = || thread::sleep(rate.wait(Instant::now()));
        let is_resolved = forwarder.progress(events, pins, now, admit);
        if is_resolved || parked_until.is_some_and(|until| until <= now) {
            for parked in std::mem::take(&mut self.parked) {
                self.answer(parked)?;
            }
        }
        if monitor.is_empty() { Ok(()) } else { self.answer_next() }
    }

    fn answer_next(&mut self) -> Result<(), Errno> {
        let request = retry_when_short(|| Request::receive(&self.socket))?;
        thread::sleep(self.rate.wait(Instant::now()));
        self.answer(Parked { request, until: Instant::now() + PARKED_LIMIT })
    }

    /// Answers a request, or keeps it until names are resolved.
    fn answer(&mut self, parked: Parked) -> Result<(), Errno> {
        let Some(socket) = self.open(&parked) else {
            self.parked.push_back(parked);
            return Ok(());
        };
        let id = parked.request.id;
        let send = |answer: &Answer| retry_when_short(|| answer.send(&self.socket));
        match send(&Answer { id, socket }) {
            // Other monitors of this user do not receive theirs (unix(7)).
            Err(Errno::TOOMANYREFS) => send(&Answer { id, socket: Err(Errno::MFILE) }),
            sent => sent,
        }
    }

    /// `None` if it depends on names that are being resolved.
    fn open(&mut self, Parked { request, until }: &Parked) -> Option<Result<OwnedFd, Errno>> {
        let now = Instant::now();
        let kind = request.kind;
        if matches!(kind, SocketKind::ResolverTcp | SocketKind::ResolverUdp) {
            if let Some(forwarder) = &mut self.forwarder {
                return Some(forwarder.connect(kind == SocketKind::ResolverTcp, now));
            }
            let attempt = usize::from(request.to.port());
            let resolver = self.resolvers.get(attempt % self.resolvers.len().max(1));
            return Some(resolver.map_or(Err(Errno::NETUNREACH), |to| open_socket(kind, *to)));
        }
        let is_last = *until <= now || self.parked.len() >= MAX_PARKED;
        let is_local = |address| self.routes.is_local(address);
        match self.policy.decide(request.to, (&self.pins, now), is_local, is_last) {
            Decision::Allowed => Some(open_socket(kind, request.to)),
            Decision::Denied => Some(Err(Errno::ACCESS)),
            Decision::Unresolved(names) => {
                let forwarder = self.forwarder.as_mut()?;
                names.into_iter().for_each(|name| forwarder.resolve(name));
                None
            }
        }
    }
}

/// Makes a call again while the system has no memory for it. A call that is given up would leave
/// the guest without new connections, or one of them without its answer.
fn retry_when_short<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::NOMEM | Errno::NOBUFS) => thread::sleep(PAUSE),
            result => return result,
        }
    }
}

/// Whether the monitor has closed its end.
fn is_end(errno: Errno) -> bool {
    matches!(errno, Errno::PIPE | Errno::CONNRESET)
}

/// A socket that is connected to `to`, or will be.
fn open_socket(kind: SocketKind, to: SocketAddr) -> Result<OwnedFd, Errno> {
    let v4 = to.is_ipv4();
    let family = if v4 { AddressFamily::INET } else { AddressFamily::INET6 };
    let (socket_type, protocol) = match kind {
        SocketKind::Tcp | SocketKind::ResolverTcp => (SocketType::STREAM, ipproto::TCP),
        SocketKind::Udp | SocketKind::ResolverUdp => (SocketType::DGRAM, ipproto::UDP),
        SocketKind::Ping if v4 => (SocketType::DGRAM, ipproto::ICMP),
        SocketKind::Ping => (SocketType::DGRAM, ipproto::ICMPV6),
    };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(family, socket_type, flags, Some(protocol))?;
    if socket_type == SocketType::STREAM {
        set_options(&socket)?;
    }
    match connect(&socket, &to) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
        Err(errno) => Err(errno),
    }
}

/// Sets the options of a TCP connection.
fn set_options(socket: &OwnedFd) -> Result<(), Errno> {
    // The guest decides when it sends a small segment.
    set_tcp_nodelay(socket, true)?;
    // Without it a reader of urgent data cannot tell its bytes by their number (RFC 6093).
    set_socket_oobinline(socket, true)?;
    set_socket_keepalive(socket, true)?;
    set_tcp_keepidle(socket, KEEPALIVE)
}

/// How fast a guest may open sockets.
#[derive(Debug)]
struct Rate {
    /// When the sockets that were opened so far would all have been opened at the rate.
    paid: Instant,
}

impl Rate {
    fn new() -> Self {
        Self { paid: Instant::now() }
    }

    /// How long the next socket must wait.
    fn wait(&mut self, now: Instant) -> Duration {
        let cost = Duration::from_secs(1) / RATE;
        self.paid = self.paid.max(now) + cost;
        (self.paid - now).saturating_sub(cost * BURST)
    }
}

/// The host's resolvers, as resolv.conf(5) lists them.
///
/// # Errors
/// The file cannot be read.
pub fn host_resolvers(path: &Path) -> io::Result<Vec<SocketAddr>> {
    let text = fs::read_to_string(path)?;
    let servers = text.lines().filter_map(|line| {
        let mut words = line.split_ascii_whitespace();
        // The scope of a link-local address is not in its text form here: such a one is left out.
        let address = words.next().filter(|word| *word == "nameserver").and(words.next())?;
        address.parse::<IpAddr>().ok()
    });
    Ok(servers.map(|address| SocketAddr::new(address, DNS_PORT)).collect())
}

#[cfg(test)]
#[path = "broker_tests.rs"]
mod tests;
