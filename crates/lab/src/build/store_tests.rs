use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

use super::Store;

#[test]
fn a_part_is_built_with_its_key_and_only_if_it_exists() {
    let cache = tempfile::tempdir().unwrap();
    let store = Store::open(cache.path()).unwrap();
    assert!(!store.is_built("guest/root.erofs", "1 a"));
    let (_, path) = store.fresh_file("guest/root.erofs").unwrap();
    fs::write(path, "image").unwrap();
    store.publish("guest/root.erofs", "1 a").unwrap();
    assert!(store.is_built("guest/root.erofs", "1 a"));
    assert!(!store.is_built("guest/root.erofs", "2 a"));
    assert_eq!(store.key("guest/root.erofs").unwrap(), "1 a");
    let stamps: Vec<_> = fs::read_dir(cache.path().join("stamps")).unwrap().collect();
    assert_eq!(stamps.len(), 1);
    assert_eq!(stamps[0].as_ref().unwrap().file_name(), "guest-root.erofs");
    fs::remove_file(store.path("guest/root.erofs")).unwrap();
    assert!(!store.is_built("guest/root.erofs", "1 a"));
}

#[test]
fn a_folder_replaces_the_previous_one() {
    let cache = tempfile::tempdir().unwrap();
    let store = Store::open(cache.path()).unwrap();
    for file in ["old", "new"] {
        let folder = store.fresh_folder("lab/l1").unwrap();
        fs::write(folder.join(file), "").unwrap();
        store.publish("lab/l1", "1").unwrap();
    }
    assert!(store.path("lab/l1/new").exists());
    assert!(!store.path("lab/l1/old").exists());
}

#[test]
fn unfinished_parts_are_removed_at_the_end() {
    let cache = tempfile::tempdir().unwrap();
    let store = Store::open(cache.path()).unwrap();
    let folder = store.fresh_folder("guest/image").unwrap();
    fs::create_dir(folder.join("etc")).unwrap();
    fs::write(folder.join("etc/passwd"), "").unwrap();
    fs::set_permissions(folder.join("etc"), Permissions::from_mode(0o555)).unwrap();
    store.fresh_file("guest/images/mine.erofs").unwrap();
    fs::write(cache.path().join("guest/kept"), "").unwrap();
    drop(store);
    assert!(!folder.exists());
    assert!(!cache.path().join("guest/images/mine.erofs.new").exists());
    assert!(cache.path().join("guest/kept").exists());
}
