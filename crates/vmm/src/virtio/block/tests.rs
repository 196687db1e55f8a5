mod writable;

use std::fs;
use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use firn_snapshot::DiskSource;
use proptest::prelude::*;
use tempfile::TempDir;
use vm_memory::{Bytes, GuestAddress};

use super::super::device::VirtioDevice;
use super::super::error::DeviceError;
use super::super::testing::{Guest, NEEDS_RESET, STATUS};
use super::*;
use crate::open_file::OpenFile;

const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

/// A disk of 64 sectors. Each starts with its number.
fn content() -> Vec<u8> {
    (0..64_u8).flat_map(|sector| [vec![sector; 8], vec![0xee; 504]].concat()).collect()
}

fn image(dir: &TempDir, content: &[u8]) -> std::path::PathBuf {
    let path = dir.path().join("disk");
    fs::write(&path, content).unwrap();
    path
}

fn open(path: &Path) -> Result<ReadOnlyDisk, OpenDiskError> {
    ReadOnlyDisk::new(OpenFile::open(path).unwrap())
}

/// The file for the guest's writes.
fn scratch(dir: &TempDir) -> File {
    scratch_file(dir.path()).unwrap()
}

fn read_only(dir: &TempDir) -> Block {
    let disk = open(&image(dir, &content())).unwrap();
    Block::new(Disk::ReadOnly(disk), "root-of-the-guest, a long name")
}

fn overlay(dir: &TempDir, content: &[u8]) -> OverlayDisk {
    let base = open(&image(dir, content)).unwrap();
    OverlayDisk::new(base, Some(scratch(dir))).unwrap()
}

fn writable(dir: &TempDir) -> Block {
    Block::new(Disk::Overlay(overlay(dir, &content())), "overlay")
}

fn header(kind: u32, sector: u64) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat()
}

fn zero_segment(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
}

/// A request with data for the disk; returns its status.
fn send(guest: &mut Guest<Block>, kind: u32, sector: u64, data: &[u8]) -> u8 {
    let header = header(kind, sector);
    let parts: Vec<&[u8]> = std::iter::once(&header[..]).chain(data.chunks(8192)).collect();
    let answer = guest.request(0, &parts, &[1]);
    assert_eq!(answer.len(), 1);
    answer[0]
}

fn read(guest: &mut Guest<Block>, sector: u64, len: u32) -> Vec<u8> {
    let mut answer = guest.request(0, &[&header(IN, sector)], &[len, 1]);
    assert_eq!(answer.pop(), Some(OK));
    answer
}

/// The content of the disk, as a freeze reads it.
fn flattened(disk: &OverlayDisk) -> Vec<u8> {
    let mut source = disk.content();
    let mut all = vec![0; usize::try_from(source.size().unwrap()).unwrap()];
    let mut offset = 0;
    while let Some(data) = source.next_data(offset).unwrap() {
        assert!(data.start >= offset && data.end > data.start);
        let range = usize::try_from(data.start).unwrap()..usize::try_from(data.end).unwrap();
        source.read(&mut all[range], data.start).unwrap();
        offset = data.end;
    }
    all
}

fn with_disk<T>(guest: &Guest<Block>, look: impl FnOnce(&OverlayDisk) -> T) -> T {
    match guest.transport().device().disk() {
        Disk::Overlay(disk) => look(disk),
        _ => panic!("not an overlay"),
    }
}

#[test]
fn features_and_configuration_describe_the_disk() {
    let dir = TempDir::new().unwrap();
    let config = read_only(&dir).config();
    assert_eq!(config[..8], 64_u64.to_le_bytes());
    assert_eq!(config[12..16], 254_u32.to_le_bytes());
    assert_eq!(config[20..24], 512_u32.to_le_bytes());
    let ro = 1 << 5;
    let zeroing = 1 << 13 | 1 << 14;
    assert_eq!(read_only(&dir).features() & (ro | zeroing), ro);
    assert_eq!(writable(&dir).features() & (ro | zeroing), zeroing);
}

