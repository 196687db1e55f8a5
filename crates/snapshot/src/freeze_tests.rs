use std::fs::{self, File};
use std::io::Write;
use std::os::fd::OwnedFd;

use super::*;
use crate::tests::support::{
    Managed, Memory, description, destination, file_with, freeze_generation, freeze_to, machine,
    names_in, open_generation,
};
use crate::{Contents, ImageKind, Verify, Writer, open_pooled};

/// A machine that its guest has taken over: it writes what it should, and then lies.
struct Liar<'a> {
    contents: Contents<'a>,
    begun: fn(Begun) -> Begun,
    sealed: fn(FreezeReport) -> FreezeReport,
    /// What it does with the descriptors of the second step, instead of writing.
    container: Option<fn(File)>,
}

impl Liar<'_> {
    fn of(memory: &Memory) -> Liar<'_> {
        let contents = Contents::new(memory, machine(description(), b"state"));
        Liar { contents, begun: |begun| begun, sealed: |report| report, container: None }
    }
}

impl Freeze for Liar<'_> {
    type Error = FreezeError;

    fn write(&mut self, begin: Begin, files: Vec<OwnedFd>) -> Result<Begun, FreezeError> {
        self.contents.write(begin, files).map(self.begun)
    }

    fn seal(&mut self, seal: Seal, mut files: Vec<OwnedFd>) -> Result<FreezeReport, FreezeError> {
        let sealed = match self.container {
            Some(container) => {
                container(files.remove(0).into());
                FreezeReport::default()
            }
            None => self.contents.seal(seal, files)?,
        };
        Ok((self.sealed)(sealed))
    }
}

#[track_caller]
fn is_refused(liar: &mut Liar<'_>, words: &str) {
    let (dir, path) = destination();
    freeze_generation(&path, 1);
    let to = Destination::Directory(path.clone());
    let error = freeze_to(liar, to, ImageKind::Sparse).unwrap_err();
    assert!(matches!(error, NotFrozen::Supervisor(FreezeError::Report { .. })), "{error:?}");
    assert!(error.to_string().contains(words), "{error}");
    assert_eq!(open_generation(&path), 1);
    assert_eq!(names_in(dir.path()), ["snapshot"]);
}

#[test]
fn a_machine_that_lies_publishes_nothing() {
    let memory = Memory::zeroed(20);
    let honest = || Liar::of(&memory);
    let extent = |_| Begun::Extent { guest_bytes: 4096, tail_bytes: 4096, disk_bytes: 0 };
    is_refused(&mut Liar { begun: extent, ..honest() }, "not written files");
    is_refused(
        &mut Liar { sealed: |report| FreezeReport { stored_pages: 21, ..report }, ..honest() },
        "more pages than it wrote",
    );
    is_refused(
        &mut Liar { sealed: |report| FreezeReport { zero_pages: u64::MAX, ..report }, ..honest() },
        "more pages than it wrote",
    );
    is_refused(&mut Liar { container: Some(|_| ()), ..honest() }, "does not start with");
    let other = |mut file: File| file.write_all(b"#!/bin/sh\nexit 1\n").unwrap();
    is_refused(&mut Liar { container: Some(other), ..honest() }, "does not start with");
}

#[test]
fn a_report_has_the_supervisors_own_facts() {
    let (_dir, path) = destination();
    let memory = Memory::zeroed(20);
    let sealed = |report| FreezeReport {
        sync_ns: u64::MAX,
        protect_ns: u64::MAX,
        publish_ns: u64::MAX,
        disk_bytes: u64::MAX,
        protected: vec!["/etc/passwd".into()],
        ..report
    };
    let mut liar = Liar { sealed, ..Liar::of(&memory) };
    let to = Destination::Directory(path.clone());
    let report = freeze_to(&mut liar, to, ImageKind::Sparse).unwrap();
    assert_eq!(report.sync_ns, u64::MAX);
    assert!(report.protect_ns.max(report.publish_ns) < 60_000_000_000, "{report:?}");
    assert!(report.disk_bytes < 1 << 20, "{report:?}");
    assert!(report.protected.is_empty() || report.protected == ["memory.img"], "{report:?}");
}

#[test]
fn a_denied_disk_is_not_published() {
    let (_dir, path) = destination();
    let memory = Memory::zeroed(20);
    let file = file_with(&[7; 4096]);
    let (mut disk, denied) = (&file, |_| Begun::Files { overlay: false });
    let mut liar = Liar { begun: denied, ..Liar::of(&memory) };
    liar.contents = Contents::new(&memory, machine(description(), b"")).with_disk(&mut disk);
    freeze_to(&mut liar, Destination::Directory(path.clone()), ImageKind::Sparse).unwrap();
    assert_eq!(names_in(&path), ["memory.img", "snapshot.firn"]);
}

