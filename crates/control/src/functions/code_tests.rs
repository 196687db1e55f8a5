use std::cell::{Cell, RefCell};
use std::io::Write;

use proptest::prelude::{any, prop, proptest};
use zip::write::{SimpleFileOptions, ZipWriter};

use super::*;

fn zip_of(files: &[(&str, &[u8], u32)]) -> Vec<u8> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    for (path, contents, mode) in files {
        let options = SimpleFileOptions::default().unix_permissions(*mode);
        zip.start_file(*path, options).unwrap();
        zip.write_all(contents).unwrap();
    }
    zip.finish().unwrap().into_inner()
}

fn store() -> (tempfile::TempDir, CodeStore) {
    let folder = tempfile::tempdir().unwrap();
    let store = CodeStore::open(folder.path().join("code")).unwrap();
    (folder, store)
}

thread_local! {
    /// What was made to last: whether it is a folder, and the names in the store's folder then.
    static SYNCED: RefCell<Vec<(bool, Vec<String>)>> = const { RefCell::new(Vec::new()) };
    static FOLDER: RefCell<PathBuf> = RefCell::default();
    static FAILING: Cell<bool> = const { Cell::new(false) };
}

fn recorded_sync(file: &File) -> io::Result<()> {
    let names = FOLDER.with_borrow(|folder| {
        let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
        names.map(|name| name.into_string().unwrap()).collect()
    });
    let is_folder = file.metadata()?.is_dir();
    SYNCED.with_borrow_mut(|synced| synced.push((is_folder, names)));
    if is_folder && FAILING.get() {
        return Err(io::Error::from_raw_os_error(5));
    }
    file.sync_all()
}

/// The order of syncs and renames, which decides what a loss of power leaves: the contents last
/// before the name exists, and the name lasts before `put` returns and the database is changed.
#[test]
fn stored_code_lasts_before_the_database_refers_to_it() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("code");
    FOLDER.set(dir.path().to_owned());
    let store = CodeStore::with_sync(folder.clone(), recorded_sync).unwrap();
    assert_eq!(SYNCED.take(), [(true, vec!["code".to_owned()])], "the folder itself lasts");

    FOLDER.set(folder);
    let zip = zip_of(&[("handler.py", b"x = 1", 0o644)]);
    let name = format!("{}.zip", CodeStore::code_of(&zip).sha256);
    FAILING.set(true);
    store.put(&zip).expect_err("the name may not last");
    let synced = SYNCED.take();
    let [(false, before), (true, after)] = &synced[..] else { panic!("{synced:?}") };
    assert!(!before.contains(&name) && before.len() == 1, "{synced:?}");
    assert_eq!(after, std::slice::from_ref(&name));

    // The file is there, and its name does not last yet.
    store.put(&zip).expect_err("the name may not last");
    FAILING.set(false);
    store.put(&zip).unwrap();
    assert_eq!(SYNCED.take(), [(true, vec![name.clone()]), (true, vec![name])]);
}

#[test]
fn stored_code_is_read_back() {
    let (_folder, store) = store();
    let zip = zip_of(&[("handler.py", b"x = 1", 0o644), ("bin/run", b"", 0o755)]);
    let code = store.put(&zip).unwrap();
    assert_eq!(store.put(&zip).unwrap(), code);
    assert_eq!(code.size, u64::try_from(zip.len()).unwrap());
    let mut found = Vec::new();
    store
        .files(&code, |file| {
            found.push((file.path, file.executable, file.contents));
            Ok::<_, CodeError>(())
        })
        .unwrap();
    let expected =
        [("handler.py".to_owned(), false, b"x = 1".to_vec()), ("bin/run".to_owned(), true, vec![])];
    assert_eq!(found, expected);
    store.keep(|_| false).unwrap();
    assert!(!store.path(&code).exists());
}

#[test]
fn paths_outside_the_folder_are_refused() {
    let (_folder, store) = store();
    for path in ["../x", "/x", "a/../../x", "a//b", "a/./b", "a\\b"] {
        let error = store.put(&zip_of(&[(path, b"", 0o644)])).unwrap_err();
        assert!(matches!(error, CodeError::Path(_)), "{path}: {error}");
    }
}

#[test]
fn links_are_refused() {
    let (_folder, store) = store();
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    zip.add_symlink("link", "/etc/passwd", SimpleFileOptions::default()).unwrap();
    let error = store.put(&zip.finish().unwrap().into_inner()).unwrap_err();
    assert!(matches!(error, CodeError::Kind(_)), "{error}");
}

#[test]
fn a_zip_bomb_is_refused() {
    let (_folder, store) = store();
    let half = vec![0; 131_072_001];
    let zip = zip_of(&[("a", &half, 0o644), ("b", &half, 0o644)]);
    assert!(zip.len() < 1 << 20);
    assert!(matches!(store.put(&zip).unwrap_err(), CodeError::TooLarge));
}

#[test]
fn too_many_entries_are_refused_before_they_are_decoded() {
    let (_folder, store) = store();
    let entries = b"PK\x01\x02".repeat(MAX_FILES);
    assert!(matches!(store.put(&entries).unwrap_err(), CodeError::NotZip(_)));
    let more = b"PK\x01\x02".repeat(MAX_FILES + 1);
    assert!(matches!(store.put(&more).unwrap_err(), CodeError::TooMany));
}

#[test]
fn invalid_and_damaged_files_are_refused() {
    let (_folder, store) = store();
    assert!(matches!(store.put(b"").unwrap_err(), CodeError::NotZip(_)));
    assert!(matches!(store.put(b"PK and then nothing").unwrap_err(), CodeError::NotZip(_)));
    let empty = ZipWriter::new(Cursor::new(Vec::new())).finish().unwrap().into_inner();
    assert!(matches!(store.put(&empty).unwrap_err(), CodeError::Empty));
    let mut zip = zip_of(&[("handler.py", b"x = 1", 0o644)]);
    let at = zip.windows(5).position(|bytes| bytes == b"handl").unwrap() + 12;
    zip[at] ^= 0x40;
    assert!(store.put(&zip).is_err());
    assert_eq!(fs::read_dir(&store.folder).unwrap().count(), 0);
}

proptest! {
    #[test]
    fn random_bytes_cause_no_panic(bytes in prop::collection::vec(any::<u8>(), 0..2000), at in 0..200_usize) {
        let (_folder, store) = store();
        let _ = store.put(&bytes);
        let mut zip = zip_of(&[("handler.py", b"x = 1", 0o644)]);
        for (offset, byte) in bytes.iter().take(3).enumerate() {
            let index = (at + offset * 7) % zip.len();
            zip[index] = *byte;
        }
        let _ = store.put(&zip);
    }
}
