//! Messages between guardian and server. A message carries descriptors; its position in the
//! sequence determines its meaning.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use thiserror::Error;

/// Maximum number of descriptors in a message.
const MOST: usize = 1;

/// Why a message was not received.
#[derive(Debug, Error)]
pub(crate) enum ReceiveError {
    #[error("cannot communicate with the other process of the pager")]
    System(#[from] rustix::io::Errno),
    #[error("the other process of the pager ended")]
    Ended,
}

/// Sends a message.
pub(super) fn send(to: impl AsFd, descriptors: &[BorrowedFd<'_>]) -> Result<(), ReceiveError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    // A message without bytes would be read as the end of the connection.
    let bytes = &[IoSlice::new(&[0])];
    retry_on_intr(|| sendmsg(&to, bytes, &mut ancillary, SendFlags::NOSIGNAL))?;
    Ok(())
}

/// Receives a message.
pub(super) fn receive(from: impl AsFd) -> Result<Vec<OwnedFd>, ReceiveError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let count = retry_on_intr(|| {
        let buffers = &mut [IoSliceMut::new(&mut byte)];
        recvmsg(&from, buffers, &mut ancillary, RecvFlags::CMSG_CLOEXEC)
    })?
    .bytes;
    let mut descriptors = Vec::new();
    for part in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = part {
            descriptors.extend(rights);
        }
    }
    if count == 0 { Err(ReceiveError::Ended) } else { Ok(descriptors) }
}
