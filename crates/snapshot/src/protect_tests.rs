use firn_base::PageRange;

use super::*;
use crate::tests::support::{destination, freeze_generation, open_generation};
use crate::{PackedError, Problem, Snapshot, pack, verify};

/// A digest that no file has.
fn named(name: &str) -> ProtectedFile {
    ProtectedFile { name: name.to_owned(), digest: [9; 32] }
}

fn name_in_manifest(path: &Path, name: &str) {
    let dir = open_directory(path).unwrap();
    set_protected(&dir, path, vec![named(name)]).unwrap();
}

#[test]
fn a_file_without_its_protection_is_refused_until_it_is_checked() {
    for name in [IMAGE_FILE, OVERLAY_FILE] {
        let (_dir, path) = destination();
        freeze_generation(&path, 4);
        name_in_manifest(&path, name);
        let error = Snapshot::open(&path).unwrap_err();
        let OpenError::Protection { path: file, .. } = &error else { panic!("{error}") };
        assert_eq!(*file, path.join(name));
        assert!(error.to_string().contains("firn verify --protect"), "{error}");
        let VerifyError::Damaged { problems, .. } = verify(&path, &mut |_, _| ()).unwrap_err()
        else {
            panic!("it was verified")
        };
        assert!(
            matches!(&problems[..], [Problem::Part(OpenError::Protection { .. })]),
            "{problems:?}"
        );

        // Temporary folders rarely have fs-verity; then the manifest names no file any more.
        let report = protect(&path, None, &mut |_, _| ()).unwrap();
        assert_eq!(open_generation(&path), 4);
        assert_eq!(verify(&path, &mut |_, _| ()).unwrap().protected, report.protected);
    }
}

#[test]
fn a_damaged_snapshot_is_not_protected() {
    let (_dir, path) = destination();
    freeze_generation(&path, 4);
    let container = std::fs::read(path.join("snapshot.firn")).unwrap();
    std::fs::rename(path.join(IMAGE_FILE), path.join("old")).unwrap();
    let mut image = std::fs::read(path.join("old")).unwrap();
    std::fs::remove_file(path.join("old")).unwrap();
    image[15 * 4096] ^= 1;
    std::fs::write(path.join(IMAGE_FILE), image).unwrap();
    let error = protect(&path, None, &mut |_, _| ()).unwrap_err();
    assert!(matches!(error, ProtectError::Verify(VerifyError::Damaged { .. })), "{error}");
    assert!(std::fs::read(path.join("snapshot.firn")).unwrap() == container);
}

#[test]
fn a_packed_file_without_its_protection_is_packed_again() {
    let (_dir, path) = destination();
    freeze_generation(&path, 4);
    let kind = PackedFile::LoadingSet;
    let pack_it = || {
        pack(&Snapshot::open(&path).unwrap(), kind, 1, &[PageRange { first: 15, pages: 1 }])
            .unwrap();
    };
    pack_it();
    name_in_manifest(&path, kind.name());
    let snapshot = Snapshot::open(&path).unwrap();
    let error = snapshot.packed(kind).unwrap_err();
    assert!(matches!(error, PackedError::Open(OpenError::Protection { .. })), "{error}");
    pack_it();
    let snapshot = Snapshot::open(&path).unwrap();
    let packed = snapshot.packed(kind).unwrap().unwrap();
    assert_eq!(packed.is_protected(), snapshot.manifest().protection(kind.name()).is_some());
    verify(&path, &mut |_, _| ()).unwrap();
}

/// A process that another thread starts has the descriptor until its `execve`.
#[test]
fn a_file_that_is_closed_soon_is_protected() {
    let (_dir, path) = destination();
    std::fs::create_dir(&path).unwrap();
    let file = path.join(IMAGE_FILE);
    let writer = File::create(&file).unwrap();
    let reader = File::open(&file).unwrap();
    // Folders for temporary files rarely have fs-verity.
    let supported = match fs_verity::protect(&reader) {
        Err(error) => error.kind() == io::ErrorKind::ExecutableFileBusy,
        Ok(_) => false,
    };
    let closing = thread::spawn(move || {
        thread::sleep(Duration::from_millis(50));
        drop(writer);
    });
    let protected = protect_file(&reader, &path, IMAGE_FILE).unwrap();
    closing.join().unwrap();
    assert_eq!(protected.is_some(), supported);
}
