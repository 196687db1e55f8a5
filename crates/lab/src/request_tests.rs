use std::fs::{self, File, Permissions};
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::PathBuf;

use super::{PackError, Request, pack, pack_results, unpack, unpack_results};

fn request() -> Request {
    Request {
        command: vec!["sh".to_owned(), "-c".to_owned(), "echo \"ä\"\n".to_owned()],
        environment: vec![("NAME".to_owned(), "a=b".to_owned())],
        results: true,
    }
}

#[test]
fn the_request_and_the_inputs_arrive() {
    let here = tempfile::tempdir().unwrap();
    let folder = here.path().join("folder");
    fs::create_dir_all(folder.join("deep")).unwrap();
    fs::write(folder.join("deep/data"), [0, 255, 10]).unwrap();
    symlink("nowhere", folder.join("dangling")).unwrap();
    let program = here.path().join("program");
    fs::write(&program, "#!/bin/sh\n").unwrap();
    fs::set_permissions(&program, Permissions::from_mode(0o750)).unwrap();
    symlink(&program, here.path().join("alias")).unwrap();
    let mut sparse = File::create(here.path().join("sparse")).unwrap();
    sparse.seek(SeekFrom::Start(64 << 20)).unwrap();
    sparse.write_all(b"end").unwrap();

    let inputs: Vec<PathBuf> =
        ["folder", "program", "alias", "sparse"].map(|name| here.path().join(name)).into();
    let mut archive = tempfile::tempfile().unwrap();
    pack(&mut archive, &request(), &inputs).unwrap();
    assert!(archive.metadata().unwrap().len() < 1 << 20, "holes are not packed");

    let there = tempfile::tempdir().unwrap();
    assert_eq!(unpack(archive, there.path()).unwrap(), request());
    let inside = there.path().join("in");
    assert_eq!(fs::read(inside.join("folder/deep/data")).unwrap(), [0, 255, 10]);
    assert_eq!(fs::read_link(inside.join("folder/dangling")).unwrap(), PathBuf::from("nowhere"));
    for name in ["program", "alias"] {
        assert_eq!(fs::read(inside.join(name)).unwrap(), b"#!/bin/sh\n");
        assert_eq!(fs::symlink_metadata(inside.join(name)).unwrap().mode(), 0o100_750);
    }
    let sparse = fs::read(inside.join("sparse")).unwrap();
    assert_eq!(sparse.len(), (64 << 20) + 3);
    assert!(sparse.ends_with(b"\0end"));
}

#[test]
fn invalid_inputs_are_reported() {
    let here = tempfile::tempdir().unwrap();
    let mut archive = tempfile::tempfile().unwrap();
    let missing = here.path().join("missing");
    let error = pack(&mut archive, &request(), std::slice::from_ref(&missing)).unwrap_err();
    assert!(matches!(&error, PackError::Input { path, .. } if *path == missing), "{error}");

    let twins: Vec<PathBuf> = ["a/twin", "b/twin"].map(|name| here.path().join(name)).into();
    for twin in &twins {
        fs::create_dir(twin.parent().unwrap()).unwrap();
        fs::write(twin, "").unwrap();
    }
    let error = pack(&mut archive, &request(), &twins).unwrap_err();
    assert!(matches!(&error, PackError::SameName { name } if name == "twin"), "{error}");
}

#[test]
fn an_archive_without_a_request_is_refused() {
    let there = tempfile::tempdir().unwrap();
    let error = unpack([0; 1024].as_slice(), there.path()).unwrap_err();
    assert!(error.to_string().contains("no request"), "{error}");
}

#[test]
fn results_are_unpacked_only_into_their_folder() {
    let there = tempfile::tempdir().unwrap();
    fs::create_dir(there.path().join("sub")).unwrap();
    fs::write(there.path().join("sub/result"), "42").unwrap();
    let mut archive = tempfile::tempfile().unwrap();
    pack_results(there.path(), &archive).unwrap();
    // A command in the lab may be hostile: an archive entry may name a path outside the folder.
    archive.seek(SeekFrom::End(-1024)).unwrap();
    let mut header = tar::Header::new_gnu();
    header.as_old_mut().name[..9].copy_from_slice(b"../escape");
    header.set_size(4);
    header.set_mode(0o644);
    header.set_cksum();
    let mut builder = tar::Builder::new(&archive);
    builder.append(&header, b"evil".as_slice()).unwrap();
    builder.finish().unwrap();
    drop(builder);

    let here = tempfile::tempdir().unwrap();
    let folder = here.path().join("results");
    fs::create_dir(&folder).unwrap();
    unpack_results(&mut archive, &folder).unwrap();
    assert_eq!(fs::read(folder.join("sub/result")).unwrap(), b"42");
    assert!(!here.path().join("escape").exists());
}
