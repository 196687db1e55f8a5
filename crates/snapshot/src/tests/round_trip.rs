//! An opened snapshot equals the frozen state.

use std::fs;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;

use firn_base::PAGE_SIZE;
use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};
use proptest::test_runner::Config;

use super::support::{
    Memory, description, destination, file_with, freeze, freeze_to, machine, names_in,
};
use crate::{
    Chunk, Contents, Description, Destination, DigestError, DiskInfo, DiskSource, FreezeError,
    ImageKind, MemoryLayout, MemoryRegion, NotFrozen, PageSource, Snapshot, verify,
};

#[test]
fn a_snapshot_contains_the_frozen_state() {
    let (dir, path) = destination();
    let mut memory = Memory::zeroed(1000);
    memory.fill(3, 1);
    memory.fill(4, 2);
    memory.fill(999, 3);
    let report = freeze(&path, &mut memory, ImageKind::Sparse, None, description(), b"state");
    assert_eq!((report.stored_pages, report.zero_pages), (3, 997));

    let snapshot = Snapshot::open(&path).unwrap();
    assert_eq!(snapshot.path(), path);
    assert_eq!(snapshot.manifest().description, description());
    assert_eq!(snapshot.manifest().layout, memory.layout);
    assert_eq!(snapshot.machine_state(), (3, b"state".as_slice()));
    assert_eq!(snapshot.profile().unwrap(), None);
    assert_eq!(snapshot.zero_map().gaps().collect::<Vec<_>>(), [3..5, 999..1000]);
    assert!(snapshot.overlay().is_none());
    let image = fs::read(path.join("memory.img")).unwrap();
    assert!(image == memory.bytes);
    snapshot.digests().check(0, &image).unwrap();
    assert_eq!(names_in(&path), ["memory.img", "snapshot.firn"]);
    assert_eq!(names_in(dir.path()), ["snapshot"]);
}

#[test]
fn other_users_cannot_read_a_snapshot() {
    let (_dir, path) = destination();
    let mut memory = Memory::zeroed(1);
    freeze(&path, &mut memory, ImageKind::Sparse, Some(b"disk"), description(), b"");
    let mode = |path| fs::metadata(path).unwrap().permissions().mode() & 0o077;
    assert_eq!(mode(path.clone()), 0);
    for name in names_in(&path) {
        assert_eq!(mode(path.join(name)), 0);
    }
}

#[test]
fn a_sparse_image_takes_no_space_for_zero_pages() {
    let (_dir, path) = destination();
    let mut memory = Memory::zeroed(4096);
    for page in (0..4096).step_by(64) {
        memory.fill(page, 1);
    }
    let report = freeze(&path, &mut memory, ImageKind::Sparse, None, description(), b"");
    let metadata = fs::metadata(path.join("memory.img")).unwrap();
    assert_eq!(metadata.len(), 16 << 20);
    assert!(metadata.blocks() * 512 < 64 * 4096 * 5 / 4, "{} blocks", metadata.blocks());
    assert!(report.disk_bytes >= metadata.blocks() * 512);
    assert!(report.bytes_written >= 64 * 4096);
}

#[test]
fn a_dense_image_is_written_in_full() {
    let (_dir, path) = destination();
    let mut memory = Memory::zeroed(1024);
    memory.fill(600, 1);
    let report = freeze(&path, &mut memory, ImageKind::Dense, None, description(), b"");
    assert_eq!((report.stored_pages, report.zero_pages), (1024, 1023));
    let metadata = fs::metadata(path.join("memory.img")).unwrap();
    assert!(metadata.blocks() * 512 >= 4 << 20);
    verify(&path, &mut |_, _| ()).unwrap();
}

#[test]
fn every_chunk_and_region_is_stored_at_its_offset() {
    let (_dir, path) = destination();
    let region = |guest_addr, pages| MemoryRegion { guest_addr, len: pages * PAGE_SIZE };
    let regions = vec![region(0x1000, 700), region(0x1000_0000, 400), region(1 << 32, 3)];
    let mut memory = Memory::with_layout(MemoryLayout::new(regions).unwrap());
    for page in 0..1103_usize {
        memory.bytes[page * 4096 + page % 4096] = u8::try_from(page % 255).unwrap() + 1;
    }
    freeze(&path, &mut memory, ImageKind::Sparse, None, description(), b"");
    let snapshot = Snapshot::open(&path).unwrap();
    assert!(fs::read(path.join("memory.img")).unwrap() == memory.bytes);
    let digests = snapshot.digests();
    for (page, bytes) in (0..).zip(memory.bytes.chunks(4096)) {
        digests.check(page, bytes).unwrap();
    }
    let across_chunks = &memory.bytes[500 * 4096..600 * 4096];
    digests.check(500, across_chunks).unwrap();
    assert!(matches!(
        digests.check(501, across_chunks),
        Err(DigestError::Mismatch { image_page: 501 })
    ));
    assert!(matches!(digests.check(1102, &[0; 8192]), Err(DigestError::OutOfRange { .. })));
    assert!(matches!(digests.check(0, &[0; 100]), Err(DigestError::OutOfRange { .. })));
    assert!(matches!(digests.check(u64::MAX, &[0; 4096]), Err(DigestError::OutOfRange { .. })));
}

