//! The snapshot format: a frozen microVM as a directory.
//!
//! - `snapshot.firn`: a header, then sections with version, length and CRC: manifest, machine
//!   state, zero map, profile, digests.
//! - `memory.img`: the image, guest memory with its regions one after the other; zero pages are
//!   holes.
//! - `overlay.img`: the writable disk, if the microVM had one.
//! - `snapshot.sig`: the signature of the others, if the snapshot is signed.
//! - `working-set.img`, `loading-set.img`: files packed from the image by the profile, if any.
//!
//! [`freeze()`] makes the files or the extent, has a machine write them ([`Writer`]), and publishes
//! them in one step.
//! [`Snapshot::open`] reads what a start needs (header, manifest, machine state, zero map), so its
//! cost does not depend on the size of guest memory. [`Digests`] check pages when they are used.
//! The byte layout is in `docs/reference/snapshot-format.md`.
//!
//! The crate does not use KVM: machine state is opaque bytes with their own version. All integers
//! are little-endian, a page has 4096 bytes.

mod attach;
mod container;
mod contents;
mod copies;
mod decode;
mod digests;
mod directory;
mod disk;
mod error;
mod extent;
mod files;
mod freeze;
mod freeze_error;
mod grant;
mod image;
mod import;
mod in_pool;
mod keys;
mod layout;
mod manifest;
mod open_files;
mod pack;
mod packed;
mod page_set;
mod profile;
mod protect;
mod read_at;
mod republish;
mod section;
mod signature;
mod snapshot;
mod sparse_file;
mod staging;
mod tail;
mod transfer;
mod verify;
mod writer;

#[cfg(test)]
mod tests;

pub use attach::{AttachError, set_profile};
pub use contents::Contents;
pub use copies::{Copies, CopyTable};
pub use digests::{DigestError, Digests};
pub use directory::SnapshotDirectory;
pub use disk::{DiskError, DiskSource};
pub use error::{OpenError, OpenPooledError};
pub use files::PackedFile;
pub use firn_pool::{ClientError, NoCopy};
pub use freeze::{
    Begin, Begun, Destination, Freeze, FreezeReport, FreezeRequest, NotFrozen, NotFrozenError,
    Seal, Target, freeze, freeze_signed,
};
pub use freeze_error::FreezeError;
pub use grant::{
    Checks, ExtentPlace, Grant, ReplicaReport, Verify, open_for_start, open_pooled, open_replica,
};
pub use image::{Chunk, PageSource};
pub use import::import;
pub use in_pool::{CheckExtentError, check_extent};
pub use keys::{KeyError, Signer, Verifier};
pub use layout::{
    CHUNK_PAGES, CHUNK_SIZE, ImageRegion, LayoutError, MAX_MEMORY, MemoryLayout, MemoryRegion,
};
pub use manifest::{
    CpuFeatures, CpuRequirement, CpuidRegister, Description, DiskIdentity, DiskInfo, FunctionInfo,
    ImageInfo, ImageKind, Manifest, ProtectedFile,
};
pub use open_files::{OpenTwice, SnapshotFiles};
pub use pack::{pack, recipe_of};
pub use packed::{Packed, PackedError, PackedRun};
pub use page_set::PageSet;
pub use profile::{CachedRun, Profile, ProfileError};
pub use protect::{ProtectError, protect};
pub use read_at::ReadAt;
pub use republish::{VerifyPooledError, set_pooled_profile, verify_pooled};
pub use section::{CONTAINER_VERSION, PROFILE_VERSION, Section};
pub use signature::sign;
pub use snapshot::{Content, Snapshot};
pub use verify::{Problem, VerifyError, VerifyReport, verify, verify_signed};
pub use writer::{Machine, Writer};
