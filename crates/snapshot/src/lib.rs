//! The snapshot format: a frozen microVM as a directory.
//!
//! - `snapshot.firn`: a header, then sections with version, length and CRC: manifest, machine state, zero map, profile,
//!   digests.
//! - `memory.img`: the image, guest memory with its regions one after the other; zero pages are holes.
//! - `overlay.img`: the writable disk, when the microVM had one.
//!
//! - `working-set.img`, `loading-set.img`: files packed from the image by the profile, when there are any.
//!
//! [`Writer`] writes a snapshot aside and publishes it in one step. [`Snapshot::open`] reads what a start needs (header,
//! manifest, machine state, zero map), so its work does not depend on how much memory the guest stored.
//! [`Digests`] check pages when they are used. The byte layout is in `docs/reference/snapshot-format.md`.
//!
//! The crate knows nothing of KVM: machine state is bytes with a version of their own. All integers are little-endian,
//! a page has 4096 bytes.

mod attach;
mod container;
mod copies;
mod digests;
mod disk;
mod error;
mod extent;
mod freeze_error;
mod grant;
mod image;
mod in_pool;
mod layout;
mod manifest;
mod packed;
mod page_set;
mod profile;
mod read_at;
mod snapshot;
mod staging;
mod verify;
mod writer;

#[cfg(test)]
mod tests;

pub use attach::{AttachError, set_profile};
pub use container::{CONTAINER_VERSION, PROFILE_VERSION, Section};
pub use copies::{Copies, CopyTable};
pub use digests::{DigestError, Digests};
pub use disk::{DiskError, DiskIdentity, DiskSource};
pub use error::OpenError;
pub use extent::{ExtentContents, ExtentTarget, write_extent};
pub use firn_pool::{ClientError, ImagedBy, NoCopy};
pub use freeze_error::FreezeError;
pub use grant::{
    ExtentPlace, Grant, OpenPooledError, ReplicaReport, Verify, open_pooled, open_pooled_with,
    open_replica, open_replica_with,
};
pub use image::{Chunk, PageSource};
pub use in_pool::{CheckExtentError, PoolTarget, check_extent, set_pooled_profile};
pub use layout::{
    CHUNK_PAGES, CHUNK_SIZE, ImageRegion, LayoutError, MAX_MEMORY, MemoryLayout, MemoryRegion,
};
pub use manifest::{
    CpuFeatures, CpuRequirement, CpuidRegister, Description, DiskInfo, FunctionInfo, ImageInfo,
    ImageKind, Manifest,
};
pub use packed::{Packed, PackedError, PackedFile, PackedRun, pack, recipe_of};
pub use page_set::PageSet;
pub use profile::{CachedRun, Profile, ProfileError};
pub use read_at::ReadAt;
pub use snapshot::{Content, Snapshot, open_directory};
pub use verify::{Problem, VerifyError, VerifyReport, verify};
pub use writer::{SealReport, Writer};
