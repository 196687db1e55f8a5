use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::{fs, io};

use tempfile::TempDir;

use super::super::BuildError;
use super::Addition;

fn addition(text: &str) -> Addition {
    text.parse().unwrap()
}

/// A folder to add, and a root.
fn folders() -> (TempDir, TempDir) {
    let (from, root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::create_dir(from.path().join("models")).unwrap();
    fs::write(from.path().join("models/net.bin"), "weights").unwrap();
    (from, root)
}

fn add(from: &Path, name: &str, place: &str, root: &Path) -> Result<(), BuildError> {
    addition(&format!("{}:{place}", from.join(name).display())).copy_to(root)
}

fn mode(path: &Path) -> u32 {
    path.symlink_metadata().unwrap().permissions().mode() & 0o7777
}

#[track_caller]
fn refused(result: Result<(), BuildError>, words: &str) {
    let text = firn_base::error_chain(&result.unwrap_err());
    assert!(text.contains(words), "{text}");
}

#[test]
fn a_text_names_source_and_place() {
    let parts = |text| {
        let Addition { source, place } = addition(text);
        format!("{} {}", source.display(), place.display())
    };
    assert_eq!(parts("a/models"), "a/models opt/models");
    assert_eq!(parts("../net.bin"), "../net.bin opt/net.bin");
    assert_eq!(parts("a:b:/usr/share/net"), "a:b usr/share/net");
    for text in ["", "..", ":/opt", "a:/", "a:/..", "a:/opt/../x", "a://opt"] {
        assert!(text.parse::<Addition>().is_err(), "{text}");
    }
}

#[test]
fn files_folders_and_links_are_copied_with_their_modes() {
    let (from, root) = folders();
    let models = from.path().join("models");
    fs::create_dir(models.join("deep")).unwrap();
    symlink("../net.bin", models.join("deep/link")).unwrap();
    fs::write(models.join("run"), "").unwrap();
    for (name, mode) in [("run", 0o755), ("net.bin", 0o640), ("deep", 0o555)] {
        fs::set_permissions(models.join(name), fs::Permissions::from_mode(mode)).unwrap();
    }
    add(from.path(), "models", "/srv/a/models", root.path()).unwrap();
    let copied = root.path().join("srv/a/models");
    assert_eq!(fs::read_to_string(copied.join("deep/link")).unwrap(), "weights");
    assert!(copied.join("deep/link").is_symlink());
    let modes = ["run", "net.bin", "deep"].map(|name| mode(&copied.join(name)));
    assert_eq!(modes, [0o755, 0o640, 0o555]);

    // A link that is named itself is followed, and folders are joined.
    symlink("net.bin", models.join("named")).unwrap();
    add(&models, "named", "/srv/a/file", root.path()).unwrap();
    assert!(root.path().join("srv/a/file").symlink_metadata().unwrap().is_file());
    fs::create_dir(from.path().join("more")).unwrap();
    fs::write(from.path().join("more/b"), "").unwrap();
    add(from.path(), "more", "/srv/a/models", root.path()).unwrap();
    assert!(copied.join("b").exists() && copied.join("run").exists());
}

#[test]
fn what_cannot_be_added_is_named() {
    let (from, root) = folders();
    let (models, root) = (from.path().join("models"), root.path());
    refused(add(from.path(), "absent", "/opt/a", root), "absent: No such file");
    add(&models, "net.bin", "/opt/net.bin", root).unwrap();
    refused(add(&models, "net.bin", "/opt/net.bin", root), "in its place");
    refused(add(&models, "net.bin", "/opt", root), "in its place");
    refused(add(from.path(), "models", "/opt/net.bin", root), "in its place");
    refused(add(&models, "net.bin", "/opt/net.bin/a", root), "below a file or a link");
    // A link of the image may lead out of it.
    symlink(from.path(), root.join("out")).unwrap();
    refused(add(&models, "net.bin", "/out/net.bin", root), "below a file or a link");
    assert!(!from.path().join("net.bin").exists());
    for (number, target) in ["/etc", "..", "../models", "a/../../b"].into_iter().enumerate() {
        let link = models.join("link");
        symlink(target, &link).unwrap();
        let place = format!("/opt/{number}");
        refused(add(from.path(), "models", &place, root), "leads out of what is added");
        fs::remove_file(link).unwrap();
    }
    let socket = UnixListener::bind(models.join("socket")).unwrap();
    refused(add(from.path(), "models", "/opt/5", root), "neither a file, a folder nor a link");
    drop(socket);
}

#[test]
fn the_key_changes_with_contents_and_place() {
    let (from, _root) = folders();
    let key = |place: &str| {
        let source = from.path().join("models");
        addition(&format!("{}:{place}", source.display())).key().unwrap()
    };
    let first = key("/opt/a");
    assert_eq!(key("/opt/a"), first);
    assert_ne!(key("/opt/b"), first);
    fs::write(from.path().join("models/net.bin"), "other weights").unwrap();
    let second = key("/opt/a");
    assert_ne!(second, first);
    fs::write(from.path().join("models/more"), "").unwrap();
    assert_ne!(key("/opt/a"), second);
    let error = addition("/nonesuch/a").key().unwrap_err();
    assert!(
        matches!(&error, BuildError::File { source, .. } if source.kind() == io::ErrorKind::NotFound)
    );
}