#[test]
fn equal_input_gives_equal_bytes() {
    let (_dir, first) = destination();
    let (_other_dir, second) = destination();
    for path in [&first, &second] {
        let mut memory = Memory::zeroed(700);
        memory.fill(650, 9);
        freeze(path, &mut memory, ImageKind::Sparse, Some(&[5; 5000]), description(), b"state");
    }
    for name in names_in(&first) {
        assert!(fs::read(first.join(&name)).unwrap() == fs::read(second.join(&name)).unwrap());
    }
}

#[test]
fn progress_ends_at_the_total() {
    let (_dir, path) = destination();
    let mut memory = Memory::zeroed(2000);
    freeze(&path, &mut memory, ImageKind::Sparse, Some(&[5; 5000]), description(), b"");
    let mut calls = Vec::new();
    verify(&path, &mut |done, total| calls.push((done, total))).unwrap();
    assert!(calls.is_sorted());
    assert!(calls.iter().all(|&(_, total)| total == 2000 * 4096 + 5000));
    assert_eq!(calls.last(), Some(&(2000 * 4096 + 5000, 2000 * 4096 + 5000)));
}

#[test]
fn read_only_disks_are_checked() {
    let (dir, path) = destination();
    let base = dir.path().join("root.erofs");
    fs::write(&base, vec![7; 200_000]).unwrap();
    let disks = vec![DiskInfo::new("root", &base).unwrap()];
    let description = Description { disks, ..description() };
    let mut memory = Memory::zeroed(1);
    freeze(&path, &mut memory, ImageKind::Sparse, None, description, b"");
    let report = verify(&path, &mut |_, _| ()).unwrap();
    assert_eq!(report.disk_bytes, 200_000);
    let snapshot = Snapshot::open(&path).unwrap();
    let disk = &snapshot.manifest().description.disks[0];
    disk.open().unwrap();

    let mut changed = vec![7; 200_000];
    changed[150_000] = 8;
    fs::write(&base, &changed).unwrap();
    disk.open().unwrap();
    let text = verify(&path, &mut |_, _| ()).unwrap_err().to_string();
    assert!(
        text.contains("disk root") && text.contains("differs from the disk at the freeze"),
        "{text}"
    );

    changed[1000] = 8;
    fs::write(&base, &changed).unwrap();
    assert!(disk.open().unwrap_err().to_string().contains("differs from the disk at the freeze"));
    fs::write(&base, &changed[..100_000]).unwrap();
    assert!(disk.open().unwrap_err().to_string().contains("differs from the disk at the freeze"));
    fs::remove_file(&base).unwrap();
    assert!(disk.open().unwrap_err().to_string().contains("cannot be opened"));
    let text = verify(&path, &mut |_, _| ()).unwrap_err().to_string();
    assert!(text.contains("disk root cannot be opened") && text.contains("No such file"), "{text}");
    fs::create_dir(&base).unwrap();
    assert!(disk.open().unwrap_err().to_string().contains("not a regular file"));
}

/// A source that fails at its second chunk, in one of two ways.
struct Failing {
    layout: MemoryLayout,
    short: bool,
}

impl PageSource for Failing {
    fn layout(&self) -> &MemoryLayout {
        &self.layout
    }

    fn chunk<'a>(&'a self, image_offset: u64, buf: &'a mut [u8]) -> io::Result<Chunk<'a>> {
        match image_offset {
            0 => Ok(Chunk::Zero),
            _ if self.short => Ok(Chunk::Bytes(&buf[1..])),
            _ => Err(io::Error::other("gone")),
        }
    }
}

/// Why a machine cannot be frozen.
fn refusal(path: &Path, machine: &mut Contents<'_>) -> FreezeError {
    let destination = Destination::Directory(path.to_owned());
    match freeze_to(machine, destination, ImageKind::Sparse).unwrap_err() {
        NotFrozen::Supervisor(error) | NotFrozen::Machine(error) => error,
    }
}

#[test]
fn a_failing_source_ends_the_freeze_and_leaves_no_files() {
    let (dir, path) = destination();
    for short in [false, true] {
        let layout = MemoryLayout::for_size(4 << 20).unwrap();
        let memory = Failing { layout, short };
        match refusal(&path, &mut Contents::new(&memory, machine(description(), b""))) {
            FreezeError::Memory { image_offset, .. } if !short => assert_eq!(image_offset, 2 << 20),
            FreezeError::ChunkLength { image_offset, expected, actual } if short => {
                assert_eq!((image_offset, expected, actual), (2 << 20, 2 << 20, (2 << 20) - 1));
            }
            error => panic!("{error}"),
        }
        assert!(names_in(dir.path()).is_empty());
    }
}

/// A disk that cannot be read.
struct BrokenDisk;

impl DiskSource for BrokenDisk {
    fn size(&mut self) -> io::Result<u64> {
        Ok(1 << 20)
    }