/// A machine without a disk leaves no file for it.
#[test]
fn a_snapshot_without_a_disk_has_two_files() {
    let (_dir, path) = destination();
    let memory = Memory::zeroed(20);
    freeze_to(&mut Liar::of(&memory), Destination::Directory(path.clone()), ImageKind::Sparse)
        .unwrap();
    assert_eq!(names_in(&path), ["memory.img", "snapshot.firn"]);
    assert_eq!(fs::metadata(path.join("memory.img")).unwrap().len(), 20 * 4096);
}

fn files(number: usize) -> Vec<OwnedFd> {
    (0..number).map(|_| file_with(b"").into()).collect()
}

#[test]
fn descriptors_are_counted_and_steps_belong_together() {
    let memory = Memory::zeroed(20);
    let begin = |target, number| {
        let machine = machine(description(), b"");
        Writer::begin(machine, &memory, None, target, files(number)).map(|(writer, _)| writer)
    };
    let directory = Target::Files { dense: false };
    for (target, expected) in [(directory, 2), (Target::Extent, 0)] {
        for actual in [0, 1, 2, 3].into_iter().filter(|actual| *actual != expected) {
            let error = begin(target, actual).unwrap_err().to_string();
            let text = format!("takes {expected} descriptors, and {actual} came");
            assert!(error.contains(&text), "{error}");
        }
    }
    let seal = |target, number, seal| {
        let writer = begin(target, number).unwrap();
        writer.seal(&memory, None, seal, files(3)).unwrap_err()
    };
    let container = || Seal::Container { protected: Vec::new() };
    let error = seal(directory, 2, container());
    assert!(matches!(error, FreezeError::Descriptors { expected: 1, actual: 3 }), "{error}");
    let error = seal(Target::Extent, 0, container());
    assert!(matches!(error, FreezeError::Steps { .. }), "{error}");
    let error = seal(Target::Extent, 0, Seal::Extent);
    assert!(matches!(error, FreezeError::Descriptors { expected: 2, actual: 3 }), "{error}");
    let error = seal(directory, 2, Seal::Extent);
    assert!(matches!(error, FreezeError::Steps { .. }), "{error}");
    let error = Contents::new(&memory, machine(description(), b"")).seal(container(), files(1));
    assert!(matches!(error, Err(FreezeError::NotBegun)), "{error:?}");
}

#[test]
fn lengths_that_contradict_each_other_are_not_signed() {
    let pool = Managed::new(32 << 20);
    let signer = Signer::read_or_make(&pool.dir.path().join("key.pem"), "alice").unwrap();
    let memory = Memory::zeroed(20);
    let mut liar = Liar::of(&memory);
    liar.begun = |_| Begun::Extent { guest_bytes: 81920, tail_bytes: 4096, disk_bytes: 4000 };
    let destination = Destination::Pool { socket: pool.socket(), name: "hello".into() };
    let request = FreezeRequest { destination, dense: false, function: None };
    let error = freeze_signed(&mut liar, request, Some(&signer)).unwrap_err().source;
    assert!(error.to_string().contains("the lengths of its parts are wrong"), "{error}");
}

#[test]
fn a_pool_without_room_is_reported_and_keeps_its_snapshot() {
    let pool = Managed::new(32 << 20);
    let memory = Memory::zeroed(20);
    let mut liar = Liar::of(&memory);
    liar.begun = |_| Begun::Extent { guest_bytes: 1 << 62, tail_bytes: 4096, disk_bytes: 0 };
    let socket = pool.socket();
    let to = || Destination::Pool { socket: socket.clone(), name: "hello".into() };
    freeze_to(&mut Liar::of(&memory), to(), ImageKind::Dense).unwrap();
    let error = freeze_to(&mut liar, to(), ImageKind::Dense).unwrap_err();
    assert_eq!(error.to_string(), "cannot allocate the snapshot's extent");
    liar.begun = |_| Begun::Files { overlay: false };
    let error = freeze_to(&mut liar, to(), ImageKind::Dense).unwrap_err();
    assert!(error.to_string().contains("not asked for an extent"), "{error}");
    open_pooled(&socket, "hello", Verify::Always).unwrap();
}
