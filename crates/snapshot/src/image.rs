//! Writing an image in one pass: finds the zero pages and writes the others, with a thread for each
//! processor.

use std::io;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use firn_base::num::u64_of;
use firn_base::{PAGE_SIZE, processors};

use crate::digests::{PAGE_LEN, append_record, page_digest};
use crate::freeze_error::FreezeError;
use crate::layout::{CHUNK_SIZE, MemoryLayout};
use crate::manifest::{ImageInfo, ImageKind};
use crate::page_set::PageSet;
use crate::section::digests_len;
use crate::sparse_file::SparseFile;

/// Guest memory, to be frozen. The guest must not run meanwhile. Several threads read it.
pub trait PageSource: Sync {
    /// The layout of guest memory. It must not change during the freeze.
    fn layout(&self) -> &MemoryLayout;

    /// The pages that were written since the last freeze, for [`Target::Written`]; `None` if that
    /// is not known.
    ///
    /// [`Target::Written`]: crate::Target::Written
    fn written(&self) -> Option<&PageSet> {
        None
    }

    /// The guest memory at `image_offset`, a multiple of 2 MiB, for `buf.len()` bytes: a chunk, or
    /// the rest at the image's end. If a region does not end at a multiple of 2 MiB of the image, a
    /// chunk spans two regions.
    ///
    /// A source that has the bytes in memory returns a reference to them. Another source fills
    /// `buf`, which has any content, and returns it.
    ///
    /// # Errors
    /// Any error of reading the memory; it ends the freeze.
    fn chunk<'a>(&'a self, image_offset: u64, buf: &'a mut [u8]) -> io::Result<Chunk<'a>>;
}

/// The content of one chunk of a [`PageSource`].
#[derive(Debug, Clone)]
pub enum Chunk<'a> {
    /// All bytes are 0.
    Zero,
    /// The requested bytes.
    Bytes(&'a [u8]),
    /// The requested bytes, and the pages of them that may have content, as ascending ranges of
    /// pages of this chunk. All other pages are zero, and what the bytes have there means nothing.
    Pages(&'a [u8], Vec<Range<usize>>),
}

/// The result of writing an image.
#[derive(Debug)]
pub(crate) struct WrittenImage {
    pub(crate) layout: MemoryLayout,
    pub(crate) info: ImageInfo,
    pub(crate) zero_map: PageSet,
    /// The digests section.
    pub(crate) digests: Vec<u8>,
    pub(crate) work: ImageWork,
}

/// The work of all threads that wrote an image. The parts of several threads overlap in time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ImageWork {
    /// Time to read guest memory, and to find out which pages were never touched.
    pub(crate) read: Duration,
    /// Time to find zero pages and to compute digests.
    pub(crate) digest: Duration,
    /// Time to write.
    pub(crate) write: Duration,
    /// Zero pages that were written.
    pub(crate) zero_pages_written: u64,
}

impl ImageWork {
    fn add(&mut self, other: &Self) {
        self.read += other.read;
        self.digest += other.digest;
        self.write += other.write;
        self.zero_pages_written += other.zero_pages_written;
    }
}

/// The destination of an image, which several threads write.
pub(crate) trait ImageSink: Sync {
    /// Writes a chunk of `len` bytes: runs of whole pages, each with its offset in the chunk. All
    /// other pages are zero.
    fn write_chunk(&self, offset: u64, len: u64, runs: &[(u64, &[u8])]) -> Result<(), FreezeError>;
}

impl ImageSink for SparseFile {
    fn write_chunk(&self, offset: u64, len: u64, runs: &[(u64, &[u8])]) -> Result<(), FreezeError> {
        for (start, bytes) in runs {
            self.write(offset + start, bytes)?;
        }
        if !runs.is_empty() {
            self.begin_writeback(offset, len);
        }
        Ok(())
    }
}

/// The pages of an image that were written, and that a file does not have yet. What else is in the
/// file stays as it is.
pub(crate) struct WrittenPages<'a> {
    pub(crate) out: SparseFile,
    pub(crate) written: &'a PageSet,
}

