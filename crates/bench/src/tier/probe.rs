//! Measuring a tier: latency, rates with one and many readers, the cost of writes, and the
//! micro-benchmark of SYSTOR '22, section 4.2.1.

use std::io;
use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;
use firn_base::num::{round_down, u64_of, usize_of};
use firn_base::{PAGE_SIZE, format_bytes};
use firn_pool::MediumError;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::area::{Area, BLOCK, Buffer};
use super::emulated::ReadTimes;
use super::{GRANULE, Tier, TierError, TierMedium};
use crate::batch::BatchError;
use crate::harness::Harness;
use crate::host::{Host, HostError};
use crate::progress::Steps;
use crate::stats::Summary;
use crate::text::{number, table};

/// Numbers of readers, and of threads of the micro-benchmark.
pub(super) const READERS: [u32; 6] = [1, 2, 4, 8, 16, 32];
/// The same as a divisor of sizes.
const MOST_READERS: u64 = 32;
/// Bytes of a thread's file in the micro-benchmark (SYSTOR '22, 4.2.1), if the area is large
/// enough.
const FILE: u64 = 16 << 20;
/// Small reads of the micro-benchmark.
const LINE: u64 = 64;
/// Samples of a latency: enough for a 99th percentile.
const SAMPLES: usize = 20_000;

/// How a tier is measured.
#[derive(Clone, Copy, Debug)]
pub struct ProbeConfig {
    /// The longest time of each of the 20 points.
    pub time: Duration,
    /// Bytes of the test area, a multiple of 32 MiB. The default, 512 MiB, is that of the paper's
    /// 32 files of 16 MiB; smaller areas have smaller files, of at least 2 MiB.
    pub size: u64,
}

impl Default for ProbeConfig {
    fn default() -> Self {
        Self { time: Duration::from_millis(500), size: FILE * MOST_READERS }
    }
}

/// Why a tier cannot be measured.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ProbeError {
    /// The size of the test area is not valid.
    #[error(
        "a test area of {} cannot be used: give a multiple of 32 MiB, from 32 MiB on",
        format_bytes(*.0)
    )]
    Size(u64),
    /// The tier cannot be used.
    #[error(transparent)]
    Tier(#[from] TierError),
    /// The medium cannot be mapped.
    #[error(transparent)]
    Medium(#[from] MediumError),
    /// The medium has become full.
    #[error("{0} has become full during the measurement: remove files, or give a smaller size")]
    Filled(TierMedium),
    /// A read or write of the medium failed.
    #[error("cannot read or write {medium}")]
    Io {
        /// The medium.
        medium: TierMedium,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The host cannot be described.
    #[error(transparent)]
    Host(#[from] HostError),
    /// A signal ended the measurement.
    #[error(transparent)]
    Interrupted(#[from] BatchError),
}

impl ProbeError {
    /// A failed read or write.
    pub(super) fn io(medium: &TierMedium, source: io::Error) -> Self {
        let medium = medium.clone();
        match source.kind() {
            io::ErrorKind::StorageFull => Self::Filled(medium),
            _ => Self::Io { medium, source },
        }
    }

    /// Whether a signal ended the measurement, so that others end, too.
    #[must_use]
    pub fn is_interrupt(&self) -> bool {
        matches!(self, Self::Interrupted(_))
    }
}

/// The measurements of a tier.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Probe {
    /// The tier.
    pub tier: Tier,
    /// The host and the build.
    pub host: Host,
    /// Bytes of the test area.
    pub size: u64,
    /// The time of a random read of 4 KiB by one reader, ns. A disk is read past the page cache.
    pub latency_ns: Summary,
    /// Rates by the number of readers.
    pub reads: Vec<ReadRate>,
    /// The cost of writes; `None` for a devdax device, which may hold a pool.
    pub write: Option<WriteCost>,
    /// The paper's micro-benchmark by the number of threads. A disk is read through the page
    /// cache, which is empty before each point.
    pub micro: Vec<MicroRate>,
}

/// The rates of a number of readers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReadRate {
    /// Readers at once.
    pub readers: u32,
    /// Random reads of 4 KiB in a second, all readers together.
    pub iops: f64,
    /// Bytes in a second in blocks of 1 MiB in random order, all readers together.
    pub bandwidth: f64,
}

/// The cost of writes that are as durable as the medium makes them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct WriteCost {
    /// The time of a random write of 4 KiB by one writer, ns.
    pub latency_ns: Summary,
    /// Bytes in a second in blocks of 1 MiB by one writer.
    pub bandwidth: f64,
}

/// A point of the micro-benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct MicroRate {
    /// Threads, each with a file of its own.
    pub threads: u32,
    /// Bytes of a file.
    pub file: u64,
    /// Bytes that all threads copied in a second.
    pub bytes_per_second: f64,
}

