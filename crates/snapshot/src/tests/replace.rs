//! A snapshot is replaced completely or not at all, even with concurrent readers and killed
//! writers.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use firn_base::PageRange;
use rustix::fs::{FlockOperation, flock};

use super::support::{
    Memory, description, destination, freeze_generation, freeze_to, machine, names_in,
    open_generation,
};
use crate::staging::Staging;
use crate::{
    Begin, Begun, Contents, Destination, Freeze, FreezeError, FreezeReport, ImageKind, NotFrozen,
    PackedFile, Seal, Snapshot, SnapshotFiles, pack, verify,
};

/// The destination of the child of [`a_killed_freeze_leaves_the_previous_snapshot_intact`].
const CHILD_DESTINATION: &str = "FIRN_TEST_FREEZE_TO";

#[test]
fn a_snapshot_is_replaced() {
    let (dir, path) = destination();
    freeze_generation(&path, 1);
    let old = Snapshot::open(&path).unwrap();
    freeze_generation(&path, 2);
    assert_eq!(open_generation(&path), 2);
    assert_eq!(names_in(dir.path()), ["snapshot"]);
    // A reader of the old snapshot still reads it.
    old.digests().check(15, &[1; 4096]).unwrap();
}

#[test]
fn a_link_to_a_snapshot_stays_a_link() {
    let (dir, path) = destination();
    freeze_generation(&path, 1);
    let link = dir.path().join("link");
    symlink("snapshot", &link).unwrap();
    freeze_generation(&link, 2);
    freeze_generation(&link.join(""), 3);
    assert_eq!(open_generation(&path), 3);
    assert_eq!(fs::read_link(&link).unwrap(), PathBuf::from("snapshot"));
}

#[test]
fn a_destination_that_is_not_a_snapshot_is_not_changed() {
    let (dir, path) = destination();
    let refused = |what: &str| {
        let error = Staging::create(&path).unwrap_err();
        assert!(matches!(error, FreezeError::NotASnapshot { .. }), "{what}: {error}");
        assert_eq!(names_in(dir.path()), ["snapshot"], "{what}");
    };
    fs::write(&path, b"a file").unwrap();
    refused("a file");
    assert_eq!(fs::read(&path).unwrap(), b"a file");
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    refused("an empty directory");
    fs::write(path.join("snapshot.firn"), b"not one").unwrap();
    refused("a directory with a file of that name");
    fs::remove_dir_all(&path).unwrap();
    freeze_generation(&path, 1);
    fs::write(path.join("notes"), b"mine").unwrap();
    refused("a snapshot with an additional file");
    assert_eq!(open_generation(&path), 1);
}

/// A machine; something else happens between its two steps.
struct Between<'a, F>(Contents<'a>, F);

impl<F: FnMut()> Freeze for Between<'_, F> {
    type Error = FreezeError;

    fn write(&mut self, begin: Begin, files: Vec<OwnedFd>) -> Result<Begun, FreezeError> {
        self.0.write(begin, files)
    }

    fn seal(&mut self, seal: Seal, files: Vec<OwnedFd>) -> Result<FreezeReport, FreezeError> {
        self.1();
        self.0.seal(seal, files)
    }
}

fn freeze_one_page(path: &Path, between: impl FnMut()) -> Result<(), FreezeError> {
    let memory = Memory::zeroed(1);
    let contents = Contents::new(&memory, machine(description(), b""));
    let destination = Destination::Directory(path.to_owned());
    match freeze_to(&mut Between(contents, between), destination, ImageKind::Sparse) {
        Err(NotFrozen::Supervisor(error) | NotFrozen::Machine(error)) => Err(error),
        Ok(_) => Ok(()),
    }
}

#[test]
fn files_created_at_the_destination_during_a_freeze_are_not_changed() {
    let (dir, path) = destination();
    let frozen = freeze_one_page(&path, || {
        fs::create_dir(&path).unwrap();
        fs::write(path.join("notes"), b"mine").unwrap();
    });
    let error = frozen.unwrap_err();
    assert!(matches!(error, FreezeError::NotASnapshot { .. }), "{error}");
    assert_eq!(names_in(&path), ["notes"]);
    assert_eq!(names_in(dir.path()), ["snapshot"]);

    let other = dir.path().join("other");
    let error = freeze_one_page(&other, || fs::write(&other, b"mine").unwrap()).unwrap_err();
    assert!(matches!(error, FreezeError::NotASnapshot { .. }), "{error}");
    assert_eq!(fs::read(other).unwrap(), b"mine");
}

