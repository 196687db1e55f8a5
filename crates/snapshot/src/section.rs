//! The sections of `snapshot.firn`, and the versions of the format.

use std::fmt;

use firn_base::PAGE_SIZE;

use crate::layout::{CHUNK_PAGES, MAX_MEMORY};

/// Version of the container: the header, the manifest, the zero map, the digests and the image.
pub const CONTAINER_VERSION: u32 = 2;
/// The previous version: a manifest without its last part. It is written where that part is empty.
pub(crate) const CONTAINER_VERSION_UNPROTECTED: u32 = 1;
/// Version of the profile section.
pub const PROFILE_VERSION: u32 = 3;
/// The previous version: a profile without its last part.
pub(crate) const PROFILE_VERSION_WITHOUT_LEAVES: u32 = 2;
/// The version of an empty profile section: nothing was recorded yet.
pub(crate) const NO_PROFILE_VERSION: u32 = 1;

/// Maximum length of a header of any version. It limits what is read before the CRC is checked.
pub(crate) const MAX_HEADER_LEN: usize = 4096;
/// A part of `snapshot.firn`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Section {
    /// Versions, architecture, and the table of the sections.
    Header,
    /// The [`crate::Manifest`].
    Manifest,
    /// State of vCPUs and devices, opaque to this crate.
    MachineState,
    /// Which pages of the image are zero.
    ZeroMap,
    /// What earlier runs touched.
    Profile,
    /// A digest for each page of the image.
    Digests,
}

impl Section {
    /// The sections after the header, in the order of table and file.
    pub(crate) const TABLE: [Self; 5] =
        [Self::Manifest, Self::MachineState, Self::ZeroMap, Self::Profile, Self::Digests];

    /// Name in the section table.
    pub(crate) fn tag(self) -> [u8; 8] {
        *match self {
            Self::Header => b"header\0\0",
            Self::Manifest => b"manifest",
            Self::MachineState => b"machine\0",
            Self::ZeroMap => b"zeromap\0",
            Self::Profile => b"profile\0",
            Self::Digests => b"digests\0",
        }
    }

    /// Maximum length of the section in bytes. It limits what a reader allocates for a hostile
    /// file.
    pub(crate) const fn max_len(self) -> u64 {
        match self {
            Self::Header => MAX_HEADER_LEN as u64,
            Self::Manifest => 1 << 20,
            Self::MachineState => 64 << 20,
            Self::ZeroMap => MAX_MEMORY / PAGE_SIZE / 8,
            Self::Profile => 64 << 20,
            Self::Digests => digests_len(MAX_MEMORY / PAGE_SIZE),
        }
    }
}

impl fmt::Display for Section {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Header => "header",
            Self::Manifest => "manifest",
            Self::MachineState => "machine state",
            Self::ZeroMap => "zero map",
            Self::Profile => "profile",
            Self::Digests => "digests",
        })
    }
}

/// Length in bytes of the digests of `pages` pages: 8 bytes for a page, 4 for each chunk's CRC.
pub(crate) const fn digests_len(pages: u64) -> u64 {
    pages * 8 + pages.div_ceil(CHUNK_PAGES) * 4
}
