//! A player's memory: the memory of its traces, and a region of its own above it.

use firn_memory::GuestView;
use firn_memory::trace::GapUnit;
use firn_player::format::{
    Header, INPUTS, Input, MOST_PAGES, OWN, PAGE, PAGE_WORDS, PORTS, PORTS_BASE, PORTS_LEN,
    PROGRAM, REGIONS, REPORT, REPORT_ADDRESS, Region, STACK, STEP, TASK_STATE, Touch, Touches,
    Window, digested, word,
};
use firn_snapshot::{ImageRegion, LayoutError, MemoryLayout, MemoryRegion, PageSet};
use thiserror::Error;
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use super::calibrate::turns_per_ns;
use super::inputs::PlayerInputs;
use super::invocations::{Invocation, invocations, iterations};
use super::options::{PlayerOptions, Repeats};
use super::page_tables::{LARGE_LEAF, PageTables};
use crate::traces::NamedTrace;

/// The player's program: a flat image at [`OWN`] + [`PROGRAM`].
const PLAYER: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/player.bin"));

/// Start of the address range of devices, which ends at 4 GiB.
const LOW_MEMORY_END: u64 = 3 << 30;
const HIGH_MEMORY_START: u64 = 4 << 30;
/// The part of the player's own region that the player maps.
const OWN_WINDOW: u64 = 512 << 20;
/// Why a player's memory cannot be built.
#[derive(Debug, Error)]
pub enum PlayerMemoryError {
    /// The trace's memory has more regions than the player supports.
    #[error("the trace's memory has {0} regions, but the player supports {REGIONS}")]
    Regions(usize),
    /// The trace's memory has page numbers that do not fit into a touch.
    #[error(
        "the trace's memory reaches to page {0:#x}, but the player supports pages up to {MOST_PAGES:#x}"
    )]
    TooHigh(u64),
    /// The touches do not fit into the player's own region.
    #[error(
        "the {touches} touches need {bytes} bytes of lists and page tables, but the player can map \
         {OWN_WINDOW}: record a shorter invocation"
    )]
    TooManyTouches {
        /// Number of touches.
        touches: usize,
        /// Required bytes of the player's own region.
        bytes: u64,
    },
    /// The trace has no repeated accesses.
    #[error(
        "the trace of {0} has no repeated accesses: use a trace that was recorded with `firn record --again`, \
         or --again N for accesses at random"
    )]
    NoRepeats(String),
    /// The layout with the player's own region is not valid.
    #[error("cannot lay out the player's memory")]
    Layout(#[from] LayoutError),
    /// Guest memory cannot be written.
    #[error("cannot fill the player's memory")]
    Write(#[from] GuestMemoryError),
}

/// A player's own region, with its content. [`fill`] fills the traces' memory.
pub(super) struct OwnRegion {
    /// Guest-physical start, a multiple of 2 MiB.
    pub(super) start: u64,
    parts: Parts,
    /// Guest-physical address of the top page table.
    pub(super) page_tables: u64,
    /// The player's first two registers: the digest of its region up to the stack, and the length
    /// of that part.
    pub(super) arguments: [u64; 2],
    /// The stack pointer at the first instruction, as at the entry of a function.
    pub(super) stack: u64,
}

/// Properties that depend on the player's monitor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Surroundings {
    /// Guest-physical start and length of the memory that the player does not check.
    pub(super) unchecked: (u64, u64),
    /// Whether the first 2 MiB are also identity-mapped, for the boot code in ring 0.
    pub(super) boot: bool,
    /// [`Header::reports`].
    pub(super) reports: u64,
    /// [`Header::tsc_khz`].
    pub(super) tsc_khz: u64,
}

impl OwnRegion {
    /// The region of a player that replays any of `inputs`.
    pub(super) fn new(
        inputs: &PlayerInputs,
        options: &PlayerOptions,
        surroundings: Surroundings,
    ) -> Result<Self, PlayerMemoryError> {
        let end = inputs.layout().regions().last().map_or(0, |region| region.guest_range().end);
        if end / PAGE > MOST_PAGES {
            return Err(PlayerMemoryError::TooHigh(end / PAGE));
        }
        let start = end.next_multiple_of(LARGE_LEAF);
        let region = Self::at(start, inputs, options, surroundings)?;
        let gap = LOW_MEMORY_END..HIGH_MEMORY_START;
        if start < gap.end && start + region.len() > gap.start {
            return Self::at(HIGH_MEMORY_START, inputs, options, surroundings);
        }
        Ok(region)
    }

