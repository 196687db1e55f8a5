//! Tap devices for tests.

use std::fs::{File, OpenOptions};
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::thread;

use rustix::ioctl::{IntegerSetter, Opcode, Setter, ioctl, opcode};
use rustix::net::netdevice::name_to_index;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use rustix::thread::{UnshareFlags, unshare_unsafe};

/// The loopback interface.
const LOOPBACK: &str = "lo";
/// The device by which programs reach tap devices.
const TUN: &str = "/dev/net/tun";

const TUNSETIFF: Opcode = opcode::write::<i32>(b'T', 202);
const TUNSETPERSIST: Opcode = opcode::write::<i32>(b'T', 203);
const TUNSETOWNER: Opcode = opcode::write::<i32>(b'T', 204);
// netdevice(7).
const SIOCSIFFLAGS: Opcode = 0x8914;
const SIOCSIFADDR: Opcode = 0x8916;
const SIOCSIFNETMASK: Opcode = 0x891c;

const IFF_TAP_WITHOUT_INFO_WITH_HEADER: [u8; 2] = 0x5002_i16.to_ne_bytes();
const IFF_UP_RUNNING: [u8; 2] = 0x0041_i16.to_ne_bytes();
const AF_INET: [u8; 2] = 2_u16.to_ne_bytes();

/// Bytes of a name in `struct ifreq`. The request decides the meaning of the rest.
const NAME: usize = 16;
const REQUEST: usize = 40;

/// Runs a test in a network namespace of its own with a loopback interface, where it may make tap
/// devices: the part `tun`.
///
/// # Panics
/// The test panics, or `FIRN_REQUIRE` names `tun`, and this process may not make them.
#[track_caller]
pub fn in_own_network(test: impl FnOnce() + Send) {
    let can = rustix::process::geteuid().is_root() && Path::new(TUN).exists();
    if !crate::has("tun", can) {
        return;
    }
    let test = || {
        // SAFETY: the namespace is of this thread alone, and no descriptor changes.
        unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.unwrap();
        set::<SIOCSIFFLAGS>(&socket().unwrap(), request(LOOPBACK, &IFF_UP_RUNNING)).unwrap();
        test();
    };
    thread::scope(|scope| scope.spawn(test).join())
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

/// A tap device in the network namespace of the calling thread, with the address
/// `address`/24, up. Nothing else uses it, so that a microVM can. Dropped, it is removed.
#[derive(Debug)]
pub struct TapDevice {
    name: String,
}

impl TapDevice {
    /// Makes it.
    ///
    /// # Errors
    /// Those of the system: the caller needs CAP_NET_ADMIN, the kernel tun devices.
    pub fn create(name: &str, address: Ipv4Addr) -> io::Result<Self> {
        change::<TUNSETPERSIST>(name, 1)?;
        let device = Self { name: name.to_owned() };
        let socket = socket()?;
        let inet = |address: Ipv4Addr| {
            let [a, b, c, d] = address.octets();
            let [low, high] = AF_INET;
            request(name, &[low, high, 0, 0, a, b, c, d])
        };
        let mask = Ipv4Addr::new(255, 255, 255, 0);
        set::<SIOCSIFADDR>(&socket, inet(address))?;
        set::<SIOCSIFNETMASK>(&socket, inet(mask))?;
        set::<SIOCSIFFLAGS>(&socket, request(name, &IFF_UP_RUNNING))?;
        Ok(device)
    }

    /// Makes it the device of a user: others need CAP_NET_ADMIN for it.
    ///
    /// # Errors
    /// Those of the system.
    pub fn give_to(&self, user: u32) -> io::Result<()> {
        change::<TUNSETOWNER>(&self.name, usize::try_from(user).map_err(io::Error::other)?)
    }
}

impl Drop for TapDevice {
    fn drop(&mut self) {
        let _ = change::<TUNSETPERSIST>(&self.name, 0);
    }
}

/// Gives the loopback interface of the network namespace of the calling thread one more address.
///
/// # Errors
/// Those of the system: the caller needs CAP_NET_ADMIN, the kernel IPv6.
pub fn add_loopback_address(address: Ipv6Addr) -> io::Result<()> {
    let socket = socket_with(AddressFamily::INET6, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    let index = name_to_index(&socket, LOOPBACK)?;
    // `struct in6_ifreq` of linux/ipv6.h.
    let mut request = [0; REQUEST];
    request[..16].copy_from_slice(&address.octets());
    request[16..20].copy_from_slice(&Ipv6Addr::BITS.to_ne_bytes());
    request[20..24].copy_from_slice(&index.to_ne_bytes());
    set::<SIOCSIFADDR>(&socket, request)
}

fn socket() -> io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?)
}

/// Makes one of the requests above that take a number, for a device that no program uses.
fn change<const OPCODE: Opcode>(name: &str, number: usize) -> io::Result<()> {
    let tun: File = OpenOptions::new().read(true).write(true).open(TUN)?;
    set::<TUNSETIFF>(&tun, request(name, &IFF_TAP_WITHOUT_INFO_WITH_HEADER))?;
    // SAFETY: the request takes a number.
    let request = unsafe { IntegerSetter::<OPCODE>::new_usize(number) };
    // SAFETY: the request has the type above, and changes no memory of this process.
    Ok(unsafe { ioctl(&tun, request) }?)
}

/// Makes one of the requests above that take a `struct ifreq`, or the smaller `struct in6_ifreq`.
fn set<const OPCODE: Opcode>(file: impl AsFd, request: [u8; REQUEST]) -> io::Result<()> {
    // SAFETY: the request takes a pointer to a structure of at most this size.
    let request = unsafe { Setter::<OPCODE, _>::new(request) };
    // SAFETY: the request has the type above, and changes no memory of this process.
    Ok(unsafe { ioctl(file, request) }?)
}

fn request(name: &str, value: &[u8]) -> [u8; REQUEST] {
    let mut request = [0; REQUEST];
    request[..name.len()].copy_from_slice(name.as_bytes());
    request[NAME..NAME + value.len()].copy_from_slice(value);
    request
}
