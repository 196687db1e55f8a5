//! The page cache before a run: cold or fully cached, as verified with mincore.
//!
//! *Cold*: no page of any file of the snapshot is cached. *Cached*: every page that the files store
//! is cached. In both states, the image is preloaded before the measured time for a planner that
//! preloads, from storage if it can be evicted.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use firn_base::PAGE_SIZE;
use firn_memory::page_cache::{Residency, evict, preload, preload_small, stored_residency, touch};
use firn_snapshot::PackedFile;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The file with guest memory in a snapshot.
pub(crate) const IMAGE: &str = "memory.img";

/// State of the page cache before a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cache {
    /// No page of the snapshot is cached.
    Cold,
    /// Every page that it stores is cached, in folios as the kernel's read-ahead makes them: 2 MiB
    /// and more if the file system has large folios.
    Cached,
    /// Every page that it stores is cached, in folios of 4 KiB, as in the papers' kernels.
    #[serde(rename = "cached_4k")]
    CachedSmall,
    /// It has no effect: the planner maps the snapshot from a pool.
    Unused,
}

impl std::fmt::Display for Cache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Cold => "cold",
            Self::Cached => "cached",
            Self::CachedSmall => "cached, 4 KiB",
            Self::Unused => "unused",
        })
    }
}

/// Why the page cache cannot be brought into a state.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CacheError {
    /// A file cannot be opened, read or evicted, or mincore fails.
    #[error("cannot prepare the page cache of {path}")]
    Io {
        /// The file, or the directory of the snapshot.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// Pages stay cached.
    #[error(
        "{} of {} pages of {path} stay cached after eviction, so the cache cannot be cold: check that \
         no process maps the file and that it is not on tmpfs, or use --cache cached or another --dir",
        residency.cached,
        residency.pages
    )]
    NotCold {
        /// The file.
        path: PathBuf,
        /// The result of mincore.
        residency: Residency,
    },
    /// Pages are not cached.
    #[error(
        "only {} of {} stored pages of {path} are cached after they were read: check that this host \
         has enough free memory",
        residency.cached,
        residency.pages
    )]
    NotCached {
        /// The file.
        path: PathBuf,
        /// The result of mincore.
        residency: Residency,
    },
}

/// The open files of a snapshot.
#[derive(Debug)]
pub(crate) struct SnapshotFiles(Vec<(PathBuf, File)>);

impl SnapshotFiles {
    /// Opens every file of a snapshot.
    pub(crate) fn all(snapshot: &Path) -> Result<Self, CacheError> {
        let mut files = Vec::new();
        for entry in fs::read_dir(snapshot).map_err(io(snapshot))? {
            let path = entry.map_err(io(snapshot))?.path();
            if path.is_file() {
                let file = File::open(&path).map_err(io(&path))?;
                files.push((path, file));
            }
        }
        Ok(Self(files))
    }

    /// Opens these files.
    pub(crate) fn of(paths: &[PathBuf]) -> Result<Self, CacheError> {
        let open = |path: &PathBuf| Ok((path.clone(), File::open(path).map_err(io(path))?));
        Ok(Self(paths.iter().map(open).collect::<Result<_, _>>()?))
    }

    /// Opens every file of a snapshot except packed files that are not `used`, which other planners
    /// map.
    pub(crate) fn open(snapshot: &Path, used: Option<PackedFile>) -> Result<Self, CacheError> {
        let mut files = Self::all(snapshot)?;
        files.0.retain(|(path, _)| {
            let mut unused = PackedFile::ALL.into_iter().filter(|packed| Some(*packed) != used);
            !unused.any(|packed| path.ends_with(packed.name()))
        });
        Ok(files)
    }

    /// Evicts their pages, as far as possible.
    pub(crate) fn evict(&self) -> Result<(), CacheError> {
        self.0.iter().try_for_each(|(path, file)| evict(file).map(drop).map_err(io(path)))
    }

