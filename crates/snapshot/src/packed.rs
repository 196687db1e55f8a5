//! Packed files: pages of a snapshot's image in the order in which a restore reads them.
//!
//! REAP's working-set file (FaaSnap, 2.5) and FaaSnap's loading-set file (FaaSnap, 4.7) are such
//! files. A packed file begins with a header of one page, which identifies the snapshot and the
//! profile, and the table of its runs, each with a CRC. The pages follow in the table's order.
//! Packing compares every page with its digest.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use firn_base::{PAGE_SIZE, PageRange};
use rustix::fs::{OFlags, fcntl_getfl};
use thiserror::Error;
use uuid::Uuid;

use crate::digests::{DigestError, Digests, PAGE_LEN};
use crate::error::OpenError;
use crate::files::PackedFile;
use crate::profile::{ProfileError, check_runs};

pub(crate) const MAGIC: [u8; 8] = *b"firnpack";
pub(crate) const VERSION: u32 = 1;
/// Bytes of the header before its CRC.
pub(crate) const HEADER: usize = 56;
/// Bytes of a run in the table: first page and number of pages.
const ENTRY: usize = 16;
/// Maximum number of bytes copied at once.
pub(crate) const COPY: u64 = 1 << 20;

/// Consecutive image pages that are consecutive in a packed file too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackedRun {
    /// The image pages.
    pub run: PageRange,
    /// Offset of the first page in the packed file, in bytes; a multiple of the page size.
    pub offset: u64,
}

/// An open packed file whose header and table were checked. Several threads may use one value.
#[derive(Debug)]
pub struct Packed {
    file: File,
    /// The same file, open with `O_DIRECT`.
    direct: Option<File>,
    path: PathBuf,
    recipe: u64,
    runs: Vec<PackedRun>,
    data: Range<u64>,
    protected: bool,
}

/// Why a packed file cannot be used. The snapshot itself is not affected.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PackedError {
    /// It cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// It cannot be read.
    #[error("reading {}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The file is not a packed file, has another version, or is damaged.
    #[error("{} cannot be used: {reason}; pack it again", .path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: &'static str,
    },
    /// The file was packed from another snapshot.
    #[error("{} was packed from snapshot {found}, this one is {expected}; pack it again", .path.display())]
    OtherSnapshot {
        /// The file.
        path: PathBuf,
        /// The snapshot that it names.
        found: Uuid,
        /// The snapshot in the same directory.
        expected: Uuid,
    },
    /// The table is invalid.
    #[error("{} has an invalid table; pack it again", .path.display())]
    Table {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: ProfileError,
    },
    /// The length does not match the table.
    #[error("{} has {len} bytes, but its table requires {expected}; pack it again", .path.display())]
    Length {
        /// The file.
        path: PathBuf,
        /// Bytes that it has.
        len: u64,
        /// Bytes that it should have.
        expected: u64,
    },
}

impl Packed {
    /// Checks an open file in the directory of the snapshot with this id, whose image has `pages`
    /// pages.
    pub(crate) fn read(
        file: File,
        path: PathBuf,
        kind: PackedFile,
        id: Uuid,
        pages: u64,
    ) -> Result<Self, PackedError> {
        let read = |source| PackedError::Read { path: path.clone(), source };
        let malformed = |reason| PackedError::Malformed { path: path.clone(), reason };
        let mut header = [0; HEADER + 4];
        let len = file.metadata().map_err(read)?.len();
        if len < PAGE_SIZE {
            return Err(malformed("it is shorter than its header"));
        }
        file.read_exact_at(&mut header, 0).map_err(read)?;
        let mut fields = Fields(&header);
        if fields.take() != MAGIC {
            return Err(malformed("it is not a packed file of firn"));
        }
        if u32::from_le_bytes(fields.take()) != VERSION {
            return Err(malformed("it is of another version"));
        }
        if u32::from_le_bytes(fields.take()) != kind.code() {
            return Err(malformed("it is a packed file of another kind"));
        }
        let found = Uuid::from_bytes(fields.take());
        let recipe = u64::from_le_bytes(fields.take());
        let count = u64::from_le_bytes(fields.take());
        let table_crc = u32::from_le_bytes(fields.take());
        let _reserved: [u8; 4] = fields.take();
        if u32::from_le_bytes(fields.take()) != crc32fast::hash(&header[..HEADER]) {
            return Err(malformed("the CRC of its header is wrong"));
        }
        if found != id {
            return Err(PackedError::OtherSnapshot { path, found, expected: id });
        }
        // No page occurs twice, so there are at most as many runs as pages. This limits what is
        // read.
        let table_len = count.min(pages + 1) * ENTRY as u64;
        if count > pages || len < PAGE_SIZE + table_len {
            return Err(malformed("its table is longer than it can be"));
        }
        let mut table = vec![0; usize::try_from(table_len).unwrap_or(usize::MAX)];
        file.read_exact_at(&mut table, PAGE_SIZE).map_err(read)?;
        if crc32fast::hash(&table) != table_crc {
            return Err(malformed("the CRC of its table is wrong"));
        }
        let start = data_start(count);
        let runs = decode(&table);
        check_runs("the table", runs.iter(), pages, false)
            .map_err(|source| PackedError::Table { path: path.clone(), source })?;
        let expected = start + runs.iter().map(|run| run.pages * PAGE_SIZE).sum::<u64>();
        if len != expected {
            return Err(PackedError::Length { path, len, expected });
        }
        let runs = place(runs, start);
        let data = start..expected;
        Ok(Self { file, direct: None, path, recipe, runs, data, protected: false })
    }

