//! Bytes that are read at an offset: a file, or the tail of an extent in a pool.

use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// Bytes that do not change and can be read from any thread.
///
/// A character device of persistent memory can only be mapped, so what is in a pool is no file.
pub trait ReadAt: Debug + Send + Sync {
    /// How many there are.
    ///
    /// # Errors
    /// Whatever keeps the length from being known.
    fn size(&self) -> io::Result<u64>;

    /// Fills `buf` from `offset` on.
    ///
    /// # Errors
    /// Whatever keeps the bytes from being read; `UnexpectedEof` where they end before.
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()>;

    /// The first range at or after `offset` that may hold other bytes than 0, cut at `offset`; `None` when there is
    /// none. As long as nobody knows better, all of them may.
    ///
    /// # Errors
    /// Whatever keeps the bytes from being looked at.
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
        crate::disk::next_data(self, offset)
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

/// A range of other bytes.
#[derive(Debug)]
pub(crate) struct Part<T> {
    pub(crate) whole: T,
    /// Within the whole.
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
