use std::io::Write;

use super::*;

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
    assert_eq!(scratch.worst(), 512 * MIB);
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
        assert_eq!(open(folder.path()).worst(), 0);
    }
}

#[test]
fn a_quota_bounds_a_disk_and_the_folder() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let disk = tempfile::NamedTempFile::new().unwrap();
    disk.as_file().set_len(512 * MIB).unwrap();
    let open = |limit, size| Scratch::open(folder.path().to_owned(), disk.path(), limit, size);
    let scratch = open(64 * MIB, Some(300 * MIB)).unwrap();
    assert_eq!((scratch.disk(), scratch.worst(), scratch.disks()), (64 * MIB, 64 * MIB, 4));
    let scratch = open(u64::MAX, Some(500 * MIB)).unwrap();
    assert_eq!((scratch.disk(), scratch.disks()), (512 * MIB, 0));
    // The free space of the file system is the default.
    let free = rustix::fs::statvfs(folder.path()).unwrap();
    let free = free.f_bavail * free.f_frsize;
    let disks = open(4096, None).unwrap().disks();
    assert!(u64::try_from(disks).unwrap() * 4096 <= free, "{disks} disks in {free} bytes");
}