    /// The same, with whether fs-verity protects it.
    pub(crate) fn with_protection(self, protected: bool) -> Self {
        Self { protected, ..self }
    }

    /// The same, with another open file of it, if that bypasses the page cache.
    pub(crate) fn with_again(self, again: &File) -> io::Result<Self> {
        let direct = fcntl_getfl(again)?.contains(OFlags::DIRECT);
        Ok(Self { direct: direct.then(|| again.try_clone()).transpose()?, ..self })
    }

    /// The file, open for reads that bypass the page cache; `None` if it cannot be read so.
    #[must_use]
    pub fn direct(&self) -> Option<&File> {
        self.direct.as_ref()
    }

    /// Whether fs-verity protects it: its digest is the manifest's.
    #[must_use]
    pub fn is_protected(&self) -> bool {
        self.protected
    }

    /// The file, open for reading. It is never written again.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Its path, for error messages.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The recipe that it was packed with, see [`recipe_of`](crate::recipe_of).
    #[must_use]
    pub fn recipe(&self) -> u64 {
        self.recipe
    }

    /// The runs, in file order.
    #[must_use]
    pub fn runs(&self) -> &[PackedRun] {
        &self.runs
    }

    /// The byte range of the pages in the file.
    #[must_use]
    pub fn data(&self) -> Range<u64> {
        self.data.clone()
    }

    /// Compares every page with its digest, and returns the image pages that differ.
    pub(crate) fn damaged(&self, digests: &Digests) -> Result<Vec<u64>, PackedError> {
        let mut damaged = Vec::new();
        let mut buf = vec![0; usize::try_from(COPY).unwrap_or(usize::MAX)];
        for packed in &self.runs {
            for first in packed.run.range().step_by(usize::try_from(COPY / PAGE_SIZE).unwrap_or(1))
            {
                let len = (packed.run.range().end - first).min(COPY / PAGE_SIZE) * PAGE_SIZE;
                let bytes = &mut buf[..usize::try_from(len).unwrap_or(usize::MAX)];
                let offset = packed.offset + (first - packed.run.first) * PAGE_SIZE;
                self.file
                    .read_exact_at(bytes, offset)
                    .map_err(|source| PackedError::Read { path: self.path.clone(), source })?;
                let pages = (first..).zip(bytes.chunks_exact(PAGE_LEN));
                let differs = |(page, bytes): &(u64, &[u8])| {
                    matches!(digests.check(*page, bytes), Err(DigestError::Mismatch { .. }))
                };
                damaged.extend(pages.filter(differs).map(|(page, _)| page));
            }
        }
        Ok(damaged)
    }

    /// Whether `len` bytes at `offset` of the file (multiples of the page size) are the image's
    /// bytes at `image_offset`.
    #[must_use]
    pub fn holds(&self, offset: u64, image_offset: u64, len: u64) -> bool {
        let index = self.runs.partition_point(|packed| packed.offset <= offset);
        let Some(packed) = index.checked_sub(1).map(|index| self.runs[index]) else { return false };
        let inside = offset - packed.offset;
        let fits = inside.checked_add(len).is_some_and(|end| end <= packed.run.pages * PAGE_SIZE);
        fits && packed.run.first * PAGE_SIZE + inside == image_offset
    }
}

/// Offset of the pages after a table of `runs` runs.
pub(crate) fn data_start(runs: u64) -> u64 {
    PAGE_SIZE + (runs * ENTRY as u64).next_multiple_of(PAGE_SIZE)
}

fn decode(table: &[u8]) -> Vec<PageRange> {
    let (entries, _) = table.as_chunks::<ENTRY>();
    let run = |entry: &[u8; ENTRY]| {
        let mut fields = Fields(entry);
        PageRange {
            first: u64::from_le_bytes(fields.take()),
            pages: u64::from_le_bytes(fields.take()),
        }
    };
    entries.iter().map(run).collect()
}

/// Runs that are stored one after the other, starting at `start`.
fn place(runs: Vec<PageRange>, start: u64) -> Vec<PackedRun> {
    let mut offset = start;
    let place = |run: PageRange| {
        let packed = PackedRun { run, offset };
        offset += run.pages * PAGE_SIZE;
        packed
    };
    runs.into_iter().map(place).collect()
}

/// Bytes, field by field.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    /// The next `N` bytes; zeros after the end.
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let Some((field, rest)) = self.0.split_first_chunk::<N>() else { return [0; N] };
        self.0 = rest;
        *field
    }
}

#[cfg(test)]
#[path = "packed_tests.rs"]
mod tests;
