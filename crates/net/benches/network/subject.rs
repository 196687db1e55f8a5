//! An engine under measurement, between a host and a guest of its own.

use std::fs::File;
use std::io::Write;
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use firn_net::Offloads;
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::net::sockopt::set_socket_send_buffer_size_force;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use crate::namespace::Namespace;
use crate::process::Process;
use crate::tap::open_tap;
use crate::{engine, pump};

/// The host's address.
pub(crate) const HOST: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
/// The send buffer of each end of the socket between an engine and the tap device: passt drops
/// frames that do not fit.
const SOCKET_BUFFER: usize = 64 << 20;

/// Where the engines are.
pub(crate) struct Engines {
    /// passt's program.
    pub(crate) passt: String,
}

/// An engine.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Firn,
    Passt,
}

/// How the guest's link is.
#[derive(Clone, Copy)]
pub(crate) struct Link {
    pub(crate) mtu: u16,
    /// Checksums and segmentation are left to the other side, in both directions. passt's socket
    /// has no header for that.
    pub(crate) offloads: bool,
}

impl Link {
    pub(crate) fn offloads(self) -> Offloads {
        let on = self.offloads;
        Offloads { checksum: on, tso4: on, tso6: on }
    }
}

impl Engines {
    /// The first line of `passt --version`.
    pub(crate) fn passt_version(&self) -> String {
        let output = Command::new(&self.passt).arg("--version").output();
        let output = output.unwrap_or_else(|error| {
            panic!("cannot run {}: {error}; install passt or name it with --passt", self.passt)
        });
        let text = String::from_utf8_lossy(&output.stdout);
        text.lines().next().unwrap_or_default().to_owned()
    }

    /// Starts an engine's process in `host`, and returns the other end of its socket.
    pub(crate) fn start(&self, kind: Kind, link: Link, host: &Namespace) -> (Child, OwnedFd) {
        let (own, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
                .unwrap();
        for end in [&own, &theirs] {
            // Root may have a larger one than the system's limit.
            set_socket_send_buffer_size_force(end, SOCKET_BUFFER).unwrap();
        }
        let fd = theirs.as_raw_fd().to_string();
        let mtu = link.mtu.to_string();
        let mut command = match kind {
            Kind::Firn => {
                let mut command = Command::new("/proc/self/exe");
                let offloads = if link.offloads { "offloads" } else { "plain" };
                command.args([engine::ROLE, &fd, &mtu, offloads]);
                command
            }
            Kind::Passt => {
                let mut command = Command::new(&self.passt);
                command.args(["--foreground", "--quiet", "--ipv4-only", "--no-map-gw"]);
                command.args(["--no-dhcp", "--address", "100.64.0.2", "--netmask", "30"]);
                command.args(["--gateway", "100.64.0.1", "--mtu", &mtu, "--fd", &fd]);
                command
            }
        };
        command.stdin(Stdio::null());
        let child = host.run(move || {
            fcntl_setfd(&theirs, FdFlags::empty()).unwrap();
            command.spawn().unwrap()
        });
        (child, own)
    }
}

/// A namespace with Linux's own choice of a congestion control, whatever this host's is.
fn new_namespace() -> Namespace {
    let namespace = Namespace::new();
    namespace.sh("ip link set lo up; echo cubic >/proc/sys/net/ipv4/tcp_congestion_control");
    namespace
}

/// A host's namespace with an address.
pub(crate) fn new_host() -> Namespace {
    let host = new_namespace();
    host.sh(&format!("ip addr add {HOST}/24 dev lo"));
    host
}

/// Host, guest and the engine between them.
pub(crate) struct Subject {
    pub(crate) host: Namespace,
    pub(crate) guest: Namespace,
    engine: Child,
}

impl Subject {
    pub(crate) fn start(engines: &Engines, kind: Kind, link: Link) -> Self {
        let (host, guest) = (new_host(), new_namespace());
        let tap = guest.run(move || open_tap(link.offloads()));
        guest.sh(&format!(
            "ip link set tap0 address 02:66:69:72:6e:02 mtu {} up; \
             ip addr add 100.64.0.2/30 dev tap0; ip route add default via 100.64.0.1",
            link.mtu
        ));
        let (engine, socket) = engines.start(kind, link, &host);
        let ends = (File::from(socket.as_fd().try_clone_to_owned().unwrap()), tap.try_clone());
        thread::spawn(move || pump::to_guest(ends.0, ends.1.unwrap(), link.offloads));
        thread::spawn(move || pump::from_guest(tap, File::from(socket), link.offloads));
        Self { host, guest, engine }
    }

    pub(crate) fn process(&self) -> Process {
        Process(self.engine.id())
    }

    /// Starts a listener in the host's namespace: its port, and its connections.
    pub(crate) fn listen(&self) -> (u16, Receiver<std::net::TcpStream>) {
        let (send, receive) = channel();
        let listener = self.host.run(|| TcpListener::bind((HOST, 0)).unwrap());
        let port = listener.local_addr().unwrap().port();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                // The client knows that it is connected.
                if stream.write_all(&[0]).is_err() || send.send(stream).is_err() {
                    return;
                }
            }
        });
        (port, receive)
    }
}

impl Drop for Subject {
    fn drop(&mut self) {
        let _ = self.engine.kill();
        let _ = self.engine.wait();
    }
}
