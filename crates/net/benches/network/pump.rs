//! Carries frames between a tap device and an engine's socket. It is the same for both engines.

use std::fs::File;
use std::io::{ErrorKind, IoSlice, IoSliceMut, Read, Write};

use rustix::event::{PollFd, PollFlags, poll};

use crate::tap::VNET_HEADER;

/// Bytes of a frame's length in the stream.
pub(crate) const LENGTH: usize = 4;
/// Bytes of the largest frame and what is before it.
pub(crate) const MAX_FRAME: usize = LENGTH + VNET_HEADER + 65_550;
/// Bytes that are carried at once.
const BATCH: usize = 256 << 10;

/// The frames at the front of a stream: calls `each` with them, and returns their bytes.
pub(crate) fn frames<'a>(stream: &'a [u8], mut each: impl FnMut(&'a [u8])) -> usize {
    let mut rest = stream;
    while let Some((length, after)) = rest.split_at_checked(LENGTH) {
        let length = u32::from_be_bytes(length.try_into().unwrap());
        let Some((frame, after)) = after.split_at_checked(usize::try_from(length).unwrap()) else {
            break;
        };
        each(frame);
        rest = after;
    }
    stream.len() - rest.len()
}

/// Carries frames to the guest until the socket is closed. With `has_headers` they have a header in
/// the stream, too.
pub(crate) fn to_guest(mut socket: File, mut tap: File, has_headers: bool) {
    let mut buffer = vec![0; BATCH + MAX_FRAME];
    let mut len = 0;
    loop {
        let Ok(read @ 1..) = socket.read(&mut buffer[len..]) else { return };
        len += read;
        let used = frames(&buffer[..len], |frame| {
            let none = [0; VNET_HEADER];
            let (header, frame) =
                if has_headers { frame.split_at(VNET_HEADER) } else { (&none[..], frame) };
            // A frame that the kernel refuses is lost, as on any link.
            let _ = tap.write_vectored(&[IoSlice::new(header), IoSlice::new(frame)]);
        });
        buffer.copy_within(used..len, 0);
        len -= used;
    }
}

/// Carries frames from the guest until the socket is closed.
pub(crate) fn from_guest(mut tap: File, mut socket: File, has_headers: bool) {
    let mut buffer = vec![0; BATCH + MAX_FRAME];
    loop {
        let mut len = 0;
        while len < BATCH {
            let (length, rest) = buffer[len..].split_at_mut(LENGTH);
            let mut unused = [0; VNET_HEADER];
            let read = if has_headers {
                tap.read(rest)
            } else {
                tap.read_vectored(&mut [IoSliceMut::new(&mut unused), IoSliceMut::new(rest)])
                    .map(|read| read - VNET_HEADER)
            };
            match read {
                Ok(read) => {
                    length.copy_from_slice(&u32::try_from(read).unwrap().to_be_bytes());
                    len += LENGTH + read;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => return,
            }
        }
        if len > 0 {
            if socket.write_all(&buffer[..len]).is_err() {
                return;
            }
        } else if poll(&mut [PollFd::new(&tap, PollFlags::IN)], None).is_err() {
            return;
        }
    }
}
