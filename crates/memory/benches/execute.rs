//! Measures planning and executing a restore for a small and for a large guest with otherwise equal
//! parameters: the work of a start must not grow with guest memory. `cargo bench -p firn-memory`
//! prints a table.

use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::time::{Duration, Instant};

use firn_memory::planners::{ImageFacts, PlanInput, parse};
use firn_memory::{HostFacts, Sources, execute};
use firn_snapshot::{MemoryLayout, PageSet};

const SIZES_MIB: [u64; 2] = [256, 2048];
const RUNS: usize = 501;
const PLANNERS: [&str; 2] = ["firecracker", "firecracker:readahead=off"];

/// The measured parts of a run, in order.
const PARTS: [&str; 7] = ["host facts", "plan", "execute", "- reserve", "- map", "unmap", "all"];

fn main() -> Result<(), Box<dyn Error>> {
    let mut out = std::io::stdout().lock();
    for planner in PLANNERS {
        let guests = SIZES_MIB.map(Guest::new);
        let [small, large] = guests;
        let (small, large) = (small?, large?);
        let mut runs = [Vec::new(), Vec::new()];
        // Interleaved, so that disturbances affect both sizes.
        for _ in 0..RUNS {
            runs[0].push(small.restore(planner)?);
            runs[1].push(large.restore(planner)?);
        }
        let [small, large] = SIZES_MIB;
        writeln!(out, "\n{planner}: median of {RUNS} runs, in microseconds")?;
        writeln!(out, "{:<12}{small:>8} MiB{large:>8} MiB{:>8}", "", "ratio")?;
        for (part, name) in PARTS.iter().enumerate() {
            let [small, large] = [0, 1].map(|size| median(&runs[size], part));
            writeln!(out, "{name:<12}{small:>12.1}{large:>12.1}{:>8.2}", large / small)?;
        }
    }
    Ok(())
}

/// A guest and its image, which is one hole: no page of it is read.
struct Guest {
    layout: MemoryLayout,
    zero_map: PageSet,
    image: File,
}

impl Guest {
    fn new(mib: u64) -> Result<Self, Box<dyn Error>> {
        let layout = MemoryLayout::for_size(mib << 20)?;
        let image = tempfile::tempfile()?;
        image.set_len(layout.total_bytes())?;
        Ok(Self { zero_map: PageSet::new(layout.pages()), layout, image })
    }

    /// Plans, executes and unmaps, and returns the time of each part.
    fn restore(&self, planner: &str) -> Result<[Duration; PARTS.len()], Box<dyn Error>> {
        let begun = Instant::now();
        let host = HostFacts::read()?;
        let facts = begun.elapsed();
        let input = PlanInput {
            layout: &self.layout,
            image: ImageFacts::of(&self.image)?,
            zero_map: &self.zero_map,
            profile: None,
            snapshot: None,
            copies: None,
            host: &host,
        };
        let plan = parse(planner)?.plan(&input)?;
        let planned = begun.elapsed();
        let executed = execute(&plan, &Sources::image(&self.image))?;
        let done = begun.elapsed();
        let [reserve, map] =
            [executed.report.reserve_ns, executed.report.map_ns].map(Duration::from_nanos);
        drop(executed);
        let all = begun.elapsed();
        Ok([facts, planned - facts, done - planned, reserve, map, all - done, all])
    }
}

/// The median of a part, in microseconds.
fn median(runs: &[[Duration; PARTS.len()]], part: usize) -> f64 {
    let mut times: Vec<Duration> = runs.iter().map(|run| run[part]).collect();
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1e6
}
