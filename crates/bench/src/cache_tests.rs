use std::io::Write;

use firn_memory::page_cache::residency;

use super::*;

/// A directory with files of this many pages; `None` if temporary files are on tmpfs, which cannot
/// evict.
fn snapshot(files: &[(&str, usize)]) -> Option<tempfile::TempDir> {
    let directory = tempfile::tempdir().unwrap();
    if !firn_required::is_on_disk(File::open(directory.path()).unwrap()) {
        return None;
    }
    for (name, pages) in files {
        let mut file = File::create(directory.path().join(name)).unwrap();
        file.write_all(&vec![7; pages * 4096]).unwrap();
        file.sync_all().unwrap();
    }
    Some(directory)
}

fn residency_of(directory: &Path, name: &str) -> Residency {
    residency(&File::open(directory.join(name)).unwrap()).unwrap()
}

#[test]
fn mincore_determines_the_state() {
    let path = Path::new("x");
    let some = Residency { pages: 10, cached: 3 };
    let none = Residency { pages: 10, cached: 0 };
    let all = Residency { pages: 10, cached: 10 };
    assert!(expect_cold(path, none).is_ok());
    assert!(expect_cached(path, all).is_ok());
    let text = expect_cold(path, some).unwrap_err().to_string();
    assert!(text.starts_with("3 of 10 pages of x stay cached"), "{text}");
    let text = expect_cached(path, some).unwrap_err().to_string();
    assert!(text.starts_with("only 3 of 10 stored pages of x"), "{text}");
    // A file without pages is cold and cached.
    assert!(expect_cold(path, Residency::default()).is_ok());
    assert!(expect_cached(path, Residency::default()).is_ok());
}

#[test]
fn both_states_are_prepared_and_verified() {
    let Some(directory) = snapshot(&[("snapshot.firn", 2), (IMAGE, 300)]) else { return };
    let files = SnapshotFiles::open(directory.path(), None).unwrap();
    assert_eq!(files.prepare(Cache::Cold, false).unwrap(), None);
    assert_eq!(files.cached_bytes().unwrap(), 0);
    assert_eq!(files.prepare(Cache::Cached, false).unwrap(), None);
    assert_eq!(files.cached_bytes().unwrap(), 302 * 4096);
    assert!(files.prepare(Cache::Cold, true).unwrap().is_some());
    assert_eq!(files.cached_bytes().unwrap(), 300 * 4096, "only the image is preloaded");
    assert!(residency_of(directory.path(), "snapshot.firn").is_cold());
    assert!(files.prepare(Cache::Cached, true).unwrap().is_some());
    assert_eq!(files.cached_bytes().unwrap(), 302 * 4096);
}

/// Cached pages of one planner's run do not stay for the next planner's runs on a full page cache.
#[test]
fn no_page_of_a_planners_run_remains_cached() {
    let Some(directory) = snapshot(&[(PackedFile::LoadingSet.name(), 5), (IMAGE, 300)]) else {
        return;
    };
    let files = SnapshotFiles::all(directory.path()).unwrap();
    files.prepare(Cache::Cached, false).unwrap();
    assert_eq!(files.cached_bytes().unwrap(), 305 * 4096);
    files.evict().unwrap();
    assert_eq!(files.cached_bytes().unwrap(), 0);
}

#[test]
fn a_packed_file_counts_for_the_planner_that_uses_it() {
    let packed = PackedFile::LoadingSet;
    let Some(directory) = snapshot(&[(IMAGE, 30), (packed.name(), 5)]) else { return };
    for (used, pages) in [(None, 30), (Some(PackedFile::WorkingSet), 30), (Some(packed), 35)] {
        let files = SnapshotFiles::open(directory.path(), used).unwrap();
        files.prepare(Cache::Cold, false).unwrap();
        assert_eq!(files.cached_bytes().unwrap(), 0);
        files.prepare(Cache::CachedSmall, false).unwrap();
        assert_eq!(files.cached_bytes().unwrap(), pages * 4096);
    }
}

#[test]
fn pages_that_stay_cached_are_an_error() {
    let Some(directory) = snapshot(&[(IMAGE, 16)]) else { return };
    let files = SnapshotFiles::open(directory.path(), None).unwrap();
    files.prepare(Cache::Cached, false).unwrap();
    let image = File::open(directory.path().join(IMAGE)).unwrap();
    // SAFETY: a fresh mapping at an address that the kernel chooses.
    let mapped = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            16 * 4096,
            rustix::mm::ProtFlags::READ,
            rustix::mm::MapFlags::PRIVATE | rustix::mm::MapFlags::POPULATE,
            &image,
            0,
        )
    };
    let mapped = mapped.unwrap();
    let refused = files.prepare(Cache::Cold, false);
    // SAFETY: this is the mapping made above, and nothing refers to it.
    unsafe { rustix::mm::munmap(mapped, 16 * 4096) }.unwrap();
    assert!(matches!(refused, Err(CacheError::NotCold { .. })), "{refused:?}");
    assert!(files.prepare(Cache::Cold, false).is_ok());
}

#[test]
fn a_missing_snapshot_is_named_in_the_error() {
    let error = SnapshotFiles::open(Path::new("/nowhere/at-all"), None).unwrap_err();
    assert!(error.to_string().contains("/nowhere/at-all"));
}