/// What random reads of one reader in a directory on a disk take: the median of 4 KiB, and a page
/// of a larger read.
pub(crate) fn read_times(directory: &Path) -> Result<ReadTimes, ProbeError> {
    let medium = TierMedium::Disk { path: directory.to_owned() };
    let size = u64_of(BLOCK) * MOST_READERS;
    let area = Area::make(&medium, size)?;
    let prober = Prober { area: &area, size, time: Duration::from_millis(200) };
    let failed = |source| ProbeError::io(&medium, source);
    let first_page_ns = prober.latency(false).map_err(failed)?.median;
    let bandwidth = prober.rate(1, BLOCK).map_err(failed)? * BLOCK as f64;
    Ok(ReadTimes { first_page_ns, further_page_ns: PAGE_SIZE as f64 * 1e9 / bandwidth })
}

/// A measurement of an area.
struct Prober<'a> {
    area: &'a Area,
    size: u64,
    time: Duration,
}

impl ProbeConfig {
    /// Measures a tier. Its test area is removed at the end, however that is.
    ///
    /// # Errors
    ///
    /// [`ProbeError`].
    pub fn run(&self, tier: &Tier, harness: &Harness<'_>) -> Result<Probe, ProbeError> {
        let least = u64_of(BLOCK) * MOST_READERS;
        if self.size < least || !self.size.is_multiple_of(least) {
            return Err(ProbeError::Size(self.size));
        }
        let file = round_down((self.size / MOST_READERS).clamp(GRANULE, FILE), GRANULE);
        tier.require(self.size.max(file * MOST_READERS))?;
        let mut host = Host::of(&tier.directory().unwrap_or_else(std::env::temp_dir))?;
        if tier.directory().is_none() {
            host.medium = tier.medium.to_string();
        }
        let mut steps = Steps::begin(harness.progress, 1 + READERS.len() as u64 * 2 + 1);
        let mut step = |text: &str| {
            steps.advance(text);
            harness.interrupt.check()?;
            // An open file outlives its directory and its mount, so reads would still succeed.
            tier.check()?;
            Ok::<_, ProbeError>(())
        };
        let size = self.size;
        let area = Area::make(&tier.medium, size)?;
        let prober = Prober { area: &area, size, time: self.time };
        let failed = |source| ProbeError::io(&tier.medium, source);
        let latency_ns = prober.latency(false).map_err(failed)?;
        step("latency")?;
        let mut reads = Vec::new();
        for readers in READERS {
            let iops = prober.rate(readers, usize_of(PAGE_SIZE)).map_err(failed)?;
            let bandwidth = prober.rate(readers, BLOCK).map_err(failed)? * BLOCK as f64;
            reads.push(ReadRate { readers, iops, bandwidth });
            step(&format!("{readers} readers"))?;
        }
        let write = area.is_writable().then(|| prober.write_cost()).transpose().map_err(failed)?;
        step("writes")?;
        let files = if area.is_writable() {
            // The files take its place.
            drop(area);
            let files = (0..MOST_READERS).map(|_| Area::make(&tier.medium, file));
            files.collect::<Result<Vec<_>, _>>()?
        } else {
            vec![area]
        };
        let mut micro = Vec::new();
        for threads in READERS {
            micro.push(micro_rate(&files, file, threads).map_err(failed)?);
            step(&format!("{threads} threads of the micro-benchmark"))?;
        }
        Ok(Probe { tier: tier.clone(), host, size, latency_ns, reads, write, micro })
    }
}

impl Prober<'_> {
    /// A random offset of a block of `len` bytes.
    fn random(&self, rng: &mut Rng, len: usize) -> u64 {
        let len = u64_of(len);
        rng.u64(0..self.size / len) * len
    }

    /// The time of random reads, or writes, of 4 KiB, one after the other.
    fn latency(&self, write: bool) -> io::Result<Summary> {
        let (mut rng, mut page) = (Rng::new(), Buffer::new(usize_of(PAGE_SIZE)));
        let (mut samples, begun) = (Vec::new(), Instant::now());
        while samples.len() < SAMPLES && (samples.is_empty() || begun.elapsed() < self.time) {
            let offset = self.random(&mut rng, usize_of(PAGE_SIZE));
            let begun = Instant::now();
            if write {
                self.area.write(offset, page.get())?;
            } else {
                self.area.read(offset, page.get())?;
            }
            samples.push(begun.elapsed().as_nanos() as f64);
        }
        Summary::of(&samples).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Random reads of blocks of `len` bytes in a second, by `readers` threads together.
    fn rate(&self, readers: u32, len: usize) -> io::Result<f64> {
        let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
        let prepare = |_| (Rng::new(), Buffer::new(len));
        let seconds = together(readers, prepare, |(mut rng, mut block)| {
            let begun = Instant::now();
            while !stop.load(Ordering::Relaxed) {
                self.area.read(self.random(&mut rng, len), block.get())?;
                done.fetch_add(1, Ordering::Relaxed);
                if begun.elapsed() >= self.time {
                    stop.store(true, Ordering::Relaxed);
                }
            }
            Ok(())
        })?;
        Ok(done.load(Ordering::Relaxed) as f64 / seconds)
    }

    fn write_cost(&self) -> io::Result<WriteCost> {
        let latency_ns = self.latency(true)?;
        let (mut rng, mut block) = (Rng::new(), Buffer::new(BLOCK));
        let (mut written, begun) = (0_u64, Instant::now());
        while written == 0 || begun.elapsed() < self.time {
            self.area.write(self.random(&mut rng, BLOCK), block.get())?;
            written += u64_of(BLOCK);
        }
        Ok(WriteCost { latency_ns, bandwidth: written as f64 / begun.elapsed().as_secs_f64() })
    }
}

