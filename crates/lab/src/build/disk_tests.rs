use std::fs;

use super::{sha256, stats, used_bytes};

#[test]
fn a_digest_has_the_form_of_sha256sum() {
    assert_eq!(
        sha256("abc"),
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad  -"
    );
}

#[test]
fn stats_change_with_the_files() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a");
    fs::write(&file, "1").unwrap();
    let before = stats(std::slice::from_ref(&file), false).unwrap();
    assert_eq!(before.split(' ').count(), 3);
    let named = stats(std::slice::from_ref(&file), true).unwrap();
    assert_eq!(named, format!("{} {before}", file.display()));
    fs::write(&file, "22").unwrap();
    assert_ne!(stats(&[file], false).unwrap(), before);
}

#[test]
fn used_bytes_count_whole_blocks() {
    let folder = tempfile::tempdir().unwrap();
    let empty = used_bytes(folder.path()).unwrap();
    fs::create_dir(folder.path().join("in")).unwrap();
    let file = fs::File::create(folder.path().join("in/file")).unwrap();
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, 65536).unwrap();
    assert!(used_bytes(folder.path()).unwrap() >= empty + 65536);
}
