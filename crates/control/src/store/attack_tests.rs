//! Attacks on the daemon's directory: damaged, lost and foreign databases, full disks.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use tempfile::TempDir;

use super::tests::{create, open, version};
use super::*;
use crate::functions::Layer;

/// A directory with functions, whose daemon was stopped.
fn used() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let store = open(&folder);
    for number in 0..30 {
        create(&store, &format!("f{number}"));
    }
    store.change(|change| change.purge("a-snapshot")).unwrap();
    store.change(|change| change.put_layer("shared", &layer())).unwrap();
    store.delete(|change| change.remove_function("f29")).unwrap();
    drop(store);
    folder
}

fn layer() -> Layer {
    Layer { owner: Some("a".into()), next_version: 3, versions: Vec::new() }
}

fn state(folder: &TempDir) -> PathBuf {
    folder.path().join("state.redb")
}

/// Everything about the functions.
fn content(store: &Store) -> String {
    let functions = store.functions().unwrap();
    let all: Vec<_> = functions
        .iter()
        .map(|function| {
            let name = &function.latest.function;
            let (versions, aliases) = (store.versions(name).unwrap(), store.aliases(name).unwrap());
            (function, versions, aliases, store.all_attachments(name).unwrap())
        })
        .collect();
    serde_json::to_string(&(all, store.layers().unwrap())).unwrap()
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy(&entry.path(), &target),
            false => drop(fs::copy(entry.path(), target).unwrap()),
        }
    }
}

fn damage(bytes: &mut Vec<u8>, random: &mut fastrand::Rng) {
    let at = random.usize(..bytes.len());
    match random.u8(..5) {
        0 => bytes[at] ^= 1 << random.u8(..8),
        1 => {
            for _ in 0..64 {
                let at = random.usize(..bytes.len());
                bytes[at] = random.u8(..);
            }
        }
        2 => bytes.truncate(at),
        3 => {
            let end = bytes.len().min(at + 4096);
            bytes[at..end].fill(0);
        }
        // The head, with the roots of the trees.
        _ => bytes[at % 512] ^= 1 << random.u8(..8),
    }
}

#[test]
fn a_damaged_database_is_an_error_or_has_no_effect_and_is_recovered() {
    let original = used();
    let expected = content(&open(&original));
    let mut refused = 0;
    for seed in 0..120 {
        let mut random = fastrand::Rng::with_seed(seed);
        let folder = tempfile::tempdir().unwrap();
        copy(original.path(), folder.path());
        let mut bytes = fs::read(state(&folder)).unwrap();
        damage(&mut bytes, &mut random);
        fs::write(state(&folder), &bytes).unwrap();
        match Store::open(folder.path(), false) {
            Ok(store) => {
                assert_eq!(content(&store), expected, "seed {seed}");
                create(&store, "after");
                continue;
            }
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains("firn serve --recover"), "seed {seed}: {text}");
                refused += 1;
            }
        }
        // The damaged file is as it was.
        assert!(fs::read(state(&folder)).unwrap() == bytes, "seed {seed}");
        let store = Store::open(folder.path(), true).unwrap();
        assert_eq!(content(&store), expected, "seed {seed}");
        let kept = folder.path().join("state.redb.damaged-1");
        if !bytes.is_empty() {
            assert!(fs::read(kept).unwrap() == bytes, "seed {seed}");
        }
    }
    assert!(refused > 40, "{refused}");
}

#[test]
fn a_lost_database_is_an_error_and_is_recovered() {
    for lose in [|path: &Path| fs::remove_file(path), |path: &Path| fs::write(path, "")] {
        let folder = used();
        let expected = content(&open(&folder));
        lose(&state(&folder)).unwrap();
        for _ in 0..2 {
            let error = Store::open(folder.path(), false).unwrap_err();
            assert!(matches!(error, StoreError::Missing { .. }), "{error:?}");
        }
        let store = Store::open(folder.path(), true).unwrap();
        assert_eq!(content(&store), expected);
        drop(store);
        assert_eq!(content(&open(&folder)), expected);
    }
}

#[test]
fn a_database_without_an_export_is_recovered_from_the_last_good_copy() {
    let folder = used();
    let expected = content(&open(&folder));
    fs::remove_dir_all(folder.path().join("functions")).unwrap();
    fs::write(state(&folder), "no database").unwrap();
    assert_eq!(content(&Store::open(folder.path(), true).unwrap()), expected);
    fs::remove_dir_all(folder.path().join("functions")).unwrap();
    fs::remove_file(folder.path().join("state.redb.good")).unwrap();
    fs::write(state(&folder), "no database").unwrap();
    let error = Store::open(folder.path(), true).unwrap_err();
    assert!(matches!(error, StoreError::NothingToRecover { .. }), "{error:?}");
    assert!(error.to_string().contains("--data"), "{error}");
}

#[test]
fn an_older_or_a_foreign_database_is_an_error() {
    let folder = used();
    let older = fs::read(state(&folder)).unwrap();
    create(&open(&folder), "new");
    fs::write(state(&folder), older).unwrap();
    let error = Store::open(folder.path(), false).unwrap_err();
    assert!(
        matches!(&error, StoreError::Older { what, .. } if what == "the function new"),
        "{error:?}"
    );
    assert!(Store::open(folder.path(), true).unwrap().function("new").unwrap().is_some());

    let older = fs::read(state(&folder)).unwrap();
    let store = open(&folder);
    store.change(|change| change.put_layer("new", &layer())).unwrap();
    drop(store);
    fs::write(state(&folder), older).unwrap();
    let error = Store::open(folder.path(), false).unwrap_err();
    assert!(
        matches!(&error, StoreError::Older { what, .. } if what == "the layer new"),
        "{error:?}"
    );
    assert_eq!(Store::open(folder.path(), true).unwrap().layer("new").unwrap(), Some(layer()));

    let other = used();
    fs::copy(state(&other), state(&folder)).unwrap();
    let error = Store::open(folder.path(), false).unwrap_err();
    assert!(matches!(error, StoreError::Foreign { .. }), "{error:?}");
    assert!(Store::open(folder.path(), true).unwrap().function("new").unwrap().is_some());
}

