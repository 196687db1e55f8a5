//! Files and folders of the caller's that become part of an image.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;

use super::BuildError;

/// The folder for files and folders without a place of their own.
const FOLDER: &str = "opt";

/// A file or folder to add, and its place in the image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Addition {
    /// On this machine.
    pub source: PathBuf,
    /// From the image's root, without the first `/`.
    pub place: PathBuf,
}

/// A text does not describe an [`Addition`].
#[derive(Debug, thiserror::Error)]
#[error("expected PATH or PATH:/PLACE/IN/GUEST, whose parts are neither empty nor . or ..")]
pub struct ParseAdditionError;

impl FromStr for Addition {
    type Err = ParseAdditionError;

    fn from_str(text: &str) -> Result<Self, ParseAdditionError> {
        let (source, place) = match text.rsplit_once(":/") {
            Some((source, place)) => (source, place.into()),
            None => {
                let name = Path::new(text).file_name().ok_or(ParseAdditionError)?;
                (text, Path::new(FOLDER).join(name))
            }
        };
        let mut parts = place.components();
        let is_plain = parts.all(|part| matches!(part, Component::Normal(_)));
        if source.is_empty() || place.as_os_str().is_empty() || !is_plain {
            return Err(ParseAdditionError);
        }
        Ok(Self { source: source.into(), place })
    }
}

impl Addition {
    /// What distinguishes it from other additions, by the sizes and times of its files.
    pub(super) fn key(&self) -> Result<String, BuildError> {
        let mut lines = format!("{}\n", self.place.display());
        list(&self.real()?, &mut lines).map_err(BuildError::file("read", &self.source))?;
        Ok(lines)
    }

    /// Copies it into the image's root. Modes are kept; its owner becomes the image's, root.
    pub(super) fn copy_to(&self, root: &Path) -> Result<(), BuildError> {
        let source = self.real()?;
        let mut place = root.to_owned();
        for part in self.place.parent().unwrap_or(Path::new("")) {
            place.push(part);
            match place.symlink_metadata() {
                Ok(metadata) if metadata.is_dir() => {}
                Ok(_) => {
                    let reason = "its place in the image is below a file or a link";
                    return Err(refused(&self.source, reason));
                }
                Err(_) => fs::create_dir(&place).map_err(BuildError::file("create", &place))?,
            }
        }
        copy(&source, &root.join(&self.place), 0)
    }

    /// The source's own path: a link that is named itself is followed.
    fn real(&self) -> Result<PathBuf, BuildError> {
        fs::canonicalize(&self.source).map_err(BuildError::file("add", &self.source))
    }
}

/// Copies what is `depth` folders below the addition's own.
fn copy(from: &Path, to: &Path, depth: usize) -> Result<(), BuildError> {
    let failed = || BuildError::file("add", from);
    let metadata = from.symlink_metadata().map_err(failed())?;
    let there = to.symlink_metadata().ok();
    if there.as_ref().is_some_and(|there| !there.is_dir() || !metadata.is_dir()) {
        return Err(refused(from, "the image has a file or folder in its place"));
    }
    if metadata.is_symlink() {
        let target = fs::read_link(from).map_err(failed())?;
        if !stays_within(&target, depth) {
            return Err(refused(from, "it is a link that leads out of what is added"));
        }
        return symlink(target, to).map_err(failed());
    }
    if metadata.is_file() {
        // The kernel copies, so a file may be larger than memory.
        return fs::copy(from, to).map(drop).map_err(failed());
    }
    if !metadata.is_dir() {
        return Err(refused(from, "it is neither a file, a folder nor a link"));
    }
    if there.is_none() {
        fs::create_dir(to).map_err(failed())?;
    }
    for entry in fs::read_dir(from).map_err(failed())? {
        let entry = entry.map_err(failed())?;
        copy(&entry.path(), &to.join(entry.file_name()), depth + 1)?;
    }
    // At the end: a folder may be read-only. One that the image has keeps its mode.
    if there.is_some() {
        return Ok(());
    }
    fs::set_permissions(to, metadata.permissions()).map_err(failed())
}

fn refused(path: &Path, reason: &'static str) -> BuildError {
    BuildError::Addition { path: path.to_owned(), reason }
}

/// Whether the target of a link that is `depth` folders deep stays in the folder that is added.
fn stays_within(target: &Path, depth: usize) -> bool {
    // The link's own folder is one less deep.
    let mut left = depth.checked_sub(1);
    for part in target.components() {
        left = match (part, left) {
            (Component::Normal(_), Some(left)) => Some(left + 1),
            (Component::CurDir, left) => left,
            (Component::ParentDir, Some(left)) => left.checked_sub(1),
            _ => None,
        };
    }
    left.is_some()
}

/// Adds a line for each file: its path, mode, size and time of modification.
fn list(path: &Path, lines: &mut String) -> io::Result<()> {
    let metadata = path.symlink_metadata()?;
    let (mode, size) = (metadata.permissions().mode(), metadata.size());
    let (seconds, nanoseconds) = (metadata.mtime(), metadata.mtime_nsec());
    *lines += &format!("{} {mode:o} {size} {seconds}.{nanoseconds}\n", path.display());
    if metadata.is_dir() {
        let entries = fs::read_dir(path)?.map(|entry| Ok(entry?.path()));
        let mut entries = entries.collect::<io::Result<Vec<_>>>()?;
        entries.sort();
        entries.iter().try_for_each(|entry| list(entry, lines))?;
    }
    Ok(())
}

#[cfg(test)]
#[path = "addition_tests.rs"]
mod tests;
