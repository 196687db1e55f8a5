//! Freezing under supervision: the supervisor makes the files, a machine in the same or in another
//! process writes them through descriptors, and the supervisor publishes them. An extent of a pool
//! is written by the supervisor, which gets the bytes from the machine.
//!
//! The machine may be a monitor that its guest has taken over. It names no path and publishes
//! nothing, and the supervisor parses nothing that it wrote, except for the first bytes of
//! `snapshot.firn`. A signature is made of hashes.

use std::error::Error;
use std::fmt;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use firn_base::{PAGE_SIZE, nanoseconds, ns_since};
use firn_pool::Client;
use serde::{Deserialize, Serialize};

use crate::extent::{ExtentTarget, failed};
use crate::files::{CONTAINER_FILE, IMAGE_FILE, OVERLAY_FILE};
use crate::freeze_error::FreezeError;
use crate::in_pool::GrantedExtent;
use crate::keys::Signer;
use crate::manifest::{FunctionInfo, ProtectedFile};
use crate::signature::{Covered, SIGNED_LEN, write_signature};
use crate::staging::Staging;
use crate::transfer::{Pieces, Received, Receiver};

/// The place of a new snapshot. An existing snapshot is replaced completely, or not at all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Destination {
    /// A directory for this snapshot. Its parent directory must exist.
    Directory(PathBuf),
    /// A pool: guest memory is written to it without a file in between.
    Pool {
        /// The socket of the pool's manager.
        socket: PathBuf,
        /// The snapshot's name in the pool.
        name: String,
    },
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(path) => write!(f, "{}", path.display()),
            Self::Pool { socket, name } => write!(f, "{name} in the pool at {}", socket.display()),
        }
    }
}

/// How long a machine may let its supervisor wait for the next bytes of an extent, and for the
/// answer after the last ones.
const MACHINE_LIMIT: Duration = Duration::from_secs(30);

/// A request to freeze.
#[derive(Clone, Debug)]
pub struct FreezeRequest {
    /// The place of the snapshot.
    pub destination: Destination,
    /// Write zero pages to the directory, instead of leaving holes; a pool always contains them.
    pub dense: bool,
    /// The function, as the manifest describes it.
    pub function: Option<FunctionInfo>,
}

/// A machine that writes its snapshot through descriptors, in two steps.
///
/// It closes all descriptors before it returns, because fs-verity protects no file that is open
/// for writing.
pub trait Freeze {
    /// Why a step failed.
    type Error: Error + 'static;

    /// Stops the machine and, for [`Target::Files`], writes image and writable disk to the two
    /// `files`, which are empty.
    ///
    /// # Errors
    /// The machine cannot be stopped, or its memory or disk not be read or written.
    fn write(&mut self, begin: Begin, files: Vec<OwnedFd>) -> Result<Begun, Self::Error>;

    /// Writes all that remains.
    ///
    /// # Errors
    /// The machine has run since [`write`](Self::write), or it cannot be written.
    fn seal(&mut self, seal: Seal, files: Vec<OwnedFd>) -> Result<FreezeReport, Self::Error>;

    /// The connection to a machine of another process. The supervisor shuts it down if the machine
    /// does not answer in time; then [`seal`](Self::seal) returns.
    ///
    /// # Errors
    /// Its descriptor cannot be duplicated.
    fn connection(&self) -> io::Result<Option<UnixStream>> {
        Ok(None)
    }
}

/// The first step of a freeze.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Begin {
    /// What is written.
    pub target: Target,
    /// The function, as the manifest describes it.
    pub function: Option<FunctionInfo>,
}

/// What a machine writes its snapshot to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// The files of a directory: with this message come the descriptors of `memory.img` and
    /// `overlay.img`.
    Files {
        /// Write zero pages too, instead of leaving holes.
        dense: bool,
    },
    /// An extent of a pool, once its size is known.
    Extent,
    /// The same files as of a directory, but to the first one only the pages are written that were
    /// written since the last freeze: at their places, zero pages too. What else is in the file
    /// stays. Digests and zero map are those of all guest memory.
    Written,
}

/// The answer to the first step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Begun {
    /// The files are written.
    Files {
        /// Whether there is a writable disk. If not, its file is empty.
        overlay: bool,
    },
    /// The machine is stopped, and nothing is written.
    Extent {
        /// Bytes that the extent needs for guest memory.
        guest_bytes: u64,
        /// Bytes that it needs for the tail.
        tail_bytes: u64,
        /// The last of these, which the writable disk takes.
        disk_bytes: u64,
    },
}

/// The second step of a freeze.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Seal {
    /// Write `snapshot.firn`, whose descriptor comes with this message.
    Container {
        /// The files that fs-verity protects.
        protected: Vec<ProtectedFile>,
    },
    /// Pass the bytes of the extent to the supervisor, which writes it. With this message come a
    /// window of memory and a socket to pass them through. They give no access to the pool.
    Extent,
}

