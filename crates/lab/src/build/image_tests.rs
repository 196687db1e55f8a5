use std::fs;

use super::{
    Below, Contents, check_place, held, is_in_status, is_name, join_certificates, list_contents,
    make_skeleton, recipe, remove_unused, suite_of,
};
use crate::build::apt::Suite;

/// The keys equal those of earlier builds, so existing caches stay valid.
#[test]
fn keys_of_own_images_are_stable() {
    let base = Contents::of(&recipe("base").unwrap()).key(&Below::default());
    assert_eq!(base, "2 2e2f7e39a8df9f4f4968ff82a1a894a9e20af46152bb76b7601be8c4de35c440  -");
}

#[test]
fn keys_change_with_the_contents_and_the_layer_below() {
    let contents =
        |package: &str| Contents { packages: vec![package.to_owned()], ..Contents::default() };
    let below = |key: &str| Below { file: None, key: key.to_owned() };
    let key = contents("a").key(&below("1"));
    assert_ne!(contents("b").key(&below("1")), key);
    assert_ne!(contents("a").key(&below("2")), key);
    let wheel = Contents { wheels: vec!["a".to_owned()], ..Contents::default() };
    assert_ne!(wheel.key(&below("1")), key);
    let added = Contents { added: vec!["net.bin 7".to_owned()], ..contents("a") };
    assert_ne!(added.key(&below("1")), key);
}

#[test]
fn names_and_files_are_distinguished() {
    for name in ["a", "mine-2", &"x".repeat(64)] {
        assert!(is_name(name), "{name}");
    }
    for place in ["./mine", "a/b.erofs", "/a"] {
        assert!(!is_name(place), "{place}");
        check_place(place).unwrap();
    }
    for place in ["", "-a", "Mine", "mine.erofs", &"x".repeat(65)] {
        let error = check_place(place).unwrap_err();
        assert!(error.to_string().contains("neither a name"), "{error}");
    }
}

#[test]
fn omitted_packages_are_listed_as_installed() {
    let shown = "Package: perl\nSource: p\nVersion: 5\nDescription: x\n y\nProvides: z\n\nPackage: tar\nVersion: 1\n";
    let status = held(shown);
    assert_eq!(
        status,
        "Package: perl\nStatus: hold ok installed\nVersion: 5\nProvides: z\n\n\
         Package: tar\nStatus: hold ok installed\nVersion: 1\n"
    );
    assert!(is_in_status(&status, "perl") && !is_in_status(&status, "per"));
}

#[test]
fn certificates_are_joined_in_one_file() {
    let root = tempfile::tempdir().unwrap();
    join_certificates(root.path()).unwrap();
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    let folder = root.path().join("usr/share/ca-certificates/mozilla");
    fs::create_dir_all(&folder).unwrap();
    for name in ["b", "a"] {
        fs::write(folder.join(name).with_extension("crt"), format!("{name}\n")).unwrap();
    }
    join_certificates(root.path()).unwrap();
    let joined = fs::read_to_string(root.path().join("etc/ssl/certs/ca-certificates.crt"));
    assert_eq!(joined.unwrap(), "a\nb\n");
}

#[test]
fn a_root_names_its_release() {
    for suite in [Suite::Bookworm, Suite::Trixie] {
        let root = tempfile::tempdir().unwrap();
        make_skeleton(root.path(), suite).unwrap();
        assert_eq!(suite_of(root.path()).unwrap(), suite);
    }
}

#[test]
fn keys_change_with_the_release() {
    let key = |suite| Contents { suite, ..Contents::default() }.key(&Below::default());
    assert_ne!(key(Suite::Trixie), key(Suite::Bookworm));
}

#[test]
fn a_root_is_stripped_of_unused_files_and_lists_the_rest() {
    let root = tempfile::tempdir().unwrap();
    let path = |name: &str| root.path().join(name);
    make_skeleton(root.path(), Suite::Bookworm).unwrap();
    assert!(fs::read_link(path("lib")).unwrap().as_os_str() == "usr/lib");
    for folder in [
        "usr/share/doc/a",
        "usr/lib/python3/dist-packages/numpy/tests",
        "usr/lib/x86_64-linux-gnu/blas",
        "var/runtime/awslambdaric-3.0.0.dist-info",
    ] {
        fs::create_dir_all(path(folder)).unwrap();
    }
    for file in ["usr/lib/x86_64-linux-gnu/libc.a", "usr/lib/x86_64-linux-gnu/blas/libblas.so.3"] {
        fs::write(path(file), "").unwrap();
    }
    fs::write(path("var/lib/dpkg/status"), "Package: a\nVersion: 1\n\nPackage: b\nVersion: 2\n")
        .unwrap();
    remove_unused(root.path()).unwrap();
    for gone in [
        "usr/share/doc",
        "usr/lib/python3/dist-packages/numpy/tests",
        "usr/lib/x86_64-linux-gnu/libc.a",
    ] {
        assert!(!path(gone).exists(), "{gone}");
    }
    let link = fs::read_link(path("usr/lib/x86_64-linux-gnu/libblas.so.3")).unwrap();
    assert_eq!(link.as_os_str(), "blas/libblas.so.3");
    assert_eq!(list_contents(root.path()).unwrap(), "a 1\nb 2\nawslambdaric 3.0.0\n");
}