/// The micro-benchmark: each thread copies the blocks of 4 KiB of the first half of its file in
/// random order, as copy-on-write does, and then reads the blocks of 64 bytes of the other half in
/// random order, as irregular read-only accesses do. A single area is a device, which has no files:
/// each thread has a part of it.
fn micro_rate(files: &[Area], file: u64, threads: u32) -> io::Result<MicroRate> {
    files.iter().try_for_each(Area::evict)?;
    let half = file / 2;
    let prepare = |thread: u32| {
        let place = match files {
            [device] => (device, u64::from(thread) * file),
            files => (&files[usize_of(thread.into())], 0),
        };
        let page = Buffer::new(usize_of(PAGE_SIZE));
        (place, page, shuffled(half / PAGE_SIZE), shuffled(half / LINE))
    };
    let seconds = together(threads, prepare, |((area, start), mut page, pages, lines)| {
        for block in pages {
            area.touch(start + block * PAGE_SIZE, page.get())?;
        }
        let line = &mut page.get()[..usize_of(LINE)];
        for block in lines {
            area.touch(start + half + block * LINE, line)?;
        }
        Ok(())
    })?;
    let bytes = file * u64::from(threads);
    Ok(MicroRate { threads, file, bytes_per_second: bytes as f64 / seconds })
}

fn shuffled(count: u64) -> Vec<u64> {
    let mut blocks: Vec<u64> = (0..count).collect();
    fastrand::shuffle(&mut blocks);
    blocks
}

/// Runs `count` threads at once, each with what it has prepared before the clock starts. Returns
/// the seconds from the first start to the last end, or the first error.
fn together<T>(
    count: u32,
    prepare: impl Fn(u32) -> T + Sync,
    run: impl Fn(T) -> io::Result<()> + Sync,
) -> io::Result<f64> {
    let ready = Barrier::new(usize_of(u64::from(count)));
    thread::scope(|scope| {
        let start = |number| {
            let (prepare, run, ready) = (&prepare, &run, &ready);
            scope.spawn(move || {
                let prepared = prepare(number);
                ready.wait();
                let begun = Instant::now();
                run(prepared)?;
                Ok::<_, io::Error>((begun, Instant::now()))
            })
        };
        let threads: Vec<_> = (0..count).map(start).collect();
        // By the threads' own clocks: this thread may get a processor when they are done.
        let mut span: Option<(Instant, Instant)> = None;
        for thread in threads {
            let ended = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            let (first, last) = span.unwrap_or(ended);
            span = Some((first.min(ended.0), last.max(ended.1)));
        }
        let seconds = span.map(|(first, last)| last.duration_since(first).as_secs_f64());
        seconds.filter(|seconds| *seconds > 0.0).ok_or_else(|| io::ErrorKind::InvalidData.into())
    })
}

impl Probe {
    /// Two tables for a terminal.
    #[must_use]
    pub fn text(&self) -> String {
        let gib = |rate: f64| number(rate / f64::from(1 << 30));
        let rows = self.reads.iter().zip(&self.micro).map(|(reads, micro)| {
            vec![
                reads.readers.to_string(),
                number(reads.iops),
                gib(reads.bandwidth),
                gib(micro.bytes_per_second),
            ]
        });
        let rows: Vec<Vec<String>> = rows.collect();
        let Tier { name, medium, .. } = &self.tier;
        let us = |time: Summary| {
            format!("{} µs, p95 {}", number(time.median / 1e3), number(time.p95 / 1e3))
        };
        let write = self.write.map_or("not measured".to_owned(), |write| {
            format!("{}; {} GiB/s", us(write.latency_ns), gib(write.bandwidth))
        });
        format!(
            "{name}: {medium}\n{}\nrandom read of 4 KiB by one reader: {}\ndurable write of 4 KiB by one writer: {write}\n{}",
            self.host.line(),
            us(self.latency_ns),
            table(&["readers", "4 KiB reads/s", "GiB/s", "micro-benchmark, GiB/s"], &rows),
        )
    }
}
