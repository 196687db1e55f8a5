//! Packed files: pages of a snapshot's image in the order in which a restore reads them, beside the image.
//!
//! REAP's working-set file (FaaSnap, 2.5) and FaaSnap's loading-set file (FaaSnap, 4.7) are such files. One begins with a
//! page of header, which says of which snapshot it is and by which profile it was packed, and the table of its runs,
//! under a CRC each; then come the pages, in the table's order. Every page was compared with its digest when it was packed.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use firn_base::{PAGE_SIZE, PageRange};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use uuid::Uuid;
use xxhash_rust::xxh3::xxh3_64;

use crate::attach::{AttachError, set_packed};
use crate::digests::{DigestError, Digests, PAGE_LEN};
use crate::error::OpenError;
use crate::profile::{ProfileError, check_runs};
use crate::snapshot::Snapshot;

const MAGIC: [u8; 8] = *b"firnpack";
const VERSION: u32 = 1;
/// Bytes of the header that hold something; its CRC follows.
const HEADER: usize = 56;
/// Bytes of a run in the table: first page and number of pages.
const ENTRY: usize = 16;
/// Most bytes copied at once.
const COPY: u64 = 1 << 20;

/// A file that is packed from a snapshot's image by its profile, so that it can be read in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PackedFile {
    /// REAP's working-set file (FaaSnap, 2.5; SnapBPF, 2.1).
    WorkingSet,
    /// FaaSnap's loading-set file (FaaSnap, 4.7).
    LoadingSet,
    /// Faast's working-set file: REAP's without the pages that the guest's allocator held free (SnapBPF, 2.1).
    UsedWorkingSet,
}

impl PackedFile {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::WorkingSet, Self::LoadingSet, Self::UsedWorkingSet];

    /// Its place among all kinds.
    pub(crate) const fn index(self) -> usize {
        match self {
            Self::WorkingSet => 0,
            Self::LoadingSet => 1,
            Self::UsedWorkingSet => 2,
        }
    }

    /// Its name in the snapshot's directory.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::WorkingSet => "working-set.img",
            Self::LoadingSet => "loading-set.img",
            Self::UsedWorkingSet => "working-set-used.img",
        }
    }

    const fn code(self) -> u32 {
        match self {
            Self::WorkingSet => 1,
            Self::LoadingSet => 2,
            Self::UsedWorkingSet => 3,
        }
    }
}

/// Pages of the image that lie behind each other in a packed file, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackedRun {
    /// Which image pages they are.
    pub run: PageRange,
    /// Where the first of them lies in the packed file, in bytes: a multiple of a page.
    pub offset: u64,
}

/// An open packed file whose header and table were checked. Shared references may be used by many threads.
#[derive(Debug)]
pub struct Packed {
    file: File,
    path: PathBuf,
    recipe: u64,
    runs: Vec<PackedRun>,
    data: Range<u64>,
}

/// Why a packed file is refused. The snapshot beside it is not touched by that.
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
        /// Why.
        source: io::Error,
    },
    /// It is no packed file, of another version, or damaged.
    #[error("{} cannot be used: {reason}; pack it anew", .path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// It was packed of another snapshot.
    #[error("{} was packed of snapshot {found}, this one is {expected}; pack it anew", .path.display())]
    OtherSnapshot {
        /// The file.
        path: PathBuf,
        /// The snapshot that it names.
        found: Uuid,
        /// The snapshot beside it.
        expected: Uuid,
    },
    /// Its table breaks a rule.
    #[error("{} has a wrong table; pack it anew", .path.display())]
    Table {
        /// The file.
        path: PathBuf,
        /// The rule.
        source: ProfileError,
    },
    /// It is shorter or longer than its table says.
    #[error("{} has {len} bytes, by its table {expected}; pack it anew", .path.display())]
    Length {
        /// The file.
        path: PathBuf,
        /// Bytes that it has.
        len: u64,
        /// Bytes that it should have.
        expected: u64,
    },
}

/// The number that stands for what a file is packed by: the part of the profile, and every option that decides what goes in.
///
/// # Errors
/// Never for the types of a profile.
pub fn recipe_of(by: &impl Serialize) -> Result<u64, postcard::Error> {
    Ok(xxh3_64(&postcard::to_stdvec(by)?))
}

