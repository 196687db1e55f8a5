//! The host's own addresses, from its routing table.

use std::cell::{Cell, OnceCell};
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::{Errno, retry_on_intr};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with,
};

// linux/netlink.h and linux/rtnetlink.h.
const RTM_NEWROUTE: u16 = 24;
const RTM_GETROUTE: u16 = 26;
const NLM_F_REQUEST: u16 = 1;
const RTA_DST: u16 = 1;
const NLMSG_HEADER: usize = 16;
const RTMSG: usize = 12;
const RTA_HEADER: usize = 4;
/// Where `struct rtmsg` has `rtm_type`.
const RTM_TYPE: usize = 7;
const RTN_UNICAST: u8 = 1;
/// No route that a packet could take: blackhole, unreachable, prohibit.
const RTN_REJECTED: std::ops::RangeInclusive<u8> = 6..=8;

/// How long the kernel may take, which answers at once.
const PATIENCE: Duration = Duration::from_secs(1);

/// Asks the kernel where a packet would go (rtnetlink(7)).
///
/// It is asked at each connect, so the answer is as new as the host's addresses, and contains what
/// a list of addresses does not: broadcast and anycast addresses, and networks that are routed to
/// the host itself.
///
/// A guest that connects to nothing takes no socket, and a start does not wait for one.
#[derive(Debug, Default)]
pub(super) struct Routes {
    socket: OnceCell<OwnedFd>,
    /// The number of the last question.
    number: Cell<u32>,
}

impl Routes {
    fn socket(&self) -> Result<&OwnedFd, Errno> {
        if let Some(socket) = self.socket.get() {
            return Ok(socket);
        }
        let flags = SocketFlags::CLOEXEC;
        // The protocol NETLINK_ROUTE is 0.
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
        set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE))?;
        Ok(self.socket.get_or_init(|| socket))
    }

    /// Whether a packet to `address` stays on this host, or goes to more than one host. Without an
    /// answer it does.
    pub(super) fn is_local(&self, address: IpAddr) -> bool {
        let Ok(socket) = self.socket() else { return true };
        match self.route_type(socket, address) {
            // Without a route the connect fails, with an error that names the reason.
            Ok(kind) => kind != RTN_UNICAST && !RTN_REJECTED.contains(&kind),
            Err(Errno::NETUNREACH | Errno::HOSTUNREACH | Errno::ACCESS) => false,
            Err(_) => true,
        }
    }

    fn route_type(&self, socket: &OwnedFd, address: IpAddr) -> Result<u8, Errno> {
        let number = self.number.get().wrapping_add(1);
        self.number.set(number);
        let request = request(address, number);
        retry_on_intr(|| send(socket, &request, SendFlags::empty()))?;
        let mut buffer = [0; 1024];
        let answer = loop {
            let (_, len) = retry_on_intr(|| recv(socket, &mut buffer, RecvFlags::empty()))?;
            let answer = buffer.get(..len).filter(|answer| answer.len() >= NLMSG_HEADER);
            let answer = answer.ok_or(Errno::PROTO)?;
            // An earlier question may have its answer late.
            if answer[8..12] == number.to_ne_bytes() {
                break answer;
            }
        };
        let kind = answer.get(4..6).and_then(|kind| kind.try_into().ok()).ok_or(Errno::PROTO)?;
        let body = answer.get(NLMSG_HEADER..).ok_or(Errno::PROTO)?;
        if u16::from_ne_bytes(kind) == RTM_NEWROUTE {
            return body.get(RTM_TYPE).copied().ok_or(Errno::PROTO);
        }
        // NLMSG_ERROR: a negative errno.
        let errno = body.first_chunk().ok_or(Errno::PROTO)?;
        Err(Errno::from_raw_os_error(i32::from_ne_bytes(*errno).saturating_neg()))
    }
}

/// `struct nlmsghdr`, `struct rtmsg` and one attribute.
fn request(address: IpAddr, number: u32) -> Vec<u8> {
    let (family, octets) = match address {
        IpAddr::V4(address) => (AddressFamily::INET, address.octets().to_vec()),
        IpAddr::V6(address) => (AddressFamily::INET6, address.octets().to_vec()),
    };
    let bytes = u8::try_from(octets.len()).unwrap_or_default();
    let attribute = RTA_HEADER + octets.len();
    let len = u32::try_from(NLMSG_HEADER + RTMSG + attribute).unwrap_or_default();
    let mut message = Vec::with_capacity(64);
    message.extend(len.to_ne_bytes());
    message.extend(RTM_GETROUTE.to_ne_bytes());
    message.extend(NLM_F_REQUEST.to_ne_bytes());
    message.extend(number.to_ne_bytes());
    message.extend([0; 4]);
    let [family, _] = family.as_raw().to_ne_bytes();
    message.extend([family, bytes * 8]);
    message.extend([0; RTMSG - 2]);
    message.extend(u16::from(bytes + 4).to_ne_bytes());
    message.extend(RTA_DST.to_ne_bytes());
    message.extend(octets);
    message
}

#[cfg(test)]
#[path = "route_tests.rs"]
mod tests;
