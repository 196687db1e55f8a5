//! Byte-addressable memory under firn's own management: the pool, PASS's PMEM manager (PASS, sections 3.3 and 4).
//!
//! A [`Medium`] is a devdax device, a file or a memfd, mapped whole. On it lies a [`Pool`]: a superblock and its twin, an extent map, and an
//! address table from function names to extents, all on the medium. An [`Extent`] is continuous: guest memory, and behind
//! it a tail that is opaque here. The crate knows nothing of KVM and nothing of snapshots.
//!
//! ```
//! use std::sync::Arc;
//! use firn_pool::{CreateOptions, MappedMedium, MemfdOptions, Pool};
//!
//! let options = MemfdOptions { size: 16 << 20, huge: false, node: None };
//! let medium = Arc::new(MappedMedium::memfd(options)?);
//! let pool = Pool::create(medium, &CreateOptions::default())?;
//!
//! let staging = pool.allocate("hello", 2 << 20, 100)?;
//! let extent = staging.map()?;
//! extent.zero_guest(0, 2 << 20);
//! extent.write_guest(4096, b"guest memory");
//! extent.write_tail(0, b"machine state");
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
//! One process changes a pool at a time; the kernel's lock on the medium says which. It may serve others ([`Server`], [`Client`]), which get descriptors
//! of the medium and map extents themselves; others read beside it ([`PoolReader`]). After a
//! loss of power, or when that process was killed, the next opening finds every sealed snapshot, none that was not sealed, and
//! all other space free. `docs/reference/pool-format.md` has the bytes, the transitions and how this was tested.

mod extent;
mod layout;
mod manager;
mod mapped_extent;
mod media;
mod pool;

pub use extent::Extent;
pub use layout::{GRANULE, POOL_VERSION};
pub use manager::{
    ArenaFacts, COPY_CHUNK, ChunkRun, Client, ClientError, ClientWatch, CopyGrant, CopyRule,
    Description, ExtentGrant, FindManagerError, MANAGER_VERSION, ManagerDirectory, NoCopy, Refusal,
    RemoveError, ReplicaGrant, Server, ServerError,
};
pub use mapped_extent::{MapExtentError, MappedExtent};
pub use media::simulated;
pub use media::{
    Access, Durability, FlushInstruction, Index, MappedMedium, Medium, MediumError, MediumFacts,
    MediumKind, MemfdOptions,
};
pub use pool::{
    AllocateError, CreateError, CreateOptions, ExtentReader, ExtentState, FreePiece, ImagedBy,
    Imaging, ListedExtent, Listing, LookupError, MediumFailure, OpenError, PageRun, Pin, Pool,
    PoolFacts, PoolReader, Problem, PublishError, ReclaimError, Recovery, RepairError,
    RepairReport, Replica, ReplicaError, Role, Staging, VerifyReport,
};
