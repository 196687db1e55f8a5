//! The tail of an extent: everything in a pooled snapshot except guest memory.

use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use crate::container::Header;
use crate::error::OpenError;
use crate::manifest::{ImageKind, Manifest};
use crate::read_at::{Part, ReadAt};
use crate::section::Section;

/// First bytes of a tail, in every version.
const MAGIC: [u8; 16] = *b"firn tail\n\0\0\0\0\0\0";
/// Version of the tail's header. The container has its own versions.
const TAIL_VERSION: u32 = 1;
/// Magic, version, CRC-32 of all that follows up to the container, then the container's length, the
/// number of runs and the length of their bytes.
const HEAD_LEN: usize = 48;
const TAIL_HEADER_LEN: u64 = HEAD_LEN as u64;
/// Bytes of a run in the table: offset in the disk and length.
const RUN_LEN: u64 = 16;
/// Maximum number of runs of a writable disk. It limits what a reader allocates.
pub(crate) const MAX_RUNS: u64 = 1 << 20;

/// The most bytes of a tail before the container.
pub(crate) const fn max_table_len() -> u64 {
    TAIL_HEADER_LEN + MAX_RUNS * RUN_LEN
}

/// The header of a tail.
#[derive(Clone, Debug)]
pub(crate) struct TailHeader {
    pub(crate) container_len: u64,
    /// Ranges of the writable disk whose bytes follow, ascending.
    pub(crate) runs: Vec<Range<u64>>,
    pub(crate) data_len: u64,
}

impl TailHeader {
    /// The range of the container in the tail.
    pub(crate) fn container(&self) -> Range<u64> {
        let start = TAIL_HEADER_LEN + self.runs.len() as u64 * RUN_LEN;
        start..start + self.container_len
    }

    /// The range of the runs' bytes in the tail.
    pub(crate) fn data(&self) -> Range<u64> {
        let start = self.container().end;
        start..start + self.data_len
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut body = Vec::new();
        for len in [self.container_len, self.runs.len() as u64, self.data_len] {
            body.extend(len.to_le_bytes());
        }
        for run in &self.runs {
            body.extend(run.start.to_le_bytes());
            body.extend((run.end - run.start).to_le_bytes());
        }
        let mut bytes = MAGIC.to_vec();
        bytes.extend(TAIL_VERSION.to_le_bytes());
        bytes.extend(crc32fast::hash(&body).to_le_bytes());
        bytes.extend(body);
        bytes
    }

    pub(crate) fn read(tail: &dyn ReadAt, path: &Path) -> Result<Self, OpenError> {
        let io = |source| OpenError::Io { path: path.into(), action: "read", source };
        let damaged = || OpenError::Damaged { path: path.into(), section: Section::Header };
        let size = tail.size().map_err(io)?;
        if size < TAIL_HEADER_LEN {
            return Err(damaged());
        }
        let mut head = [0; HEAD_LEN];
        tail.read_exact_at(&mut head, 0).map_err(io)?;
        if head[..16] != MAGIC {
            return Err(OpenError::NotASnapshot {
                path: path.into(),
                reason: "its tail does not start with \"firn tail\"",
            });
        }
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&head[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let version_and_crc = word(16);
        let version = u32::try_from(version_and_crc & u64::from(u32::MAX)).unwrap_or_default();
        if version != TAIL_VERSION {
            return Err(OpenError::ContainerVersion {
                path: path.into(),
                found: version,
                supported: TAIL_VERSION,
            });
        }
        let (container_len, count, data_len) = (word(24), word(32), word(40));
        let fits = TAIL_HEADER_LEN
            .checked_add(count.saturating_mul(RUN_LEN))
            .and_then(|sum| sum.checked_add(container_len))
            .and_then(|sum| sum.checked_add(data_len))
            .is_some_and(|sum| sum <= size);
        if count > MAX_RUNS || !fits {
            return Err(damaged());
        }
        let mut table = vec![0; usize::try_from(count * RUN_LEN).unwrap_or(usize::MAX)];
        tail.read_exact_at(&mut table, TAIL_HEADER_LEN).map_err(io)?;
        let mut crc = crc32fast::Hasher::new();
        crc.update(&head[24..]);
        crc.update(&table);
        if u64::from(crc.finalize()) != version_and_crc >> 32 {
            return Err(damaged());
        }
        let (words, _) = table.as_chunks::<8>();
        let runs = words.chunks_exact(2).map(|pair| {
            let start = u64::from_le_bytes(pair[0]);
            start..start.saturating_add(u64::from_le_bytes(pair[1]))
        });
        Ok(Self { container_len, runs: runs.collect(), data_len })
    }
}

/// The parts of an opened tail.
pub(crate) struct Tail {
    /// The content of `snapshot.firn`.
    pub(crate) container: Part<Arc<dyn ReadAt>>,
    pub(crate) header: TailHeader,
}

impl Tail {
    pub(crate) fn open(tail: &Arc<dyn ReadAt>, path: &Path) -> Result<Self, OpenError> {
        let header = TailHeader::read(tail, path)?;
        Ok(Self { container: Part { whole: tail.clone(), range: header.container() }, header })
    }

