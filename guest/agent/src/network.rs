//! The guest's network interfaces, by the requests of netdevice(7).

use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsRawFd;

use crate::protocol::NetworkAddresses;

/// The interface of the monitor's network device.
pub(crate) const INTERFACE: &str = "eth0";

/// Brings an interface up, such as `lo`: functions use 127.0.0.1 internally.
///
/// # Errors
/// There is no such interface.
pub fn bring_up(interface: &str) -> io::Result<()> {
    let mut request = named(interface);
    let flags = libc::IFF_UP | libc::IFF_RUNNING;
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags).map_err(io::Error::other)?;
    // SAFETY: SIOCSIFFLAGS takes a pointer to an ifreq.
    unsafe { set(libc::SIOCSIFFLAGS, &request) }
}

/// Gives an interface these addresses instead of its earlier ones, and brings it up.
pub(crate) fn set_addresses(interface: &str, addresses: &NetworkAddresses) -> io::Result<()> {
    let mut request = named(interface);
    request.ifr_ifru.ifru_addr = socket_address(addresses.address);
    // SAFETY: SIOCSIFADDR takes a pointer to an ifreq.
    unsafe { set(libc::SIOCSIFADDR, &request) }?;
    let mask = u32::MAX.checked_shl(32_u32.saturating_sub(addresses.prefix.into())).unwrap_or(0);
    request.ifr_ifru.ifru_netmask = socket_address(mask.into());
    // SAFETY: SIOCSIFNETMASK takes a pointer to an ifreq.
    unsafe { set(libc::SIOCSIFNETMASK, &request) }?;
    bring_up(interface)?;
    let Some(gateway) = addresses.gateway else { return Ok(()) };
    // SAFETY: rtentry is plain data, for which zeros are valid.
    let mut route: libc::rtentry = unsafe { std::mem::zeroed() };
    route.rt_dst = socket_address(Ipv4Addr::UNSPECIFIED);
    route.rt_genmask = socket_address(Ipv4Addr::UNSPECIFIED);
    route.rt_gateway = socket_address(gateway);
    route.rt_flags = libc::RTF_UP | libc::RTF_GATEWAY;
    // SAFETY: SIOCADDRT takes a pointer to an rtentry.
    match unsafe { set(libc::SIOCADDRT, &route) } {
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
/// The request takes a pointer to a `T`, and only reads it.
unsafe fn set<T>(request: libc::Ioctl, argument: &T) -> io::Result<()> {
    // Any socket of the family accepts the request. Binding to the unspecified address needs no
    // interface.
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    // SAFETY: the caller's.
    let set = unsafe { libc::ioctl(socket.as_raw_fd(), request, std::ptr::from_ref(argument)) };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
#[path = "network_tests.rs"]
mod tests;
