//! What a guest has flushed is on the host's disk.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::super::testing::Guest;
use super::{Block, Disk, DiskCache, WritableDisk, is_in_memory};
use crate::open_file::OpenFile;

/// The disk of the child below.
const CHILD_DISK: &str = "FIRN_TEST_DISK";
const SECTORS: u8 = 200;

/// The number of cachestat(2), on every architecture.
const CACHESTAT: libc::c_long = 451;

const OUT: u32 = 1;
const FLUSH: u32 = 4;

/// A folder beside the test program: the one for temporary files may be in memory.
fn folder() -> tempfile::TempDir {
    let program = std::env::current_exe().unwrap();
    tempfile::tempdir_in(program.parent().unwrap()).unwrap()
}

fn guest(path: &Path) -> Guest<Block> {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let disk = OpenFile { file, path: path.to_owned() };
    let disk = WritableDisk::new(disk, DiskCache::Writeback).unwrap();
    Guest::started(Block::new(Disk::Writable(disk), "data"))
}

fn send(guest: &mut Guest<Block>, kind: u32, sector: u8, data: &[u8]) {
    let header = [&kind.to_le_bytes()[..], &[0; 4], &u64::from(sector).to_le_bytes()].concat();
    assert_eq!(guest.request(0, &[&header, data], &[1]), [0]);
}

/// Pages of a file in the page cache that the disk does not have (`cachestat(2)`, Linux 6.5);
/// `None` on an older kernel.
fn unwritten_pages(path: &Path) -> Option<u64> {
    #[repr(C)]
    #[derive(Default)]
    struct Cachestat {
        cached: u64,
        dirty: u64,
        writeback: u64,
        evicted: u64,
        recently_evicted: u64,
    }
    let (file, range, mut stat) = (File::open(path).unwrap(), [0u64; 2], Cachestat::default());
    // SAFETY: the kernel reads `range` and writes `stat`, which have the types of the call.
    let done =
        unsafe { libc::syscall(CACHESTAT, file.as_raw_fd(), &raw const range, &raw mut stat, 0) };
    (done == 0).then_some(stat.dirty + stat.writeback)
}

#[test]
fn a_flush_writes_everything_to_the_disk() {
    let folder = folder();
    let path = folder.path().join("disk");
    fs::write(&path, [0; 100 * 512]).unwrap();
    let mut guest = guest(&path);
    for sector in 0..100 {
        send(&mut guest, OUT, sector, &[sector; 512]);
    }
    send(&mut guest, FLUSH, 0, &[]);
    if !is_in_memory(File::open(&path).unwrap()).unwrap() {
        assert!(unwritten_pages(&path).is_none_or(|pages| pages == 0));
    }
}

#[test]
fn a_killed_monitor_loses_nothing_that_its_guest_has_flushed() {
    let folder = folder();
    let path = folder.path().join("disk");
    fs::write(&path, vec![0; usize::from(SECTORS) * 512]).unwrap();
    let test = "virtio::block::durability_tests::write_until_killed";
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--nocapture"])
        .env(CHILD_DISK, &path)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let flushed = lines.by_ref().filter_map(|line| {
        let sectors: u8 = line.unwrap().strip_prefix("flushed ")?.parse().unwrap();
        Some(sectors)
    });
    let flushed = flushed.take(3).last().unwrap();
    // SIGKILL, while it writes on.
    child.kill().unwrap();
    child.wait().unwrap();
    let content = fs::read(&path).unwrap();
    for sector in 0..flushed {
        let at = usize::from(sector) * 512;
        assert_eq!(content[at..at + 512], [sector + 1; 512], "sector {sector} of {flushed}");
    }
}

/// The monitor of the test above.
#[test]
#[ignore = "a_killed_monitor_loses_nothing_that_its_guest_has_flushed starts and kills it"]
fn write_until_killed() {
    let Some(path) = std::env::var_os(CHILD_DISK).map(PathBuf::from) else { return };
    let mut guest = guest(&path);
    let mut sectors = 0;
    loop {
        // Writes on the last sector follow, which is never flushed.
        if sectors < SECTORS - 1 {
            send(&mut guest, OUT, sectors, &[sectors + 1; 512]);
            sectors += 1;
            send(&mut guest, FLUSH, 0, &[]);
            println!("flushed {sectors}");
        } else {
            send(&mut guest, OUT, sectors, &[0xff; 512]);
        }
    }
}
