//! The message with which Firecracker passes its guest's memory to a page fault handler (its `Uffd`
//! backend).
//!
//! It is one message on a Unix socket: a JSON array that maps memory to parts of the memory file,
//! with the userfaultfd attached (SCM_RIGHTS). The message is not trusted.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use firn_base::PAGE_SIZE;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde::Deserialize;
use thiserror::Error;

use super::Area;

/// The longest message, in bytes. A region takes about 150.
const MAX_MESSAGE: usize = 64 << 10;
/// The largest number of regions of guest memory.
const MAX_REGIONS: usize = 64;
/// The timeout for the rest of a message, which a monitor sends in one piece.
const TIMEOUT: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };

/// Why a message is not valid.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum HandoffError {
    /// It cannot be received.
    #[error("cannot receive the monitor's message")]
    Receive(#[source] std::io::Error),
    /// It is too long, or does not end in time.
    #[error("the monitor's message is longer than {MAX_MESSAGE} bytes, or does not end")]
    TooLong,
    /// No userfaultfd is attached.
    #[error("the monitor's message has {0} descriptors; expected one userfaultfd")]
    Descriptors(usize),
    /// It is not such an array.
    #[error("the monitor's message is not a JSON array of memory regions")]
    Json(#[source] serde_json::Error),
    /// It contains no region, or too many.
    #[error("the monitor's message has {0} memory regions; expected 1 to {MAX_REGIONS}")]
    Count(usize),
    /// A region is not whole pages of 4 KiB.
    #[error(
        "memory region {index} of the monitor's message is not whole pages of 4096 bytes; huge pages are not supported"
    )]
    Pages {
        /// Number of the region, from 0.
        index: usize,
    },
    /// A region is not a part of the image.
    #[error(
        "memory region {index} of the monitor's message ends at byte {end:#x} of the memory file, which has {len:#x}: \
         is this the memory file of its snapshot?"
    )]
    Beyond {
        /// Number of the region, from 0.
        index: usize,
        /// The end of the region; `u64::MAX` where it overflows.
        end: u64,
        /// Bytes of the image.
        len: u64,
    },
    /// Two regions are the same memory, or the same part of the image.
    #[error("memory regions {0} and {1} of the monitor's message overlap")]
    Overlap(usize, usize),
}

/// A region as Firecracker describes it. Older versions have `page_size_kib`, which also contains
/// bytes.
#[derive(Debug, Deserialize)]
struct Region {
    base_host_virt_addr: u64,
    size: u64,
    offset: u64,
    page_size: Option<u64>,
    page_size_kib: Option<u64>,
}

impl Region {
    fn has_small_pages(&self) -> bool {
        let size = self.page_size.or(self.page_size_kib).unwrap_or(PAGE_SIZE);
        let aligned = [self.base_host_virt_addr, self.size, self.offset];
        size == PAGE_SIZE && self.size > 0 && aligned.iter().all(|n| n.is_multiple_of(PAGE_SIZE))
    }
}

/// The memory of a message, checked against an image of `len` bytes.
///
/// # Errors
/// [`HandoffError`] where the message is not valid.
pub fn parse(message: &[u8], len: u64) -> Result<Vec<Area>, HandoffError> {
    let regions: Vec<Region> = serde_json::from_slice(message).map_err(HandoffError::Json)?;
    if regions.is_empty() || regions.len() > MAX_REGIONS {
        return Err(HandoffError::Count(regions.len()));
    }
    let mut areas: Vec<Area> = Vec::with_capacity(regions.len());
    for (index, region) in regions.iter().enumerate() {
        let in_memory = region.base_host_virt_addr.checked_add(region.size);
        if !region.has_small_pages() || in_memory.is_none() {
            return Err(HandoffError::Pages { index });
        }
        let end = region.offset.checked_add(region.size);
        if end.is_none_or(|end| end > len) {
            return Err(HandoffError::Beyond { index, end: end.unwrap_or(u64::MAX), len });
        }
        let area = Area {
            address: region.base_host_virt_addr,
            len: region.size,
            image_offset: region.offset,
        };
        let meet = |a: u64, b: u64, other: &Area| a < b + other.len && b < a + area.len;
        let overlaps = |other: &Area| {
            meet(area.address, other.address, other)
                || meet(area.image_offset, other.image_offset, other)
        };
        if let Some(other) = areas.iter().position(overlaps) {
            return Err(HandoffError::Overlap(other, index));
        }
        areas.push(area);
    }
    Ok(areas)
}

/// Duplicates the descriptors of the pending message without receiving it: they stay open even if
/// the message is refused.
///
/// # Errors
/// [`HandoffError::Receive`].
pub fn peek(connection: impl AsFd) -> Result<Vec<OwnedFd>, HandoffError> {
    let mut descriptors = Vec::new();
    receive_part(connection, RecvFlags::PEEK, &mut Vec::new(), &mut descriptors)?;
    Ok(descriptors)
}

/// Receives a message and the userfaultfd from a connection. When the message is refused, its
/// descriptors are closed: the process that owns the memory must have ended by then, or [`peek`]
/// must have duplicated them.
///
/// # Errors
/// [`HandoffError`] where the message is not valid.
pub fn receive(connection: impl AsFd) -> Result<(Vec<u8>, OwnedFd), HandoffError> {
    let (mut message, mut descriptors) = (Vec::new(), Vec::new());
    while receive_part(connection.as_fd(), RecvFlags::empty(), &mut message, &mut descriptors)? {
        // The array is complete when it parses, or fails for another reason than its end.
        match serde_json::from_slice::<serde::de::IgnoredAny>(&message) {
            Err(error) if error.is_eof() => {}
            _ => break,
        }
    }
    match <[OwnedFd; 1]>::try_from(descriptors) {
        Ok([uffd]) => Ok((message, uffd)),
        Err(descriptors) => Err(HandoffError::Descriptors(descriptors.len())),
    }
}

/// Receives the next part of a message; returns `false` at the end of the stream.
fn receive_part(
    connection: impl AsFd,
    flags: RecvFlags,
    message: &mut Vec<u8>,
    descriptors: &mut Vec<OwnedFd>,
) -> Result<bool, HandoffError> {
    let failed = |errno: Errno| HandoffError::Receive(errno.into());
    if message.len() >= MAX_MESSAGE {
        return Err(HandoffError::TooLong);
    }
    let mut wait = [PollFd::new(&connection, PollFlags::IN)];
    if retry_on_intr(|| poll(&mut wait, Some(&TIMEOUT))).map_err(failed)? == 0 {
        return Err(HandoffError::TooLong);
    }
    let mut bytes = vec![0; MAX_MESSAGE - message.len()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = retry_on_intr(|| {
        let buffers = &mut [IoSliceMut::new(&mut bytes)];
        recvmsg(&connection, buffers, &mut ancillary, RecvFlags::CMSG_CLOEXEC | flags)
    });
    let count = received.map_err(failed)?.bytes;
    for part in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = part {
            descriptors.extend(rights);
        }
    }
    message.extend_from_slice(&bytes[..count]);
    Ok(count > 0)
}

#[cfg(test)]
#[path = "firecracker_tests.rs"]
mod tests;
