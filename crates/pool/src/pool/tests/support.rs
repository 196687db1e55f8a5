use std::sync::Arc;

use crate::layout::GRANULE;
use crate::media::Medium;
use crate::simulated::SimulatedMedium;
use crate::{CreateOptions, Extent, Pool, Staging};

/// Small tables, to limit the number of crash states.
pub(super) fn options() -> CreateOptions {
    CreateOptions { names: 3, longest_name: 40, ..CreateOptions::default() }
}

/// A pool with `granules` available to extents, on a simulated medium.
pub(super) fn pool(granules: u64) -> (Arc<SimulatedMedium>, Pool) {
    let medium = Arc::new(SimulatedMedium::new((granules + 2) * GRANULE));
    let pool = Pool::create(Arc::clone(&medium) as Arc<dyn Medium>, &options()).unwrap();
    (medium, pool)
}

/// A mark that identifies a name and a version, written at the beginning and the end of guest
/// memory and into the tail.
fn mark(name: &str, version: u64) -> [u8; 16] {
    let mut mark = [0; 16];
    mark[..8].copy_from_slice(&(xxhash_rust::xxh3::xxh3_64(name.as_bytes()) | 1).to_le_bytes());
    mark[8..].copy_from_slice(&version.to_le_bytes());
    mark
}

/// Writes a snapshot's content. The mark at the end of guest memory spans two cache lines, so that
/// it can be lost in part.
pub(super) fn write(staging: &Staging, name: &str, version: u64) {
    let mark = mark(name, version);
    staging.write_guest(0, &mark);
    staging.write_guest(staging.extent().guest_bytes - 16, &mark);
    staging.write_tail(56, &mark);
}

/// The version of the content; `None` if it is not intact.
pub(super) fn version(medium: &dyn Medium, extent: &Extent, name: &str) -> Option<u64> {
    let at = [extent.offset, extent.offset + extent.guest_bytes - 16, extent.tail_offset + 56];
    let marks = at.map(|at| {
        let mut bytes = [0; 16];
        medium.load(at, &mut bytes);
        bytes
    });
    let version = u64::from_le_bytes(marks[0][8..].try_into().unwrap());
    marks.iter().all(|found| *found == mark(name, version)).then_some(version)
}

/// Writes and publishes a snapshot of one granule of guest memory and a tail.
pub(super) fn publish(pool: &Pool, name: &str, version: u64) {
    let staging = pool.allocate(name, GRANULE, 100).unwrap();
    write(&staging, name, version);
    staging.publish().unwrap();
}