    fn at(
        start: u64,
        inputs: &PlayerInputs,
        options: &PlayerOptions,
        surroundings: Surroundings,
    ) -> Result<Self, PlayerMemoryError> {
        let mut regions = [Region::default(); REGIONS];
        let layout = inputs.layout();
        let count = layout.regions().count();
        if count > REGIONS {
            return Err(PlayerMemoryError::Regions(count));
        }
        for (place, region) in regions.iter_mut().zip(layout.regions()) {
            *place = Region { page: region.guest_addr / PAGE, pages: region.len / PAGE };
        }
        let mut parts = Parts { parts: vec![(PROGRAM, PLAYER.to_vec())], end: PROGRAM };
        parts.end += (PLAYER.len() as u64).next_multiple_of(PAGE);
        let mut all = Vec::new();
        let mut list = [Input::default(); INPUTS];
        let zero_map = inputs.zero_map(options.sanitised);
        for (place, NamedTrace { trace, .. }) in list.iter_mut().zip(inputs.iter()) {
            let unchecked = surroundings.unchecked;
            let (first, second, connected) = invocations(trace, &zero_map, options, unchecked)?;
            *place = Input {
                first: parts.add_touches(&first),
                second: parts.add_touches(&second),
                pages: trace.touched_pages(),
                connected,
            };
            all.extend(first.touches);
            all.extend(second.touches);
        }
        let rate = options.medium.map_or(0.0, |_| turns_per_ns());
        let turns = |ns: Option<f64>| whole(ns.unwrap_or_default() * rate);
        let header = Header {
            seed: options.seed,
            zero_map: parts.add(bitmap(&zero_map)),
            free_map: inputs.free().map_or(0, |free| parts.add(bitmap(free))),
            unchecked_start: surroundings.unchecked.0,
            unchecked_len: surroundings.unchecked.1,
            reports: surroundings.reports,
            tsc_khz: surroundings.tsc_khz,
            again_every: match options.again {
                Some(Repeats::Random(every)) => again_every(inputs, every.get()),
                Some(Repeats::Recorded) | None => 0,
            },
            medium_load: turns(options.medium.map(|medium| medium.load_ns)),
            medium_copy: turns(options.medium.map(|medium| medium.copy_ns)),
            regions,
            inputs: list,
        };
        parts.parts.push((0, header.to_words().into_iter().flat_map(u64::to_le_bytes).collect()));
        let ports = u16::try_from(PORTS).unwrap_or_default().to_le_bytes();
        parts.parts.push((TASK_STATE + PORTS_BASE, ports.to_vec()));
        parts.parts.push((TASK_STATE + PORTS + PORTS_LEN, vec![0xff]));
        let page_tables = start + parts.end;
        let mut tables = tables(page_tables, start, layout, &all);
        if surroundings.boot {
            tables.map_large(0, 0);
        }
        parts.add(tables.into_bytes());
        let arguments = [digest(&parts.bytes()), parts.end];
        parts.end += STACK;
        let stack = OWN + parts.end - 8;
        if parts.end > OWN_WINDOW {
            let touches = all.len();
            return Err(PlayerMemoryError::TooManyTouches { touches, bytes: parts.end });
        }
        Ok(Self { start, parts, page_tables, arguments, stack })
    }

    /// The layout of the traces' memory and this region.
    pub(super) fn layout(&self, inputs: &PlayerInputs) -> Result<MemoryLayout, LayoutError> {
        let mut regions = Vec::<MemoryRegion>::from(inputs.layout().clone());
        // The region ends at a multiple of 2 MiB, so that it can be mapped by large leaves.
        let len = self.len().next_multiple_of(LARGE_LEAF);
        regions.push(MemoryRegion { guest_addr: self.start, len });
        MemoryLayout::new(regions)
    }

    /// The length of its content in bytes.
    pub(super) fn len(&self) -> u64 {
        self.parts.end
    }

    /// Its content.
    pub(super) fn bytes(&self) -> Vec<u8> {
        self.parts.bytes()
    }

    /// Writes the region into guest memory.
    pub(super) fn write(&self, memory: &GuestView) -> Result<(), GuestMemoryError> {
        memory.write_slice(&self.bytes(), GuestAddress(self.start))
    }
}

/// Fills the traces' memory with the content that the player expects.
pub(super) fn fill(
    memory: &GuestView,
    inputs: &PlayerInputs,
    options: &PlayerOptions,
) -> Result<(), GuestMemoryError> {
    let (seed, zero_map) = (options.seed, inputs.zero_map(options.sanitised));
    let mut bytes = Vec::new();
    for region in inputs.layout().regions() {
        let ImageRegion { guest_addr, .. } = region;
        let pages = region.image_pages();
        let first = pages.start;
        for page in zero_map.gaps_in(pages).flatten() {
            let address = guest_addr + (page - first) * PAGE;
            let mut value = word(seed, address / PAGE, 0);
            bytes.clear();
            for _ in 0..PAGE_WORDS {
                bytes.extend(value.to_le_bytes());
                value = value.wrapping_add(STEP);
            }
            memory.write_slice(&bytes, GuestAddress(address))?;
        }
    }
    Ok(())
}

