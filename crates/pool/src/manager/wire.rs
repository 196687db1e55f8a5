//! Framing of messages on the socket.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use firn_base::num::{u64_of, usize_of};
use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

use super::MANAGER_VERSION;
use crate::layout::{put, u32_at};

const MAGIC: [u8; 4] = *b"fpmg";
const HEAD: usize = 12;
/// Maximum size of a request, bytes.
pub(super) const MAX_REQUEST: u32 = 4 << 20;
/// Maximum size of a response, bytes: a listing of several hundred thousand extents.
pub(super) const MAX_RESPONSE: u32 = 256 << 20;

/// Bytes that are allocated for a message before any of it is received.
const MAX_UNGROWN: usize = 16 << 10;

/// Why no message was received.
#[derive(Debug, Error)]
pub(super) enum WireError {
    /// The peer closed the connection between two frames.
    #[error("the connection was closed")]
    Closed,
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("unsupported protocol version {0}")]
    Version(u32),
    #[error("not a message of the pool protocol")]
    Malformed,
}

/// Sends a message, with an optional descriptor.
pub(super) fn send(
    stream: &UnixStream,
    message: &impl Serialize,
    descriptor: Option<&OwnedFd>,
) -> io::Result<()> {
    let frame = frame(message)?;
    let mut sent = 0;
    if let Some(descriptor) = descriptor {
        let descriptors = [descriptor.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
        sent = retry_on_intr(|| {
            sendmsg(stream, &[IoSlice::new(&frame)], &mut control, SendFlags::NOSIGNAL)
        })?;
    }
    let mut stream = stream;
    stream.write_all(&frame[sent..])
}

/// The bytes of a message.
pub(super) fn frame(message: &impl Serialize) -> io::Result<Vec<u8>> {
    let body = serde_json::to_vec(message)?;
    let len = u32::try_from(body.len()).map_err(io::Error::other)?;
    let mut frame = vec![0; HEAD];
    put(&mut frame, 0, &MAGIC);
    put(&mut frame, 4, &MANAGER_VERSION.to_le_bytes());
    put(&mut frame, 8, &len.to_le_bytes());
    frame.extend(body);
    Ok(frame)
}

/// Receives a message. The kernel closes a descriptor sent with it.
pub(super) fn receive<T: DeserializeOwned>(stream: &UnixStream, max: u32) -> Result<T, WireError> {
    let mut head = [0; HEAD];
    let mut reader = stream;
    let first = loop {
        match reader.read(&mut head) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            read => break read?,
        }
    };
    if first == 0 {
        return Err(WireError::Closed);
    }
    reader.read_exact(&mut head[first..])?;
    receive_body(stream, &head, max)
}

/// Receives a message and the descriptor sent with it.
pub(super) fn receive_with_descriptor<T: DeserializeOwned>(
    stream: &UnixStream,
    max: u32,
) -> Result<(T, Option<OwnedFd>), WireError> {
    let mut head = [0; HEAD];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received =
        retry_on_intr(|| recvmsg(stream, &mut [IoSliceMut::new(&mut head)], &mut control, flags));
    let first = received.map_err(io::Error::from)?.bytes;
    let mut descriptor = None;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            descriptor = descriptors.last();
        }
    }
    if first == 0 {
        return Err(WireError::Closed);
    }
    let mut reader = stream;
    reader.read_exact(&mut head[first..])?;
    Ok((receive_body(stream, &head, max)?, descriptor))
}

fn receive_body<T: DeserializeOwned>(
    stream: &UnixStream,
    head: &[u8; HEAD],
    max: u32,
) -> Result<T, WireError> {
    if !head.starts_with(&MAGIC) {
        return Err(WireError::Malformed);
    }
    let version = u32_at(head, 4);
    if version != MANAGER_VERSION {
        return Err(WireError::Version(version));
    }
    let len = u32_at(head, 8);
    if len > max {
        return Err(WireError::Malformed);
    }
    // The buffer of a long message grows with the received bytes, not with the announced length.
    let mut body = Vec::with_capacity(usize_of(u64::from(len)).min(MAX_UNGROWN));
    Read::take(stream, u64::from(len)).read_to_end(&mut body)?;
    if u64_of(body.len()) != u64::from(len) {
        return Err(WireError::Io(io::ErrorKind::UnexpectedEof.into()));
    }
    serde_json::from_slice(&body[..usize_of(u64::from(len))]).map_err(|_| WireError::Malformed)
}

#[cfg(test)]
#[path = "wire_tests.rs"]
mod tests;
