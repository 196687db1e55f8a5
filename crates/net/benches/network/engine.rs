//! The proxy as a process that speaks QEMU's stream protocol, as passt does.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};

use firn_net::{Broker, GuestNetwork, Policy, Proxy};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_setfl};

use crate::pump::{LENGTH, MAX_FRAME, frames};
use crate::subject::Link;
use crate::tap::{VNET_HEADER, encode};

/// The first argument of this process.
pub(crate) const ROLE: &str = "engine";
/// Bytes that are read at once, and those that are written, which stay in a processor's cache.
const READ: usize = 4 << 20;
const BATCH: usize = 1 << 20;

/// The proxy of a guest with the MTU `mtu`.
pub(crate) fn proxy(mtu: u16) -> Proxy {
    let policy = Policy::parse(["allow:192.0.2.0/24"]).unwrap();
    let broker = Broker::start(policy, Vec::new()).unwrap();
    Proxy::new(GuestNetwork { mtu, ..GuestNetwork::default() }, broker).unwrap()
}

/// Runs until the socket is closed.
pub(crate) fn run(mut arguments: impl Iterator<Item = String>) {
    let mut next = || arguments.next().unwrap();
    let fd = next().parse().unwrap();
    let link = Link { mtu: next().parse().unwrap(), offloads: next() == "offloads" };
    // SAFETY: the process that started this one has left the descriptor to it.
    let socket = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    fcntl_setfl(&socket, OFlags::NONBLOCK).unwrap();
    let mut proxy = proxy(link.mtu);
    proxy.set_offloads(link.offloads());
    drive(proxy, socket, link.offloads);
}

/// Does what passt does: reads a burst of frames, and writes what there is for the guest at once.
fn drive(mut proxy: Proxy, mut socket: File, has_headers: bool) {
    let mut input = vec![0; READ + MAX_FRAME];
    let mut filled = 0;
    let mut output = Vec::new();
    let (mut written, mut made) = (0, 0);
    let header_len = if has_headers { VNET_HEADER } else { 0 };
    loop {
        let is_full = written < made;
        let wanted = if is_full { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        let mut fds = [
            PollFd::from_borrowed_fd(socket.as_fd(), wanted),
            PollFd::from_borrowed_fd(proxy.event_source(), PollFlags::IN),
        ];
        let at_once = Timespec::default();
        let has_frames = !is_full && proxy.has_frames();
        poll(&mut fds, has_frames.then_some(&at_once)).unwrap();
        let [from_guest, from_host] = fds.map(|fd| fd.revents().contains(PollFlags::IN));
        if from_guest {
            let Ok(read @ 1..) = socket.read(&mut input[filled..]) else { return };
            filled += read;
            let mut burst = Vec::new();
            let used = frames(&input[..filled], |frame| burst.push(&frame[header_len..]));
            proxy.transmit(&burst);
            input.copy_within(used..filled, 0);
            filled -= used;
        }
        if from_host {
            proxy.poll();
        }
        if written == made {
            (written, made) = (0, 0);
        }
        while written == 0 && made < BATCH {
            let start = made + LENGTH + header_len;
            let Some((header, len)) = proxy.receive_into(&mut output, start, MAX_FRAME) else {
                break;
            };
            let length = u32::try_from(header_len + len).unwrap();
            output[made..made + LENGTH].copy_from_slice(&length.to_be_bytes());
            output[made + LENGTH..start].copy_from_slice(&encode(header)[..header_len]);
            made = start + len;
        }
        if written < made {
            match socket.write(&output[written..made]) {
                Ok(count) => written += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(_) => return,
            }
        }
    }
}