impl ImageSink for WrittenPages<'_> {
    /// Zero pages that were written are written as zeros: a hole would leave what was there.
    fn write_chunk(&self, offset: u64, len: u64, runs: &[(u64, &[u8])]) -> Result<(), FreezeError> {
        let (first, end) = (offset / PAGE_SIZE, (offset + len) / PAGE_SIZE);
        let zero = [0; PAGE_LEN];
        let mut any = false;
        for page in self.written.ranges_in(first..end).flatten() {
            let at = page * PAGE_SIZE - offset;
            let run =
                runs.iter().find(|(start, run)| (*start..start + u64_of(run.len())).contains(&at));
            let bytes = run.map_or(&zero[..], |(start, run)| {
                let from = usize::try_from(at - start).unwrap_or(usize::MAX);
                &run[from..from + PAGE_LEN]
            });
            self.out.write(offset + at, bytes)?;
            any = true;
        }
        if any {
            self.out.begin_writeback(offset, len);
        }
        Ok(())
    }
}

/// The largest number of threads: each has a buffer of a chunk.
const MAX_THREADS: usize = 8;

/// The number of threads that write an image.
pub(crate) fn threads() -> usize {
    processors().min(MAX_THREADS)
}

/// Streams guest memory into `out`, which has the layout's length, and computes its zero map and
/// digests. The output does not depend on the number of threads.
pub(crate) fn write_image(
    out: &dyn ImageSink,
    source: &dyn PageSource,
    kind: ImageKind,
) -> Result<WrittenImage, FreezeError> {
    let layout = source.layout().clone();
    let task = Task {
        out,
        source,
        kind,
        layout: &layout,
        next: AtomicU64::new(0),
        failed: AtomicBool::new(false),
    };
    let threads = threads();
    let results = thread::scope(|scope| {
        // Fewer threads do the same work.
        let others: Vec<_> = (1..threads)
            .map_while(|_| {
                let thread = thread::Builder::new().name("freeze".to_owned());
                thread.spawn_scoped(scope, || task.run()).ok()
            })
            .collect();
        let mut results = vec![task.run()];
        results.extend(
            others
                .into_iter()
                .map(|other| other.join().unwrap_or_else(|panic| resume_unwind(panic))),
        );
        results
    });
    let mut work = ImageWork::default();
    let mut chunks = Vec::new();
    let mut first_error: Option<(u64, FreezeError)> = None;
    for result in results {
        work.add(&result.work);
        chunks.extend(result.chunks);
        if let Some((chunk, error)) = result.error
            && first_error.as_ref().is_none_or(|(first, _)| chunk < *first)
        {
            first_error = Some((chunk, error));
        }
    }
    if let Some((_, error)) = first_error {
        return Err(error);
    }
    chunks.sort_unstable_by_key(|chunk| chunk.number);
    let mut zero_map = PageSet::new(layout.pages());
    let capacity = usize::try_from(digests_len(layout.pages())).unwrap_or(usize::MAX);
    let mut digests = Vec::with_capacity(capacity);
    for chunk in chunks {
        chunk.zero.into_iter().for_each(|pages| zero_map.insert_range(pages));
        digests.extend(chunk.record);
    }
    let stored_pages = match kind {
        ImageKind::Sparse => layout.pages() - zero_map.count(),
        ImageKind::Dense => layout.pages(),
    };
    let info = ImageInfo { kind, stored_pages };
    Ok(WrittenImage { layout, info, zero_map, digests, work })
}

/// An image that is being written. Each thread takes the next chunk.
struct Task<'a> {
    out: &'a dyn ImageSink,
    source: &'a dyn PageSource,
    kind: ImageKind,
    layout: &'a MemoryLayout,
    next: AtomicU64,
    failed: AtomicBool,
}

/// What one thread did.
#[derive(Default)]
struct Done {
    chunks: Vec<ChunkDone>,
    work: ImageWork,
    /// The chunk that failed.
    error: Option<(u64, FreezeError)>,
}

/// A chunk that was written.
struct ChunkDone {
    number: u64,
    /// Image pages.
    zero: Vec<Range<u64>>,
    /// The record of digests.
    record: Vec<u8>,
}