/// What a freeze wrote, and the durations of its parts, in ns.
///
/// For a pool, machine and supervisor work at the same time, each with a thread for each processor:
/// the machine reads, digests and passes bytes, and the supervisor writes them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FreezeReport {
    /// Bringing all vCPUs out of guest mode.
    pub pause_ns: u64,
    /// Reading the machine state.
    pub save_ns: u64,
    /// Reading, digesting and writing guest memory, with a thread for each processor; for a pool,
    /// allocating and mapping the extent, and reading, digesting and passing guest memory.
    pub image_ns: u64,
    /// Of that, reading guest memory and finding the pages that were never touched: the sum over
    /// all threads.
    pub read_ns: u64,
    /// Of that, finding zero pages and computing digests: the sum over all threads.
    pub digest_ns: u64,
    /// Of that, writing: the sum over all threads. For a pool, the supervisor's threads, with the
    /// tail and what they wrote after the machine had passed everything.
    pub write_ns: u64,
    /// Reading, digesting and writing (for a pool, passing) the guest's disk.
    pub overlay_ns: u64,
    /// Writing (for a pool, passing) the other parts, making all bytes durable and, for a pool,
    /// unmapping the extent.
    pub sync_ns: u64,
    /// Protecting files with fs-verity, or finding out that their file system has none.
    pub protect_ns: u64,
    /// Moving the snapshot to its place.
    pub publish_ns: u64,
    /// Pages that the image stores.
    pub stored_pages: u64,
    /// Pages of guest memory that are zero.
    pub zero_pages: u64,
    /// Zero pages that were written.
    pub zero_pages_written: u64,
    /// Bytes written to all files.
    pub bytes_written: u64,
    /// Bytes that all files take on the medium.
    pub disk_bytes: u64,
    /// The files that fs-verity protects.
    pub protected: Vec<String>,
}

/// A snapshot was not frozen. An existing snapshot at the destination is unchanged.
#[derive(Debug, thiserror::Error)]
#[error("cannot write the snapshot {destination}")]
pub struct NotFrozenError<E: Error + 'static> {
    /// The place of the snapshot.
    pub destination: Destination,
    /// Why it failed.
    pub source: NotFrozen<E>,
}

/// Why a snapshot was not frozen.
#[derive(Debug, thiserror::Error)]
pub enum NotFrozen<E: Error + 'static> {
    /// The supervisor cannot make the files or the extent, make them durable, or publish them.
    #[error(transparent)]
    Supervisor(#[from] FreezeError),
    /// The machine cannot be stopped, or not be written.
    #[error(transparent)]
    Machine(E),
}

/// Freezes a machine into a snapshot, which is published in one step.
///
/// If this process is killed, an existing snapshot remains; the next freeze into the same parent
/// directory removes the files of the killed one.
///
/// # Errors
/// See [`NotFrozenError`]. The files that were written are removed.
pub fn freeze<M: Freeze>(
    machine: &mut M,
    request: FreezeRequest,
) -> Result<FreezeReport, NotFrozenError<M::Error>> {
    freeze_signed(machine, request, None)
}

/// The same, with a signature if there is a signer.
///
/// # Errors
/// See [`NotFrozenError`].
pub fn freeze_signed<M: Freeze>(
    machine: &mut M,
    request: FreezeRequest,
    signer: Option<&Signer>,
) -> Result<FreezeReport, NotFrozenError<M::Error>> {
    let FreezeRequest { destination, dense, function } = request;
    let frozen = match &destination {
        Destination::Directory(path) => {
            let begin = Begin { target: Target::Files { dense }, function };
            into_directory(machine, path, begin, signer)
        }
        Destination::Pool { socket, name } => {
            let begin = Begin { target: Target::Extent, function };
            into_pool(machine, socket, name, begin, signer, MACHINE_LIMIT)
        }
    };
    frozen.map_err(|source| NotFrozenError { destination, source })
}

fn into_directory<M: Freeze>(
    machine: &mut M,
    path: &Path,
    begin: Begin,
    signer: Option<&Signer>,
) -> Result<FreezeReport, NotFrozen<M::Error>> {
    let staging = Staging::create(path)?;
    let image = staging.create_file(IMAGE_FILE)?;
    let overlay = staging.create_file(OVERLAY_FILE)?;
    let sent = vec![copy_of(&image)?, copy_of(&overlay)?];
    let begun = machine.write(begin, sent).map_err(NotFrozen::Machine)?;
    let Begun::Files { overlay: has_overlay } = begun else {
        return Err(mismatch("it has not written files"));
    };
    let overlay = if has_overlay {
        Some(overlay)
    } else {
        staging.remove_file(OVERLAY_FILE)?;
        None
    };
    let (mut sync, mut protect, mut disk_bytes) = (Duration::ZERO, Duration::ZERO, 0);
    let mut protected = Vec::new();
    let image_len = staging.len_of(&image, IMAGE_FILE)?;
    for (name, file) in [(IMAGE_FILE, Some(image)), (OVERLAY_FILE, overlay)] {
        let Some(file) = file else { continue };
        let begin = Instant::now();
        disk_bytes += staging.sync(&file, name)?;
        sync += begin.elapsed();
        // The kernel protects no file that is open for writing.
        drop(file);
        let begin = Instant::now();
        protected.extend(staging.protect(name)?);
        protect += begin.elapsed();
    }
    let names = protected.iter().map(|file| file.name.clone()).collect();
    let container = staging.create_file(CONTAINER_FILE)?;
    let sent = vec![copy_of(&container)?];
    let sealed = machine.seal(Seal::Container { protected }, sent).map_err(NotFrozen::Machine)?;
    let report = check(sealed, image_len)?;
    let begin = Instant::now();
    disk_bytes += staging.sync(&container, CONTAINER_FILE)?;
    sync += begin.elapsed();
    if let Some(signer) = signer {
        write_signature(&staging, staging.directory(), path, signer)
            .map_err(|source| FreezeError::Sign { source: Box::new(source) })?;
    }
    let begin = Instant::now();
    staging.publish()?;
    Ok(FreezeReport {
        sync_ns: report.sync_ns.saturating_add(nanoseconds(sync)),
        protect_ns: nanoseconds(protect),
        publish_ns: ns_since(begin),
        disk_bytes,
        protected: names,
        ..report
    })
}

