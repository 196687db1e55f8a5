//! Decoding the sections of a container.

use std::path::Path;

use crate::container::Header;
use crate::error::OpenError;
use crate::manifest::{ImageKind, Manifest};
use crate::page_set::PageSet;
use crate::profile::Profile;
use crate::section::{CONTAINER_VERSION_UNPROTECTED, Section, digests_len};

/// The postcard encoding of a missing or empty part.
pub(crate) const EMPTY: u8 = 0;

/// Decodes the zero map of an image of `pages` pages.
pub(crate) fn decode_zero_map(bytes: &[u8], pages: u64, path: &Path) -> Result<PageSet, OpenError> {
    PageSet::from_bytes(bytes, pages).ok_or_else(|| OpenError::Malformed {
        path: path.into(),
        section: Section::ZeroMap,
        reason: "it does not have one bit for each page of guest memory",
    })
}

/// Decodes a manifest of a container version, whose CRC was checked.
pub(crate) fn decode_manifest(
    mut bytes: Vec<u8>,
    version: u32,
    path: &Path,
) -> Result<Manifest, OpenError> {
    if version == CONTAINER_VERSION_UNPROTECTED {
        bytes.push(EMPTY);
    }
    match postcard::take_from_bytes(&bytes) {
        Ok((manifest, [])) => Ok(manifest),
        _ => Err(OpenError::Malformed {
            path: path.into(),
            section: Section::Manifest,
            reason: "it does not decode",
        }),
    }
}

/// Decodes a profile whose CRC was checked, and checks that it matches the manifest.
pub(crate) fn decode_profile(
    bytes: &[u8],
    manifest: &Manifest,
    path: &Path,
) -> Result<Profile, OpenError> {
    let Ok((profile, [])) = postcard::take_from_bytes::<Profile>(bytes) else {
        let (section, reason) = (Section::Profile, "it does not decode");
        return Err(OpenError::Malformed { path: path.into(), section, reason });
    };
    profile
        .check(manifest.description.id, manifest.layout.pages())
        .map_err(|source| OpenError::Profile { path: path.into(), source })?;
    Ok(profile)
}

/// Checks that the sections describe the same image.
pub(crate) fn check_consistent(
    header: &Header,
    manifest: &Manifest,
    zero_map: &PageSet,
    path: &Path,
) -> Result<(), OpenError> {
    let malformed =
        |section, reason| Err(OpenError::Malformed { path: path.into(), section, reason });
    let pages = manifest.layout.pages();
    let stored = match manifest.image.kind {
        ImageKind::Sparse => pages - zero_map.count(),
        ImageKind::Dense => pages,
    };
    if manifest.image.stored_pages != stored {
        return malformed(Section::Manifest, "its count of stored pages contradicts the zero map");
    }
    if header.entry(Section::Digests).len != digests_len(pages) {
        return malformed(Section::Digests, "its length is not that of one digest for each page");
    }
    Ok(())
}