#[test]
fn sectors_are_read() {
    let dir = TempDir::new().unwrap();
    let mut guest = Guest::started(read_only(&dir));
    assert_eq!(read(&mut guest, 0, 512), content()[..512]);
    assert_eq!(read(&mut guest, 63, 512), content()[63 * 512..]);
    assert_eq!(read(&mut guest, 3, 8192), content()[3 * 512..19 * 512]);
    let counters = guest.transport().device().counters();
    assert_eq!((counters.reads.count, counters.bytes_read, counters.refused), (3, 9216, 0));
}

#[test]
fn buffers_of_a_request_may_have_any_boundaries() {
    let dir = TempDir::new().unwrap();
    let mut guest = Guest::started(read_only(&dir));
    let header = header(IN, 7);
    let answer =
        guest.request(0, &[&header[..3], &header[3..9], &header[9..]], &[100, 400, 500, 25]);
    assert_eq!(answer[..1024], content()[7 * 512..9 * 512]);
    assert_eq!(answer[1024], OK);
    // Status and data in one buffer.
    let answer = guest.request(0, &[&header], &[513]);
    assert_eq!((answer[0], answer[512]), (7, OK));
}

#[test]
fn sectors_beyond_the_end_are_an_error() {
    let dir = TempDir::new().unwrap();
    let mut guest = Guest::started(writable(&dir));
    for (sector, len) in [(64, 512), (63, 1024), (u64::MAX, 512), (u64::MAX / 512, 512), (0, 100)] {
        let answer = guest.request(0, &[&header(IN, sector)], &[len, 1]);
        assert_eq!(answer.last(), Some(&IOERR), "reading {len} at {sector}");
        let data = vec![1; usize::try_from(len).unwrap()];
        assert_eq!(send(&mut guest, OUT, sector, &data), IOERR, "writing {len} at {sector}");
    }
    assert_eq!(guest.transport().device().counters().refused, 10);
    assert_eq!(send(&mut guest, 999, 0, &[]), UNSUPP);
    assert_eq!(with_disk(&guest, flattened), content());
}

#[test]
fn a_read_only_disk_does_not_change() {
    let dir = TempDir::new().unwrap();
    let mut guest = Guest::started(read_only(&dir));
    assert_eq!(send(&mut guest, OUT, 0, &[1; 512]), IOERR);
    assert_eq!(send(&mut guest, DISCARD, 0, &zero_segment(0, 1, 0)), UNSUPP);
    assert_eq!(send(&mut guest, WRITE_ZEROES, 0, &zero_segment(0, 1, 0)), UNSUPP);
    assert_eq!(send(&mut guest, FLUSH, 0, &[]), OK);
    assert_eq!(fs::read(dir.path().join("disk")).unwrap(), content());
}

#[test]
fn the_serial_number_has_twenty_bytes() {
    let dir = TempDir::new().unwrap();
    let mut guest = Guest::started(read_only(&dir));
    let answer = guest.request(0, &[&header(GET_ID, 0)], &[20, 1]);
    assert_eq!(answer, b"root-of-the-guest, a\0");
    let answer = guest.request(0, &[&header(GET_ID, 0)], &[5]);
    assert_eq!(answer, b"root\0", "four bytes and the status");
}

#[test]
fn requests_without_header_or_status_stop_the_device() {
    let dir = TempDir::new().unwrap();
    for (readable, writable) in [(vec![0; 15], vec![1]), (vec![0; 16], vec![])] {
        let mut guest = Guest::started(read_only(&dir));
        guest.add(0, &[&readable], &writable);
        guest.kick(0);
        assert_eq!(guest.used(0), None);
        assert_eq!(guest.get(STATUS) & NEEDS_RESET, NEEDS_RESET);
        assert!(matches!(guest.transport().error(), Some(DeviceError::Chain { queue: 0, .. })));
    }
}

