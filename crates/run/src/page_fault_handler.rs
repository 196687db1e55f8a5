//! Guest memory that another process fills: Firecracker's hand-over to a page fault handler.
//!
//! The handler listens on a unix socket. It gets one message: a JSON list of the regions of guest
//! memory, and with it a userfaultfd that reports the faults on them (`SCM_RIGHTS`).

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use firn_base::PAGE_SIZE;
use firn_memory::uffd::{Features, RegisterMode, Uffd, UffdError};
use firn_memory::{AnonymousError, GuestMemory};
use firn_snapshot::MemoryLayout;
use rustix::io::retry_on_intr;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::json;
use thiserror::Error;

/// Why a handler did not get guest memory.
#[derive(Debug, Error)]
pub enum HandOverError {
    /// The memory cannot be mapped.
    #[error(transparent)]
    Memory(#[from] AnonymousError),
    /// Its faults cannot be reported.
    #[error(transparent)]
    Uffd(#[from] UffdError),
    /// There is no handler.
    #[error("cannot connect to the page fault handler at {path}: start it first")]
    Connect {
        /// Its socket.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The handler does not take the message.
    #[error("cannot hand guest memory over to the page fault handler")]
    Send(#[source] io::Error),
}

/// A process that fills guest memory. It is kept until the memory is unmapped: with the last
/// descriptor of the userfaultfd closed, missing pages would be zeros.
#[derive(Debug)]
pub struct PageFaultHandler {
    _uffd: Uffd,
    /// Its end tells the handler that the guest has ended.
    _connection: UnixStream,
}

impl PageFaultHandler {
    /// Maps guest memory without contents, and hands it over to the handler that listens on
    /// `socket`.
    ///
    /// # Errors
    /// See [`HandOverError`].
    pub fn hand_over(
        layout: MemoryLayout,
        socket: &Path,
    ) -> Result<(Self, GuestMemory), HandOverError> {
        let connection = UnixStream::connect(socket)
            .map_err(|source| HandOverError::Connect { path: socket.to_owned(), source })?;
        let regions: Vec<_> = layout.regions().collect();
        let memory = GuestMemory::anonymous(layout)?;
        let uffd = Uffd::open(Features::REMOVE)?;
        memory.register(&uffd, RegisterMode::MISSING)?;
        let regions = memory.slots().iter().zip(regions).map(|(slot, region)| {
            json!({
                "base_host_virt_addr": slot.host_addr,
                "size": slot.len,
                "offset": region.image_offset,
                "page_size": PAGE_SIZE,
                // Both are bytes: the name is Firecracker's older one.
                "page_size_kib": PAGE_SIZE,
            })
        });
        let message = json!(regions.collect::<Vec<_>>()).to_string();
        send(&connection, message.as_bytes(), &uffd).map_err(HandOverError::Send)?;
        Ok((Self { _uffd: uffd, _connection: connection }, memory))
    }
}

fn send(connection: &UnixStream, message: &[u8], uffd: &Uffd) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let descriptors = [uffd.as_fd()];
    ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
    let bytes = [IoSlice::new(message)];
    let sent = retry_on_intr(|| sendmsg(connection, &bytes, &mut ancillary, SendFlags::NOSIGNAL))?;
    if sent == message.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}
