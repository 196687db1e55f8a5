//! `snapshot.firn`: the header with versions, lengths and CRCs, followed by the sections.
//!
//! The byte layout is in `docs/reference/snapshot-format.md`.

use std::ops::Range;
use std::path::Path;

use crate::error::OpenError;
use crate::freeze_error::FreezeError;
use crate::read_at::ReadAt;
use crate::section::{
    CONTAINER_VERSION, CONTAINER_VERSION_UNPROTECTED, MAX_HEADER_LEN, NO_PROFILE_VERSION,
    PROFILE_VERSION, Section,
};

/// First bytes of `snapshot.firn`, in every version.
pub(crate) const MAGIC: [u8; 16] = *b"firn snapshot\n\0\0";
/// Bytes with the same meaning in every version: magic, container version, header length.
const PREAMBLE_LEN: usize = 24;

/// Bytes of the CRC-32 that ends the header.
const CRC_LEN: usize = 4;
/// Bytes of one entry of the section table: name (8), version (4), CRC-32 (4), length (8).
const ENTRY_LEN: usize = 24;
/// Offset of the section table: preamble, architecture (4), count of sections (4).
const TABLE_START: usize = PREAMBLE_LEN + 8;
/// Length of the header of this version.
pub(crate) const HEADER_LEN: usize = TABLE_START + Section::TABLE.len() * ENTRY_LEN + CRC_LEN;

/// Architecture of this host, as ELF's `e_machine` names it; 0 on architectures that firn does not
/// support.
pub(crate) const HOST_ARCHITECTURE: u32 = if cfg!(target_arch = "x86_64") {
    62
} else if cfg!(target_arch = "aarch64") {
    183
} else {
    0
};

/// One entry of the section table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) section: Section,
    pub(crate) version: u32,
    pub(crate) crc: u32,
    pub(crate) len: u64,
}

impl Entry {
    /// The entry for a section of one version with these bytes.
    pub(crate) fn of(section: Section, version: u32, bytes: &[u8]) -> Self {
        let len = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        Self { section, version, crc: crc32fast::hash(bytes), len }
    }
}

/// The decoded header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) version: u32,
    pub(crate) architecture: u32,
    pub(crate) entries: [Entry; Section::TABLE.len()],
}

