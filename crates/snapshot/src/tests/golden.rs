//! Golden snapshots: one for each released container version. Every later firn must open and verify
//! them.

use std::fs;
use std::path::{Path, PathBuf};

use firn_base::PAGE_SIZE;

use super::support::{Memory, description, destination, freeze, names_in};
use crate::attach::set_protected;
use crate::directory::open_directory;
use crate::{
    Description, DiskError, DiskIdentity, DiskInfo, ImageKind, MemoryLayout, MemoryRegion, Problem,
    ProtectedFile, Snapshot, VerifyError, verify,
};

const V1: [(&str, &[u8]); 3] = [
    ("memory.img", include_bytes!("../../tests/golden/v1/memory.img")),
    ("overlay.img", include_bytes!("../../tests/golden/v1/overlay.img")),
    ("snapshot.firn", include_bytes!("../../tests/golden/v1/snapshot.firn")),
];

/// Version 2 differs by the files that the manifest names as protected by fs-verity.
const V2: &[u8] = include_bytes!("../../tests/golden/v2/snapshot.firn");

/// A snapshot's directory with these files.
fn directory(files: &[(&str, &[u8])]) -> (tempfile::TempDir, PathBuf) {
    let (dir, path) = destination();
    fs::create_dir(&path).unwrap();
    for (name, bytes) in files {
        fs::write(path.join(name), bytes).unwrap();
    }
    (dir, path)
}

/// Freezes the content of the golden snapshots: two regions with three nonzero pages, an overlay,
/// and a read-only disk that exists on no host.
fn freeze_golden(path: &Path) {
    let region = |guest_addr, pages| MemoryRegion { guest_addr, len: pages * PAGE_SIZE };
    let layout = MemoryLayout::new(vec![region(0, 4), region(1 << 32, 2)]).unwrap();
    let mut memory = Memory::with_layout(layout);
    memory.fill(1, 0x11);
    memory.fill(2, 0x22);
    memory.fill(5, 0x55);
    let identity = DiskIdentity { len: 4096, head: 1, digest: 2 };
    let disk = DiskInfo { id: "root".into(), path: "/nonexistent/root.erofs".into(), identity };
    let description = Description { disks: vec![disk], ..description() };
    let overlay = [[0; 4096], [0x77; 4096]].concat();
    freeze(path, &mut memory, ImageKind::Sparse, Some(&overlay), description, b"machine state");
}

#[test]
#[cfg(target_arch = "x86_64")]
fn version_1_opens_and_verifies() {
    let (_dir, path) = directory(&V1);
    opens_and_verifies(&path);
}

/// The loading-set file is not there, so no file has to be protected.
#[test]
#[cfg(target_arch = "x86_64")]
fn version_2_opens_and_verifies() {
    let [image, overlay, _] = V1;
    let (_dir, path) = directory(&[image, overlay, ("snapshot.firn", V2)]);
    opens_and_verifies(&path);
    let snapshot = Snapshot::open(&path).unwrap();
    assert_eq!(snapshot.manifest().protected, [protected()]);
    assert!(!snapshot.image_is_protected());
}

fn protected() -> ProtectedFile {
    ProtectedFile { name: "loading-set.img".into(), digest: [7; 32] }
}

fn opens_and_verifies(path: &Path) {
    let snapshot = Snapshot::open(path).unwrap();
    let manifest = snapshot.manifest();
    assert_eq!(manifest.description.id, description().id);
    assert_eq!(manifest.description.cpu, description().cpu);
    assert_eq!(manifest.description.function, description().function);
    assert_eq!(manifest.description.disks[0].path, PathBuf::from("/nonexistent/root.erofs"));
    assert_eq!(manifest.layout.guest_addr(5 * 4096), Some((1 << 32) + 4096));
    assert_eq!(snapshot.machine_state(), (3, b"machine state".as_slice()));
    assert_eq!(snapshot.zero_map().gaps().collect::<Vec<_>>(), [1..3, 5..6]);
    snapshot.digests().check(1, &[0x11; 4096]).unwrap();
    // The only problem is the disk, which is not part of the snapshot.
    let error = verify(path, &mut |_, _| ()).unwrap_err();
    let VerifyError::Damaged { problems, .. } = error else { panic!("{error}") };
    assert!(matches!(&problems[..], [Problem::Disk(DiskError::Open { .. })]), "{problems:?}");
}

#[test]
#[cfg(target_arch = "x86_64")]
fn the_writer_still_writes_version_1() {
    let (_dir, path) = destination();
    freeze_golden(&path);
    assert_eq!(names_in(&path), V1.map(|(name, _)| name));
    for (name, bytes) in V1 {
        assert!(fs::read(path.join(name)).unwrap() == bytes, "{name} differs from the golden one");
    }
}

#[test]
#[cfg(target_arch = "x86_64")]
fn the_writer_writes_version_2_for_protected_files_alone() {
    let (_dir, path) = directory(&V1);
    let dir = open_directory(&path).unwrap();
    let container = path.join("snapshot.firn");
    set_protected(&dir, &path, vec![protected()]).unwrap();
    assert!(fs::read(&container).unwrap() == V2, "snapshot.firn differs from the golden one");
    set_protected(&dir, &path, vec![]).unwrap();
    assert!(fs::read(&container).unwrap() == V1[2].1, "it is not of version 1 again");
}
