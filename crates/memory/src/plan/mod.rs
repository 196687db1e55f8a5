//! The plan: where each page of guest memory comes from, when, and which VMs share it.

mod flatten;
mod table;
mod validate;

pub use table::{PlanSummary, PlanTable};
pub use validate::PlanError;

use std::fmt;
use std::ops::Range;

use firn_base::{GuestRange, ImageRange, PAGE_SIZE};
use firn_snapshot::{CopyTable, MemoryLayout, PackedFile};
use serde::{Deserialize, Serialize};

/// Where the bytes of a range come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
#[non_exhaustive]
pub enum Source {
    /// Zeros: anonymous memory.
    Zero,
    /// The snapshot's image.
    Image {
        /// The offset of the range's first byte in the image, in bytes.
        offset: u64,
    },
    /// A file that was packed from the image.
    Packed {
        /// The offset of the range's first byte in the packed file, in bytes.
        offset: u64,
        /// The offset of the same bytes in the image, in bytes. It must match the file's own table.
        image: u64,
    },
    /// The snapshot's extent in a pool, or a replica of it.
    Extent {
        /// The offset of the range's first byte in the pool's medium, in bytes.
        offset: u64,
    },
    /// A copy of parts of the snapshot's extent that was made ahead for this VM.
    Copy {
        /// The offset of the range's first byte in the copy, in bytes.
        offset: u64,
    },
    /// The pager, which fills pages from the image on a page fault, or installs them in advance.
    Pager {
        /// The offset of the range's first byte in the image, in bytes.
        offset: u64,
    },
}

impl Source {
    /// The source of the byte at offset `bytes` of a range that starts with this source.
    pub(crate) fn advanced(self, bytes: u64) -> Self {
        match self {
            Self::Zero => Self::Zero,
            Self::Pager { offset } => Self::Pager { offset: offset.saturating_add(bytes) },
            Self::Image { offset } => Self::Image { offset: offset.saturating_add(bytes) },
            Self::Packed { offset, image } => Self::Packed {
                offset: offset.saturating_add(bytes),
                image: image.saturating_add(bytes),
            },
            Self::Extent { offset } => Self::Extent { offset: offset.saturating_add(bytes) },
            Self::Copy { offset } => Self::Copy { offset: offset.saturating_add(bytes) },
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Zero => f.write_str("zero"),
            Self::Pager { offset } => write!(f, "pager, image at {offset:#x}"),
            Self::Image { offset } => write!(f, "image at {offset:#x}"),
            Self::Packed { offset, image } => {
                write!(f, "packed file at {offset:#x} (image at {image:#x})")
            }
            Self::Extent { offset } => write!(f, "pool extent at {offset:#x}"),
            Self::Copy { offset } => write!(f, "copy at {offset:#x}"),
        }
    }
}

/// How VMs share the memory of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Sharing {
    /// Every VM of the snapshot maps the same memory read-only: the monitor copies the chunk of 2
    /// MiB that a VM is about to write. For media that the kernel cannot map privately.
    Shared,
    /// Every VM of the snapshot maps the same memory; the kernel copies a page that a VM writes.
    PrivateCow,
    /// Only this VM maps the memory.
    Exclusive,
}

impl fmt::Display for Sharing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Shared => "shared",
            Self::PrivateCow => "private copy-on-write",
            Self::Exclusive => "exclusive",
        })
    }
}

/// The granule in which the host's page tables can map a range: its guest addresses and its offsets
/// in the source are multiples of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Leaf {
    /// 4 KiB.
    #[serde(rename = "4KiB")]
    Size4K,
    /// 2 MiB.
    #[serde(rename = "2MiB")]
    Size2M,
    /// 1 GiB.
    #[serde(rename = "1GiB")]
    Size1G,
}

impl Leaf {
    /// Its size in bytes.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Size4K => 4 << 10,
            Self::Size2M => 2 << 20,
            Self::Size1G => 1 << 30,
        }
    }
}

impl fmt::Display for Leaf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Size4K => "4 KiB",
            Self::Size2M => "2 MiB",
            Self::Size1G => "1 GiB",
        })
    }
}

/// How the bytes of a range are verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Integrity {
    /// The bytes are verified when they are filled in. This includes zeros: the zero map has a
    /// checksum of its own.
    CheckedOnFill,
    /// The bytes are mapped from a sealed extent that was verified after its pool's medium was
    /// opened and is read-only from then on, or from a replica or a copy of it.
    CheckedAtSeal,
    /// The kernel pages the bytes in from a file that fs-verity protects, and checks each block
    /// when it reads it. A damaged page is never mapped.
    CheckedByKernel,
    /// The kernel pages the bytes in from a file, without verification.
    Unchecked,
}