/// Parts of a region, as offset and bytes. Each added part starts at a page boundary.
struct Parts {
    parts: Vec<(u64, Vec<u8>)>,
    end: u64,
}

impl Parts {
    /// Adds a part, and returns its address in the player's address space.
    fn add(&mut self, bytes: impl IntoIterator<Item = u8>) -> u64 {
        let offset = self.end;
        let bytes: Vec<u8> = bytes.into_iter().collect();
        self.end += (bytes.len() as u64).next_multiple_of(PAGE);
        self.parts.push((offset, bytes));
        OWN + offset
    }

    fn add_touches(&mut self, invocation: &Invocation) -> Touches {
        let Invocation { touches, repeats, gaps, written } = invocation;
        Touches {
            touches: self.add(touches.iter().flat_map(|touch| touch.bits().to_le_bytes())),
            count: touches.len() as u64,
            repeats: *repeats,
            gaps: if gaps.iter().all(|gap| *gap == 0) {
                0
            } else {
                self.add(gaps.iter().flat_map(|gap| gap.to_le_bytes()))
            },
            written_map: self.add(bitmap(written)),
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let place = |offset: u64| usize::try_from(offset).unwrap_or(usize::MAX);
        let mut all = vec![0; place(self.end)];
        for (offset, bytes) in &self.parts {
            all[place(*offset)..][..bytes.len()].copy_from_slice(bytes);
        }
        all
    }
}

/// The digest that the player computes of these bytes of its region.
fn digest(bytes: &[u8]) -> u64 {
    let (words, _) = bytes.as_chunks();
    words.iter().fold(0, |digest, word| digested(digest, u64::from_le_bytes(*word)))
}

/// Iterations of the player's gap loop between repeated accesses, at least one.
fn again_every(inputs: &PlayerInputs, every: u32) -> u64 {
    let unit = inputs.iter().map(|input| input.trace.origin().gaps).next();
    iterations(unit.unwrap_or(GapUnit::Instructions), every.into()).max(1)
}

/// A number of iterations: a rounded amount, at most that of any gap.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "clamped to the range of the type"
)]
fn whole(amount: f64) -> u64 {
    amount.round().clamp(0.0, f64::from(u32::MAX)) as u64
}

fn bitmap(set: &PageSet) -> Vec<u8> {
    let bits = usize::try_from(set.pages()).unwrap_or(usize::MAX);
    let mut bytes = vec![0_u8; bits.div_ceil(8)];
    for page in set.iter() {
        if let Some(byte) = usize::try_from(page / 8).ok().and_then(|at| bytes.get_mut(at)) {
            *byte |= 1 << (page % 8);
        }
    }
    bytes
}

/// The page tables at `at`. Chunks of 2 MiB are mapped by small leaves if a touch needs them.
fn tables(at: u64, own: u64, layout: &MemoryLayout, touches: &[Touch]) -> PageTables {
    let mut tables = PageTables::new(at);
    for offset in (0..OWN_WINDOW).step_by(LEAF_STEP) {
        tables.map_large(OWN + offset, own + offset);
    }
    tables.map_small(REPORT, REPORT_ADDRESS);
    for region in layout.regions() {
        let chunks = region.guest_addr / LARGE_LEAF..region.guest_range().end.div_ceil(LARGE_LEAF);
        for address in chunks.map(|chunk| chunk * LARGE_LEAF) {
            tables.map_large(Window::Large.base() + address, address);
        }
    }
    let mut done = None;
    let mut small: Vec<u64> = touches
        .iter()
        .filter(|touch| touch.window() == Window::Small)
        .map(|touch| touch.page() * PAGE / LARGE_LEAF)
        .collect();
    small.sort_unstable();
    for chunk in small {
        if done.replace(chunk) != Some(chunk) {
            for address in (chunk * LARGE_LEAF..(chunk + 1) * LARGE_LEAF).step_by(PAGE_STEP) {
                tables.map_small(Window::Small.base() + address, address);
            }
        }
    }
    tables
}

const LEAF_STEP: usize = 2 << 20;
const PAGE_STEP: usize = 4096;

#[cfg(test)]
#[path = "memory_tests.rs"]
mod tests;
