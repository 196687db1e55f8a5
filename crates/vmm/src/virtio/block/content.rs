//! Reading an overlay disk's content as the guest sees it, for a freeze.

use std::fs::File;
use std::io;
use std::ops::Range;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use firn_base::num::u64_of;
use firn_snapshot::DiskSource;

use super::overlay::{OverlayDisk, Place};

/// The content of an [`OverlayDisk`] with its holes. The guest must be paused.
#[derive(Debug)]
pub(crate) struct OverlayContent<'a>(&'a OverlayDisk);

impl OverlayDisk {
    /// The disk as the guest sees it: the base with the guest's changes.
    #[must_use]
    pub(crate) fn content(&self) -> OverlayContent<'_> {
        OverlayContent(self)
    }
}

impl DiskSource for OverlayContent<'_> {
    fn size(&mut self) -> io::Result<u64> {
        Ok(self.0.size())
    }

    fn next_data(&mut self, mut offset: u64) -> io::Result<Option<Range<u64>>> {
        while offset < self.0.size() {
            let (place, len) = self.0.extent(offset, self.0.size() - offset);
            let end = offset + len;
            let data = match place {
                Place::File(file) => data_of(file, offset, end)?,
                Place::Extent(extent) => extent
                    .next_data(offset)?
                    .filter(|data| data.start < end)
                    .map(|data| data.start..data.end.min(end)),
            };
            if let Some(data) = data {
                return Ok(Some(data));
            }
            offset = end;
        }
        Ok(None)
    }

    fn read(&mut self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let mut done = 0;
        while done < buf.len() {
            let at = offset + u64_of(done);
            let (place, len) = self.0.extent(at, u64_of(buf.len() - done));
            let len = usize::try_from(len).map_err(io::Error::other)?;
            place.read_exact_at(&mut buf[done..done + len], at)?;
            done += len;
        }
        Ok(())
    }
}

/// The first range between `start` and `end` that is not a hole of `file`.
fn data_of(file: &File, start: u64, end: u64) -> io::Result<Option<Range<u64>>> {
    let data = match seek(file, SeekFrom::Data(start)) {
        Ok(data) if data < end => data,
        Ok(_) | Err(Errno::NXIO) => return Ok(None),
        // The file system does not support holes.
        Err(Errno::INVAL) => return Ok(Some(start..end)),
        Err(errno) => return Err(errno.into()),
    };
    let hole = seek(file, SeekFrom::Hole(data))?;
    Ok(Some(data..hole.min(end)))
}
