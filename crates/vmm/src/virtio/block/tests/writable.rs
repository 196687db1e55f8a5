//! Disks that are files of the caller, and their limits.

use std::time::Duration;

use super::super::super::rate_limiter::TokenBucket;
use super::*;

/// A disk that the guest's writes change.
fn written(dir: &TempDir, cache: DiskCache) -> (Block, std::path::PathBuf) {
    let path = image(dir, &content());
    (Block::new(Disk::Writable(writable_disk(&path, cache).unwrap()), "data"), path)
}

fn writable_disk(path: &Path, cache: DiskCache) -> Result<WritableDisk, OpenDiskError> {
    let file = File::options().read(true).write(true).open(path).unwrap();
    WritableDisk::new(OpenFile { file, path: path.to_owned() }, cache)
}

#[test]
fn writes_go_to_the_callers_file() {
    let dir = TempDir::new().unwrap();
    let (block, path) = written(&dir, DiskCache::Writeback);
    let mut guest = Guest::started(block);
    assert_eq!(send(&mut guest, OUT, 5, &[0x77; 1024]), OK);
    assert_eq!(read(&mut guest, 5, 1024), [0x77; 1024]);
    let mut expected = content();
    expected[5 * 512..7 * 512].fill(0x77);
    assert_eq!(fs::read(&path).unwrap(), expected);
    assert_eq!(send(&mut guest, FLUSH, 0, &[]), OK);
    // What others write to the file is there as well.
    fs::write(&path, vec![0x33; 64 * 512]).unwrap();
    assert_eq!(read(&mut guest, 63, 512), [0x33; 512]);
    // Holes are not offered.
    for kind in [DISCARD, WRITE_ZEROES] {
        assert_eq!(send(&mut guest, kind, 0, &zero_segment(0, 1, 0)), UNSUPP);
    }
    assert_eq!(send(&mut guest, OUT, 64, &[1; 512]), IOERR);
    assert_eq!(fs::read(&path).unwrap(), vec![0x33; 64 * 512]);
}

#[test]
fn only_a_disk_with_writeback_can_be_flushed() {
    let (flush, read_only, zeroing) = (1 << 9, 1 << 5, 1 << 13 | 1 << 14);
    for (cache, offered, status) in
        [(DiskCache::Writeback, flush, OK), (DiskCache::Unsafe, 0, UNSUPP)]
    {
        let dir = TempDir::new().unwrap();
        let (block, _) = written(&dir, cache);
        assert_eq!(block.features() & (flush | read_only | zeroing), offered);
        let mut guest = Guest::started(block);
        assert_eq!(send(&mut guest, FLUSH, 0, &[]), status);
        let counters = guest.transport().device().counters();
        let flushes = u64::from(status == OK);
        assert_eq!((counters.flushes, counters.refused), (flushes, 1 - flushes));
    }
}

#[test]
fn a_file_that_is_open_for_reading_is_no_writable_disk() {
    let dir = TempDir::new().unwrap();
    let path = image(&dir, &content());
    let error = WritableDisk::new(OpenFile::open(&path).unwrap(), DiskCache::Unsafe).unwrap_err();
    assert!(matches!(error, OpenDiskError::NotWritable { .. }), "{error}");
}

#[test]
fn a_driver_learns_of_a_new_file_and_its_size() {
    let dir = TempDir::new().unwrap();
    let (block, _) = written(&dir, DiskCache::Unsafe);
    let mut guest = Guest::started(block);
    assert_eq!((guest.get(0x100), guest.get(0xfc)), (64, 0));
    let other = dir.path().join("other");
    fs::write(&other, vec![0x44; 128 * 512]).unwrap();
    let disk = Disk::Writable(writable_disk(&other, DiskCache::Unsafe).unwrap());
    guest.interrupts();
    guest.transport().configure(|device| device.replace(disk));
    assert_eq!(guest.interrupts(), 1);
    // A change of the configuration, and its generation.
    assert_eq!((guest.get(0x60), guest.get(0x100), guest.get(0xfc)), (2, 128, 1));
    assert_eq!(read(&mut guest, 127, 512), [0x44; 512]);
    assert_eq!(send(&mut guest, OUT, 127, &[0x55; 512]), OK);
    assert_eq!(fs::read(&other).unwrap()[127 * 512..], [0x55; 512]);
    // A clone has the generation.
    let state = guest.save();
    let disk = Disk::Writable(writable_disk(&other, DiskCache::Unsafe).unwrap());
    assert_eq!(guest.restored(Block::new(disk, ""), &state).get(0xfc), 1);
}