impl Integrity {
    /// Of bytes that the kernel pages in from a file, which fs-verity may protect.
    pub(crate) fn of_file(protected: bool) -> Self {
        if protected { Self::CheckedByKernel } else { Self::Unchecked }
    }
}

impl fmt::Display for Integrity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::CheckedOnFill => "checked on fill",
            Self::CheckedAtSeal => "checked at seal",
            Self::CheckedByKernel => "checked by the kernel",
            Self::Unchecked => "unchecked",
        })
    }
}

/// What a restore guarantees for one range of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Segment {
    /// The range: multiples of the leaf.
    pub guest: GuestRange,
    /// Where its bytes come from.
    pub source: Source,
    /// How VMs share its memory.
    pub sharing: Sharing,
    /// The granule of the host's page tables.
    pub leaf: Leaf,
    /// How its bytes are verified.
    pub integrity: Integrity,
}

/// Advice to the kernel about the accesses to a layer (`madvise(2)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Advice {
    /// None: the kernel reads ahead by its own rules.
    Normal,
    /// `MADV_RANDOM`: a fault reads one page.
    Random,
    /// `MADV_HUGEPAGE`: a fault on anonymous memory maps 2 MiB of zeros.
    Huge,
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Normal => "normal",
            Self::Random => "random",
            Self::Huge => "huge",
        })
    }
}

/// One mmap, readable and, unless it is shared, writable. Layers are applied in order; a later
/// layer replaces an earlier one where they overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Layer {
    /// The mapped range: whole pages within one region of guest memory.
    pub guest: GuestRange,
    /// What is mapped: `Zero` is anonymous memory, `Image` the image file, `Packed` the packed
    /// file, `Extent` the pool's medium, `Copy` the copy, `Pager` anonymous memory that the pager
    /// serves.
    pub source: Source,
    /// The kind of mapping: `Shared` is a read-only `MAP_SHARED` of a medium; `PrivateCow` is
    /// `MAP_PRIVATE` of a file or medium; `Exclusive` is private anonymous memory, or `MAP_SHARED`
    /// of a replica or a copy, which this VM writes to.
    pub sharing: Sharing,
    /// Advice to the kernel.
    pub advice: Advice,
}

/// When a step runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum When {
    /// From the request on, concurrently: neither the restore nor the response waits for it. The
    /// [loader](crate::loader) runs it.
    AtRequest,
    /// Before the guest runs.
    BeforeResume,
    /// While the guest runs.
    AfterResume,
}

impl fmt::Display for When {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AtRequest => "at the request",
            Self::BeforeResume => "before the resume",
            Self::AfterResume => "after the resume",
        })
    }
}

/// A file that a loader reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LoadFile {
    /// The image.
    Image,
    /// The packed file.
    Packed,
}

impl fmt::Display for LoadFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Image => "image",
            Self::Packed => "packed file",
        })
    }
}

/// What a step does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
#[non_exhaustive]
pub enum Work {
    /// Reads the stored pages of a range of the image into the page cache, by plain reads. Holes
    /// are skipped, because a fault on a hole causes no read.
    Preload {
        /// The range of the image: whole pages.
        image: ImageRange,
    },
    /// Requests a range of a file from the kernel into the page cache, once for all microVMs that
    /// start at the same time. Only [at the request](When::AtRequest).
    Load {
        /// The file.
        file: LoadFile,
        /// The first byte: a multiple of a page.
        offset: u64,
        /// Length in bytes: whole pages.
        len: u64,
    },
    /// Has the kernel read a range of the image into the page cache, without a thread, once the
    /// loader reads a page of it: SnapBPF's prefetch (3.1). The process that starts the microVM
    /// attaches the [program](crate::Prefetch). Only [at the request](When::AtRequest).
    Prefetch {
        /// The range of the image: whole pages.
        image: ImageRange,
    },
    /// Builds the host's page tables of a range in advance: `MADV_POPULATE_READ`, which maps every
    /// page for reading and copies none.
    Index {
        /// The range of guest memory: whole pages within one region.
        guest: GuestRange,
    },
    /// The same for the parts of a range that come from the copy, and for no others.
    IndexCopy {
        /// The range of guest memory: whole pages within one region.
        guest: GuestRange,
    },
    /// Has the kernel copy the [populated](Plan::populated) parts of a range before the guest
    /// writes to them: `MADV_POPULATE_WRITE`. Where it cannot, it does when the guest does.
    Populate {
        /// The range of guest memory: whole pages within one region.
        guest: GuestRange,
    },
    /// Installs all pages of a packed file into memory that the pager serves: one read that
    /// bypasses the page cache, a copy for each run, one wake. Only before the resume.
    Install {
        /// The file, beside the image.
        packed: PackedFile,
    },
}