#[test]
fn a_base_that_shrinks_while_the_guest_runs_causes_read_errors() {
    let dir = TempDir::new().unwrap();
    let mut guest = Guest::started(writable(&dir));
    assert_eq!(send(&mut guest, OUT, 40, &[9; 512]), OK);
    File::options().write(true).open(dir.path().join("disk")).unwrap().set_len(8192).unwrap();
    assert_eq!(guest.request(0, &[&header(IN, 20)], &[512, 1]).last(), Some(&IOERR));
    assert_eq!(send(&mut guest, OUT, 20, &[9; 512]), IOERR, "a partial cluster requires the base");
    assert_eq!(read(&mut guest, 40, 512), [9; 512]);
    assert_eq!(send(&mut guest, OUT, 24, &[8; 4096]), OK, "a complete cluster does not");
    assert_eq!(read(&mut guest, 24, 4096), [8; 4096]);
}

#[test]
fn writes_change_only_what_the_guest_reads() {
    let dir = TempDir::new().unwrap();
    let mut guest = Guest::started(writable(&dir));
    let mut model = content();
    for (sector, len, byte) in
        [(3, 512, 1), (8, 4096, 2), (20, 8192, 3), (56, 4096, 4), (63, 512, 5)]
    {
        assert_eq!(send(&mut guest, OUT, sector, &vec![byte; len]), OK);
        let at = usize::try_from(sector).unwrap() * 512;
        model[at..at + len].fill(byte);
    }
    assert_eq!(send(&mut guest, FLUSH, 0, &[]), OK);
    for (sector, expected) in (0..).step_by(16).zip(model.chunks(8192)) {
        assert_eq!(read(&mut guest, sector, 8192), expected);
    }
    assert_eq!(with_disk(&guest, flattened), model);
    assert_eq!(fs::read(dir.path().join("disk")).unwrap(), content());
    let counters = guest.transport().device().counters();
    assert_eq!(
        (counters.writes.count, counters.bytes_written),
        (5, 512 + 4096 + 8192 + 4096 + 512)
    );
    drop(guest);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "only the disk is left");
}

#[test]
fn discarded_and_zeroed_sectors_read_as_zeros_and_use_no_space() {
    let dir = TempDir::new().unwrap();
    let mut guest = Guest::started(writable(&dir));
    let mut model = content();
    let zero = |model: &mut Vec<u8>, sector: usize, sectors: usize| {
        model[sector * 512..(sector + sectors) * 512].fill(0);
    };
    assert_eq!(send(&mut guest, OUT, 0, &[7; 8192]), OK);
    model[..8192].fill(7);
    let two = [zero_segment(1, 2, 0), zero_segment(8, 30, 0)].concat();
    assert_eq!(send(&mut guest, DISCARD, 0, &two), OK);
    zero(&mut model, 1, 2);
    zero(&mut model, 8, 30);
    assert_eq!(send(&mut guest, WRITE_ZEROES, 0, &zero_segment(50, 14, 1)), OK);
    zero(&mut model, 50, 14);
    assert_eq!(with_disk(&guest, flattened), model);
    // Sectors 8 to 31 are three clusters without data in any file.
    with_disk(&guest, |disk| {
        assert_eq!(disk.content().next_data(8 * 512).unwrap().unwrap().start, 32 * 512);
    });
}

#[test]
fn a_zeroed_cluster_is_a_hole_of_the_disk() {
    let dir = TempDir::new().unwrap();
    let mut guest = Guest::started(writable(&dir));
    assert_eq!(send(&mut guest, DISCARD, 0, &zero_segment(8, 8, 0)), OK);
    assert_eq!(send(&mut guest, OUT, 24, &[1; 4096]), OK);
    with_disk(&guest, |disk| {
        let mut source = disk.content();
        assert_eq!(source.next_data(0).unwrap(), Some(0..4096));
        assert_eq!(source.next_data(4096).unwrap(), Some(8192..12288), "data of the base");
        assert_eq!(source.next_data(12288).unwrap(), Some(12288..16384), "data of the guest");
    });
}

