//! Extents of a real pool, as this crate writes and reads them.

use std::io;
use std::sync::Arc;

use firn_pool::{MappedExtent, Pool, Staging};

use crate::extent::ExtentTarget;
use crate::read_at::ReadAt;

/// The tail of a mapped extent, to open a snapshot with.
#[must_use]
pub fn tail_of(extent: MappedExtent) -> Arc<dyn ReadAt> {
    Arc::new(MappedTail(extent))
}

#[derive(Debug)]
struct MappedTail(MappedExtent);

impl ReadAt for MappedTail {
    fn size(&self) -> io::Result<u64> {
        Ok(self.0.extent().tail_bytes)
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset.checked_add(buf.len() as u64);
        if end.is_none_or(|end| end > self.0.extent().tail_bytes) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.0.read_tail(offset, buf);
        Ok(())
    }
}

/// A name in a pool of this process that a snapshot is frozen into.
#[derive(Debug)]
pub struct PoolTarget<'a> {
    pool: &'a Pool,
    name: &'a str,
    staging: Option<(Staging, MappedExtent)>,
}

impl<'a> PoolTarget<'a> {
    /// The snapshot will have this name.
    #[must_use]
    pub fn new(pool: &'a Pool, name: &'a str) -> Self {
        Self { pool, name, staging: None }
    }

    fn mapped(&self) -> io::Result<&MappedExtent> {
        let staging = self.staging.as_ref().map(|(_, mapped)| mapped);
        staging.ok_or_else(|| io::Error::other("nothing is allocated"))
    }
}

impl ExtentTarget for PoolTarget<'_> {
    fn allocate(&mut self, guest_bytes: u64, tail_bytes: u64) -> io::Result<()> {
        let staging =
            self.pool.allocate(self.name, guest_bytes, tail_bytes).map_err(io::Error::other)?;
        let mapped = staging.map().map_err(io::Error::other)?;
        self.staging = Some((staging, mapped));
        Ok(())
    }

    fn write_memory(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.mapped()?.write_guest(offset, bytes);
        Ok(())
    }

    fn write_tail(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.mapped()?.write_tail(offset, bytes);
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.mapped()?.flush()
    }

    fn publish(&mut self) -> io::Result<()> {
        let (staging, _) =
            self.staging.take().ok_or_else(|| io::Error::other("nothing is allocated"))?;
        staging.publish().map_err(io::Error::other).map(drop)
    }
}

#[cfg(test)]
#[path = "in_pool_tests.rs"]
mod tests;
