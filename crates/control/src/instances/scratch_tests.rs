use std::io::Write;

use super::*;
use crate::functions::testing::version;
use crate::functions::{Code, UsedLayer};

const MIB: u64 = 1 << 20;

fn open(folder: &Path) -> Scratch {
    let disk = tempfile::NamedTempFile::new().unwrap();
    disk.as_file().set_len(512 * MIB).unwrap();
    Scratch::open(folder.join("scratch"), disk.path(), u64::MAX, None).unwrap()
}

#[test]
fn disks_in_memory_are_booked() {
    // Every Linux has a tmpfs there.
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let scratch = open(folder.path());
    assert!(scratch.is_in_memory());
    let process = std::process::id();
    let before = scratch.bytes_of(process);
    let mut disk = tempfile::tempfile_in(scratch.path()).unwrap();
    disk.write_all(&vec![1; 8 << 20]).unwrap();
    disk.set_len(64 * MIB).unwrap();
    let _again = disk.try_clone().unwrap();
    let grown = scratch.bytes_of(process) - before;
    assert!((8 * MIB..9 * MIB).contains(&grown), "{grown}");
    assert_eq!(scratch.bytes_of(u32::MAX), 0);
}

#[test]
fn disks_on_a_disk_are_not() {
    let folder = tempfile::tempdir().unwrap();
    if firn_required::is_on_disk(File::open(folder.path()).unwrap()) {
        assert!(!open(folder.path()).is_in_memory());
    }
}

#[test]
fn a_quota_bounds_a_disk_and_the_folder() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let disk = tempfile::NamedTempFile::new().unwrap();
    disk.as_file().set_len(600 * MIB).unwrap();
    let open = |limit, size| Scratch::open(folder.path().to_owned(), disk.path(), limit, size);
    let small = version();
    let large = Version { storage: 10_240, ..version() };
    let scratch = open(64 * MIB, Some(300 * MIB)).unwrap();
    assert_eq!(scratch.size(), 300 * MIB);
    assert_eq!(scratch.smallest(), 64 * MIB);
    assert_eq!((scratch.disk(&small), scratch.disk(&large)), (64 * MIB, 64 * MIB));
    let scratch = open(u64::MAX, Some(500 * MIB)).unwrap();
    assert_eq!(scratch.smallest(), 600 * MIB);
    assert_eq!((scratch.disk(&small), scratch.disk(&large)), (600 * MIB, 10_576 * MIB));
    // The function's files are on the disk, too.
    let code = Code { unpacked: 100 * MIB, ..small.code.clone() };
    let with_files = Version { code, ..small };
    assert_eq!(scratch.disk(&with_files), 644 * MIB);
    let layer = UsedLayer { layer: "l".into(), version: 1, code: with_files.code.clone() };
    let with_layer = Version { layers: vec![layer], ..with_files };
    assert_eq!(scratch.disk(&with_layer), 744 * MIB);
    // The free space of the file system is the default.
    let free = rustix::fs::statvfs(folder.path()).unwrap();
    assert!(open(4096, None).unwrap().size() <= free.f_bavail * free.f_frsize);
}
