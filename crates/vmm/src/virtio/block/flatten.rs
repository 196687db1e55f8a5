//! Writing an overlay disk's content out, for a freeze.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use thiserror::Error;

use super::super::chain::to_u64;
use super::disk::{CLUSTER, CLUSTER_LEN, OverlayDisk};

/// Bytes copied at a time.
const CHUNK: u64 = 1 << 20;

/// Why a disk's content could not be written out.
#[derive(Debug, Error)]
pub enum FlattenError {
    /// The disk cannot be read.
    #[error("reading the guest's disk at byte {offset}")]
    Read {
        /// Where on the disk.
        offset: u64,
        /// What went wrong.
        source: io::Error,
    },
    /// The copy cannot be written.
    #[error("writing a copy of the guest's disk at byte {offset}")]
    Write {
        /// Where on the disk.
        offset: u64,
        /// What went wrong.
        source: io::Error,
    },
}

impl OverlayDisk {
    /// Makes `out` a copy of the disk as the guest sees it, and returns the bytes written. Clusters of
    /// zeros are holes in the copy, and only what base and changes hold is read. The guest must be paused;
    /// `out` is not synced.
    ///
    /// # Errors
    /// See [`FlattenError`]; `out` is of no use then.
    pub fn flatten_into(&self, out: &File) -> Result<u64, FlattenError> {
        let resize =
            |len| out.set_len(len).map_err(|source| FlattenError::Write { offset: len, source });
        // First nothing, so that nothing older stays where holes are to be.
        resize(0)?;
        resize(self.size())?;
        let mut written = 0;
        let mut offset = 0;
        while offset < self.size() {
            let (file, len) = self.extent(offset, self.size() - offset);
            written += copy_data(file, offset, offset + len, out)?;
            offset += len;
        }
        Ok(written)
    }
}

/// Copies what `from` holds between `start` and `end`, to the same place in `out`.
fn copy_data(from: &File, start: u64, end: u64, out: &File) -> Result<u64, FlattenError> {
    let mut written = 0;
    let mut offset = start;
    while offset < end {
        let read_error = |errno: Errno| FlattenError::Read { offset, source: errno.into() };
        let data = match seek(from, SeekFrom::Data(offset)) {
            // To a cluster's boundary: `extent` gave whole clusters.
            Ok(data) => offset.max(data / CLUSTER * CLUSTER),
            // No data up to the end of the file.
            Err(Errno::NXIO) => break,
            // A file system that does not know its holes.
            Err(Errno::INVAL) => offset,
            Err(errno) => return Err(read_error(errno)),
        };
        if data >= end {
            break;
        }
        let hole = match seek(from, SeekFrom::Hole(data)) {
            Ok(hole) => hole.next_multiple_of(CLUSTER).min(end),
            Err(Errno::INVAL) => end,
            Err(errno) => return Err(read_error(errno)),
        };
        written += copy_nonzero(from, data, hole, out)?;
        offset = hole;
    }
    Ok(written)
}

fn copy_nonzero(from: &File, start: u64, end: u64, out: &File) -> Result<u64, FlattenError> {
    let mut written = 0;
    let mut offset = start;
    let mut buffer = Vec::new();
    while offset < end {
        let len = CHUNK.min(end - offset);
        buffer.resize(usize::try_from(len).unwrap_or(0), 0);
        from.read_exact_at(&mut buffer, offset)
            .map_err(|source| FlattenError::Read { offset, source })?;
        // The last cluster of a disk may be cut off.
        let (clusters, cut) = buffer.as_chunks::<CLUSTER_LEN>();
        let runs = clusters.chunk_by(|left, right| is_zero(left) == is_zero(right));
        for run in runs.map(<[_]>::as_flattened).chain([cut]) {
            if !is_zero(run) {
                out.write_all_at(run, offset)
                    .map_err(|source| FlattenError::Write { offset, source })?;
                written += to_u64(run.len());
            }
            offset += to_u64(run.len());
        }
    }
    Ok(written)
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}
