//! What a snapshot says of itself: the manifest section, encoded with postcard.
//!
//! Every type here is part of the container version. The assertion at the end of the file fails the build
//! when one of them changes and the version does not.

use std::path::PathBuf;

use postcard_schema::Schema;
use postcard_schema::key::hash::fnv1a64::hash_ty_path;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::container::CONTAINER_VERSION;
use crate::disk::DiskIdentity;
use crate::freeze_error::FreezeError;
use crate::layout::MemoryLayout;

/// The manifest: all that a snapshot says of itself beside machine state, zero map and digests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub struct Manifest {
    /// What the monitor said of the microVM.
    pub description: Description,
    /// Where guest memory lies; the image is as long as its total.
    pub layout: MemoryLayout,
    /// How the image is stored.
    pub image: ImageInfo,
    /// The writable disk's content at the freeze (`overlay.img`), when the microVM had one.
    pub overlay: Option<DiskIdentity>,
}

impl Manifest {
    /// The bytes of the manifest's section.
    pub(crate) fn encode(&self) -> Result<Vec<u8>, FreezeError> {
        if let Some(disk) = self.description.disks.iter().find(|disk| disk.path.to_str().is_none())
        {
            return Err(FreezeError::PathNotUtf8 { path: disk.path.clone() });
        }
        postcard::to_stdvec(self).map_err(|source| FreezeError::Encode { source })
    }
}

/// The part of the manifest that the monitor gives to [`crate::Writer::seal`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub struct Description {
    /// Name of this one freeze; no two snapshots share it.
    pub id: Uuid,
    /// The snapshot that the frozen microVM was itself thawed from.
    pub parent: Option<Uuid>,
    /// When the microVM was frozen, in ns since the Unix epoch.
    pub created_ns: u64,
    /// Version of the firn that froze it, for people to read.
    pub firn_version: String,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// What a host's CPU must have to run the guest on.
    pub cpu: CpuRequirement,
    /// The read-only disks, in the order of the guest's devices. They lie outside the snapshot.
    pub disks: Vec<DiskInfo>,
    /// The function that the guest has loaded.
    pub function: Option<FunctionInfo>,
}

/// What a host's CPU must have. This crate carries it; the monitor compares it with the host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub struct CpuRequirement {
    /// Vendor string of CPUID leaf 0, such as `AuthenticAMD`.
    pub vendor: String,
    /// Brand string of CPUID leaves 0x80000002 to 4, for people to read.
    pub brand: String,
    /// Feature bits that the guest was shown.
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

/// A read-only disk that lies outside the snapshot, such as the root file system.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub struct DiskInfo {
    /// Name of the disk, unique within the microVM.
    pub id: String,
    /// Where the file was at the freeze; absolute, and UTF-8.
    pub path: PathBuf,
    /// What it held.
    pub identity: DiskIdentity,
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
    /// Every page is written, for media that hold no holes.
    Dense,
}

/// Fingerprint of the manifest's fields, in order, with all they contain, for each container version.
const SCHEMAS: [(u32, u64); 1] = [(1, 0x6015f54170250fbe)];

const _: () = {
    let (version, fingerprint) = SCHEMAS[SCHEMAS.len() - 1];
    assert!(version == CONTAINER_VERSION, "add a line to SCHEMAS for the new container version");
    assert!(
        fingerprint == u64::from_le_bytes(hash_ty_path::<Manifest>("firn manifest")),
        "the manifest's fields changed: raise CONTAINER_VERSION, keep a reader for the old version, \
         add a golden snapshot, and add the new fingerprint to SCHEMAS"
    );
};