#[test]
fn zeroing_enforces_the_limits_of_the_configuration() {
    let dir = TempDir::new().unwrap();
    let mut guest = Guest::started(writable(&dir));
    let refused = [
        (DISCARD, zero_segment(60, 5, 0), IOERR),
        (DISCARD, zero_segment(0, u32::MAX, 0), IOERR),
        (DISCARD, zero_segment(u64::MAX, 1, 0), IOERR),
        (DISCARD, zero_segment(0, 1, 1), UNSUPP),
        (WRITE_ZEROES, zero_segment(0, 1, 2), UNSUPP),
        (WRITE_ZEROES, vec![], IOERR),
        (WRITE_ZEROES, vec![0; 15], IOERR),
        (WRITE_ZEROES, zero_segment(0, 1, 0).repeat(17), IOERR),
    ];
    for (kind, segments, status) in refused {
        assert_eq!(send(&mut guest, kind, 0, &segments), status, "{segments:?}");
    }
    assert_eq!(with_disk(&guest, flattened), content());
}

#[test]
fn a_disk_may_end_within_a_cluster() {
    let dir = TempDir::new().unwrap();
    let mut disk = overlay(&dir, &content()[..9 * 512]);
    let mem = super::super::testing::memory();
    let slice = |len| {
        let all = vm_memory::Permissions::ReadWrite;
        let mut slices =
            vm_memory::GuestMemory::get_slices(&mem, GuestAddress(0), len, all).unwrap();
        slices.next().unwrap().unwrap()
    };
    mem.write_slice(&[5; 1024], GuestAddress(0)).unwrap();
    let mut disk_as_enum = Disk::Overlay(disk);
    disk_as_enum.write_at(8 * 512, &slice(512)).unwrap();
    disk_as_enum.write_zeroes(0, 512).unwrap();
    disk_as_enum.read_at(7 * 512, &slice(1024)).unwrap();
    let mut seen = [0; 1024];
    mem.read_slice(&mut seen, GuestAddress(0)).unwrap();
    assert_eq!(seen[..512], content()[7 * 512..8 * 512]);
    assert_eq!(seen[512..], [5; 512]);
    disk = match disk_as_enum {
        Disk::Overlay(disk) => disk,
        _ => unreachable!(),
    };
    let flat = flattened(&disk);
    assert_eq!(flat.len(), 9 * 512);
    assert_eq!(flat[..512], [0; 512]);
    assert_eq!(flat[8 * 512..], [5; 512]);
}

/// A snapshot's disk of a guest that has written nothing to the zeros has them as holes.
#[test]
fn a_disk_grows_by_zeros_that_take_no_space() {
    let dir = TempDir::new().unwrap();
    let base = content()[..9 * 512].to_vec();
    let disk = || overlay(&dir, &base);
    let unchanged = disk().grown_to(9 * 512 - 1).unwrap();
    assert_eq!(flattened(&unchanged), base);

    let disk = disk().with_limit(8192).grown_to((1 << 20) - 5).unwrap();
    let grown = [base, vec![0; (1 << 20) - 9 * 512]].concat();
    assert_eq!(flattened(&disk), grown);
    let mut content = disk.content();
    let mut data = 0;
    while let Some(range) = content.next_data(data).unwrap() {
        data = range.end;
    }
    assert_eq!(data, 8192);
    // A cluster of the base that it ended in, and one of the zeros, are in the space for writes.
    let mut guest = Guest::started(Block::new(Disk::Overlay(disk), "overlay"));
    assert_eq!(send(&mut guest, OUT, 2000, &[9; 512]), OK);
    assert_eq!(send(&mut guest, OUT, 1000, &[9; 512]), IOERR);
    let mut written = grown;
    written[2000 * 512..2001 * 512].fill(9);
    assert_eq!(with_disk(&guest, flattened), written);
}

#[test]
fn invalid_disks_are_refused() {
    let dir = TempDir::new().unwrap();
    let directory = open(dir.path());
    assert!(matches!(directory, Err(OpenDiskError::Kind { .. })), "{directory:?}");
    let character = open(Path::new("/dev/null"));
    assert!(matches!(character, Err(OpenDiskError::Kind { .. })), "{character:?}");
    for size in [0, 511, 513, 4097] {
        let path = image(&dir, &vec![0; size]);
        let error = open(&path).unwrap_err();
        assert!(error.to_string().contains(&format!("{size} bytes")), "{error}");
    }
    let base = open(&image(&dir, &content())).unwrap();
    let read_only = File::open(image(&dir, &content())).unwrap();
    let error = OverlayDisk::new(base, Some(read_only)).unwrap_err();
    assert!(matches!(error, OpenDiskError::Upper(_)), "{error:?}");
}