impl Packed {
    /// Checks a file that was opened beside a snapshot with this id, whose image has `pages` pages.
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
            return Err(malformed("it is no packed file of firn"));
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
        // No page is in it twice, so there are no more runs than pages: that bounds what is read.
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
        Ok(Self { file, path, recipe, runs, data: start..expected })
    }

    /// The file, open for reading. It is never written again.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Its path, for messages.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it was packed by, by [`recipe_of`].
    #[must_use]
    pub fn recipe(&self) -> u64 {
        self.recipe
    }

    /// The runs, in the order in which they lie in the file.
    #[must_use]
    pub fn runs(&self) -> &[PackedRun] {
        &self.runs
    }

    /// The bytes of the file that hold pages.
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

    /// Whether `len` bytes at `offset` of the file (both whole pages) are the image's at `image_offset`.
    #[must_use]
    pub fn holds(&self, offset: u64, image_offset: u64, len: u64) -> bool {
        let index = self.runs.partition_point(|packed| packed.offset <= offset);
        let Some(packed) = index.checked_sub(1).map(|index| self.runs[index]) else { return false };
        let inside = offset - packed.offset;
        let fits = inside.checked_add(len).is_some_and(|end| end <= packed.run.pages * PAGE_SIZE);
        fits && packed.run.first * PAGE_SIZE + inside == image_offset
    }
}

/// Packs pages of the image of the snapshot at `path` into a file beside it, in the place of the one it has: these runs,
/// in this order. `recipe` is what [`recipe_of`] gave for what they come from. Every page is compared with its digest.
///
/// # Errors
/// [`AttachError`]; the snapshot is as it was.
pub fn pack(
    path: &Path,
    kind: PackedFile,
    recipe: u64,
    runs: &[PageRange],
) -> Result<(), AttachError> {
    let snapshot = Snapshot::open(path)?;
    let manifest = snapshot.manifest();
    let table = |source| AttachError::Table { path: path.into(), source };
    check_runs("the table", runs.iter(), manifest.layout.pages(), false).map_err(table)?;
    let id = manifest.description.id;
    set_packed(path, kind, |file| write(file, &snapshot, kind, id, recipe, runs))
}

fn write(
    file: &File,
    snapshot: &Snapshot,
    kind: PackedFile,
    id: Uuid,
    recipe: u64,
    runs: &[PageRange],
) -> io::Result<()> {
    let table: Vec<u8> = runs
        .iter()
        .flat_map(|run| [run.first.to_le_bytes(), run.pages.to_le_bytes()].concat())
        .collect();
    let count = runs.len() as u64;
    let mut header = Vec::with_capacity(HEADER + 4);
    header.extend(MAGIC);
    header.extend(VERSION.to_le_bytes());
    header.extend(kind.code().to_le_bytes());
    header.extend(id.as_bytes());
    header.extend(recipe.to_le_bytes());
    header.extend(count.to_le_bytes());
    header.extend(crc32fast::hash(&table).to_le_bytes());
    header.extend([0; 4]);
    header.extend(crc32fast::hash(&header).to_le_bytes());
    file.write_all_at(&header, 0)?;
    file.write_all_at(&table, PAGE_SIZE)?;
    // A file without pages is as long as its header and table say, too.
    file.set_len(data_start(count))?;
    let mut buf = vec![0; usize::try_from(COPY).unwrap_or(usize::MAX)];
    let mut to = data_start(count);
    for run in runs {
        let (mut page, end) = (run.first, run.first + run.pages);
        while page < end {
            let pages = (end - page).min(COPY / PAGE_SIZE);
            let len = pages * PAGE_SIZE;
            let bytes = &mut buf[..usize::try_from(len).unwrap_or(usize::MAX)];
            crate::read_at::ReadAt::read_exact_at(snapshot.image(), bytes, page * PAGE_SIZE)?;
            snapshot.digests().check(page, bytes).map_err(io::Error::other)?;
            file.write_all_at(bytes, to)?;
            to += len;
            page += pages;
        }
    }
    Ok(())
}

/// Where the pages begin behind a table of `runs` runs.
fn data_start(runs: u64) -> u64 {
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

/// Runs that lie behind each other from `start` on.
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
    /// The next `N` bytes; zeros where there are none left.
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let Some((field, rest)) = self.0.split_first_chunk::<N>() else { return [0; N] };
        self.0 = rest;
        *field
    }
}

#[cfg(test)]
#[path = "packed_tests.rs"]
mod tests;
