//! The cache's finished and unfinished parts.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

use super::BuildError;

/// The ending of unfinished parts.
const UNFINISHED: &str = ".new";

/// The cache of one build. It is locked until it is dropped.
pub(super) struct Store {
    root: PathBuf,
    /// Locked: one build at a time.
    _lock: File,
}

impl Store {
    /// Opens the cache, after any other build of it has ended.
    pub(super) fn open(root: &Path) -> Result<Self, BuildError> {
        for folder in ["stamps", "apt"] {
            create_folder(&root.join(folder))?;
        }
        let root = fs::canonicalize(root).map_err(BuildError::file("find", root))?;
        let path = root.join(".lock");
        let lock = File::create(&path).map_err(BuildError::file("create", &path))?;
        flock(&lock, FlockOperation::LockExclusive)
            .map_err(|error| BuildError::file("lock", &path)(error.into()))?;
        Ok(Self { root, _lock: lock })
    }

    /// The path of a part.
    pub(super) fn path(&self, part: impl AsRef<Path>) -> PathBuf {
        self.root.join(part)
    }

    /// The path where a part is built.
    pub(super) fn unfinished(&self, part: &str) -> PathBuf {
        self.path(format!("{part}{UNFINISHED}"))
    }

    fn stamp(&self, part: &str) -> PathBuf {
        self.path("stamps").join(part.replace('/', "-"))
    }

    /// The description of what a part is made of, if the part is built.
    pub(super) fn key(&self, part: &str) -> Option<String> {
        let text = fs::read_to_string(self.stamp(part)).ok()?;
        self.path(part).exists().then(|| text.trim_end_matches('\n').to_owned())
    }

    /// Whether a part is built from what `key` describes. The key names everything that the part is
    /// made of, after a number that changes with the way of making it.
    pub(super) fn is_built(&self, part: &str, key: &str) -> bool {
        self.key(part).is_some_and(|built| built == key)
    }

    /// Puts the unfinished part in place.
    pub(super) fn publish(&self, part: &str, key: &str) -> Result<(), BuildError> {
        let (place, stamp) = (self.path(part), self.stamp(part));
        let failed = |source| BuildError::File { action: "replace", path: place.clone(), source };
        remove_file(&stamp).map_err(failed)?;
        if place.is_dir() {
            fs::remove_dir_all(&place).map_err(failed)?;
        }
        fs::rename(self.unfinished(part), &place).map_err(failed)?;
        let new = self.stamp(&format!("{part}{UNFINISHED}"));
        fs::write(&new, format!("{key}\n")).and_then(|()| fs::rename(&new, &stamp)).map_err(failed)
    }

    /// An empty folder to build a part in.
    pub(super) fn fresh_folder(&self, part: &str) -> Result<PathBuf, BuildError> {
        let folder = self.unfinished(part);
        remove_tree(&folder).map_err(BuildError::file("remove", &folder))?;
        create_folder(&folder)?;
        Ok(folder)
    }

    /// A new file to build a part in.
    pub(super) fn fresh_file(&self, part: &str) -> Result<(File, PathBuf), BuildError> {
        let path = self.unfinished(part);
        if let Some(folder) = path.parent() {
            create_folder(folder)?;
        }
        let file = remove_file(&path).and_then(|()| File::create_new(&path));
        Ok((file.map_err(BuildError::file("create", &path))?, path))
    }

    /// Removes the unfinished parts in the cache and in two levels of folders.
    fn remove_unfinished(&self) {
        let mut folders = vec![self.root.clone()];
        for _ in 0..3 {
            let entries = folders.iter().filter_map(|folder| fs::read_dir(folder).ok());
            let entries: Vec<_> = entries.flatten().flatten().map(|entry| entry.path()).collect();
            let unfinished = |path: &&PathBuf| path.to_string_lossy().ends_with(UNFINISHED);
            for path in entries.iter().filter(unfinished) {
                // The next build of the part removes it again and reports errors.
                let _ = remove_tree(path);
            }
            folders = entries
                .into_iter()
                .filter(|path| path.symlink_metadata().is_ok_and(|metadata| metadata.is_dir()))
                .collect();
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.remove_unfinished();
    }
}

/// Creates a folder and those above it.
pub(super) fn create_folder(path: &Path) -> Result<(), BuildError> {
    fs::create_dir_all(path).map_err(BuildError::file("create the folder", path))
}

fn remove_file(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Removes a file, or a folder with its contents. Folders of packages may be read-only.
pub(super) fn remove_tree(path: &Path) -> io::Result<()> {
    match path.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(metadata) if metadata.is_dir() => {
            make_writable(path)?;
            fs::remove_dir_all(path)
        }
        Ok(_) => fs::remove_file(path),
    }
}

fn make_writable(folder: &Path) -> io::Result<()> {
    let mut permissions = folder.metadata()?.permissions();
    permissions.set_mode(permissions.mode() | 0o700);
    fs::set_permissions(folder, permissions)?;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            make_writable(&entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
