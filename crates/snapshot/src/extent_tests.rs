use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use firn_pool::Window;
use parking_lot::Mutex;
use proptest::prelude::{any, proptest};

use super::{ExtentPlan, ExtentTarget, MAX_RUNS, OverlayRuns, Part, Tail, TailHeader};
use crate::container::Header;
use crate::manifest::DiskIdentity;
use crate::section::Section;
use crate::tests::support::{Bytes, Memory, description, file_with, machine, pass_extent};
use crate::transfer::Received;
use crate::{DiskSource, FreezeError, OpenError, ReadAt, Snapshot};

/// The bytes of an extent.
struct Frozen {
    memory: Vec<u8>,
    tail: Vec<u8>,
}

/// An extent in vectors, which initially contains old bytes.
struct Extent {
    memory: Mutex<Vec<u8>>,
    tail: Mutex<Vec<u8>>,
    flushed: AtomicBool,
}

impl ExtentTarget for Extent {
    fn write(&self, part: Part, offset: u64, bytes: &[u8]) -> io::Result<()> {
        assert!(!self.flushed.load(Ordering::Relaxed));
        let to = match part {
            Part::Guest => &self.memory,
            Part::Tail => &self.tail,
        };
        to.lock()[usize::try_from(offset).unwrap()..][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn write_from(
        &self,
        part: Part,
        offset: u64,
        window: &Window,
        start: u64,
        len: u64,
    ) -> io::Result<()> {
        let mut bytes = vec![0; usize::try_from(len).unwrap()];
        window.load(start, &mut bytes);
        self.write(part, offset, &bytes)
    }

    fn is_zeroed(&self, _: Part, _: u64, _: u64) -> bool {
        false
    }

    fn flush(&self) -> io::Result<()> {
        self.flushed.store(true, Ordering::Relaxed);
        Ok(())
    }
}

const PAGES: u64 = 1200;
const STATE: [u8; 300] = [7; 300];

fn memory() -> Memory {
    let mut memory = Memory::zeroed(PAGES);
    for (page, byte) in [(0, 1), (511, 2), (512, 3), (1199, 4)] {
        memory.fill(page, byte);
    }
    memory
}

/// A disk with data at both ends and in the centre, and holes between.
fn disk() -> Vec<u8> {
    let mut disk = vec![0; 5 << 20];
    disk[..100].fill(1);
    disk[(2 << 20) - 10..(2 << 20) + 10].fill(2);
    let end = disk.len();
    disk[end - 1] = 3;
    disk
}

/// The tail, and what was received of the whole extent.
fn freeze(memory: &mut Memory, disk: Option<&[u8]>) -> (Frozen, Received) {
    let file = disk.map(file_with);
    let mut disk = file.as_ref();
    freeze_disk(memory, disk.as_mut().map(|file| file as &mut dyn DiskSource))
}

fn freeze_disk(memory: &mut Memory, mut disk: Option<&mut dyn DiskSource>) -> (Frozen, Received) {
    let machine = machine(description(), &STATE);
    let again = disk.as_mut().map(|disk| &mut **disk as &mut dyn DiskSource);
    let plan = ExtentPlan::new(&machine, &memory.layout, again).unwrap();
    let old = |bytes| vec![0xa5; usize::try_from(bytes).unwrap()];
    let extent = Extent {
        memory: Mutex::new(old(plan.guest_bytes())),
        tail: Mutex::new(old(plan.tail_bytes())),
        flushed: AtomicBool::new(false),
    };
    let (report, received) = pass_extent(plan, &machine, memory, disk, &extent);
    assert_eq!(report.zero_pages, received.zero_pages_written);
    (Frozen { memory: extent.memory.into_inner(), tail: extent.tail.into_inner() }, received)
}

fn medium(extent: &Frozen) -> File {
    file_with(&extent.memory)
}

fn open(medium: &File, tail: Vec<u8>) -> Result<Snapshot, OpenError> {
    let tail: Arc<dyn ReadAt> = Bytes::new(tail);
    Snapshot::open_extent("hello", Arc::new(medium.try_clone().unwrap()), &tail, None)
}

#[test]
fn a_dirty_extent_contains_the_frozen_snapshot() {
    let mut memory = memory();
    let (extent, received) = freeze(&mut memory, Some(&disk()));
    assert_eq!(received.zero_pages_written, PAGES - 4);
    assert!(extent.memory == memory.bytes);

    let snapshot = open(&medium(&extent), extent.tail).unwrap();
    assert!(snapshot.image_file().is_none());
    assert_eq!(snapshot.manifest().description, description());
    assert_eq!(snapshot.machine_state(), (3, &STATE[..]));
    assert_eq!(snapshot.zero_map().gaps().collect::<Vec<_>>(), [0..1, 511..513, 1199..1200]);
    let mut image = vec![0; memory.bytes.len()];
    snapshot.image().read_exact_at(&mut image, 0).unwrap();
    snapshot.digests().check(0, &image).unwrap();

    let overlay = snapshot.overlay().unwrap();
    let mut whole = vec![0xff; disk().len()];
    overlay.read_exact_at(&mut whole, 0).unwrap();
    assert!(whole == disk());
    let mut part = [0; 30];
    overlay.read_exact_at(&mut part, (2 << 20) - 15).unwrap();
    assert_eq!(part, disk()[(2 << 20) - 15..][..30]);
    assert!(overlay.read_exact_at(&mut part, disk().len() as u64 - 29).is_err());
}

/// A disk that records the length of the longest read.
struct RecordedReads {
    disk: Vec<u8>,
    longest: usize,
}

impl DiskSource for RecordedReads {
    fn size(&mut self) -> io::Result<u64> {
        Ok(self.disk.len() as u64)
    }

    fn next_data(&mut self, offset: u64) -> io::Result<Option<std::ops::Range<u64>>> {
        let len = self.disk.len() as u64;
        Ok((offset < len).then_some(offset..len))
    }

    fn read(&mut self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.longest = self.longest.max(buf.len());
        buf.copy_from_slice(&self.disk[usize::try_from(offset).unwrap()..][..buf.len()]);
        Ok(())
    }
}

#[test]
fn a_tail_has_its_exact_length_and_the_disk_is_copied_in_pieces() {
    let mut disk = vec![3; 9 << 20];
    disk[4096..3 << 20].fill(0);
    let mut counted = RecordedReads { disk: disk.clone(), longest: 0 };
    let (extent, received) = freeze_disk(&mut memory(), Some(&mut counted));
    assert!(counted.longest <= 2 << 20, "{}", counted.longest);
    let guest = PAGES * 4096;
    assert_eq!(received.bytes_written, guest + extent.tail.len() as u64);
    // The tail contains no zero page of the disk, and few bytes besides the disk's data.
    let data = (6 << 20) + 4096;
    assert!((data..data + 100_000).contains(&extent.tail.len()), "{}", extent.tail.len());
    let snapshot = open(&medium(&extent), extent.tail).unwrap();
    let mut whole = vec![0xff; disk.len()];
    snapshot.overlay().unwrap().read_exact_at(&mut whole, 0).unwrap();
    assert!(whole == disk);
}

#[test]
fn a_snapshot_without_a_disk_has_no_overlay() {
    let (extent, _) = freeze(&mut memory(), None);
    assert!(open(&medium(&extent), extent.tail).unwrap().overlay().is_none());
}

#[test]
fn every_damaged_byte_that_a_start_reads_is_found() {
    let (extent, _) = freeze(&mut memory(), Some(&disk()));
    // Tail header, runs, container header, manifest, machine state and zero map.
    let tail: Arc<dyn ReadAt> = Bytes::new(extent.tail.clone());
    let opened = Tail::open(&tail, Path::new("hello")).unwrap();
    let header = Header::read(&opened.container, Path::new("hello")).unwrap();
    let medium = medium(&extent);
    let end = opened.container.range.start + header.range(Section::ZeroMap).end;
    for at in 0..usize::try_from(end).unwrap() {
        let mut tail = extent.tail.clone();
        tail[at] ^= 0x10;
        assert!(open(&medium, tail).is_err(), "byte {at}");
    }
}

#[test]
fn a_tail_that_ends_early_is_refused() {
    let (extent, _) = freeze(&mut memory(), Some(&disk()));
    let medium = medium(&extent);
    for len in [0, 10, 47, 48, 500, 780] {
        assert!(open(&medium, extent.tail[..len].to_vec()).is_err(), "{len}");
    }
}

#[test]
fn a_disk_in_too_many_pieces_is_refused() {
    let identity = DiskIdentity { len: 0, head: 0, digest: 0 };
    let mut runs = OverlayRuns { identity, runs: Vec::new() };
    for run in 0..MAX_RUNS {
        runs.add(run * 2, &[1]).unwrap();
    }
    // Data that continues the last piece is not a new piece.
    runs.add(MAX_RUNS * 2 - 1, &[1]).unwrap();
    let error = runs.add(MAX_RUNS * 2 + 1, &[1]).unwrap_err();
    assert!(matches!(error, FreezeError::TooManyRuns { max: MAX_RUNS }), "{error}");
}

#[test]
fn runs_of_the_maximum_length_are_refused() {
    let longest = 1..u64::MAX;
    let header = TailHeader { container_len: 0, runs: vec![longest], data_len: 0 };
    let tail: Arc<dyn ReadAt> = Bytes::new(header.encode());
    let path = Path::new("hello");
    let error = Tail::open(&tail, path).unwrap().overlay(u64::MAX, path).unwrap_err();
    assert!(matches!(error, OpenError::Malformed { section: Section::Header, .. }), "{error}");
}

proptest! {
    #[test]
    fn a_hostile_tail_never_panics(
        head in proptest::collection::vec(any::<u8>(), 24),
        table in proptest::collection::vec(any::<u8>(), 0..200),
    ) {
        let body = [&head[..], &table[..]].concat();
        let mut tail = b"firn tail\n\0\0\0\0\0\0\x01\0\0\0".to_vec();
        tail.extend(crc32fast::hash(&body).to_le_bytes());
        tail.extend(body);
        let tail: Arc<dyn ReadAt> = Bytes::new(tail);
        let opened = Snapshot::open_extent("hostile", Arc::new(file_with(&[])), &tail, None);
        assert!(opened.is_err());
    }
}
