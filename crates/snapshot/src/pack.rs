//! Writing a packed file.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use firn_base::{PAGE_SIZE, PageRange};
use serde::Serialize;
use uuid::Uuid;
use xxhash_rust::xxh3::xxh3_64;

use crate::attach::{AttachError, set_packed};
use crate::files::PackedFile;
use crate::packed::{COPY, HEADER, MAGIC, VERSION, data_start};
use crate::profile::check_runs;
use crate::read_at::ReadAt;
use crate::snapshot::Snapshot;

/// A digest of what determines a packed file's content: the part of the profile and the options.
///
/// # Errors
/// Encoding fails; it never does for the types of a profile.
pub fn recipe_of(by: &impl Serialize) -> Result<u64, postcard::Error> {
    Ok(xxh3_64(&postcard::to_stdvec(by)?))
}

/// Packs these runs of image pages of a snapshot, in this order, into a file in its directory, and
/// replaces the existing one. `recipe` is the result of [`recipe_of`] for their
/// source. Every page is compared with its digest.
///
/// # Errors
/// [`AttachError`]; the snapshot is unchanged.
pub fn pack(
    snapshot: &Snapshot,
    kind: PackedFile,
    recipe: u64,
    runs: &[PageRange],
) -> Result<(), AttachError> {
    let (path, manifest) = (snapshot.path(), snapshot.manifest());
    let table = |source| AttachError::Table { path: path.into(), source };
    check_runs("the table", runs.iter(), manifest.layout.pages(), false).map_err(table)?;
    let id = manifest.description.id;
    set_packed(path, kind, |file| write(file, snapshot, kind, id, recipe, runs))
}

fn write(
    file: &File,
    snapshot: &Snapshot,
    kind: PackedFile,
    id: Uuid,
    recipe: u64,
    runs: &[PageRange],
) -> io::Result<()> {
    let table: Vec<u8> = runs
        .iter()
        .flat_map(|run| [run.first.to_le_bytes(), run.pages.to_le_bytes()].concat())
        .collect();
    let count = runs.len() as u64;
    let mut header = Vec::with_capacity(HEADER + 4);
    header.extend(MAGIC);
    header.extend(VERSION.to_le_bytes());
    header.extend(kind.code().to_le_bytes());
    header.extend(id.as_bytes());
    header.extend(recipe.to_le_bytes());
    header.extend(count.to_le_bytes());
    header.extend(crc32fast::hash(&table).to_le_bytes());
    header.extend([0; 4]);
    header.extend(crc32fast::hash(&header).to_le_bytes());
    file.write_all_at(&header, 0)?;
    file.write_all_at(&table, PAGE_SIZE)?;
    // A file without pages has the length of its header and table.
    file.set_len(data_start(count))?;
    let mut buf = vec![0; usize::try_from(COPY).unwrap_or(usize::MAX)];
    let mut to = data_start(count);
    for run in runs {
        let (mut page, end) = (run.first, run.first + run.pages);
        while page < end {
            let pages = (end - page).min(COPY / PAGE_SIZE);
            let len = pages * PAGE_SIZE;
            let bytes = &mut buf[..usize::try_from(len).unwrap_or(usize::MAX)];
            ReadAt::read_exact_at(snapshot.image(), bytes, page * PAGE_SIZE)?;
            snapshot.digests().check(page, bytes).map_err(io::Error::other)?;
            file.write_all_at(bytes, to)?;
            to += len;
            page += pages;
        }
    }
    Ok(())
}