#[test]
fn writes_beyond_the_limit_are_errors() {
    let dir = TempDir::new().unwrap();
    let base = open(&image(&dir, &vec![7; 64 << 10])).unwrap();
    let disk = OverlayDisk::new(base, Some(scratch(&dir))).unwrap();
    let mut guest = Guest::started(Block::new(Disk::Overlay(disk.with_limit(3 * 4096)), ""));
    // A part of a cluster takes all of it.
    assert_eq!(send(&mut guest, OUT, 1, &[1; 512]), OK);
    assert_eq!(send(&mut guest, OUT, 8, &[2; 8192]), OK);
    assert_eq!(send(&mut guest, OUT, 24, &[3; 512]), IOERR);
    assert_eq!(send(&mut guest, WRITE_ZEROES, 25, &zero_segment(25, 1, 0)), IOERR);
    // What is stored can be written again, and what is not has the base's content.
    assert_eq!(send(&mut guest, OUT, 0, &[4; 12288]), OK);
    assert_eq!(read(&mut guest, 24, 1024), [7; 1024]);
    // Holes take no space, and give back what they had.
    assert_eq!(send(&mut guest, WRITE_ZEROES, 32, &zero_segment(32, 8, 0)), OK);
    assert_eq!(send(&mut guest, DISCARD, 0, &zero_segment(0, 8, 0)), OK);
    assert_eq!(send(&mut guest, OUT, 24, &[5; 4096]), OK);
    assert_eq!(send(&mut guest, OUT, 40, &[6; 512]), IOERR);
    assert_eq!(send(&mut guest, OUT, 33, &[6; 512]), IOERR, "a part of a hole takes space");
    let stored = |disk: &OverlayDisk| disk.upper.metadata().unwrap().blocks() * 512;
    assert_eq!(with_disk(&guest, stored), 3 * 4096);
}

#[test]
fn scratch_files_have_no_name() {
    let dir = TempDir::new().unwrap();
    let file = scratch_file(dir.path()).unwrap();
    assert_eq!((file.metadata().unwrap().nlink(), file.metadata().unwrap().len()), (0, 0));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    // sysfs has no files without a name.
    scratch_file(Path::new("/sys")).unwrap().set_len(4096).unwrap();
    let error = scratch_file(&dir.path().join("missing")).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
}

#[test]
fn without_a_scratch_file_writes_go_to_memory() {
    let dir = TempDir::new().unwrap();
    let base = open(&image(&dir, &content())).unwrap();
    let disk = OverlayDisk::new(base, None).unwrap();
    let mut guest = Guest::started(Block::new(Disk::Overlay(disk), ""));
    assert_eq!(send(&mut guest, OUT, 1, &[3; 512]), OK);
    assert_eq!(send(&mut guest, DISCARD, 0, &zero_segment(8, 8, 0)), OK);
    assert_eq!(read(&mut guest, 1, 512), [3; 512]);
    assert_eq!(read(&mut guest, 8, 4096), [0; 4096]);
}

#[test]
fn holes_of_the_base_are_holes_of_the_disk() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("disk");
    let mut file = File::create(&path).unwrap();
    file.set_len(1 << 30).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[1; 4096], 512 << 20).unwrap();
    file.flush().unwrap();
    let disk = OverlayDisk::new(open(&path).unwrap(), Some(scratch(&dir))).unwrap();
    let mut source = disk.content();
    let data = source.next_data(0).unwrap().unwrap();
    assert!(data.start <= 512 << 20 && data.end >= (512 << 20) + 4096);
    assert!(data.end - data.start <= 1 << 20, "{data:?}");
    assert_eq!(source.next_data(data.end).unwrap(), None);
}

