//! Digests of the image's pages, read chunk by chunk when they are needed.

use std::io;
use std::path::PathBuf;
use std::sync::OnceLock;

use firn_base::{PAGE_SIZE, get_or_try_init};
use thiserror::Error;
use xxhash_rust::xxh3::xxh3_64;

use crate::layout::CHUNK_PAGES;
use crate::read_at::ReadAt;
use crate::section::digests_len;

/// Bytes in a page, for slices.
pub(crate) const PAGE_LEN: usize = 4096;
const _: () = assert!(PAGE_LEN as u64 == PAGE_SIZE);
/// Bytes of one digest.
const DIGEST_LEN: usize = 8;

/// The digests of a snapshot's pages.
///
/// They are stored in one record for each chunk of 2 MiB: an XXH3-64 digest for each page, then a
/// CRC-32 of the chunk's index and those digests. A record is read and checked when a page of its
/// chunk is first requested, and then kept in memory (8 bytes for each page). Several threads may
/// use one value.
#[derive(Debug)]
pub struct Digests {
    file: Box<dyn ReadAt>,
    path: PathBuf,
    /// Offset of the section in the file.
    start: u64,
    pages: u64,
    records: OnceLock<Box<[Record]>>,
}

/// The digests of one chunk's pages, after they were read.
type Record = OnceLock<Box<[u64]>>;

/// Why a check of pages failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DigestError {
    /// A page differs from the frozen one.
    #[error(
        "page {image_page} of the image is damaged: its digest does not match; run firn verify on the \
         snapshot, and freeze again"
    )]
    Mismatch {
        /// The first bad page, by its number in the image.
        image_page: u64,
    },
    /// The record with the digests is damaged.
    #[error("{}: the digests of chunk {chunk} are damaged: their CRC does not match; freeze again", .path.display())]
    DamagedRecord {
        /// The file.
        path: PathBuf,
        /// Number of the chunk of 2 MiB in the image.
        chunk: u64,
    },
    /// The caller's pages are not whole pages of the image.
    #[error(
        "{bytes} bytes from page {image_page} are not whole pages of an image of {pages} pages"
    )]
    OutOfRange {
        /// The first requested page.
        image_page: u64,
        /// Bytes given.
        bytes: usize,
        /// Pages of the image.
        pages: u64,
    },
    /// The operating system returned an error.
    #[error("cannot read the digests in {}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

impl Digests {
    pub(crate) fn new(file: impl ReadAt + 'static, path: PathBuf, start: u64, pages: u64) -> Self {
        Self { file: Box::new(file), path, start, pages, records: OnceLock::new() }
    }

    /// Checks `bytes`, one or more whole pages, against the digests of the image's pages starting
    /// at `image_page`.
    ///
    /// # Errors
    /// [`DigestError::Mismatch`] contains the first bad page; the other variants report why pages
    /// could not be compared.
    pub fn check(&self, image_page: u64, bytes: &[u8]) -> Result<(), DigestError> {
        let out_of_range =
            || DigestError::OutOfRange { image_page, bytes: bytes.len(), pages: self.pages };
        let count = u64::try_from(bytes.len() / PAGE_LEN).map_err(|_| out_of_range())?;
        let end = image_page.checked_add(count).filter(|&end| end <= self.pages);
        if !bytes.len().is_multiple_of(PAGE_LEN) || end.is_none() {
            return Err(out_of_range());
        }
        for (image_page, page) in (image_page..).zip(bytes.chunks_exact(PAGE_LEN)) {
            let record = self.record(image_page / CHUNK_PAGES)?;
            if record[index_in_chunk(image_page)] != page_digest(page) {
                return Err(DigestError::Mismatch { image_page });
            }
        }
        Ok(())
    }

    /// The digests of `chunk`'s pages; `chunk` must be within the image.
    fn record(&self, chunk: u64) -> Result<&[u64], DigestError> {
        let chunks = usize::try_from(self.pages.div_ceil(CHUNK_PAGES)).unwrap_or(usize::MAX);
        let records = self.records.get_or_init(|| (0..chunks).map(|_| Record::new()).collect());
        let slot = &records[usize::try_from(chunk).unwrap_or(usize::MAX)];
        Ok(get_or_try_init(slot, || self.read_record(chunk))?)
    }

    /// Reads and checks the record of `chunk`, which must be within the image, without keeping it.
    pub(crate) fn read_record(&self, chunk: u64) -> Result<Box<[u64]>, DigestError> {
        let first_page = chunk * CHUNK_PAGES;
        let pages = (self.pages - first_page).min(CHUNK_PAGES);
        let mut bytes = vec![0; usize::try_from(digests_len(pages)).unwrap_or(usize::MAX)];
        self.file
            .read_exact_at(&mut bytes, self.start + digests_len(first_page))
            .map_err(|source| DigestError::Io { path: self.path.clone(), source })?;
        let (digests, crc) = bytes.split_at(bytes.len() - 4);
        if record_crc(chunk, digests).to_le_bytes() != crc {
            return Err(DigestError::DamagedRecord { path: self.path.clone(), chunk });
        }
        let digests = digests.chunks_exact(DIGEST_LEN).map(|bytes| {
            let mut digest = [0; DIGEST_LEN];
            digest.copy_from_slice(bytes);
            u64::from_le_bytes(digest)
        });
        Ok(digests.collect())
    }
}

/// Appends the record of chunk number `chunk`.
pub(crate) fn append_record(section: &mut Vec<u8>, chunk: u64, digests: &[u64]) {
    let start = section.len();
    section.extend(digests.iter().flat_map(|digest| digest.to_le_bytes()));
    let crc = record_crc(chunk, &section[start..]);
    section.extend(crc.to_le_bytes());
}

/// Digest of one page.
pub(crate) fn page_digest(page: &[u8]) -> u64 {
    xxh3_64(page)
}

/// Index of an image page within its chunk.
pub(crate) fn index_in_chunk(image_page: u64) -> usize {
    usize::try_from(image_page % CHUNK_PAGES).unwrap_or(usize::MAX)
}

/// The CRC covers the chunk's index, so a record in the wrong place is detected.
fn record_crc(chunk: u64, digests: &[u8]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(&chunk.to_le_bytes());
    crc.update(digests);
    crc.finalize()
}