    /// The offset of the digests in the tail, by the container's header.
    pub(crate) fn digests(&self, header: &Header) -> u64 {
        self.container.range.start + header.range(Section::Digests).start
    }

    /// The bytes that are stored of the writable disk.
    pub(crate) fn disk(&self) -> Part<Arc<dyn ReadAt>> {
        Part { whole: self.container.whole.clone(), range: self.header.data() }
    }

    /// The writable disk of `len` bytes.
    pub(crate) fn overlay(&self, len: u64, path: &Path) -> Result<OverlayInTail, OpenError> {
        let malformed =
            |reason| OpenError::Malformed { path: path.into(), section: Section::Header, reason };
        let mut runs = Vec::with_capacity(self.header.runs.len());
        let (mut end, mut at) = (0, self.header.data().start);
        for run in &self.header.runs {
            if run.start < end || run.end <= run.start || run.end > len {
                return Err(malformed("the runs of its disk are not in order within the disk"));
            }
            runs.push(StoredRange { disk: run.clone(), at });
            end = run.end;
            // Saturation is safe: runs that are longer than any tail do not end at the tail's end.
            at = at.saturating_add(run.end - run.start);
        }
        if at != self.header.data().end {
            return Err(malformed("the runs of its disk are not as long as their bytes"));
        }
        Ok(OverlayInTail { tail: self.container.whole.clone(), len, runs })
    }
}

/// A writable disk's content in a tail.
#[derive(Debug)]
pub(crate) struct OverlayInTail {
    tail: Arc<dyn ReadAt>,
    len: u64,
    runs: Vec<StoredRange>,
}

#[derive(Debug)]
struct StoredRange {
    disk: Range<u64>,
    /// Offset of its bytes in the tail.
    at: u64,
}

impl ReadAt for OverlayInTail {
    fn size(&self) -> io::Result<u64> {
        Ok(self.len)
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset.checked_add(buf.len() as u64).filter(|end| *end <= self.len);
        let end = end.ok_or(io::ErrorKind::UnexpectedEof)?;
        buf.fill(0);
        let first = self.runs.partition_point(|run| run.disk.end <= offset);
        for run in self.runs[first..].iter().take_while(|run| run.disk.start < end) {
            let part = run.disk.start.max(offset)..run.disk.end.min(end);
            let within = |at: u64| usize::try_from(at - offset).unwrap_or(usize::MAX);
            let at = run.at + (part.start - run.disk.start);
            self.tail.read_exact_at(&mut buf[within(part.start)..within(part.end)], at)?;
        }
        Ok(())
    }

    fn next_data(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        let next = self.runs.partition_point(|run| run.disk.end <= offset);
        Ok(self.runs.get(next).map(|run| run.disk.start.max(offset)..run.disk.end))
    }
}

/// Checks that the image is dense: an extent stores every page of guest memory.
pub(crate) fn check_dense(manifest: &Manifest, path: &Path) -> Result<(), OpenError> {
    if manifest.image.kind == ImageKind::Dense {
        return Ok(());
    }
    Err(OpenError::Malformed {
        path: path.into(),
        section: Section::Manifest,
        reason: "an extent stores every page, but its manifest has an image with holes",
    })
}
