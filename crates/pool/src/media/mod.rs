//! Media: the byte-addressable memory that a pool lies on.
//!
//! | medium | mapped | leaf | made durable by |
//! |---|---|---|---|
//! | devdax character device | `MAP_SHARED` | the device's alignment | cache-line flush, fence |
//! | file on a DAX file system | `MAP_SHARED_VALIDATE`, `MAP_SYNC` | 2 MiB where the file lies so | cache-line flush, fence |
//! | file on another file system | `MAP_SHARED` | no index: page cache | `fdatasync` at each fence |
//! | file on tmpfs or hugetlbfs | `MAP_SHARED` | as mounted | nothing: it does not outlive the machine's run |
//! | memfd | `MAP_SHARED` | 4 KiB, or 2 MiB huge pages | nothing: it lives as long as its process |

mod devdax;
mod error;
mod flush;
mod leaf;
mod mapped;
mod memory;
pub mod simulated;

use std::fmt::Debug;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use error::MediumError;
pub use flush::FlushInstruction;
pub(crate) use flush::fence;
pub use mapped::{MappedMedium, MemfdOptions};
pub(crate) use memory::{How, Memory};

/// What a medium is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MediumKind {
    /// A devdax character device.
    Devdax,
    /// A file on a file system mounted with DAX.
    DaxFile,
    /// A file on any other file system: the pool's bytes are also page cache.
    File,
    /// A file on tmpfs.
    Tmpfs,
    /// A file on hugetlbfs, or an anonymous one in its huge pages.
    Hugetlbfs,
    /// An anonymous file in memory, in small pages.
    Memfd,
    /// No medium: a model that tests cut the power of.
    Simulated,
}

/// How stored bytes become durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Durability {
    /// Flushing cache lines with the instruction, then SFENCE.
    CacheLines(FlushInstruction),
    /// `fdatasync` at each fence.
    FileSync,
    /// They need not: the medium does not survive a loss of power.
    Volatile,
}

/// The host's page-table entries for a medium, built when it was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Index {
    /// Bytes that one entry maps: the smallest found.
    pub leaf: u64,
    /// Entries.
    pub entries: u64,
    /// How long it took.
    pub duration: Duration,
}

/// What is known of a medium.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MediumFacts {
    /// What it is.
    pub kind: MediumKind,
    /// Its path, or what stands for it.
    pub name: String,
    /// Bytes, a multiple of 2 MiB: a rest is not used.
    pub size: u64,
    /// Bytes: mappings begin and end at multiples of it. At least 2 MiB.
    pub granule: u64,
    /// How stored bytes become durable.
    pub durability: Durability,
    /// The index, where opening built one: not for reading only, and not for a file in the page cache.
    pub index: Option<Index>,
}

impl MediumFacts {
    /// Bytes of the largest leaf at which this host maps it, as its index shows; 4 KiB where it has none.
    #[must_use]
    pub fn leaf(&self) -> u64 {
        self.index.map_or(4096, |index| index.leaf)
    }

    /// Whether the kernel copies what is written to private mappings of it. Of a devdax device it has none. Of hugetlbfs it has, but its copies
    /// are huge pages that were set aside, and once none is left a vCPU that needs one waits for ever where KVM faults
    /// asynchronously.
    #[must_use]
    pub fn has_private_mappings(&self) -> bool {
        !matches!(self.kind, MediumKind::Devdax | MediumKind::Hugetlbfs | MediumKind::Simulated)
    }
}

/// What an opened medium or a descriptor of it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reading only.
    Read,
    /// Writing too. A medium has one writer at a time.
    Write,
}

/// Byte-addressable memory of a fixed size.
///
/// Offsets and lengths are bytes. A range outside of the medium, and a store to one that is open for reading, is an error of the
/// program and panics. Safe to use from several threads; who writes the same bytes at the same time gets a mixture.
pub trait Medium: Debug + Send + Sync {
    /// What is known of it.
    fn facts(&self) -> &MediumFacts;

    /// Copies bytes out.
    fn load(&self, offset: u64, buffer: &mut [u8]);

    /// Reads a word at a multiple of 8 at once.
    fn load_word(&self, offset: u64) -> u64;

    /// Copies bytes in. After a loss of power any of its aligned words may be there or not, until flush and fence.
    fn store(&self, offset: u64, bytes: &[u8]);

    /// Writes a word at a multiple of 8 at once: after a loss of power the old or the new one is there.
    fn store_word(&self, offset: u64, value: u64);

    /// Starts making the range durable.
    fn flush(&self, offset: u64, len: u64);

    /// Waits until all that was flushed is durable.
    ///
    /// # Errors
    /// The medium is a file and cannot be synced.
    fn fence(&self) -> io::Result<()>;

    /// The size that it has now, rounded as [`MediumFacts::size`] is.
    ///
    /// # Errors
    /// The system does not tell.
    fn current_size(&self) -> io::Result<u64>;

    /// A descriptor of its own for another process, which shares no lock with this one.
    ///
    /// # Errors
    /// It cannot be opened once more; a simulated medium has none.
    fn descriptor(&self, access: Access) -> io::Result<OwnedFd>;
}
