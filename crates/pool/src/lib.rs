//! Byte-addressable memory under firn's own management: the pool, PASS's PMEM manager (PASS,
//! sections 3.3 and 4).
//!
//! A [`Medium`] is a devdax device, a file or a memfd, mapped completely. It holds a [`Pool`]: a
//! superblock and its twin, an extent map, and an address table from function names to extents. An
//! [`Extent`] is contiguous: guest memory, followed by a tail that is opaque to this crate. The
//! crate knows nothing of KVM and nothing of snapshots.
//!
//! ```
//! use std::sync::Arc;
//! use firn_pool::{CreateOptions, MappedMedium, MemfdOptions, Pool};
//!
//! let options = MemfdOptions { size: 16 << 20, huge: None, node: None };
//! let medium = Arc::new(MappedMedium::memfd(options)?);
//! let pool = Pool::create(medium, &CreateOptions::default())?;
//!
//! let staging = pool.allocate("hello", 2 << 20, 100)?;
//! let extent = staging.map()?;
//! extent.write_guest(0, &vec![0; 2 << 20])?;
//! extent.write_guest(4096, b"guest memory")?;
//! extent.write_tail(0, b"machine state")?;
//! extent.flush()?;
//! staging.publish()?;
//!
//! let pin = pool.pin("hello")?;
//! let mut bytes = [0; 12];
//! pin.map()?.read_guest(4096, &mut bytes);
//! assert_eq!(&bytes, b"guest memory");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! One process at a time changes a pool; the kernel's lock on the medium ensures it. This process
//! can serve others ([`Server`], [`Client`]), which receive descriptors of the medium and map
//! extents themselves. Further processes can read the pool concurrently ([`PoolReader`]). After a
//! loss of power, or after the process was killed, the next opening finds every published snapshot,
//! no unpublished one, and all other space free. `docs/reference/pool-format.md` specifies the
//! format, the transitions and their tests.

mod extent;
mod layout;
mod learnt;
mod manager;
mod mapped_extent;
mod media;
mod pool;
mod runs;
mod window;

pub use extent::Extent;
pub use layout::GRANULE;
pub use learnt::Learnt;
pub use manager::{
    ArenaFacts, Client, ClientError, ClientWatch, CopyGrant, CopySet, Description, ExtentGrant,
    FindManagerError, ManagerDirectory, NoCopy, Refusal, RemoveError, ReplicaGrant, Server,
    ServerError, StartGrant, Wanted,
};
pub use mapped_extent::{MapExtentError, MappedExtent};
#[cfg(any(test, feature = "simulated"))]
pub use media::simulated;
pub use media::{
    Access, Durability, ExtentDescriptor, FlushInstruction, Huge, Index, MappedMedium, Medium,
    MediumError, MediumFacts, MediumKind, MemfdOptions, NodeBytes,
};
pub use pool::{
    AllocateError, CreateError, CreateOptions, ExtentReader, ExtentState, FreePiece, Imaging,
    ListedExtent, Listing, LookupError, MediumFailure, OpenError, Pin, Pool, PoolFacts, PoolReader,
    Problem, PublishError, ReclaimError, Recovery, RepairError, RepairReport, Replica,
    ReplicaError, Role, Staging, VerifyReport,
};
pub use runs::{COPY_CHUNK, pack_copy};
pub use window::Window;
