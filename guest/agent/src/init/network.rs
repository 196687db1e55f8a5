//! The loopback interface.

use std::io;
use std::net::UdpSocket;
use std::os::fd::AsRawFd;

/// Brings `lo` up: functions use 127.0.0.1 internally.
pub(super) fn loopback_up() -> io::Result<()> {
    // Any socket of the family accepts the request. Binding to the unspecified address needs no
    // interface.
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    // SAFETY: ifreq is plain data, for which zeros are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = libc::c_char::from_ne_bytes([*from]);
    }
    let flags = libc::IFF_UP | libc::IFF_RUNNING;
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags).map_err(io::Error::other)?;
    // SAFETY: `request` is an initialised ifreq that outlives the call, which only reads it.
    let set = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
