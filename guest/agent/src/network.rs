//! The guest's network interfaces, by the requests of netdevice(7).

use std::ffi::CString;
use std::fs;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, UdpSocket};
use std::os::fd::AsRawFd;
use std::path::Path;

use rustix::net::netdevice::name_to_index;

use crate::protocol::{Ipv6Addresses, NetworkAddresses};

/// The interface of the monitor's network device.
pub(crate) const INTERFACE: &str = "eth0";

/// The address of a socket that needs no interface. Any socket of a family accepts the requests.
const ANY_V4: (Ipv4Addr, u16) = (Ipv4Addr::UNSPECIFIED, 0);
const ANY_V6: (Ipv6Addr, u16) = (Ipv6Addr::UNSPECIFIED, 0);

/// `struct in6_rtmsg` of `<linux/ipv6_route.h>`, whose fields are private in libc. All zeros is the
/// route to any destination.
#[repr(C)]
#[derive(Default)]
struct Ipv6Route {
    destination: [u8; 16],
    source: [u8; 16],
    gateway: [u8; 16],
    kind: u32,
    destination_len: u16,
    source_len: u16,
    metric: u32,
    info: libc::c_ulong,
    flags: u32,
    interface: libc::c_int,
}

/// Brings an interface up, such as `lo`: functions use 127.0.0.1 internally.
///
/// # Errors
/// There is no such interface.
pub fn bring_up(interface: &str) -> io::Result<()> {
    bring_up_by(&UdpSocket::bind(ANY_V4)?, interface)
}

fn bring_up_by(socket: &UdpSocket, interface: &str) -> io::Result<()> {
    let mut request = named(interface);
    let flags = libc::IFF_UP | libc::IFF_RUNNING;
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags).map_err(io::Error::other)?;
    // SAFETY: SIOCSIFFLAGS takes a pointer to an ifreq, which it reads.
    unsafe { call(socket, libc::SIOCSIFFLAGS, &mut request) }
}

/// Gives an interface these addresses instead of its earlier ones, and brings it up. Only the
/// gateway is set if it has the address already, as in a clone.
pub(crate) fn set_addresses(interface: &str, addresses: &NetworkAddresses) -> io::Result<()> {
    let socket = UdpSocket::bind(ANY_V4)?;
    let mut request = named(interface);
    // SAFETY: SIOCGIFADDR takes a pointer to an ifreq, and writes an address to it.
    let has_one = unsafe { call(&socket, libc::SIOCGIFADDR, &mut request) }.is_ok();
    let wanted = socket_address(addresses.address);
    // SAFETY: the request wrote an address.
    if has_one && unsafe { request.ifr_ifru.ifru_addr }.sa_data == wanted.sa_data {
        return addresses.gateway.map_or(Ok(()), |gateway| set_gateway(&socket, gateway));
    }
    request.ifr_ifru.ifru_addr = wanted;
    // SAFETY: SIOCSIFADDR takes a pointer to an ifreq, which it reads.
    unsafe { call(&socket, libc::SIOCSIFADDR, &mut request) }?;
    let mask = u32::MAX.checked_shl(32_u32.saturating_sub(addresses.prefix.into())).unwrap_or(0);
    request.ifr_ifru.ifru_netmask = socket_address(mask.into());
    // SAFETY: SIOCSIFNETMASK takes a pointer to an ifreq, which it reads.
    unsafe { call(&socket, libc::SIOCSIFNETMASK, &mut request) }?;
    // A kernel may have no IPv6.
    let ipv6 = addresses.ipv6.filter(|_| Path::new("/proc/sys/net/ipv6").exists());
    if ipv6.is_some() {
        // The link has one guest, so its address is valid at once.
        for setting in ["accept_dad", "accept_ra", "autoconf"] {
            fs::write(format!("/proc/sys/net/ipv6/conf/{interface}/{setting}"), "0")?;
        }
    }
    bring_up_by(&socket, interface)?;
    if let Some(gateway) = addresses.gateway {
        set_gateway(&socket, gateway)?;
    }
    ipv6.map_or(Ok(()), |addresses| set_ipv6(interface, addresses))
}

