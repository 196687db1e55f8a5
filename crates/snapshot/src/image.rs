//! Writing an image in one pass: finds the zero pages and writes the others.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

use firn_base::PAGE_SIZE;
use rustix::fs::fstatvfs;

use crate::digests::{PAGE_LEN, append_record, page_digest};
use crate::freeze_error::FreezeError;
use crate::layout::{CHUNK_SIZE, MemoryLayout};
use crate::manifest::{ImageInfo, ImageKind};
use crate::page_set::PageSet;
use crate::section::digests_len;

/// Guest memory, to be frozen. The guest must not run meanwhile.
pub trait PageSource {
    /// The layout of guest memory. It must not change during the freeze.
    fn layout(&self) -> &MemoryLayout;

    /// The guest memory at `image_offset`, a multiple of 2 MiB, for `buf.len()` bytes: a chunk, or
    /// the rest at the image's end. If a region does not end at a multiple of 2 MiB of the image, a
    /// chunk spans two regions.
    ///
    /// A source that has the bytes in memory returns a reference to them. Another source fills
    /// `buf` and returns it. A source that knows that the chunk was never touched returns
    /// [`Chunk::Zero`].
    ///
    /// # Errors
    /// Any error of reading the memory; it ends the freeze.
    fn chunk<'a>(&'a mut self, image_offset: u64, buf: &'a mut [u8]) -> io::Result<Chunk<'a>>;
}

/// The content of one chunk of a [`PageSource`].
#[derive(Debug, Clone, Copy)]
pub enum Chunk<'a> {
    /// All bytes are 0.
    Zero,
    /// The requested bytes.
    Bytes(&'a [u8]),
}

/// The result of writing an image.
#[derive(Debug)]
pub(crate) struct WrittenImage {
    pub(crate) layout: MemoryLayout,
    pub(crate) info: ImageInfo,
    pub(crate) zero_map: PageSet,
    /// The digests section.
    pub(crate) digests: Vec<u8>,
}

/// A file that is written in runs, with holes between them.
///
/// After the file system is full it only counts bytes, so that the error can report the total size.
#[derive(Debug)]
pub(crate) struct SparseFile {
    file: File,
    path: PathBuf,
    needed: u64,
    full: bool,
}

impl SparseFile {
    /// Takes an empty file and gives it its length, without data.
    pub(crate) fn new(file: File, path: PathBuf, len: u64) -> Result<Self, FreezeError> {
        file.set_len(len).map_err(|source| FreezeError::Io {
            path: path.clone(),
            action: "extend",
            source,
        })?;
        Ok(Self { file, path, needed: 0, full: false })
    }

    /// Writes `bytes` at `offset`.
    pub(crate) fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), FreezeError> {
        self.needed += u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        if self.full {
            return Ok(());
        }
        match self.file.write_all_at(bytes, offset) {
            Err(error) if is_full(&error) => self.full = true,
            Err(source) => return Err(self.io_error("write", source)),
            Ok(()) => {}
        }
        Ok(())
    }

    /// Finishes the file. It returns an error if the file system was full.
    pub(crate) fn finish(self) -> Result<StoredFile, FreezeError> {
        if self.full {
            return Err(no_space(&self.file, self.path, self.needed));
        }
        Ok(StoredFile { file: self.file, path: self.path, written: self.needed })
    }

    fn io_error(&self, action: &'static str, source: io::Error) -> FreezeError {
        FreezeError::Io { path: self.path.clone(), action, source }
    }
}

/// A file that is written but not synced.
#[derive(Debug)]
pub(crate) struct StoredFile {
    pub(crate) file: File,
    pub(crate) path: PathBuf,
    /// Bytes written, without holes.
    pub(crate) written: u64,
}

impl StoredFile {
    /// Syncs the file and returns the bytes that it occupies on the medium.
    pub(crate) fn sync(&self) -> Result<u64, FreezeError> {
        let result = self.file.sync_all().and_then(|()| self.file.metadata());
        match result {
            Ok(metadata) => Ok(metadata.blocks() * 512),
            Err(error) if is_full(&error) => {
                Err(no_space(&self.file, self.path.clone(), self.written))
            }
            Err(source) => Err(FreezeError::Io { path: self.path.clone(), action: "sync", source }),
        }
    }
}

/// The destination of an image.
pub(crate) trait ImageSink {
    /// Writes bytes of the image at `offset`.
    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), FreezeError>;
}

impl ImageSink for SparseFile {
    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), FreezeError> {
        Self::write(self, offset, bytes)
    }
}

