//! Measures the ways to read pages into the page cache: `cargo bench -p firn-memory --bench load`
//! prints a table. The directory for temporary files, which holds the file, must be on storage.

use std::error::Error;
use std::fs::File;
use std::io::{self, Write};
use std::num::NonZeroU64;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use firn_memory::page_cache::{evict, preload, residency};
use io_uring::{IoUring, opcode, types};
use rustix::fs::{Advice, fadvise};

const SIZE: u64 = 256 << 20;
const RUNS: usize = 5;
/// The time after which missing pages are requested again.
const RETRY_AFTER: Duration = Duration::from_millis(500);

/// Requests ranges (offset, length) of a file.
type Method = fn(&File, &[(u64, u64)]) -> io::Result<()>;

fn willneed(file: &File, ranges: &[(u64, u64)]) -> io::Result<()> {
    for &(offset, len) in ranges {
        for at in (offset..offset + len).step_by(128 << 10) {
            let len = (offset + len - at).min(128 << 10);
            fadvise(file, at, NonZeroU64::new(len), Advice::WillNeed)?;
        }
    }
    Ok(())
}

/// The method with which the loader reads a packed file.
fn send(file: &File, ranges: &[(u64, u64)]) -> io::Result<()> {
    ranges.iter().try_for_each(|&(at, len)| preload(file, at..at + len).map(drop))
}

fn read(file: &File, ranges: &[(u64, u64)]) -> io::Result<()> {
    let mut buffer = vec![0; 1 << 20];
    for &(offset, len) in ranges {
        for at in (offset..offset + len).step_by(1 << 20) {
            let len =
                usize::try_from((offset + len - at).min(1 << 20)).map_err(io::Error::other)?;
            file.read_exact_at(&mut buffer[..len], at)?;
        }
    }
    Ok(())
}

/// readahead(2), which the kernel also uses for WILLNEED.
fn read_ahead(file: &File, ranges: &[(u64, u64)]) -> io::Result<()> {
    for &(offset, len) in ranges {
        for at in (offset..offset + len).step_by(128 << 10) {
            let len = (offset + len - at).min(128 << 10);
            let (at, len) = (i64::try_from(at), usize::try_from(len));
            let (at, len) = (at.map_err(io::Error::other)?, len.map_err(io::Error::other)?);
            // SAFETY: the call takes a descriptor and touches no memory.
            if unsafe { libc::readahead(file.as_raw_fd(), at, len) } != 0 {
                return Err(io::Error::last_os_error());
            }
        }
    }
    Ok(())
}

/// Plain reads of 128 KiB, 32 of them at once, by io_uring.
fn uring(file: &File, ranges: &[(u64, u64)]) -> io::Result<()> {
    const DEPTH: usize = 32;
    const LEN: u32 = 128 << 10;
    let mut ring = IoUring::new(u32::try_from(DEPTH).map_err(io::Error::other)?)?;
    let mut buffers = vec![0; DEPTH << 17];
    let requests = ranges.iter().flat_map(|&(offset, len)| {
        (offset..offset + len)
            .step_by(1 << 17)
            .map(move |at| (at, u32::try_from(offset + len - at).unwrap_or(LEN).min(LEN)))
    });
    let (mut requests, mut free) = (requests, (0..DEPTH).collect::<Vec<_>>());
    loop {
        while let Some(index) = free.pop() {
            let Some((at, len)) = requests.next() else {
                free.push(index);
                break;
            };
            let buffer = buffers[index << 17..].as_mut_ptr();
            let read = opcode::Read::new(types::Fd(file.as_raw_fd()), buffer, len).offset(at);
            let entry = read.build().user_data(index as u64);
            // SAFETY: each request has a separate part of the buffers, at least of its length; the
            // buffers and the file exist until all requests have ended.
            unsafe { ring.submission().push(&entry) }.map_err(io::Error::other)?;
        }
        if free.len() == DEPTH {
            return Ok(());
        }
        ring.submit_and_wait(1)?;
        for done in ring.completion() {
            if done.result() < 0 {
                return Err(io::Error::from_raw_os_error(-done.result()));
            }
            free.push(usize::try_from(done.user_data()).map_err(io::Error::other)?);
        }
    }
}

const METHODS: [(&str, Method); 5] = [
    ("sendfile, 1 MiB", send),
    ("pread, 1 MiB", read),
    ("WILLNEED, 128 KiB", willneed),
    ("readahead(2), 128 KiB", read_ahead),
    ("io_uring, 32 x 128 KiB", uring),
];

fn main() -> Result<(), Box<dyn Error>> {
    let mut out = io::stdout().lock();
    let mut file = tempfile::tempfile()?;
    let bytes = vec![0x5a; 1 << 20];
    for _ in 0..SIZE >> 20 {
        file.write_all(&bytes)?;
    }
    if !evict(&file)?.is_cold() {
        writeln!(out, "the directory for temporary files is in memory; set TMPDIR")?;
        return Ok(());
    }
    // Eight of every sixteen pages.
    let scattered: Vec<(u64, u64)> = (0..SIZE).step_by(64 << 10).map(|at| (at, 32 << 10)).collect();
    for (shape, ranges) in [("in sequence", vec![(0, SIZE)]), ("8 pages of 16", scattered)] {
        let pages = ranges.iter().map(|(_, len)| len / 4096).sum::<u64>();
        for (name, method) in METHODS {
            let mut runs = Vec::new();
            for _ in 0..RUNS {
                runs.push(measure(&file, &ranges, pages, method)?);
            }
            runs.sort_unstable();
            let median = runs[RUNS / 2];
            writeln!(out, "{shape:<14} {name:<22} {:>8.1} ms", median.as_secs_f64() * 1e3)?;
        }
    }
    Ok(())
}

/// The time from the first request until `pages` pages are cached.
fn measure(file: &File, ranges: &[(u64, u64)], pages: u64, method: Method) -> io::Result<Duration> {
    evict(file)?;
    let begun = Instant::now();
    method(file, ranges)?;
    let mut requested = Instant::now();
    while residency(file)?.cached < pages {
        std::thread::sleep(Duration::from_micros(100));
        // Read-ahead is a hint: the kernel may skip some pages.
        if requested.elapsed() > RETRY_AFTER {
            method(file, ranges)?;
            requested = Instant::now();
        }
    }
    Ok(begun.elapsed())
}
