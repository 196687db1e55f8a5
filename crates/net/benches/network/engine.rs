//! The proxy as a process that speaks QEMU's stream protocol, as passt does.

use std::fs::File;
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::ops::Range;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};

use firn_net::{Broker, GuestNetwork, HEADROOM, Policy, Proxy};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_setfl};

use crate::pump::{LENGTH, MAX_FRAME, frames};
use crate::subject::Link;
use crate::tap::{VNET_HEADER, encode};

/// The first argument of this process.
pub(crate) const ROLE: &str = "engine";
/// Bytes that are read at once, and the bytes and frames that are written: few enough to stay in a
/// processor's cache.
const READ: usize = 1 << 20;
const BATCH: usize = 1 << 20;
const MAX_FRAMES: usize = 512;

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
    let mut output = Output::default();
    let header_len = if has_headers { VNET_HEADER } else { 0 };
    loop {
        let is_full = output.has_rest();
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
        if !output.has_rest() {
            output.fill(&mut proxy, header_len);
        }
        if output.has_rest() && output.write(&mut socket).is_err() {
            return;
        }
    }
}

/// Frames on their way to the guest, with what is before them in the stream.
#[derive(Default)]
struct Output {
    /// Their memory, and where they are in it.
    frames: Vec<(Vec<u8>, Range<usize>)>,
    /// Those that are not written yet.
    rest: Range<usize>,
}

impl Output {
    fn has_rest(&self) -> bool {
        !self.rest.is_empty()
    }

    fn fill(&mut self, proxy: &mut Proxy, header_len: usize) {
        self.rest = 0..0;
        let mut bytes = 0;
        while bytes < BATCH && self.rest.end < MAX_FRAMES {
            if self.rest.end == self.frames.len() {
                self.frames.push((Vec::new(), 0..0));
            }
            let (memory, place) = &mut self.frames[self.rest.end];
            let Some((header, len)) = proxy.receive_into(memory, MAX_FRAME) else { break };
            let before = HEADROOM - header_len;
            *place = before - LENGTH..HEADROOM + len;
            let length = u32::try_from(header_len + len).unwrap();
            memory[place.start..before].copy_from_slice(&length.to_be_bytes());
            memory[before..HEADROOM].copy_from_slice(&encode(header)[..header_len]);
            bytes += place.len();
            self.rest.end += 1;
        }
    }

    /// Writes what the socket takes.
    fn write(&mut self, socket: &mut File) -> std::io::Result<()> {
        let frames = &self.frames[self.rest.clone()];
        let slices = frames.iter().map(|(memory, place)| IoSlice::new(&memory[place.clone()]));
        let mut written = match socket.write_vectored(&slices.collect::<Vec<_>>()) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => 0,
            written => written?,
        };
        for (_, place) in &mut self.frames[self.rest.clone()] {
            let part = written.min(place.len());
            place.start += part;
            written -= part;
            if place.start < place.end {
                break;
            }
            self.rest.start += 1;
        }
        Ok(())
    }
}
