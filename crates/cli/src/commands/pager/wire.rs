//! Messages with descriptors between guardian and server: each one packet, for each side waits for the other's.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use thiserror::Error;

/// Most bytes of a message: a monitor's.
const LONGEST: usize = 64 << 10;
/// Most descriptors with a message.
const MOST: usize = 2;

/// Why a message did not arrive.
#[derive(Debug, Error)]
pub(crate) enum ReceiveError {
    #[error("speaking to the other process of the pager")]
    System(#[from] rustix::io::Errno),
    #[error("the other process of the pager ended")]
    Ended,
}

/// Sends a message.
pub(super) fn send(
    to: impl AsFd,
    message: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> Result<(), ReceiveError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    let count = retry_on_intr(|| {
        sendmsg(&to, &[IoSlice::new(message)], &mut ancillary, SendFlags::NOSIGNAL)
    })?;
    if count == message.len() { Ok(()) } else { Err(ReceiveError::Ended) }
}

/// Receives a message and its descriptors.
pub(super) fn receive(from: impl AsFd) -> Result<(Vec<u8>, Vec<OwnedFd>), ReceiveError> {
    let mut bytes = vec![0; LONGEST];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let count = retry_on_intr(|| {
        let buffers = &mut [IoSliceMut::new(&mut bytes)];
        recvmsg(&from, buffers, &mut ancillary, RecvFlags::CMSG_CLOEXEC)
    })?
    .bytes;
    let mut descriptors = Vec::new();
    for part in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = part {
            descriptors.extend(rights);
        }
    }
    if count == 0 {
        return Err(ReceiveError::Ended);
    }
    bytes.truncate(count);
    Ok((bytes, descriptors))
}
