//! A snapshot that is open, written to another place: one whose files lie in no directory of a
//! snapshot becomes one.

use std::io;

use firn_base::PAGE_SIZE;

use crate::contents::Contents;
use crate::freeze::{Destination, FreezeReport, FreezeRequest, NotFrozenError, freeze_signed};
use crate::freeze_error::FreezeError;
use crate::image::{Chunk, PageSource};
use crate::keys::Signer;
use crate::layout::MemoryLayout;
use crate::read_at::ReadAt;
use crate::snapshot::Snapshot;
use crate::writer::Machine;

/// Writes a snapshot without a writable disk to a directory or a pool, with the same id. Every page
/// of its image is compared with its digest. It is signed if there is a signer.
///
/// # Errors
/// See [`NotFrozenError`]. Nothing is published.
pub fn import(
    snapshot: &Snapshot,
    destination: Destination,
    signer: Option<&Signer>,
) -> Result<FreezeReport, NotFrozenError<FreezeError>> {
    let (state_version, state) = snapshot.machine_state();
    let description = snapshot.manifest().description.clone();
    let function = description.function.clone();
    let machine =
        Machine { description, state_version, state: state.to_vec(), reported: Vec::new() };
    let image = Image(snapshot);
    let mut contents = Contents::new(&image, machine);
    let request = FreezeRequest { destination, dense: false, function };
    freeze_signed(&mut contents, request, signer)
}

/// The image of a snapshot, checked.
struct Image<'a>(&'a Snapshot);

impl PageSource for Image<'_> {
    fn layout(&self) -> &MemoryLayout {
        &self.0.manifest().layout
    }

    fn chunk<'a>(&'a self, image_offset: u64, buf: &'a mut [u8]) -> io::Result<Chunk<'a>> {
        self.0.image().read_exact_at(buf, image_offset)?;
        let page = image_offset / PAGE_SIZE;
        self.0.digests().check(page, buf).map_err(io::Error::other)?;
        Ok(Chunk::Bytes(buf))
    }
}

#[cfg(test)]
#[path = "import_tests.rs"]
mod tests;
