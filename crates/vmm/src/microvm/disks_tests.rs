use std::path::Path;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use firn_snapshot::{CpuRequirement, Description, ImageInfo, ImageKind, MemoryLayout};
use rustix::fs::{CWD, FileType, Mode, inotify, makedev, mknodat};
use rustix::io::Errno;
use uuid::Uuid;

use super::*;

fn manifest(disks: Vec<DiskInfo>) -> Manifest {
    Manifest {
        description: Description {
            id: Uuid::nil(),
            parent: None,
            created_ns: 0,
            firn_version: String::new(),
            vcpus: 1,
            cpu: CpuRequirement::default(),
            disks,
            function: None,
        },
        layout: MemoryLayout::for_size(1 << 20).unwrap(),
        image: ImageInfo { kind: ImageKind::Sparse, stored_pages: 0 },
        overlay: None,
        protected: Vec::new(),
    }
}

/// What a process gets that opens the disk of a manifest whose disk was replaced by `path`.
fn refused(disk: &DiskInfo, path: &Path) -> String {
    let (hostile, moved) = (DiskInfo { path: path.to_owned(), ..disk.clone() }, path.to_owned());
    let disk = disk.clone();
    let (sender, receiver) = channel();
    thread::spawn(move || {
        let named = open_root_disk(&manifest(vec![hostile]), None).unwrap_err();
        let moved = open_root_disk(&manifest(vec![disk]), Some(&moved)).unwrap_err();
        let texts = [named, moved].map(|error| firn_base::error_chain(&error));
        sender.send(texts).unwrap();
    });
    // A FIFO could block it.
    let [named, moved] = receiver.recv_timeout(Duration::from_secs(60)).unwrap();
    assert_eq!(named, moved);
    named
}

#[test]
fn the_root_disk_of_a_manifest_is_opened_if_it_is_that_of_the_freeze() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("root");
    std::fs::write(&path, vec![7; 100_000]).unwrap();
    let disk = DiskInfo::new(ROOT_DRIVE, &path).unwrap();
    let opened = open_root_disk(&manifest(vec![disk.clone()]), None).unwrap().unwrap();
    assert_eq!(opened.path, disk.path);
    assert!(open_root_disk(&manifest(Vec::new()), None).unwrap().is_none());

    let other = dir.path().join("other");
    std::fs::rename(&path, &other).unwrap();
    let moved = open_root_disk(&manifest(vec![disk.clone()]), Some(&other)).unwrap().unwrap();
    assert_eq!(moved.path, other.canonicalize().unwrap());
    let gone = open_root_disk(&manifest(vec![disk.clone()]), None).unwrap_err();
    assert!(matches!(gone, DiskError::Root(_)), "{gone}");

    // Files that the manifest does not know.
    std::fs::write(&path, vec![7; 99_999]).unwrap();
    assert!(refused(&disk, &path).contains("differs from the disk at the freeze"));
    std::fs::write(&path, vec![8; 100_000]).unwrap();
    assert!(refused(&disk, &path).contains("differs from the disk at the freeze"));
    // What is no file is not opened.
    let fifo = dir.path().join("fifo");
    mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR, makedev(0, 0)).unwrap();
    let opens = inotify::init(inotify::CreateFlags::NONBLOCK).unwrap();
    inotify::add_watch(&opens, &fifo, inotify::WatchFlags::OPEN).unwrap();
    for path in [fifo.as_path(), dir.path(), Path::new("/dev/zero")] {
        assert!(refused(&disk, path).contains("is not a regular file"), "{}", path.display());
    }
    assert_eq!(rustix::io::read(&opens, &mut [0; 64]), Err(Errno::AGAIN));
}