#[test]
fn content_in_an_extent_is_read_and_overlaid() {
    let dir = TempDir::new().unwrap();
    let bytes: Vec<u8> = (0..200_192_u32).map(|at| (at / 7).to_le_bytes()[0]).collect();
    let base = Arc::new(File::open(image(&dir, &bytes)).unwrap());
    let disk = OverlayDisk::of_extent(base, Some(scratch(&dir))).unwrap();
    let mut guest = Guest::started(Block::new(Disk::Overlay(disk), "overlay"));
    // Longer than the unit of copying, and not a multiple of it.
    assert!(read(&mut guest, 1, 6144) == bytes[512..][..6144]);
    assert_eq!(send(&mut guest, OUT, 200, &[9; 512]), OK);
    let expected = [&bytes[..200 * 512], &[9; 512], &bytes[201 * 512..]].concat();
    assert!(with_disk(&guest, flattened) == expected);
}

#[test]
fn a_restore_requires_the_same_disk() {
    let dir = TempDir::new().unwrap();
    let guest = Guest::started(writable(&dir));
    let state = guest.save();
    let other = TempDir::new().unwrap();
    for device in [
        read_only(&other),
        Block::new(Disk::Overlay(overlay(&other, &content()[..8192])), "overlay"),
    ] {
        let fresh = Guest::new(device);
        let error = fresh.transport().restore(&state).unwrap_err();
        assert!(matches!(error, RestoreDeviceError::OtherDisk { saved: 64, .. }), "{error}");
    }
    let mut thawed = guest.restored(writable(&other), &state);
    assert_eq!(read(&mut thawed, 5, 512), content()[5 * 512..6 * 512]);
}

#[derive(Clone, Debug)]
enum Step {
    Write { sector: u64, sectors: usize, byte: u8 },
    Zero { kind: u32, sector: u64, sectors: u32 },
    Read { sector: u64, sectors: u32 },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0..80_u64, 1..24_usize, any::<u8>()).prop_map(|(sector, sectors, byte)| Step::Write {
            sector,
            sectors,
            byte
        }),
        (prop::sample::select(vec![DISCARD, WRITE_ZEROES]), 0..80_u64, 0..40_u32)
            .prop_map(|(kind, sector, sectors)| Step::Zero { kind, sector, sectors }),
        (0..80_u64, 1..17_u32).prop_map(|(sector, sectors)| Step::Read { sector, sectors }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// An overlay disk behaves as an array of bytes, and its base never changes. Its 61 sectors end
    /// within a cluster.
    #[test]
    fn an_overlay_disk_behaves_as_an_array(steps in prop::collection::vec(step(), 1..40)) {
        let dir = TempDir::new().unwrap();
        let base = content()[..61 * 512].to_vec();
        let mut guest = Guest::started(Block::new(Disk::Overlay(overlay(&dir, &base)), "x"));
        let mut model = base.clone();
        for step in steps {
            let (sector, sectors) = match &step {
                Step::Write { sector, sectors, .. } => (*sector, *sectors),
                Step::Zero { sector, sectors, .. } | Step::Read { sector, sectors } => {
                    (*sector, usize::try_from(*sectors).unwrap())
                }
            };
            let start = usize::try_from(sector).unwrap() * 512;
            let range = start..start + sectors * 512;
            let expected = if range.end <= model.len() { OK } else { IOERR };
            match step {
                Step::Write { byte, .. } => {
                    let data = vec![byte; range.len()];
                    prop_assert_eq!(send(&mut guest, OUT, sector, &data), expected);
                    if expected == OK {
                        model[range].fill(byte);
                    }
                }
                Step::Zero { kind, sectors, .. } => {
                    let segment = zero_segment(sector, sectors, 0);
                    prop_assert_eq!(send(&mut guest, kind, 0, &segment), expected);
                    if expected == OK {
                        model[range].fill(0);
                    }
                }
                Step::Read { sectors, .. } => {
                    let mut answer =
                        guest.request(0, &[&header(IN, sector)], &[sectors * 512, 1]);
                    prop_assert_eq!(answer.pop(), Some(expected));
                    if expected == OK {
                        prop_assert_eq!(&answer[..], &model[range]);
                    }
                }
            }
        }
        prop_assert_eq!(with_disk(&guest, flattened), model);
        prop_assert_eq!(fs::read(dir.path().join("disk")).unwrap(), base);
    }
}
