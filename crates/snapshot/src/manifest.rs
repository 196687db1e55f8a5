//! The manifest section: the description of a snapshot, encoded with postcard.
//!
//! Every type here is part of the container version. An assertion at the end of the file fails the
//! build when a type changes without a new version.

use std::path::PathBuf;

use firn_base::fs_verity;
use postcard_schema::Schema;
use postcard_schema::key::hash::fnv1a64::hash_ty_path;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::freeze_error::FreezeError;
use crate::layout::MemoryLayout;
use crate::section::{CONTAINER_VERSION, CONTAINER_VERSION_UNPROTECTED};

/// The manifest: everything in a snapshot except machine state, zero map, profile and digests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub struct Manifest {
    /// The monitor's description of the microVM.
    pub description: Description,
    /// The layout of guest memory. The image has the layout's total size.
    pub layout: MemoryLayout,
    /// How the image is stored.
    pub image: ImageInfo,
    /// The writable disk's content at the freeze (`overlay.img`), if the microVM had one.
    pub overlay: Option<DiskIdentity>,
    /// The files of the directory that fs-verity protects: the kernel checks each block of them
    /// when it reads it. Opening such a file compares its digest.
    pub protected: Vec<ProtectedFile>,
}

/// A file that fs-verity protects.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub struct ProtectedFile {
    /// Its name in the snapshot's directory.
    pub name: String,
    /// Its digest, as the kernel measures it.
    pub digest: fs_verity::Digest,
}

impl Manifest {
    /// The version of the container that it requires, and the bytes of its section.
    pub(crate) fn encode(&self) -> Result<(u32, Vec<u8>), FreezeError> {
        if let Some(disk) = self.description.disks.iter().find(|disk| disk.path.to_str().is_none())
        {
            return Err(FreezeError::PathNotUtf8 { path: disk.path.clone() });
        }
        let mut bytes =
            postcard::to_stdvec(self).map_err(|source| FreezeError::Encode { source })?;
        if self.protected.is_empty() {
            // Earlier readers know everything but the list's length of 0.
            bytes.pop();
            return Ok((CONTAINER_VERSION_UNPROTECTED, bytes));
        }
        Ok((CONTAINER_VERSION, bytes))
    }

    /// The digest of a file of the directory that fs-verity protects.
    #[must_use]
    pub fn protection(&self, name: &str) -> Option<&fs_verity::Digest> {
        let file = self.protected.iter().find(|file| file.name == name);
        file.map(|file| &file.digest)
    }
}

/// The part of the manifest that the monitor passes to [`crate::Writer::seal`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub struct Description {
    /// Unique identifier of this freeze.
    pub id: Uuid,
    /// The snapshot that the frozen microVM was thawed from.
    pub parent: Option<Uuid>,
    /// When the microVM was frozen, in ns since the Unix epoch.
    pub created_ns: u64,
    /// Version of firn at the freeze, for information.
    pub firn_version: String,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// The requirements on a host's CPU.
    pub cpu: CpuRequirement,
    /// The read-only disks, in the order of the guest's devices. They are not part of the snapshot.
    pub disks: Vec<DiskInfo>,
    /// The function that the guest has loaded.
    pub function: Option<FunctionInfo>,
}

/// The requirements on a host's CPU. The monitor compares them with the host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub struct CpuRequirement {
    /// Vendor string of CPUID leaf 0, such as `AuthenticAMD`.
    pub vendor: String,
    /// Brand string of CPUID leaves 0x80000002 to 4, for information.
    pub brand: String,
    /// Feature bits that the guest saw.
    pub features: Vec<CpuFeatures>,
}

/// Feature bits of one register of one CPUID leaf.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub struct CpuFeatures {
    /// Leaf (EAX on entry).
    pub leaf: u32,
    /// Subleaf (ECX on entry).
    pub subleaf: u32,
    /// The register that returns the bits.
    pub register: CpuidRegister,
    /// The bits that must be set.
    pub bits: u32,
}

/// A register that CPUID returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub enum CpuidRegister {
    /// EAX.
    Eax,
    /// EBX.
    Ebx,
    /// ECX.
    Ecx,
    /// EDX.
    Edx,
}

/// A read-only disk that is not part of the snapshot, such as the root file system.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub struct DiskInfo {
    /// Name of the disk, unique within the microVM.
    pub id: String,
    /// The path of the file at the freeze; absolute and UTF-8.
    pub path: PathBuf,
    /// Its content at the freeze.
    pub identity: DiskIdentity,
}

/// The identity of a disk's content: length and digests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub struct DiskIdentity {
    /// Length in bytes.
    pub len: u64,
    /// XXH3-64 of the first 64 KiB (or of all, if shorter). Every start checks it.
    pub head: u64,
    /// Digest of all: XXH3-64 over the XXH3-64 digests (little-endian) of the disk's blocks of 2
    /// MiB. The two levels avoid reading holes.
    pub digest: u64,
}

/// The function that the guest has loaded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub struct FunctionInfo {
    /// Name of the function.
    pub name: String,
    /// Entry point, `module.attribute`.
    pub handler: String,
}

/// How `memory.img` is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub struct ImageInfo {
    /// Whether zero pages are holes.
    pub kind: ImageKind,
    /// Pages that were written to the file.
    pub stored_pages: u64,
}

/// Whether zero pages of the image are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub enum ImageKind {
    /// Zero pages are holes in the file.
    Sparse,
    /// Every page is written, for media without holes.
    Dense,
}

/// Fingerprint of the manifest's fields, in order and recursively, for each container version.
const SCHEMAS: [(u32, u64); 2] = [(1, 0x6015f54170250fbe), (2, 0x19e5568cd992f82d)];

const _: () = {
    let (version, fingerprint) = SCHEMAS[SCHEMAS.len() - 1];
    assert!(version == CONTAINER_VERSION, "add a line to SCHEMAS for the new container version");
    assert!(
        fingerprint == u64::from_le_bytes(hash_ty_path::<Manifest>("firn manifest")),
        "the manifest's fields changed: raise CONTAINER_VERSION, keep a reader for the old version, \
         add a golden snapshot, and add the new fingerprint to SCHEMAS"
    );
};
