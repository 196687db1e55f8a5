//! Whether the content of a pool's snapshots is what was frozen.

use std::fs::File;
use std::io;
use std::sync::Arc;

use firn_pool::MappedExtent;
use firn_snapshot::{CHUNK_SIZE, ExtentPlace, PAGE_SIZE, ReadAt, Snapshot};
use firn_vmm::error_chain;

/// A mapped extent whose tail is read by the snapshot format.
#[derive(Debug, Clone)]
struct Tail(Arc<MappedExtent>);

impl ReadAt for Tail {
    fn size(&self) -> io::Result<u64> {
        Ok(self.0.extent().tail_bytes)
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let len = u64::try_from(buffer.len()).map_err(io::Error::other)?;
        let end = offset.checked_add(len);
        if end.is_none_or(|end| end > self.0.extent().tail_bytes) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.0.read_tail(offset, buffer);
        Ok(())
    }
}

/// Checks the tail's sections, and every page of guest memory against its digest.
///
/// # Errors
/// What is wrong, for people.
pub(super) fn check(name: &str, medium: File, extent: MappedExtent) -> Result<(), String> {
    let extent = Arc::new(extent);
    let place = ExtentPlace {
        offset: extent.extent().offset,
        // It is read, not mapped.
        leaf: PAGE_SIZE,
        private: false,
        replica: false,
        checked: false,
    };
    let tail: Arc<dyn ReadAt> = Arc::new(Tail(Arc::clone(&extent)));
    let snapshot =
        Snapshot::open_extent(name, medium, place, &tail).map_err(|error| error_chain(&error))?;
    let size = snapshot.manifest().layout.total_bytes();
    if size != extent.extent().guest_bytes {
        let room = extent.extent().guest_bytes;
        return Err(format!("its manifest says {size} bytes of guest memory, its extent {room}"));
    }
    let mut buffer = vec![0; usize::try_from(CHUNK_SIZE.min(size)).map_err(|e| e.to_string())?];
    let mut at = 0;
    while at < size {
        let len = usize::try_from(CHUNK_SIZE.min(size - at)).map_err(|e| e.to_string())?;
        extent.read_guest(at, &mut buffer[..len]);
        snapshot
            .digests()
            .check(at / PAGE_SIZE, &buffer[..len])
            .map_err(|error| error_chain(&error))?;
        at += CHUNK_SIZE;
    }
    Ok(())
}
