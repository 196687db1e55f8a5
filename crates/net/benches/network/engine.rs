//! The proxy as a process that speaks QEMU's stream protocol, as passt does.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};

use firn_net::{Broker, GuestNetwork, Policy, Proxy};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{OFlags, fcntl_setfl};

use crate::pump::{MAX_FRAME, frames};
use crate::subject::Link;
use crate::tap::{VNET_HEADER, decode, encode};

/// The first argument of this process.
pub(crate) const ROLE: &str = "engine";
/// Bytes that are read, or written, at once.
const BATCH: usize = 256 << 10;

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

fn drive(mut proxy: Proxy, mut socket: File, has_headers: bool) {
    let mut input = vec![0; BATCH + MAX_FRAME];
    let mut filled = 0;
    let mut output: Vec<u8> = Vec::with_capacity(BATCH + MAX_FRAME);
    let mut written = 0;
    let header_len = if has_headers { VNET_HEADER } else { 0 };
    loop {
        match socket.read(&mut input[filled..]) {
            Ok(0) => return,
            Ok(read) => {
                filled += read;
                let used = frames(&input[..filled], |frame| {
                    let (header, frame) = frame.split_at(header_len);
                    let header = if has_headers { decode(header) } else { Default::default() };
                    proxy.transmit(header, frame);
                });
                input.copy_within(used..filled, 0);
                filled -= used;
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(_) => return,
        }
        proxy.poll();
        while output.len() < BATCH
            && let Some((header, frame)) = proxy.receive(65_550)
        {
            let length = u32::try_from(header_len + frame.len()).unwrap();
            output.extend_from_slice(&length.to_be_bytes());
            output.extend_from_slice(&encode(header)[..header_len]);
            output.extend_from_slice(frame);
        }
        if written < output.len() {
            match socket.write(&output[written..]) {
                Ok(count) => written += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(_) => return,
            }
        }
        let is_full = written < output.len();
        if !is_full {
            output.clear();
            written = 0;
            if proxy.has_frames() {
                continue;
            }
        }
        let wanted = if is_full { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        let events = proxy.event_source();
        let mut fds = [
            PollFd::from_borrowed_fd(socket.as_fd(), wanted),
            PollFd::from_borrowed_fd(events, PollFlags::IN),
        ];
        poll(&mut fds, None).unwrap();
    }
}