    fn next_data(&mut self, offset: u64) -> io::Result<Option<Range<u64>>> {
        Ok(Some(offset..1 << 20))
    }

    fn read(&mut self, _: &mut [u8], _: u64) -> io::Result<()> {
        Err(io::Error::other("gone"))
    }
}

#[test]
fn invalid_contents_are_refused() {
    let (dir, path) = destination();
    let memory = Memory::zeroed(1);
    let with = |machine| Contents::new(&memory, machine);
    let mut disk = BrokenDisk;
    let error = refusal(&path, &mut with(machine(description(), b"")).with_disk(&mut disk));
    assert!(matches!(error, FreezeError::Overlay { .. }), "{error}");

    let huge = vec![0; (64 << 20) + 1];
    let error = refusal(&path, &mut with(machine(description(), &huge)));
    assert!(matches!(error, FreezeError::TooLarge { .. }), "{error}");

    let mut disk = DiskInfo::new("root", std::env::current_exe().unwrap()).unwrap();
    disk.path = std::ffi::OsString::from_encoded(b"/\xff").into();
    let description = Description { disks: vec![disk], ..description() };
    let error = refusal(&path, &mut with(machine(description, b"")));
    assert!(matches!(error, FreezeError::PathNotUtf8 { .. }), "{error}");
    assert!(names_in(dir.path()).is_empty());
}

trait FromEncoded {
    fn from_encoded(bytes: &[u8]) -> Self;
}

impl FromEncoded for std::ffi::OsString {
    fn from_encoded(bytes: &[u8]) -> Self {
        std::os::unix::ffi::OsStringExt::from_vec(bytes.to_vec())
    }
}

proptest! {
    #![proptest_config(Config::with_cases(64))]

    /// Random bytes in random pages; some pages have one nonzero byte.
    #[test]
    fn random_memory_and_disks_are_restored(
        pages in 1_u64..1200,
        spots in proptest::collection::vec((any::<u64>(), any::<u16>(), any::<u8>(), 1_u64..600), 0..8),
        disk_len in 0_usize..20_000,
        disk_spots in proptest::collection::vec((any::<usize>(), any::<u8>()), 0..4),
        dense in any::<bool>(),
        through_buffer in any::<bool>(),
        state in proptest::collection::vec(any::<u8>(), 0..300),
    ) {
        let mut memory = Memory { through_buffer, ..Memory::zeroed(pages) };
        for (page, offset, byte, run) in spots {
            let start = page % pages;
            for page in start..(start + run).min(pages) {
                let at = page * 4096 + u64::from(offset) % 4096;
                memory.bytes[usize::try_from(at).unwrap()] = byte;
            }
        }
        let mut disk = vec![0; disk_len];
        for (at, byte) in disk_spots {
            if disk_len > 0 {
                disk[at % disk_len] = byte;
            }
        }
        let kind = if dense { ImageKind::Dense } else { ImageKind::Sparse };
        let (_dir, path) = destination();
        let report = freeze(&path, &mut memory, kind, Some(&disk), description(), &state);

        let zero = |page: &[u8]| page.iter().all(|&byte| byte == 0);
        let zero_pages = memory.bytes.chunks(4096).filter(|page| zero(page)).count() as u64;
        let stored = if dense { pages } else { pages - zero_pages };
        prop_assert_eq!((report.stored_pages, report.zero_pages), (stored, zero_pages));
        let snapshot = Snapshot::open(&path).unwrap();
        prop_assert_eq!(snapshot.manifest().image.stored_pages, stored);
        for (page, bytes) in (0..).zip(memory.bytes.chunks(4096)) {
            prop_assert_eq!(snapshot.zero_map().get(page), zero(bytes));
        }
        let mut image = vec![1; memory.bytes.len()];
        snapshot.image_file().unwrap().read_exact_at(&mut image, 0).unwrap();
        prop_assert!(image == memory.bytes);
        let mut overlay = vec![1; disk_len];
        crate::ReadAt::read_exact_at(snapshot.overlay().unwrap(), &mut overlay, 0).unwrap();
        prop_assert!(overlay == disk);
        prop_assert_eq!(snapshot.machine_state().1, &state[..]);
        snapshot.digests().check(0, &image).unwrap();
        let verified = verify(&path, &mut |_, _| ()).unwrap();
        prop_assert_eq!((verified.pages, verified.zero_pages), (pages, zero_pages));
        prop_assert_eq!(verified.disk_bytes, disk_len as u64);
    }
}

#[test]
fn a_disks_identity_does_not_depend_on_its_holes() {
    let mut bytes = vec![0; 5 << 20];
    bytes[3 << 20] = 1;
    let written = file_with(&bytes);
    let sparse = tempfile::tempfile().unwrap();
    sparse.set_len(5 << 20).unwrap();
    sparse.write_all_at(&[1], 3 << 20).unwrap();
    let identity = crate::DiskIdentity::of(&written).unwrap();
    assert_eq!(crate::DiskIdentity::of(&sparse).unwrap(), identity);
    sparse.write_all_at(&[1], 0).unwrap();
    assert_ne!(crate::DiskIdentity::of(&sparse).unwrap(), identity);
}