/// The machine may let the supervisor wait for `limit` at a time.
pub(crate) fn into_pool<M: Freeze>(
    machine: &mut M,
    socket: &Path,
    name: &str,
    begin: Begin,
    signer: Option<&Signer>,
    limit: Duration,
) -> Result<FreezeReport, NotFrozen<M::Error>> {
    let begun = machine.write(begin, Vec::new()).map_err(NotFrozen::Machine)?;
    let Begun::Extent { guest_bytes, tail_bytes, disk_bytes } = begun else {
        return Err(mismatch("it has not asked for an extent"));
    };
    let signing = match signer {
        Some(signer) => {
            let covered = Covered::of(guest_bytes, tail_bytes, disk_bytes);
            Some((signer, covered.ok_or_else(|| mismatch("the lengths of its parts are wrong"))?))
        }
        None => None,
    };
    let room = tail_bytes.saturating_add(signer.map_or(0, |_| SIGNED_LEN));
    let start = Instant::now();
    let allocate = |error| failed("allocate")(io::Error::other(error));
    let mut connection = Client::connect(socket).map_err(allocate)?;
    let grant = connection.begin(name, guest_bytes, room).map_err(allocate)?;
    let generation = grant.extent().generation;
    let extent = GrantedExtent::map(grant)?;
    let pieces = Pieces { guest_bytes, tail_bytes };
    let (receiver, sent) = Receiver::new(&extent, pieces, limit)?;
    let hung_up = machine.connection().map_err(|source| FreezeError::Duplicate { source })?;
    let hang_up = || {
        // A connection that is not there any more has ended.
        let _ = hung_up.map(|connection| connection.shutdown(Shutdown::Both));
    };
    let allocation = ns_since(start);
    let (sealed, received) = receiver.during(|| machine.seal(Seal::Extent, sent), hang_up);
    let received = match received {
        Ok(received) => received,
        // A machine that failed has a reason.
        Err(FreezeError::Incomplete { .. }) if sealed.is_err() => Received::default(),
        Err(error) => return Err(error.into()),
    };
    let report = check(sealed.map_err(NotFrozen::Machine)?, guest_bytes)?;
    signing.map_or(Ok(()), |(signer, covered)| extent.sign(covered, signer))?;
    let begin = Instant::now();
    extent.flush().map_err(failed("make durable"))?;
    drop(extent);
    let synced = Instant::now();
    connection.commit(generation).map_err(io::Error::other).map_err(failed("publish"))?;
    Ok(FreezeReport {
        image_ns: report.image_ns.saturating_add(allocation),
        write_ns: nanoseconds(received.write),
        sync_ns: report.sync_ns.saturating_add(nanoseconds(synced - begin)),
        publish_ns: ns_since(synced),
        stored_pages: guest_bytes / PAGE_SIZE,
        zero_pages_written: received.zero_pages_written,
        bytes_written: received.bytes_written,
        disk_bytes: received.bytes_written,
        protect_ns: 0,
        protected: Vec::new(),
        ..report
    })
}

/// A descriptor for the machine.
fn copy_of(descriptor: &impl AsFd) -> Result<OwnedFd, FreezeError> {
    descriptor.as_fd().try_clone_to_owned().map_err(|source| FreezeError::Duplicate { source })
}

/// Checks the sizes of a report against guest memory of `image_len` bytes.
fn check(report: FreezeReport, image_len: u64) -> Result<FreezeReport, FreezeError> {
    let pages = image_len / PAGE_SIZE;
    if report.stored_pages > pages || report.zero_pages > pages {
        return Err(FreezeError::Report { reason: "it counts more pages than it wrote" });
    }
    Ok(report)
}

fn mismatch<E: Error>(reason: &'static str) -> NotFrozen<E> {
    NotFrozen::Supervisor(FreezeError::Report { reason })
}

#[cfg(test)]
#[path = "freeze_tests.rs"]
mod tests;