impl Header {
    /// The header's bytes.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER_LEN);
        bytes.extend(MAGIC);
        bytes.extend(self.version.to_le_bytes());
        bytes.extend(u32::try_from(HEADER_LEN).unwrap_or(u32::MAX).to_le_bytes());
        bytes.extend(self.architecture.to_le_bytes());
        bytes.extend(u32::try_from(self.entries.len()).unwrap_or(u32::MAX).to_le_bytes());
        for entry in &self.entries {
            bytes.extend(entry.section.tag());
            bytes.extend(entry.version.to_le_bytes());
            bytes.extend(entry.crc.to_le_bytes());
            bytes.extend(entry.len.to_le_bytes());
        }
        let crc = crc32fast::hash(&bytes);
        bytes.extend(crc.to_le_bytes());
        bytes
    }

    /// The header of sections with these versions and bytes, in the order of the section table. The
    /// manifest has the container's version.
    pub(crate) fn of(
        sections: &[(Section, u32, &[u8]); Section::TABLE.len()],
    ) -> Result<Self, FreezeError> {
        for &(section, _, bytes) in sections {
            let (len, max) = (bytes.len(), section.max_len());
            if u64::try_from(len).map_or(true, |len| len > max) {
                return Err(FreezeError::TooLarge { section, len, max });
            }
        }
        let entries = sections.map(|(section, version, bytes)| Entry::of(section, version, bytes));
        Ok(Self { version: entries[0].version, architecture: HOST_ARCHITECTURE, entries })
    }

    /// Replaces the entry of a section.
    pub(crate) fn set(&mut self, entry: Entry) -> Result<(), FreezeError> {
        let (section, max) = (entry.section, entry.section.max_len());
        if entry.len > max {
            let len = usize::try_from(entry.len).unwrap_or(usize::MAX);
            return Err(FreezeError::TooLarge { section, len, max });
        }
        for old in self.entries.iter_mut().filter(|old| old.section == section) {
            *old = entry;
        }
        Ok(())
    }

    /// Sets the container's version, which its own sections have too.
    pub(crate) fn set_version(&mut self, version: u32) {
        self.version = version;
        for entry in &mut self.entries {
            match entry.section {
                Section::MachineState | Section::Profile => {}
                Section::Header | Section::Manifest | Section::ZeroMap | Section::Digests => {
                    entry.version = version;
                }
            }
        }
    }

    /// Reads the header of `file` and checks that it is consistent and matches the file's length.
    pub(crate) fn read(file: &dyn ReadAt, path: &Path) -> Result<Self, OpenError> {
        let io = |source| OpenError::Io { path: path.into(), action: "read", source };
        let file_len = file.size().map_err(io)?;
        let present = usize::try_from(file_len).unwrap_or(usize::MAX).min(MAX_HEADER_LEN);
        let mut bytes = vec![0; present];
        file.read_exact_at(&mut bytes, 0).map_err(io)?;
        let header = Self::decode(&bytes, path)?;
        let ends =
            header.entries.iter().map(|entry| (entry.section, header.range(entry.section).end));
        for (section, end) in ends {
            if file_len < end {
                return Err(OpenError::Truncated {
                    path: path.into(),
                    section: Some(section),
                    expected: header.file_len(),
                    actual: file_len,
                });
            }
        }
        if file_len > header.file_len() {
            return Err(OpenError::TooLong {
                path: path.into(),
                expected: header.file_len(),
                actual: file_len,
            });
        }
        Ok(header)
    }

    /// Decodes the header at the start of `bytes`, which are the file's first 4096 (or fewer).
    fn decode(bytes: &[u8], path: &Path) -> Result<Self, OpenError> {
        let damaged = || OpenError::Damaged { path: path.into(), section: Section::Header };
        let truncated = |expected: usize| OpenError::Truncated {
            path: path.into(),
            section: Some(Section::Header),
            expected: u64::try_from(expected).unwrap_or(u64::MAX),
            actual: u64::try_from(bytes.len()).unwrap_or(u64::MAX),
        };
        let magic = &bytes[..bytes.len().min(MAGIC.len())];
        if magic != &MAGIC[..magic.len()] {
            return Err(OpenError::NotASnapshot {
                path: path.into(),
                reason: "its snapshot.firn does not start with \"firn snapshot\"",
            });
        }
        if bytes.len() < PREAMBLE_LEN {
            return Err(truncated(HEADER_LEN));
        }
        let version = u32_at(bytes, MAGIC.len());
        let header_len = usize::try_from(u32_at(bytes, MAGIC.len() + 4)).unwrap_or(usize::MAX);
        if !(PREAMBLE_LEN + CRC_LEN..=MAX_HEADER_LEN).contains(&header_len) {
            return Err(damaged());
        }
        if bytes.len() < header_len {
            return Err(truncated(header_len));
        }
        let body = header_len - CRC_LEN;
        if crc32fast::hash(&bytes[..body]) != u32_at(bytes, body) {
            return Err(damaged());
        }
        if !(CONTAINER_VERSION_UNPROTECTED..=CONTAINER_VERSION).contains(&version) {
            return Err(OpenError::ContainerVersion {
                path: path.into(),
                found: version,
                supported: CONTAINER_VERSION,
            });
        }
        Self::decode_table(&bytes[..body], version, path)
    }

    /// Decodes what follows the preamble of a header, without its CRC.
    fn decode_table(bytes: &[u8], container: u32, path: &Path) -> Result<Self, OpenError> {
        let malformed =
            |reason| OpenError::Malformed { path: path.into(), section: Section::Header, reason };
        if bytes.len() != HEADER_LEN - CRC_LEN {
            return Err(malformed("its length is not that of a header of its version"));
        }
        let architecture = u32_at(bytes, PREAMBLE_LEN);
        if architecture != HOST_ARCHITECTURE {
            return Err(OpenError::Architecture {
                path: path.into(),
                found: architecture,
                host: HOST_ARCHITECTURE,
            });
        }
        if usize::try_from(u32_at(bytes, PREAMBLE_LEN + 4)) != Ok(Section::TABLE.len()) {
            return Err(malformed("it does not list the five sections of its version"));
        }
        let mut entries =
            Section::TABLE.map(|section| Entry { section, version: 0, crc: 0, len: 0 });
        for (entry, bytes) in entries.iter_mut().zip(bytes[TABLE_START..].chunks_exact(ENTRY_LEN)) {
            if bytes[..8] != entry.section.tag() {
                return Err(malformed("its section table is not in the order of its version"));
            }
            entry.version = u32_at(bytes, 8);
            entry.crc = u32_at(bytes, 12);
            entry.len = u64_at(bytes, 16);
            let (section, version) = (entry.section, entry.version);
            match section {
                Section::MachineState => {}
                Section::Profile if !(NO_PROFILE_VERSION..=PROFILE_VERSION).contains(&version) => {
                    return Err(OpenError::ProfileVersion {
                        path: path.into(),
                        found: version,
                        supported: PROFILE_VERSION,
                    });
                }
                Section::Profile => {}
                _ if version != container => {
                    return Err(malformed(
                        "a section of the container has another version than it",
                    ));
                }
                _ => {}
            }
            let max = match section {
                Section::Profile if version == NO_PROFILE_VERSION => 0,
                section => section.max_len(),
            };
            if entry.len > max {
                let path = path.into();
                return Err(OpenError::TooLarge { path, section, len: entry.len, max });
            }
        }
        Ok(Self { version: container, architecture, entries })
    }

    /// The table's entry for `section`, which is not the header.
    pub(crate) fn entry(&self, section: Section) -> &Entry {
        let index = Section::TABLE.iter().position(|&other| other == section);
        &self.entries[index.unwrap_or_default()]
    }

    /// The range of `section` in the file. The sections follow the header and each other without
    /// gaps; their lengths are bounded, so the sum cannot overflow.
    pub(crate) fn range(&self, section: Section) -> Range<u64> {
        let mut start = HEADER_LEN as u64;
        for entry in &self.entries {
            if entry.section == section {
                break;
            }
            start += entry.len;
        }
        start..start + self.entry(section).len
    }

    /// Length that the file must have.
    pub(crate) fn file_len(&self) -> u64 {
        self.range(Section::Digests).end
    }

    /// Reads `section` and checks its CRC.
    pub(crate) fn read_section(
        &self,
        file: &dyn ReadAt,
        path: &Path,
        section: Section,
    ) -> Result<Vec<u8>, OpenError> {
        let range = self.range(section);
        let mut bytes = vec![0; usize::try_from(range.end - range.start).unwrap_or(usize::MAX)];
        file.read_exact_at(&mut bytes, range.start).map_err(|source| OpenError::Io {
            path: path.into(),
            action: "read",
            source,
        })?;
        if crc32fast::hash(&bytes) != self.entry(section).crc {
            return Err(OpenError::Damaged { path: path.into(), section });
        }
        Ok(bytes)
    }
}

fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    let mut value = [0; 4];
    value.copy_from_slice(&bytes[offset..offset + 4]);
    u32::from_le_bytes(value)
}

fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    let mut value = [0; 8];
    value.copy_from_slice(&bytes[offset..offset + 8]);
    u64::from_le_bytes(value)
}
