use std::fs;

use super::{NOP, find_store, patch};

const STORE: &[u8] = &[
    0x89, 0x83, 1, 2, 3, 4, 0xc7, 0x83, 5, 6, 7, 8, 0, 0, 0, 0, 0x48, 0xc7, 0x83, 9, 9, 9, 9, 0xff,
    0xff, 0xff, 0xff, 0xf6, 0x05, 1, 1, 1, 1, 2, 0x0f, 0x85, 1, 1, 1, 1, 0xba, 1, 0, 0, 0,
];

#[test]
fn the_store_is_found_only_if_it_is_unique() {
    let program = [b"before", STORE, b"after"].concat();
    assert_eq!(find_store(&program), Some(6));
    assert_eq!(find_store(&[STORE, b"x", STORE].concat()), None);
    let mut other = program.clone();
    other[6 + 12] = 1;
    assert_eq!(find_store(&other), None);
}

#[test]
fn a_patched_program_differs_in_the_store_only() {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), [b"before", STORE].concat()).unwrap();
    assert!(patch(file.path()).unwrap());
    assert_eq!(fs::read(file.path()).unwrap(), [b"before".as_slice(), &NOP, &STORE[6..]].concat());
    assert!(!patch(file.path()).unwrap());
}
