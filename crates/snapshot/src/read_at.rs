//! Reading bytes at an offset, from a file or from an extent of a pool.

use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

/// Immutable bytes that any thread can read.
///
/// A character device of persistent memory can only be mapped, so a snapshot in a pool is not read
/// as a file.
pub trait ReadAt: Debug + Send + Sync {
    /// The number of bytes.
    ///
    /// # Errors
    /// Any error of determining the length.
    fn size(&self) -> io::Result<u64>;

    /// Fills `buf` with the bytes at `offset`.
    ///
    /// # Errors
    /// Any error of reading; `UnexpectedEof` when the range is beyond the end.
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()>;

    /// The first range at or after `offset` that may contain nonzero bytes, cut at `offset`; `None`
    /// if all bytes are zero. The default implementation returns everything up to the end.
    ///
    /// # Errors
    /// Any error of examining the bytes.
    fn next_data(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        let size = self.size()?;
        Ok((offset < size).then_some(offset..size))
    }
}

impl ReadAt for File {
    fn size(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        FileExt::read_exact_at(self, buf, offset)
    }

    fn next_data(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        next_data(self, offset)
    }
}

impl<T: ReadAt + ?Sized> ReadAt for std::sync::Arc<T> {
    fn size(&self) -> io::Result<u64> {
        (**self).size()
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        (**self).read_exact_at(buf, offset)
    }

    fn next_data(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        (**self).next_data(offset)
    }
}

/// A part of other bytes.
#[derive(Debug)]
pub(crate) struct Part<T> {
    pub(crate) whole: T,
    /// The range within the whole.
    pub(crate) range: Range<u64>,
}

impl<T: ReadAt> ReadAt for Part<T> {
    fn size(&self) -> io::Result<u64> {
        Ok(self.range.end - self.range.start)
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let start = self.range.start.checked_add(offset);
        let end = start.and_then(|start| start.checked_add(buf.len() as u64));
        match (start, end) {
            (Some(start), Some(end)) if end <= self.range.end => {
                self.whole.read_exact_at(buf, start)
            }
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

/// The first range of `file` at or after `offset` that is not a hole.
pub(crate) fn next_data(file: &File, offset: u64) -> io::Result<Option<Range<u64>>> {
    let start = match seek(file, SeekFrom::Data(offset)) {
        Ok(start) => start,
        Err(Errno::NXIO) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    Ok(Some(start..seek(file, SeekFrom::Hole(start))?))
}
