//! A tap device of the host (Linux Documentation/networking/tuntap.rst).

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::time::Instant;

use firn_base::num::u64_of;
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::ioctl::{IntegerSetter, Opcode, Setter, ioctl, opcode};
use rustix::net::netdevice::name_to_index;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use thiserror::Error;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6,
};

use super::backend::{BackendCounters, NetworkBackend, Traffic};
use super::{HEADER_LEN, MAX_PACKET};
use crate::counters::Timed;

/// The device by which programs reach tap devices.
const TUN: &str = "/dev/net/tun";
/// The most bytes of an interface's name, `IFNAMSIZ` less the final zero.
const MAX_NAME: usize = 15;

const TUNSETIFF: Opcode = opcode::write::<i32>(b'T', 202);
const TUNSETOFFLOAD: Opcode = opcode::write::<u32>(b'T', 208);
const TUNSETVNETHDRSZ: Opcode = opcode::write::<i32>(b'T', 216);

const IFF_TAP: i16 = 0x0002;
const IFF_NO_PI: i16 = 0x1000;
const IFF_VNET_HDR: i16 = 0x4000;

const TUN_F_CSUM: usize = 1;
const TUN_F_TSO4: usize = 2;
const TUN_F_TSO6: usize = 4;

/// Why a tap device cannot be used.
#[derive(Debug, Error)]
pub enum OpenTapError {
    /// The name is not one of an interface.
    #[error("{0:?} is not the name of a network interface: use 1 to {MAX_NAME} bytes without /")]
    Name(String),
    /// There is no such interface.
    #[error(
        "there is no network interface {0}: make it with `ip tuntap add dev {0} mode tap user USER` and `ip link set {0} up`"
    )]
    Unknown(String),
    /// The interface cannot be looked up.
    #[error("cannot look up the network interface {name}")]
    Lookup {
        /// The interface.
        name: String,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The host has no tap devices, or this user may not use them.
    #[error("cannot open {TUN}")]
    Tun(#[source] io::Error),
    /// It belongs to another user.
    #[error(
        "no permission for the tap device {0}: make it with `ip tuntap add dev {0} mode tap user USER`, or run as root"
    )]
    Permission(String),
    /// Another program uses it.
    #[error("the tap device {0} is in use: give each microVM a tap device of its own")]
    Busy(String),
    /// The interface is no tap device, or one with several queues.
    #[error("{0} is not a tap device with one queue")]
    NotTap(String),
    /// The device refuses its settings.
    #[error("cannot set up the tap device {name}")]
    SetUp {
        /// The device.
        name: String,
        /// The error of the operating system.
        source: io::Error,
    },
}

/// `struct ifreq` (netdevice(7)) with flags.
#[repr(C)]
struct InterfaceFlags {
    name: [u8; MAX_NAME + 1],
    flags: i16,
    rest: [u8; 22],
}

/// One end of a tap device: what the guest sends comes out of the host's interface.
#[derive(Debug)]
pub(super) struct Tap {
    file: File,
    packet: Vec<u8>,
    /// Bytes of the packet that waits for the guest, if one does.
    len: Option<usize>,
    counters: BackendCounters,
}