impl Work {
    /// Whether it reads the image into the page cache while the restore waits.
    pub fn is_preload(&self) -> bool {
        match self {
            Self::Preload { .. } => true,
            Self::Load { .. }
            | Self::Prefetch { .. }
            | Self::Index { .. }
            | Self::IndexCopy { .. }
            | Self::Populate { .. }
            | Self::Install { .. } => false,
        }
    }
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Preload { image } => write!(f, "preload image {image}"),
            Self::Load { file, offset, len } => {
                write!(f, "load {file} {:#x}-{:#x}", offset, offset.saturating_add(*len))
            }
            Self::Prefetch { image } => write!(f, "have the kernel load image {image}"),
            Self::Index { guest } => write!(f, "index guest {guest}"),
            Self::IndexCopy { guest } => write!(f, "index the copy in guest {guest}"),
            Self::Populate { guest } => write!(f, "populate guest {guest}"),
            Self::Install { packed } => write!(f, "install {}", packed.name()),
        }
    }
}

/// One step of a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Step {
    /// When it runs.
    pub when: When,
    /// What it does.
    pub work: Work,
}

impl Step {
    /// Reads pages of the image into the page cache, from the request on. `pages` count from the
    /// image's beginning.
    pub(crate) fn load_image(pages: &Range<u64>) -> Self {
        let (offset, len) = (pages.start * PAGE_SIZE, (pages.end - pages.start) * PAGE_SIZE);
        Self { when: When::AtRequest, work: Work::Load { file: LoadFile::Image, offset, len } }
    }
}

/// How guest memory is restored: a [planner](crate::planners) makes it, [`execute`](crate::execute)
/// carries it out.
///
/// The image holds the regions of guest memory in succession, so each guest page has one offset in
/// the image; [`validate`](Self::validate) requires sources to match it.
///
/// # Examples
///
/// ```
/// use firn_memory::planners::{ImageFacts, PlanInput, parse};
/// use firn_memory::{HostFacts, Sharing};
/// use firn_snapshot::{MemoryLayout, PageSet};
///
/// let layout = MemoryLayout::for_size(4 << 20)?;
/// let plan = parse("firecracker")?.plan(&PlanInput {
///     layout: &layout,
///     image: ImageFacts { len: 4 << 20, stored: 4 << 20, ..ImageFacts::default() },
///     zero_map: &PageSet::new(layout.pages()),
///     profile: None,
///     snapshot: None,
///     copies: None,
///     host: &HostFacts::read()?,
/// })?;
/// plan.validate()?;
/// assert_eq!(plan.segments[0].sharing, Sharing::PrivateCow);
/// assert_eq!(plan.summary().by_source["image"], 4 << 20);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// The planner that made it, with its options: `firecracker:readahead=off`.
    pub planner: String,
    /// The guest memory it restores.
    pub layout: MemoryLayout,
    /// The parts of the image that the copy holds; empty without a copy.
    pub copies: CopyTable,
    /// The parts of private mappings that [`Work::Populate`] copies, ascending.
    pub populated: Vec<GuestRange>,
    /// What the plan guarantees. In ascending order, the segments tile guest memory exactly once.
    pub segments: Vec<Segment>,
    /// The mmaps that realise the segments, in the order in which they are applied.
    pub layers: Vec<Layer>,
    /// The other work, in order: the steps at the request, then those before the resume, then those
    /// after it.
    pub schedule: Vec<Step>,
    /// The [policy](crate::pager::PagerPolicy) of the pager, by name; `None` where no segment has
    /// the pager as its source.
    pub pager: Option<String>,
}

impl Plan {
    /// The largest leaf of its segments.
    #[must_use]
    pub fn largest_leaf(&self) -> Leaf {
        self.segments.iter().map(|segment| segment.leaf).max().unwrap_or(Leaf::Size4K)
    }

    /// The sharing of the plan's extent, if it has one: that of the layer below the copy, of which
    /// the copy and a pager may leave nothing visible.
    pub(crate) fn extent_sharing(&self) -> Option<Sharing> {
        let of_extent = |layer: &&Layer| matches!(layer.source, Source::Extent { .. });
        self.layers.iter().find(of_extent).map(|layer| layer.sharing)
    }
}

#[cfg(test)]
mod tests;