#[test]
fn a_damaged_export_is_written_again_and_recovers_nothing() {
    let folder = used();
    let file = folder.path().join("functions/f3.json");
    let good = fs::read_to_string(&file).unwrap();
    let damaged = good.replace("\"timeout\":3", "\"timeout\":4");
    assert_ne!(good, damaged);
    fs::write(&file, &damaged).unwrap();
    drop(open(&folder));
    assert!(fs::read_to_string(&file).unwrap().contains("\"timeout\":3"));
    fs::write(&file, &damaged).unwrap();
    fs::remove_file(state(&folder)).unwrap();
    let error = Store::open(folder.path(), true).unwrap_err();
    assert!(matches!(&error, StoreError::Export { path, .. } if *path == file), "{error:?}");
}

#[test]
fn a_database_of_an_earlier_version_gets_a_marker_and_an_export() {
    let folder = used();
    let expected = content(&open(&folder));
    fs::remove_file(folder.path().join(".firn-serve")).unwrap();
    fs::remove_dir_all(folder.path().join("functions")).unwrap();
    let database = Database::open(state(&folder)).unwrap();
    let change = database.begin_write().unwrap();
    change.delete_table(META).unwrap();
    change.commit().unwrap();
    drop(database);
    assert_eq!(content(&open(&folder)), expected);
    fs::remove_file(state(&folder)).unwrap();
    assert_eq!(content(&Store::open(folder.path(), true).unwrap()), expected);
}

#[test]
fn only_the_daemons_user_can_read_its_directory() {
    let folder = used();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(state(&folder), fs::Permissions::from_mode(0o644)).unwrap();
    drop(open(&folder));
    assert_eq!(mode(folder.path()), 0o700);
    for entry in fs::read_dir(folder.path()).unwrap() {
        let entry = entry.unwrap();
        let expected = if entry.file_type().unwrap().is_dir() { 0o700 } else { 0o600 };
        assert_eq!(mode(&entry.path()), expected, "{entry:?}");
    }
    assert_eq!(mode(&folder.path().join("functions/f1.json")), 0o600);
}

/// A file system of 8 MiB, unmounted when dropped.
struct SmallDisk(TempDir);

impl SmallDisk {
    /// `None` if this process may not mount.
    fn mount() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let flags = rustix::mount::MountFlags::empty();
        let mounted =
            rustix::mount::mount("tmpfs", folder.path(), "tmpfs", flags, Some(c"size=8m"));
        firn_required::has("root", mounted.is_ok()).then_some(Self(folder))
    }

    fn fill(&self) {
        let mut file = fs::File::create(self.0.path().join("ballast")).unwrap();
        let mut length = 1 << 20;
        while length > 0 {
            if io::Write::write_all(&mut file, &vec![1; length]).is_err() {
                length /= 2;
            }
        }
    }

    fn free(&self) {
        fs::remove_file(self.0.path().join("ballast")).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.0.path(), rustix::mount::UnmountFlags::DETACH);
    }
}

#[test]
fn a_full_disk_refuses_changes_until_there_is_space() {
    let Some(disk) = SmallDisk::mount() else { return };
    let store = open(&disk.0);
    for name in ["a", "b"] {
        create(&store, name);
    }
    disk.fill();
    let large = || {
        let mut latest = version("c", LATEST);
        latest.description = "x".repeat(3 << 20);
        let function = FunctionRecord {
            id: Uuid::nil(),
            next_version: 1,
            concurrency: None,
            owner: None,
            latest,
        };
        store.change(|change| change.put_function("c", &function))
    };
    for _ in 0..3 {
        let full = large();
        assert!(matches!(full, Err(StoreError::Full(_))), "{full:?}");
        // It still answers.
        assert_eq!(store.functions().unwrap().len(), 2);
    }
    // With space it goes on.
    disk.free();
    create(&store, "d");
    disk.fill();
    large().unwrap_err();
    // Functions can be deleted.
    assert!(store.delete(|change| change.remove_function("a")).unwrap());
    assert_eq!(store.functions().unwrap().len(), 2);
    disk.free();
    create(&store, "e");
    assert_eq!(store.functions().unwrap().len(), 3);
    drop(store);
    let store = open(&disk.0);
    assert!(store.function("a").unwrap().is_none() && store.function("d").unwrap().is_some());
}

#[test]
fn a_daemon_starts_on_a_full_disk() {
    let Some(disk) = SmallDisk::mount() else { return };
    create(&open(&disk.0), "a");
    disk.fill();
    let store = open(&disk.0);
    assert!(store.delete(|change| change.remove_function("a")).unwrap());
    drop(store);
    // Without the reserve too.
    let _ = fs::remove_file(disk.0.path().join("reserve"));
    disk.free();
    disk.fill();
    let store = open(&disk.0);
    assert_eq!(store.functions().unwrap().len(), 0);
    let full = store.change(|change| change.put_function("b", &record("b")));
    assert!(matches!(full, Err(StoreError::Full(_))), "{full:?}");
    disk.free();
    create(&store, "b");
}

fn record(name: &str) -> FunctionRecord {
    FunctionRecord {
        id: Uuid::nil(),
        next_version: 1,
        concurrency: None,
        owner: None,
        latest: version(name, LATEST),
    }
}