#[test]
fn a_driver_that_has_not_started_gets_no_interrupt_for_a_new_file() {
    let dir = TempDir::new().unwrap();
    let (block, path) = written(&dir, DiskCache::Unsafe);
    let guest = Guest::new(block);
    let disk = Disk::Writable(writable_disk(&path, DiskCache::Unsafe).unwrap());
    guest.transport().configure(|device| device.replace(disk));
    assert_eq!(guest.interrupts(), 0);
}

#[test]
fn a_limited_disk_serves_the_rest_later() {
    let dir = TempDir::new().unwrap();
    let operations = TokenBucket { size: 1, burst: 0, refill: Duration::from_millis(20) };
    let limit = RateLimit { bytes: None, operations: Some(operations) };
    let block = written(&dir, DiskCache::Unsafe).0;
    let limiter = RateLimiter::new(limit).unwrap();
    let mut guest = Guest::started(block.with_limiter(Some(limiter)));
    for sector in 0..3 {
        guest.add(0, &[&header(IN, sector)], &[512, 1]);
    }
    guest.kick(0);
    let mut answered = 0;
    while answered < 3 {
        guest.run();
        while guest.used(0).is_some() {
            answered += 1;
        }
        assert!(guest.transport().device().counters().reads.count <= answered + 1);
    }
    let counters = guest.transport().device().counters();
    // The second and the third request wait; nothing waits for the limit afterwards.
    assert!(counters.limiter.delays >= 2 && counters.limiter.refills >= 2, "{counters:?}");
    assert_eq!(counters.remaining, 2 + 1);
    // Without a limit everything is served at once.
    assert!(guest.transport().device_mut().set_limit(RateLimit::default()));
    for sector in 0..60 {
        guest.add(0, &[&header(IN, sector)], &[512, 1]);
    }
    guest.kick(0);
    assert_eq!(std::iter::from_fn(|| guest.used(0)).count(), 60);
    let without = written(&dir, DiskCache::Unsafe).0;
    assert!(!Guest::started(without).transport().device_mut().set_limit(limit));
}

#[test]
fn work_that_waits_is_looked_at_when_the_limit_changes() {
    let dir = TempDir::new().unwrap();
    let bytes = TokenBucket { size: 1, burst: 0, refill: Duration::from_secs(1 << 20) };
    let limit = RateLimit { bytes: Some(bytes), operations: None };
    let limiter = RateLimiter::new(limit).unwrap();
    let block = written(&dir, DiskCache::Unsafe).0.with_limiter(Some(limiter));
    let mut guest = Guest::started(block);
    for sector in 0..2 {
        guest.add(0, &[&header(IN, sector)], &[512, 1]);
    }
    guest.kick(0);
    assert!(guest.used(0).is_some() && guest.used(0).is_none());
    guest.transport().device_mut().set_limit(RateLimit::default());
    while guest.used(0).is_none() {
        guest.run();
    }
}

#[test]
fn the_rest_of_a_file_behind_its_last_whole_sector_is_no_part_of_its_drive() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    for (bytes, sectors) in [(0, 0), (511, 0), (512, 1), (1535, 2)] {
        fs::write(&path, vec![1; bytes]).unwrap();
        let disk = writable_disk(&path, DiskCache::Unsafe).unwrap();
        assert_eq!(Disk::Writable(disk).size(), sectors * 512);
        let read = ReadOnlyDisk::of_any_size(OpenFile::open(&path).unwrap()).unwrap();
        assert_eq!(Disk::ReadOnly(read).size(), sectors * 512);
        let exact = ReadOnlyDisk::new(OpenFile::open(&path).unwrap());
        assert_eq!(exact.is_ok(), bytes == 512, "{bytes}");
    }
}
