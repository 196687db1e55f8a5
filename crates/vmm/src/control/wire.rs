//! Lines of JSON on a stream socket, with descriptors.

use std::io::{self, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::Serialize;

use super::MAX_LINE;

/// Descriptors that can come with one line.
const MAX_DESCRIPTORS: usize = 4;
/// Bytes that are received at once.
const PART: usize = 16 << 10;

/// Sends a line. The descriptors go with its first byte.
pub(super) fn send(
    mut stream: &UnixStream,
    message: &impl Serialize,
    descriptors: &[OwnedFd],
) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    // A monitor sends none, and its jail denies it sendmsg(2).
    if descriptors.is_empty() {
        return stream.write_all(&line);
    }
    let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if descriptors.len() > MAX_DESCRIPTORS {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    control.push(SendAncillaryMessage::ScmRights(&descriptors));
    let bytes = [IoSlice::new(&line)];
    let sent = retry_on_intr(|| sendmsg(stream, &bytes, &mut control, SendFlags::NOSIGNAL))?;
    stream.write_all(&line[sent..])
}

/// Receives lines with their descriptors. Dropping it closes descriptors that no line took.
pub(super) struct Lines<'a> {
    stream: &'a UnixStream,
    bytes: Vec<u8>,
    descriptors: Vec<OwnedFd>,
}

impl<'a> Lines<'a> {
    pub(super) fn of(stream: &'a UnixStream) -> Self {
        Self { stream, bytes: Vec::new(), descriptors: Vec::new() }
    }

    /// The next line without its end, and the descriptors that came up to its end; `None` when the
    /// peer has closed the connection.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`]: the line is too long or has too many descriptors. The
    /// connection cannot be used any further, as after any error.
    pub(super) fn next(&mut self) -> io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
        let mut searched = 0;
        loop {
            let end = self.bytes[searched..].iter().position(|byte| *byte == b'\n');
            if let Some(end) = end {
                let rest = self.bytes.split_off(searched + end + 1);
                let mut line = std::mem::replace(&mut self.bytes, rest);
                line.pop();
                return Ok(Some((line, std::mem::take(&mut self.descriptors))));
            }
            searched = self.bytes.len();
            if searched >= MAX_LINE {
                return Err(invalid(format!("the line is longer than {MAX_LINE} bytes")));
            }
            if self.receive()? == 0 {
                return Ok(None);
            }
        }
    }

    /// Receives what is there, at least one byte; 0 at the end.
    fn receive(&mut self) -> io::Result<usize> {
        let mut part = [0; PART];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = retry_on_intr(|| {
            let bytes = &mut [IoSliceMut::new(&mut part)];
            recvmsg(self.stream, bytes, &mut control, RecvFlags::CMSG_CLOEXEC)
        })?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                self.descriptors.extend(descriptors);
            }
        }
        // The kernel has closed those for which there was no space.
        if self.descriptors.len() > MAX_DESCRIPTORS || received.flags.contains(ReturnFlags::CTRUNC)
        {
            return Err(invalid(format!(
                "more than {MAX_DESCRIPTORS} descriptors came with a line"
            )));
        }
        self.bytes.extend(&part[..received.bytes]);
        Ok(received.bytes)
    }
}

fn invalid(reason: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

#[cfg(test)]
#[path = "wire_tests.rs"]
mod tests;
