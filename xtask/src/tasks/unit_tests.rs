//! The lists of tests that require a KVM are complete.

use std::fs;
use std::path::{Path, PathBuf};

use super::{KVM_MODULES, KVM_PROGRAMS};

fn crates() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates")
}

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, found);
        } else if path.extension().is_some_and(|end| end == "rs") {
            found.push(path);
        }
    }
}

#[test]
fn programs_that_require_a_kvm_are_listed() {
    let mut found = Vec::new();
    for entry in fs::read_dir(crates().join("cli/tests")).unwrap() {
        let path = entry.unwrap().path();
        let main = if path.is_dir() { path.join("main.rs") } else { path.clone() };
        // A folder without one is a module that programs share.
        if !main.exists() {
            continue;
        }
        let mut sources = Vec::new();
        if path.is_dir() {
            files(&path, &mut sources);
        } else {
            sources.push(main);
        }
        let requires = |source| fs::read_to_string(source).unwrap().contains("has(\"kvm\"");
        if sources.iter().any(requires) {
            found.push(path.file_stem().unwrap().to_string_lossy().into_owned());
        }
    }
    found.retain(|name| name != "lost");
    found.sort();
    assert_eq!(found, KVM_PROGRAMS);
}

#[test]
fn unit_tests_that_require_a_kvm_are_in_listed_modules() {
    let mut tests = Vec::new();
    for entry in fs::read_dir(crates()).unwrap() {
        files(&entry.unwrap().path().join("src"), &mut tests);
    }
    for path in tests {
        let name = path.display().to_string();
        let is_test = name.ends_with("tests.rs") || name.contains("/tests/");
        let source = fs::read_to_string(&path).unwrap();
        if is_test && ["KVM_DEVICE", "has(\"kvm\""].iter().any(|mark| source.contains(mark)) {
            // The test of `a/b.rs` is in `a/b_tests.rs` or `a/b/tests.rs`.
            let module = name.replace("_tests.rs", "/tests.rs").replace('/', "::");
            assert!(KVM_MODULES.iter().any(|listed| module.contains(listed)), "{name}");
        }
    }
}