/// Opens an existing tap device, for the monitor.
///
/// # Errors
/// See [`OpenTapError`].
pub fn open_tap(name: &str) -> Result<OwnedFd, OpenTapError> {
    let owned = || name.to_owned();
    if name.is_empty() || name.len() > MAX_NAME || name.contains(['/', '\0']) {
        return Err(OpenTapError::Name(owned()));
    }
    // Attaching to a device that does not exist would make one.
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None);
    match socket.and_then(|socket| name_to_index(socket, name)) {
        Ok(_) => {}
        Err(Errno::NODEV) => return Err(OpenTapError::Unknown(owned())),
        Err(errno) => {
            return Err(OpenTapError::Lookup { name: owned(), source: errno.into() });
        }
    }
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_NONBLOCK);
    let tap = options.open(TUN).map_err(OpenTapError::Tun)?;
    let mut request = InterfaceFlags {
        name: [0; MAX_NAME + 1],
        flags: IFF_TAP | IFF_NO_PI | IFF_VNET_HDR,
        rest: [0; 22],
    };
    request.name[..name.len()].copy_from_slice(name.as_bytes());
    // SAFETY: TUNSETIFF takes a pointer to a `struct ifreq`, which this is.
    let request = unsafe { Setter::<TUNSETIFF, _>::new(request) };
    // SAFETY: the request has the type above, and changes no memory of this process.
    let attached = unsafe { ioctl(&tap, request) };
    attached.map_err(|errno| match errno {
        Errno::PERM => OpenTapError::Permission(owned()),
        Errno::BUSY => OpenTapError::Busy(owned()),
        Errno::INVAL => OpenTapError::NotTap(owned()),
        errno => OpenTapError::SetUp { name: owned(), source: errno.into() },
    })?;
    let header = i32::try_from(HEADER_LEN).unwrap_or_default();
    // SAFETY: TUNSETVNETHDRSZ takes a pointer to an int.
    let header = unsafe { Setter::<TUNSETVNETHDRSZ, _>::new(header) };
    // SAFETY: the request has the type above, and changes no memory of this process.
    let set = unsafe { ioctl(&tap, header) };
    set.map_err(|errno| OpenTapError::SetUp { name: owned(), source: errno.into() })?;
    Ok(tap.into())
}

impl Tap {
    /// The backend of a device that [`open_tap`] opened.
    pub(super) fn new(tap: OwnedFd) -> Self {
        let counters = BackendCounters::default();
        Self { file: tap.into(), packet: Vec::new(), len: None, counters }
    }
}

impl NetworkBackend for Tap {
    fn start(&mut self, features: u64) -> io::Result<()> {
        // The packet may need what this driver does not accept.
        self.len = None;
        let flags = [
            (VIRTIO_NET_F_GUEST_CSUM, TUN_F_CSUM),
            (VIRTIO_NET_F_GUEST_TSO4, TUN_F_TSO4),
            (VIRTIO_NET_F_GUEST_TSO6, TUN_F_TSO6),
        ];
        let flags = flags.iter().filter(|(feature, _)| features & 1 << feature != 0);
        let flags = flags.fold(0, |flags, (_, flag)| flags | flag);
        // SAFETY: TUNSETOFFLOAD takes the flags themselves.
        let offload = unsafe { IntegerSetter::<TUNSETOFFLOAD>::new_usize(flags) };
        // SAFETY: the request has the type above, and changes no memory of this process.
        Ok(unsafe { ioctl(&self.file, offload) }?)
    }

    fn event_sources(&self) -> Vec<(BorrowedFd<'_>, EventFlags)> {
        // Packets may wait for the guest's buffers.
        vec![(self.file.as_fd(), EventFlags::ET)]
    }

    fn packet(&mut self) -> Option<&mut [u8]> {
        if self.len.is_none() {
            self.packet.resize(MAX_PACKET, 0);
            let read = rustix::io::read(&self.file, &mut self.packet[..]);
            // A device that was removed has no packets.
            let failed = matches!(read, Err(errno) if errno != Errno::AGAIN);
            self.counters.read_failures += u64::from(failed);
            let len = read.ok()?;
            self.len = Some(len).filter(|len| *len > HEADER_LEN);
        }
        self.packet.get_mut(..self.len?)
    }

    fn taken(&mut self) {
        self.len = None;
    }

    fn transmit(&mut self, packets: &[&[u8]]) -> Traffic {
        let mut traffic = Traffic::default();
        for packet in packets {
            let begin = Instant::now();
            let sent = rustix::io::write(&self.file, packet) == Ok(packet.len());
            self.counters.writes += Timed::once(begin.elapsed());
            traffic.count(u64_of(packet.len().saturating_sub(HEADER_LEN)), sent);
        }
        traffic
    }

    fn counters(&self) -> BackendCounters {
        self.counters
    }
}

#[cfg(test)]
#[path = "tap_tests.rs"]
mod tests;
