//! Disks: reading them with their holes, and telling them apart by digest.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use postcard_schema::Schema;
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Bytes that one inner digest of a disk covers (2 MiB).
const BLOCK_SIZE: u64 = 2 << 20;
/// Bytes at the start of a disk that [`DiskIdentity::head`] covers. A file system's superblock, with its
/// UUID and its times, is among them.
const HEAD_SIZE: usize = 64 << 10;

/// What a disk holds, by length and digests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub struct DiskIdentity {
    /// Length in bytes.
    pub len: u64,
    /// XXH3-64 of the first 64 KiB (or of all, when shorter): cheap enough to check at every start.
    pub head: u64,
    /// Digest of all: XXH3-64 over the XXH3-64 digests (little-endian) of the disk's blocks of 2 MiB. Two levels,
    /// so that holes cost nothing.
    pub digest: u64,
}

/// A disk that can be read from start to end.
pub trait DiskSource {
    /// Length in bytes. It must not change while the disk is read.
    ///
    /// # Errors
    /// Whatever keeps the length from being known.
    fn size(&mut self) -> io::Result<u64>;

    /// The first range at or after `offset` that may hold other bytes than 0, cut at `offset`; `None` when there
    /// is none before the end.
    ///
    /// # Errors
    /// Whatever keeps the disk from being read.
    fn next_data(&mut self, offset: u64) -> io::Result<Option<Range<u64>>>;

    /// Fills `buf` from `offset`; the caller stays within the disk.
    ///
    /// # Errors
    /// Whatever keeps the disk from being read.
    fn read(&mut self, buf: &mut [u8], offset: u64) -> io::Result<()>;
}

/// A file as a disk; its holes are skipped. The file's position is moved.
impl DiskSource for &File {
    fn size(&mut self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn next_data(&mut self, offset: u64) -> io::Result<Option<Range<u64>>> {
        next_data(self, offset)
    }

    fn read(&mut self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.read_exact_at(buf, offset)
    }
}

impl DiskIdentity {
    /// Reads all of `file` (its holes apart) and digests it. The file's position is moved.
    ///
    /// # Errors
    /// Whatever keeps the file from being read.
    pub fn of(file: &File) -> io::Result<Self> {
        scan(&mut &*file, |_, _| Ok(()))
    }

    /// Whether `file` has this length and these first 64 KiB. What follows them is not read.
    ///
    /// # Errors
    /// Whatever keeps the file from being read.
    pub fn head_matches(&self, file: &File) -> io::Result<bool> {
        if file.metadata()?.len() != self.len {
            return Ok(false);
        }
        let mut head = vec![0; head_len(self.len)];
        file.read_exact_at(&mut head, 0)?;
        Ok(xxh3_64(&head) == self.head)
    }
}

/// Reads `source` from start to end, hands each block that may hold data to `block` (offset, bytes), and
/// returns the identity of the whole.
pub(crate) fn scan<E: From<io::Error>>(
    source: &mut dyn DiskSource,
    mut block: impl FnMut(u64, &[u8]) -> Result<(), E>,
) -> Result<DiskIdentity, E> {
    let len = source.size()?;
    let block_size = usize::try_from(BLOCK_SIZE.min(len)).unwrap_or(usize::MAX);
    let mut buf = vec![0; block_size];
    let zero_block = xxh3_64(&buf);
    let mut head = xxh3_64(&buf[..head_len(len)]);
    let mut digest = Xxh3::new();
    let mut data = 0..0;
    let mut offset = 0;
    while offset < len {
        let end = (offset + BLOCK_SIZE).min(len);
        let bytes = &mut buf[..usize::try_from(end - offset).unwrap_or(usize::MAX)];
        let mut holds_data = false;
        let mut position = offset;
        while position < end {
            if data.end <= position {
                data = source.next_data(position)?.unwrap_or(len..len);
                if data.start < position || data.end <= data.start && data.start < len {
                    return Err(
                        io::Error::other("data range in front of the offset asked for").into()
                    );
                }
            }
            let piece = data.start.clamp(position, end)..data.end.min(end);
            if piece.start >= piece.end {
                break;
            }
            if !holds_data {
                bytes.fill(0);
                holds_data = true;
            }
            let within = |at: u64| usize::try_from(at - offset).unwrap_or(usize::MAX);
            source.read(&mut bytes[within(piece.start)..within(piece.end)], piece.start)?;
            position = piece.end;
        }
        let block_digest = if holds_data {
            if offset == 0 {
                head = xxh3_64(&bytes[..head_len(len)]);
            }
            block(offset, bytes)?;
            xxh3_64(bytes)
        } else if end - offset == BLOCK_SIZE.min(len) {
            zero_block
        } else {
            bytes.fill(0);
            xxh3_64(bytes)
        };
        digest.update(&block_digest.to_le_bytes());
        offset = end;
    }
    Ok(DiskIdentity { len, head, digest: digest.digest() })
}

/// The first range of `file` at or after `offset` that is no hole.
pub(crate) fn next_data(file: &File, offset: u64) -> io::Result<Option<Range<u64>>> {
    let start = match seek(file, SeekFrom::Data(offset)) {
        Ok(start) => start,
        Err(Errno::NXIO) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    Ok(Some(start..seek(file, SeekFrom::Hole(start))?))
}

fn head_len(len: u64) -> usize {
    usize::try_from(len).map_or(HEAD_SIZE, |len| len.min(HEAD_SIZE))
}