/// Streams guest memory into `out`, which has the layout's length, and computes its zero map and
/// digests.
pub(crate) fn write_image(
    out: &mut impl ImageSink,
    source: &mut dyn PageSource,
    kind: ImageKind,
) -> Result<WrittenImage, FreezeError> {
    let layout = source.layout().clone();
    let mut zero_map = PageSet::new(layout.pages());
    let capacity = usize::try_from(digests_len(layout.pages())).unwrap_or(usize::MAX);
    let mut digests = Vec::with_capacity(capacity);
    let chunk_len = usize::try_from(CHUNK_SIZE).unwrap_or(usize::MAX);
    let mut buf = vec![0; chunk_len];
    let zero_chunk = vec![0; if kind == ImageKind::Dense { chunk_len } else { 0 }];
    let zero_digest = page_digest(&[0; PAGE_LEN]);
    let mut record = Vec::new();
    for chunk in 0..layout.chunks() {
        let offset = chunk * CHUNK_SIZE;
        let first_page = offset / PAGE_SIZE;
        let expected =
            usize::try_from(CHUNK_SIZE.min(layout.total_bytes() - offset)).unwrap_or(usize::MAX);
        record.clear();
        record.resize(expected / PAGE_LEN, zero_digest);
        let bytes = source
            .chunk(offset, &mut buf[..expected])
            .map_err(|source| FreezeError::Memory { image_offset: offset, source })?;
        match bytes {
            Chunk::Zero => {
                let pages = u64::try_from(record.len()).unwrap_or(u64::MAX);
                zero_map.insert_range(first_page..first_page + pages);
                if kind == ImageKind::Dense {
                    out.write(offset, &zero_chunk[..expected])?;
                }
            }
            Chunk::Bytes(bytes) if bytes.len() == expected => {
                write_nonzero(out, offset, bytes, |index, page| {
                    let zero = is_zero(page);
                    if zero {
                        zero_map.insert(first_page + u64::try_from(index).unwrap_or(u64::MAX));
                    } else {
                        record[index] = page_digest(page);
                    }
                    zero && kind == ImageKind::Sparse
                })?;
            }
            Chunk::Bytes(bytes) => {
                let (image_offset, actual) = (offset, bytes.len());
                return Err(FreezeError::ChunkLength { image_offset, expected, actual });
            }
        }
        append_record(&mut digests, chunk, &record);
    }
    let stored_pages = match kind {
        ImageKind::Sparse => layout.pages() - zero_map.count(),
        ImageKind::Dense => layout.pages(),
    };
    let info = ImageInfo { kind, stored_pages };
    Ok(WrittenImage { layout, info, zero_map, digests })
}

/// Writes the pages of `bytes` (4 KiB each, the last may be short) for which `is_zero` is false,
/// adjacent pages at once.
pub(crate) fn write_nonzero(
    out: &mut impl ImageSink,
    offset: u64,
    bytes: &[u8],
    mut is_zero: impl FnMut(usize, &[u8]) -> bool,
) -> Result<(), FreezeError> {
    let at = |start: usize| offset + u64::try_from(start).unwrap_or(u64::MAX);
    let mut run_start = 0;
    for (index, page) in bytes.chunks(PAGE_LEN).enumerate() {
        let start = index * PAGE_LEN;
        if is_zero(index, page) {
            if run_start < start {
                out.write(at(run_start), &bytes[run_start..start])?;
            }
            run_start = start + page.len();
        }
    }
    if run_start < bytes.len() {
        out.write(at(run_start), &bytes[run_start..])?;
    }
    Ok(())
}

/// Whether all bytes are 0. It compares blocks of 64 bytes, so that the compiler uses vector
/// instructions and the loop stops early.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    let (blocks, rest) = bytes.as_chunks::<64>();
    blocks.iter().all(|block| block.iter().fold(0, |any, byte| any | byte) == 0)
        && rest.iter().all(|&byte| byte == 0)
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// The space that was available for `file` is the free space plus what the file itself occupies.
fn no_space(file: &File, path: PathBuf, needed: u64) -> FreezeError {
    let free = fstatvfs(file).map_or(0, |stat| stat.f_bavail.saturating_mul(stat.f_frsize));
    let taken = file.metadata().map_or(0, |metadata| metadata.blocks() * 512);
    FreezeError::NoSpace { path, needed, available: free.saturating_add(taken) }
}

#[cfg(test)]
#[path = "image_tests.rs"]
mod tests;
