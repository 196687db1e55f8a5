//! Media: the byte-addressable memory that holds a pool.
//!
//! | medium | mapping | leaf | durability |
//! |---|---|---|---|
//! | devdax character device | `MAP_SHARED` | the device's alignment | cache-line flush, fence |
//! | file on DAX | `MAP_SHARED_VALIDATE`, `MAP_SYNC` | 2 MiB if aligned | cache-line flush, fence |
//! | file, no DAX | `MAP_SHARED` | no index: page cache | `fdatasync` at each fence |
//! | tmpfs or hugetlbfs | `MAP_SHARED` | as mounted | none: lost when the machine restarts |
//! | memfd | `MAP_SHARED` | 4 KiB, 2 MiB or 1 GiB | none: lost when its process exits |

mod devdax;
mod error;
mod flush;
mod leaf;
mod mapped;
mod memory;
mod nodes;
#[cfg(any(test, feature = "simulated"))]
pub mod simulated;

use std::fmt::Debug;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use error::MediumError;
pub use flush::FlushInstruction;
pub(crate) use flush::fence;
pub use mapped::{Huge, MappedMedium, MemfdOptions};
pub(crate) use memory::{How, Memory, prefer_node};
pub use nodes::NodeBytes;

/// The kind of a medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MediumKind {
    /// A devdax character device.
    Devdax,
    /// A file on a file system mounted with DAX.
    DaxFile,
    /// A file on any other file system. The page cache holds the pool's bytes, too.
    File,
    /// A file on tmpfs.
    Tmpfs,
    /// A file on hugetlbfs, or a memfd of huge pages.
    Hugetlbfs,
    /// A memfd of small pages.
    Memfd,
    /// A model of persistent memory that simulates power loss in tests.
    Simulated,
}

/// How stored bytes become durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Durability {
    /// Flushing cache lines with this instruction, then SFENCE.
    CacheLines(FlushInstruction),
    /// `fdatasync` at each fence.
    FileSync,
    /// No operation: the medium does not survive a loss of power.
    Volatile,
}

/// The host's page-table entries for a medium, built when it was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Index {
    /// Bytes mapped by one entry; with entries of several sizes, the smallest.
    pub leaf: u64,
    /// Entries.
    pub entries: u64,
    /// Duration of building the index.
    pub duration: Duration,
}

/// Properties of a medium.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MediumFacts {
    /// Kind.
    pub kind: MediumKind,
    /// Path, or a description of a medium without a path.
    pub name: String,
    /// Size in bytes, a multiple of 2 MiB. Bytes beyond the last multiple are unused.
    pub size: u64,
    /// Alignment of mappings in bytes, at least 2 MiB.
    pub granule: u64,
    /// How stored bytes become durable.
    pub durability: Durability,
    /// The index, if opening built one. A medium opened for reading, or a file in the page cache,
    /// has no index.
    pub index: Option<Index>,
    /// The NUMA nodes of the medium's bytes when the index was built, in ascending order. Empty
    /// without an index.
    pub nodes: Vec<NodeBytes>,
}

impl MediumFacts {
    /// Bytes of the leaves at which this host maps the medium according to its index; 4 KiB without
    /// an index.
    #[must_use]
    pub fn leaf(&self) -> u64 {
        self.index.map_or(4096, |index| index.leaf)
    }

    /// Why this host maps the medium with leaves of less than 1 GiB, and the way out; `None` if it
    /// maps it with leaves of 1 GiB.
    #[must_use]
    pub fn why_no_larger_leaf(&self) -> Option<&'static str> {
        let reason = match self.kind {
            MediumKind::Devdax => {
                "the device's alignment; `ndctl create-namespace --mode devdax --align 1G` makes a device with leaves of 1 GiB"
            }
            MediumKind::DaxFile => "Linux maps files with leaves of at most 2 MiB",
            MediumKind::File => "page cache",
            MediumKind::Tmpfs | MediumKind::Memfd => {
                "shared memory has pages of at most 2 MiB; `memfd:SIZE,huge=1G`, or a hugetlbfs with pagesize=1G, has pages of 1 GiB"
            }
            MediumKind::Hugetlbfs => {
                "the size of the huge pages; `memfd:SIZE,huge=1G`, or a hugetlbfs with pagesize=1G, has pages of 1 GiB"
            }
            MediumKind::Simulated => "a model",
        };
        (self.leaf() < 1 << 30).then_some(reason)
    }

    /// Whether the kernel supports private (copy-on-write) mappings of the medium. devdax does not
    /// support them. hugetlbfs does, but a copy takes a reserved huge page: when none is left, a
    /// vCPU that needs one waits forever if KVM handles the fault asynchronously.
    #[must_use]
    pub fn has_private_mappings(&self) -> bool {
        !matches!(self.kind, MediumKind::Devdax | MediumKind::Hugetlbfs | MediumKind::Simulated)
    }
}