/// Sets the route to one host on the link of an interface in place of an `earlier` one, if the
/// interface is up and has an address. Otherwise the guest has not set it up so far.
pub(crate) fn set_host_route(
    interface: &str,
    earlier: Option<Ipv4Addr>,
    host: Option<Ipv4Addr>,
) -> io::Result<()> {
    let socket = UdpSocket::bind(ANY_V4)?;
    if let Some(earlier) = earlier.filter(|earlier| Some(*earlier) != host) {
        match host_route(&socket, libc::SIOCDELRT, interface, earlier) {
            // It ended with the addresses of the interface.
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
            deleted => deleted?,
        }
    }
    let Some(host) = host else { return Ok(()) };
    let mut request = named(interface);
    // SAFETY: SIOCGIFADDR takes a pointer to an ifreq, and writes an address to it.
    match unsafe { call(&socket, libc::SIOCGIFADDR, &mut request) } {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => return Ok(()),
        Err(error) => return Err(error),
    }
    match unless_it_exists(host_route(&socket, libc::SIOCADDRT, interface, host)) {
        Err(error) if error.kind() == io::ErrorKind::NetworkDown => Ok(()),
        set => set,
    }
}

fn host_route(
    socket: &UdpSocket,
    request: libc::Ioctl,
    interface: &str,
    host: Ipv4Addr,
) -> io::Result<()> {
    let name = CString::new(interface)?;
    // SAFETY: rtentry is plain data, for which zeros are valid.
    let mut route: libc::rtentry = unsafe { std::mem::zeroed() };
    route.rt_dst = socket_address(host);
    route.rt_flags = libc::RTF_UP | libc::RTF_HOST;
    route.rt_dev = name.as_ptr().cast_mut();
    // SAFETY: both requests take a pointer to an rtentry, which they read, as the name that it
    // points to, which outlives the call.
    unsafe { call(socket, request, &mut route) }
}

/// Sets the router to all other networks. It takes precedence over an earlier one.
fn set_gateway(socket: &UdpSocket, gateway: Ipv4Addr) -> io::Result<()> {
    // SAFETY: rtentry is plain data, for which zeros are valid.
    let mut route: libc::rtentry = unsafe { std::mem::zeroed() };
    route.rt_dst = socket_address(Ipv4Addr::UNSPECIFIED);
    route.rt_genmask = socket_address(Ipv4Addr::UNSPECIFIED);
    route.rt_gateway = socket_address(gateway);
    route.rt_flags = libc::RTF_UP | libc::RTF_GATEWAY;
    // SAFETY: SIOCADDRT takes a pointer to an rtentry, which it reads.
    unless_it_exists(unsafe { call(socket, libc::SIOCADDRT, &mut route) })
}

fn set_ipv6(interface: &str, addresses: Ipv6Addresses) -> io::Result<()> {
    let socket = UdpSocket::bind(ANY_V6)?;
    let index = name_to_index(&socket, interface)?;
    let mut request = libc::in6_ifreq {
        ifr6_addr: libc::in6_addr { s6_addr: addresses.address.octets() },
        ifr6_prefixlen: addresses.prefix.into(),
        ifr6_ifindex: libc::c_int::try_from(index).map_err(io::Error::other)?,
    };
    // SAFETY: SIOCSIFADDR of an IPv6 socket takes a pointer to an in6_ifreq, which it reads.
    unless_it_exists(unsafe { call(&socket, libc::SIOCSIFADDR, &mut request) })?;
    let mut route = Ipv6Route {
        gateway: addresses.gateway.octets(),
        metric: 1,
        flags: u32::from(libc::RTF_UP | libc::RTF_GATEWAY),
        interface: request.ifr6_ifindex,
        ..Ipv6Route::default()
    };
    // SAFETY: SIOCADDRT of an IPv6 socket takes a pointer to an Ipv6Route, which it reads.
    unless_it_exists(unsafe { call(&socket, libc::SIOCADDRT, &mut route) })
}

fn unless_it_exists(set: io::Result<()>) -> io::Result<()> {
    match set {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        set => set,
    }
}

/// A request about an interface.
fn named(interface: &str) -> libc::ifreq {
    // SAFETY: ifreq is plain data, for which zeros are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // One byte less than the field has, which ends with a zero.
    for (to, from) in request.ifr_name.iter_mut().zip(interface.bytes().take(15)) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    request
}

fn socket_address(address: Ipv4Addr) -> libc::sockaddr {
    // SAFETY: sockaddr is plain data, for which zeros are valid.
    let mut found: libc::sockaddr = unsafe { std::mem::zeroed() };
    // The constant is 2.
    found.sa_family = libc::sa_family_t::try_from(libc::AF_INET).unwrap_or_default();
    // Behind the port.
    for (to, from) in found.sa_data.iter_mut().skip(2).zip(address.octets()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    found
}

/// Makes a request.
///
/// # Safety
/// The request takes a pointer to a `T`, and reads or writes that alone.
unsafe fn call<T>(socket: &UdpSocket, request: libc::Ioctl, argument: &mut T) -> io::Result<()> {
    // SAFETY: the caller's.
    let done = unsafe { libc::ioctl(socket.as_raw_fd(), request, std::ptr::from_mut(argument)) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
#[path = "network_tests.rs"]
mod tests;