    /// Brings the page cache into a state, and verifies it with mincore. With `preload_image` it
    /// then preloads the image, and returns the time in ns if the image came from storage.
    pub(crate) fn prepare(
        &self,
        cache: Cache,
        preload_image: bool,
    ) -> Result<Option<u64>, CacheError> {
        for (path, file) in &self.0 {
            match cache {
                Cache::Cold => {
                    expect_cold(path, evict(file).map_err(io(path))?)?;
                }
                Cache::Cached => fill(path, file)?,
                Cache::CachedSmall => fill_small(path, file)?,
                Cache::Unused => continue,
            }
            if cache != Cache::Cold {
                even_out(path, file)?;
            }
        }
        let image = self.0.iter().find(|(path, _)| path.ends_with(IMAGE));
        let Some((path, image)) = image.filter(|_| preload_image) else { return Ok(None) };
        let evicted = evict(image).map_err(io(path))?;
        let begun = Instant::now();
        match cache {
            Cache::CachedSmall => fill_small(path, image)?,
            Cache::Cold | Cache::Cached | Cache::Unused => fill(path, image)?,
        }
        let elapsed = firn_base::ns_since(begun);
        even_out(path, image)?;
        Ok(evicted.is_cold().then_some(elapsed))
    }

    /// Reads all of the image into the page cache. The players then check all their memory, outside
    /// the measured time, without reading it page by page.
    pub(crate) fn warm(&self) {
        for (path, image) in self.0.iter().filter(|(path, _)| path.ends_with(IMAGE)) {
            // A page that is not cached now is read later.
            let _ = fill(path, image);
        }
    }

    /// Bytes of the snapshot in the page cache: DRAM that all microVMs share.
    pub(crate) fn cached_bytes(&self) -> Result<u64, CacheError> {
        self.0.iter().try_fold(0, |sum, (path, file)| {
            Ok(sum + stored_residency(file).map_err(io(path))?.cached * PAGE_SIZE)
        })
    }
}

fn io(path: &Path) -> impl FnOnce(io::Error) -> CacheError {
    move |source| CacheError::Io { path: path.to_owned(), source }
}

/// Reads the stored pages of a file into the page cache, and verifies that with mincore.
fn fill(path: &Path, file: &File) -> Result<(), CacheError> {
    let len = file.metadata().map_err(io(path))?.len();
    fill_by(path, file, || preload(file, 0..len).map(|_| ()))
}

/// Does the same with reads of single pages. Cached pages may be in larger folios, so they are
/// evicted first.
fn fill_small(path: &Path, file: &File) -> Result<(), CacheError> {
    expect_cold(path, evict(file).map_err(io(path))?)?;
    fill_by(path, file, || preload_small(file).map(|_| ()))
}

/// Touches every cached page of a file, so that the first planner to map them does not alone pay
/// for a first touch in a virtual machine.
fn even_out(path: &Path, file: &File) -> Result<(), CacheError> {
    touch(file).map(drop).map_err(io(path))
}

/// Reads until every page is cached. A host may reclaim pages at any time, so several attempts are
/// made.
fn fill_by(path: &Path, file: &File, read: impl Fn() -> io::Result<()>) -> Result<(), CacheError> {
    const ATTEMPTS: u32 = 5;
    let mut residency = stored_residency(file).map_err(io(path))?;
    for _ in 0..ATTEMPTS {
        read().map_err(io(path))?;
        residency = stored_residency(file).map_err(io(path))?;
        if residency.is_cached() {
            break;
        }
    }
    expect_cached(path, residency)
}

fn expect_cold(path: &Path, residency: Residency) -> Result<(), CacheError> {
    if residency.is_cold() {
        return Ok(());
    }
    Err(CacheError::NotCold { path: path.to_owned(), residency })
}

fn expect_cached(path: &Path, residency: Residency) -> Result<(), CacheError> {
    if residency.is_cached() {
        return Ok(());
    }
    Err(CacheError::NotCached { path: path.to_owned(), residency })
}

#[cfg(test)]
#[path = "cache_tests.rs"]
mod tests;
