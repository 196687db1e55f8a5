//! Tap devices, and the headers of their frames.

use std::fs::{self, File};

use firn_net::{FrameHeader, Offloads};
use rustix::fs::{OFlags, fcntl_setfl};

/// Bytes of `struct virtio_net_hdr`.
pub(crate) const VNET_HEADER: usize = 10;
const TUN_F_CSUM: libc::c_ulong = 1;
const TUN_F_TSO4: libc::c_ulong = 2;
const TUN_F_TSO6: libc::c_ulong = 4;

#[repr(C)]
struct InterfaceRequest {
    name: [u8; 16],
    flags: libc::c_short,
    rest: [u8; 22],
}

/// Opens the device `tap0`, whose kernel leaves `offloads` to this process. Each frame has a
/// header.
pub(crate) fn open_tap(offloads: Offloads) -> File {
    let tap = fs::OpenOptions::new().read(true).write(true).open("/dev/net/tun").unwrap();
    let mut request = InterfaceRequest { name: [0; 16], flags: 0, rest: [0; 22] };
    request.name[..4].copy_from_slice(b"tap0");
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    request.flags = libc::c_short::try_from(flags).unwrap();
    let fd = std::os::fd::AsRawFd::as_raw_fd(&tap);
    // SAFETY: the argument is a `struct ifreq`, which lives for the call.
    assert_eq!(unsafe { libc::ioctl(fd, libc::TUNSETIFF, &raw mut request) }, 0);
    let mut features = if offloads.checksum { TUN_F_CSUM } else { 0 };
    features |= if offloads.tso4 { TUN_F_TSO4 } else { 0 };
    features |= if offloads.tso6 { TUN_F_TSO6 } else { 0 };
    // SAFETY: the argument is a number.
    assert_eq!(unsafe { libc::ioctl(fd, libc::TUNSETOFFLOAD, features) }, 0);
    fcntl_setfl(&tap, OFlags::NONBLOCK).unwrap();
    tap
}

/// The header of a frame to the device.
pub(crate) fn encode(header: FrameHeader) -> [u8; VNET_HEADER] {
    let words = [header.hdr_len, header.gso_size, header.csum_start, header.csum_offset];
    let mut bytes = [0; VNET_HEADER];
    bytes[..2].copy_from_slice(&[header.flags, header.gso_type]);
    for (to, word) in bytes[2..].as_chunks_mut().0.iter_mut().zip(words) {
        *to = word.to_ne_bytes();
    }
    bytes
}