impl Task<'_> {
    /// Writes chunks until none is left, or a thread fails.
    fn run(&self) -> Done {
        let chunk_len = usize::try_from(CHUNK_SIZE).unwrap_or(usize::MAX);
        let mut buf = vec![0; chunk_len];
        let zeros = vec![0; if self.kind == ImageKind::Dense { chunk_len } else { 0 }];
        let zero_digest = page_digest(&[0; PAGE_LEN]);
        let mut done = Done::default();
        while !self.failed.load(Ordering::Relaxed) {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            if number >= self.layout.chunks() {
                break;
            }
            match self.write_chunk(number, &mut buf, &zeros, zero_digest, &mut done.work) {
                Ok(chunk) => done.chunks.push(chunk),
                Err(error) => {
                    self.failed.store(true, Ordering::Relaxed);
                    done.error = Some((number, error));
                }
            }
        }
        done
    }

    fn write_chunk(
        &self,
        number: u64,
        buf: &mut [u8],
        zeros: &[u8],
        zero_digest: u64,
        work: &mut ImageWork,
    ) -> Result<ChunkDone, FreezeError> {
        let offset = number * CHUNK_SIZE;
        let len = CHUNK_SIZE.min(self.layout.total_bytes() - offset);
        let expected = usize::try_from(len).unwrap_or(usize::MAX);
        let with_zeros = self.kind == ImageKind::Dense;
        let mut digests = vec![zero_digest; expected / PAGE_LEN];
        let begin = Instant::now();
        let chunk = self
            .source
            .chunk(offset, &mut buf[..expected])
            .map_err(|source| FreezeError::Memory { image_offset: offset, source })?;
        let was_read = Instant::now();
        work.read += was_read - begin;
        let (bytes, content) = match chunk {
            Chunk::Zero => (&zeros[..0], Vec::new()),
            Chunk::Bytes(bytes) => (bytes, std::iter::once(0..digests.len()).collect()),
            Chunk::Pages(bytes, pages) => (bytes, pages),
        };
        if !content.is_empty() && bytes.len() != expected {
            let (image_offset, actual) = (offset, bytes.len());
            return Err(FreezeError::ChunkLength { image_offset, expected, actual });
        }
        // Runs of pages that are not zero.
        let mut stored: Vec<Range<usize>> = Vec::new();
        for page in content.into_iter().flatten() {
            let bytes = &bytes[page * PAGE_LEN..][..PAGE_LEN];
            if is_zero(bytes) {
                continue;
            }
            digests[page] = page_digest(bytes);
            match stored.last_mut() {
                Some(last) if last.end == page => last.end += 1,
                _ => stored.push(page..page + 1),
            }
        }
        let zero = gaps(&stored, digests.len());
        let zero_pages: u64 = zero.iter().map(|pages| u64_of(pages.len())).sum();
        let digested = Instant::now();
        // A dense image stores zero pages, too.
        let zero_runs = zero.iter().filter(|_| with_zeros).map(|pages| (pages, zeros));
        let runs = stored.iter().map(|pages| (pages, bytes)).chain(zero_runs);
        let runs: Vec<_> = runs
            .map(|(pages, from)| {
                let start = pages.start * PAGE_LEN;
                (u64_of(start), &from[start..pages.end * PAGE_LEN])
            })
            .collect();
        self.out.write_chunk(offset, len, &runs)?;
        let first_page = offset / PAGE_SIZE;
        let zero = zero
            .into_iter()
            .map(|pages| first_page + u64_of(pages.start)..first_page + u64_of(pages.end));
        let zero = zero.collect();
        work.digest += digested - was_read;
        work.write += digested.elapsed();
        work.zero_pages_written += if with_zeros { zero_pages } else { 0 };
        let mut record = Vec::new();
        append_record(&mut record, number, &digests);
        Ok(ChunkDone { number, zero, record })
    }
}

/// The ranges of `0..end` between `runs`, which are ascending.
fn gaps(runs: &[Range<usize>], end: usize) -> Vec<Range<usize>> {
    let starts = std::iter::once(0).chain(runs.iter().map(|run| run.end));
    let ends = runs.iter().map(|run| run.start).chain(std::iter::once(end));
    starts.zip(ends).map(|(start, end)| start..end).filter(|gap| !gap.is_empty()).collect()
}

/// Writes the pages of `bytes` (4 KiB each, the last may be short) for which `is_zero` is false,
/// adjacent pages at once.
pub(crate) fn write_nonzero(
    offset: u64,
    bytes: &[u8],
    mut is_zero: impl FnMut(usize, &[u8]) -> bool,
    mut write: impl FnMut(u64, &[u8]) -> Result<(), FreezeError>,
) -> Result<(), FreezeError> {
    let at = |start: usize| offset + u64::try_from(start).unwrap_or(u64::MAX);
    let mut run_start = 0;
    for (index, page) in bytes.chunks(PAGE_LEN).enumerate() {
        let start = index * PAGE_LEN;
        if is_zero(index, page) {
            if run_start < start {
                write(at(run_start), &bytes[run_start..start])?;
            }
            run_start = start + page.len();
        }
    }
    if run_start < bytes.len() {
        write(at(run_start), &bytes[run_start..])?;
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

#[cfg(test)]
#[path = "image_tests.rs"]
mod tests;