/// Access mode of an opened medium or of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Access {
    /// Reading only.
    Read,
    /// Reading and writing. A medium has one writer at a time.
    Write,
}

/// Byte-addressable memory of a fixed size.
///
/// Offsets and lengths are in bytes. A range outside the medium, or a store to a medium opened for
/// reading, is a programming error and panics. The medium may be used from several threads.
/// Concurrent stores to the same bytes leave a mixture.
pub trait Medium: Debug + Send + Sync {
    /// The medium's properties.
    fn facts(&self) -> &MediumFacts;

    /// Copies bytes from the medium into `buffer`.
    fn load(&self, offset: u64, buffer: &mut [u8]);

    /// Reads the 8-byte word at `offset`, a multiple of 8, atomically.
    fn load_word(&self, offset: u64) -> u64;

    /// Copies bytes into the medium. Until a flush and a fence, a loss of power may lose any of the
    /// aligned words.
    fn store(&self, offset: u64, bytes: &[u8]);

    /// Writes the 8-byte word at `offset`, a multiple of 8, atomically: a loss of power leaves the
    /// old or the new word.
    fn store_word(&self, offset: u64, value: u64);

    /// Starts making the range durable.
    fn flush(&self, offset: u64, len: u64);

    /// Waits until all flushed ranges are durable.
    ///
    /// # Errors
    /// The medium is a file and `fdatasync` fails.
    fn fence(&self) -> io::Result<()>;

    /// Makes the range zeros. A fence of any process that has written the medium, or the end of
    /// this call, makes them durable.
    ///
    /// # Errors
    /// The medium is a file, and its file system cannot do it without writing the bytes.
    fn zero(&self, offset: u64, len: u64) -> io::Result<()>;

    /// The medium's current size, rounded as [`MediumFacts::size`] is.
    ///
    /// # Errors
    /// The system does not report the size.
    fn current_size(&self) -> io::Result<u64>;

    /// Opens a new descriptor of the medium for another process. It shares no lock with this
    /// process.
    ///
    /// # Errors
    /// The medium cannot be reopened. A simulated medium has no descriptor.
    fn descriptor(&self, access: Access) -> io::Result<OwnedFd>;

    /// Opens a descriptor for a client that is granted the extent at `offset`: of the extent's own
    /// memory if it is [separate](Self::separate), and otherwise of the medium. The extent
    /// [is held](Self::is_held) until no descriptor and no mapping made with it is left, in any
    /// process.
    ///
    /// # Errors
    /// As of [`descriptor`](Self::descriptor).
    fn grant(&self, access: Access, offset: u64) -> io::Result<ExtentDescriptor>;

    /// Opens in advance what the next [`grant`](Self::grant) needs. If it fails, that grant has the
    /// error.
    fn prepare_grants(&self) {}

    /// Whether a process has a descriptor of [`grant`](Self::grant) for the extent at `offset`, or
    /// a mapping that was made with one.
    fn is_held(&self, offset: u64) -> bool;

    /// Gives a range memory of its own in place of the medium's, zeros, so that a client's
    /// descriptor reaches this range and nothing else. Only media of anonymous memory do; for
    /// others the call has no effect. After a failure call [`join`](Self::join), too.
    ///
    /// # Errors
    /// The system has too little memory, or too few huge pages.
    fn separate(&self, offset: u64, len: u64) -> io::Result<()>;

    /// Gives a range that is [separate](Self::separate) the medium's memory again. Returns whether
    /// it was separate: then it is zeros now.
    ///
    /// # Errors
    /// As of [`separate`](Self::separate). The range must not be used until a later call succeeds.
    fn join(&self, offset: u64, len: u64) -> io::Result<bool>;
}

/// A descriptor for a client that is granted an extent.
#[derive(Debug)]
pub struct ExtentDescriptor {
    /// The descriptor.
    pub descriptor: OwnedFd,
    /// Where in it the extent begins, bytes.
    pub offset: u64,
    /// Bytes of the leaves at which this host maps the extent.
    pub leaf: u64,
}
