//! What is frozen is what is opened.

use std::os::unix::fs::FileExt;

use super::support::{Memory, description, destination};
use crate::{ImageKind, Snapshot, Writer};

#[test]
fn a_snapshot_holds_what_was_frozen() {
    let (_dir, path) = destination();
    let mut memory = Memory::zeroed(1000);
    memory.fill(3, 1);
    memory.fill(4, 2);
    memory.fill(999, 3);
    let mut writer = Writer::create(&path).unwrap();
    writer.write_image(&mut memory, ImageKind::Sparse).unwrap();
    let report = writer.seal(description(), 9, b"state").unwrap();
    assert_eq!((report.stored_pages, report.zero_pages), (3, 997));

    let snapshot = Snapshot::open(&path).unwrap();
    assert_eq!(snapshot.manifest().description, description());
    assert_eq!(snapshot.manifest().layout, memory.layout);
    assert_eq!(snapshot.machine_state(), (9, b"state".as_slice()));
    assert_eq!(snapshot.zero_map().gaps().collect::<Vec<_>>(), [3..5, 999..1000]);
    let mut image = vec![0; memory.bytes.len()];
    snapshot.image().read_exact_at(&mut image, 0).unwrap();
    assert!(image == memory.bytes);
    snapshot.digests().check(0, &image).unwrap();
}