#[test]
fn a_destination_without_name_or_parent_is_refused() {
    for path in ["/", "..", "/tmp/.."] {
        let error = Staging::create(path.as_ref()).unwrap_err();
        assert!(matches!(error, FreezeError::BadDestination { .. }), "{path}: {error}");
    }
    let (_dir, path) = destination();
    let error = Staging::create(&path.join("below")).unwrap_err();
    assert!(matches!(error, FreezeError::Parent { .. }), "{error}");
}

#[test]
fn a_freeze_does_not_remove_files_of_another_running_freeze() {
    let (dir, path) = destination();
    freeze_one_page(&path, || freeze_generation(&dir.path().join("other"), 1)).unwrap();
    verify(&path, &mut |_, _| ()).unwrap();
    assert_eq!(names_in(dir.path()), ["other", "snapshot"]);
}

#[test]
fn an_open_during_replacements_reads_one_generation() {
    let (dir, path) = destination();
    freeze_generation(&path, 1);
    thread::scope(|scope| {
        let freezers = [1, 101].map(|first| {
            let path = &path;
            scope.spawn(move || {
                (first..first + 100).for_each(|generation| freeze_generation(path, generation));
            })
        });
        scope.spawn(|| {
            for _ in 0..200 {
                verify(&path, &mut |_, _| ()).unwrap();
            }
        });
        while freezers.iter().any(|freezer| !freezer.is_finished()) {
            open_generation(&path);
        }
    });
    assert!([100, 200].contains(&open_generation(&path)));
    assert_eq!(names_in(dir.path()), ["snapshot"]);
}

#[test]
fn a_killed_freeze_leaves_the_previous_snapshot_intact() {
    let (dir, path) = destination();
    freeze_generation(&path, 1);
    // The delays distribute the kills over all steps of a freeze.
    for round in 0..60 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "tests::replace::freeze_until_killed", "--ignored", "--nocapture"])
            .env(CHILD_DESTINATION, &path)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().contains("freezing")));
        thread::sleep(Duration::from_micros(round * 397));
        child.kill().unwrap();
        child.wait().unwrap();
        open_generation(&path);
        verify(&path, &mut |_, _| ()).unwrap();
        drop(Staging::create(&dir.path().join("other")).unwrap());
        assert_eq!(names_in(dir.path()), ["snapshot"], "round {round}");
    }
}

/// The child of the test above: replaces one snapshot repeatedly.
#[test]
#[ignore = "a_killed_freeze_leaves_the_previous_snapshot_intact starts and kills it"]
fn freeze_until_killed() {
    let Some(path) = std::env::var_os(CHILD_DESTINATION).map(PathBuf::from) else { return };
    println!("freezing");
    for generation in (1..=u8::MAX).cycle() {
        freeze_generation(&path, generation);
    }
}

#[test]
fn the_files_of_a_snapshot_stay_its_files_and_its_directory_tells_that_they_are_old() {
    let (dir, path) = destination();
    freeze_generation(&path, 1);
    pack(
        &Snapshot::open(&path).unwrap(),
        PackedFile::LoadingSet,
        1,
        &[PageRange { first: 15, pages: 1 }],
    )
    .unwrap();
    let (files, directory) = SnapshotFiles::open(&path).unwrap();
    assert!(directory.is_current());
    let id = files.manifest(&path, None).unwrap().description.id;
    freeze_generation(&path, 2);
    assert!(!directory.is_current(), "replaced");
    let snapshot = Snapshot::of_files(files, &path, None).unwrap();
    assert_eq!(snapshot.manifest().description.id, id);
    snapshot.digests().check(15, &[1; 4096]).unwrap();
    assert!(snapshot.packed(PackedFile::LoadingSet).unwrap().is_some());
    // The image is open twice, by descriptions of their own.
    let image = snapshot.image_file().unwrap();
    flock(image, FlockOperation::NonBlockingLockExclusive).unwrap();
    let again = snapshot.image_again().unwrap();
    flock(again, FlockOperation::NonBlockingLockExclusive).unwrap_err();

    let (_, directory) = SnapshotFiles::open(&path).unwrap();
    fs::rename(&path, dir.path().join("away")).unwrap();
    assert!(!directory.is_current(), "moved");
    let (_, directory) = SnapshotFiles::open(&dir.path().join("away")).unwrap();
    fs::remove_file(dir.path().join("away/memory.img")).unwrap();
    assert!(!directory.is_current(), "being removed");
}
