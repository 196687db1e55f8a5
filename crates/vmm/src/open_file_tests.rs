use std::path::Path;

use super::OpenFile;

#[test]
fn the_error_names_a_missing_file() {
    let error = OpenFile::open(Path::new("/nonexistent")).unwrap_err();
    assert_eq!(error.to_string(), "cannot open /nonexistent");
}

#[test]
fn links_are_resolved() {
    let dir = tempfile::tempdir().unwrap();
    let (file, link) = (dir.path().join("file"), dir.path().join("link"));
    std::fs::write(&file, b"").unwrap();
    std::os::unix::fs::symlink(&file, &link).unwrap();
    assert_eq!(OpenFile::open(&link).unwrap().path, file.canonicalize().unwrap());
}
