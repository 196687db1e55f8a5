//! How pages get into the page cache soonest: `cargo bench -p firn-memory --bench load` prints a table. The file lies in the folder
//! for temporary files, which must be on a medium.

use std::error::Error;
use std::fs::File;
use std::io::{self, Write};
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use firn_memory::page_cache::{evict, residency};
use rustix::fs::{Advice, fadvise};

const SIZE: u64 = 256 << 20;
const RUNS: usize = 5;

/// Asks for ranges (offset, length) of a file.
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

fn main() -> Result<(), Box<dyn Error>> {
    let mut out = io::stdout().lock();
    let mut file = tempfile::tempfile()?;
    let bytes = vec![0x5a; 1 << 20];
    for _ in 0..SIZE >> 20 {
        file.write_all(&bytes)?;
    }
    if !evict(&file)?.is_cold() {
        writeln!(out, "the folder for temporary files is in memory: set TMPDIR")?;
        return Ok(());
    }
    // Eight pages of every sixteen.
    let scattered: Vec<(u64, u64)> = (0..SIZE).step_by(64 << 10).map(|at| (at, 32 << 10)).collect();
    for (shape, ranges) in [("in sequence", vec![(0, SIZE)]), ("8 pages of 16", scattered)] {
        let pages = ranges.iter().map(|(_, len)| len / 4096).sum::<u64>();
        for (name, method) in [("WILLNEED, 128 KiB", willneed as Method), ("pread, 1 MiB", read)] {
            let mut runs = Vec::new();
            for _ in 0..RUNS {
                runs.push(measure(&file, &ranges, pages, method)?);
            }
            runs.sort_unstable();
            let median = runs[RUNS / 2];
            writeln!(out, "{shape:<14} {name:<18} {:>8.1} ms", median.as_secs_f64() * 1e3)?;
        }
    }
    Ok(())
}

/// From the first request until `pages` pages are cached.
fn measure(file: &File, ranges: &[(u64, u64)], pages: u64, method: Method) -> io::Result<Duration> {
    evict(file)?;
    let begun = Instant::now();
    method(file, ranges)?;
    while residency(file)?.cached < pages {
        std::thread::sleep(Duration::from_micros(100));
    }
    Ok(begun.elapsed())
}
