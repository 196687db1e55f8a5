//! The pages that a recorded run touched, by what held them when it had ended.
//!
//! The guest describes itself, so this is for the search for pages to save: no restore uses it.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use firn_agent::protocol::{KernelSymbols, Pages};
use firn_base::PAGE_SIZE;
use firn_memory::trace::{Access, Toucher, Trace};
use firn_snapshot::CHUNK_SIZE;
use serde::Serialize;
use thiserror::Error;

/// The parts of the kernel's image that its symbols are in.
const WITH_SYMBOLS: [&str; 3] = ["kernel: code", "kernel: data", "kernel: bss"];

const CHUNK_PAGES: u64 = CHUNK_SIZE / PAGE_SIZE;

/// What a recorded run touched.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Touched {
    /// What held pages, most pages first.
    pub holders: Vec<Holder>,
    /// The pages, in the order of their first touch.
    pub pages: Vec<TouchedPage>,
}

/// What held pages that were touched.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Holder {
    /// Its name, by the guest.
    pub name: String,
    /// Pages of it that were touched.
    pub pages: u64,
    /// Those that were written.
    pub written_pages: u64,
    /// Chunks with such pages.
    pub chunks: u64,
    /// Chunks in which no page of another holder was touched.
    pub own_chunks: u64,
}

/// A page that was touched.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct TouchedPage {
    /// The guest page: guest-physical address / 4096.
    pub page: u64,
    /// Whether it was written.
    pub written: bool,
    /// What touched it first.
    pub by: Toucher,
    /// Index of its holder.
    pub holder: usize,
    /// For a page of the kernel's code and variables, the symbol that has most of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub symbol: Option<String>,
    /// The kernel's function that touched it first; a program has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub function: Option<String>,
}

/// A guest's description of its memory is not valid.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum HoldersError {
    /// The description ends before a page that was touched.
    #[error("the guest does not describe what holds its page {0:#x}")]
    Undescribed(u64),
    /// A run names a holder that the description does not have.
    #[error("the guest describes a page of holder {index}, and has named {holders}")]
    Unnamed {
        /// The number in the run.
        index: u32,
        /// Holders of the description.
        holders: usize,
    },
}

impl Touched {
    /// Joins the touches of a run, the instructions that touched the pages first (by guest page)
    /// and the guest's description.
    ///
    /// # Errors
    /// [`HoldersError`].
    pub fn of(
        trace: &Trace,
        instructions: &HashMap<u64, u64>,
        described: &Pages,
    ) -> Result<Self, HoldersError> {
        let ends: Vec<(u64, u32)> = described
            .runs
            .iter()
            .scan(0_u64, |end, (holder, pages)| {
                *end = end.saturating_add(*pages);
                Some((*end, *holder))
            })
            .collect();
        let holder_of = |page| {
            let run = ends.partition_point(|(end, _)| *end <= page);
            let (_, index) = *ends.get(run).ok_or(HoldersError::Undescribed(page))?;
            let holders = described.holders.len();
            let found = usize::try_from(index).ok().filter(|index| *index < holders);
            found.ok_or(HoldersError::Unnamed { index, holders })
        };
        let kernel = described.kernel.as_ref();
        let symbol_of = |page| kernel.and_then(|kernel| symbol_of(kernel, page));
        let function_of = |address| kernel.and_then(|kernel| function_of(kernel, address));

        let touches = || trace.touches().iter();
        let written: HashSet<u64> = touches()
            .filter(|touch| touch.access != Access::Read)
            .map(|touch| touch.page)
            .collect();
        let first = touches().filter(|touch| touch.access != Access::LaterWrite);
        let pages = first.map(|touch| {
            let (page, by) = (touch.page, touch.by);
            let holder = holder_of(page)?;
            // After a device, the guest may have been the first to write.
            let instruction = instructions.get(&page).filter(|_| by != Toucher::Device);
            let has_symbols = WITH_SYMBOLS.contains(&described.holders[holder].as_str());
            Ok(TouchedPage {
                page,
                written: written.contains(&page),
                by,
                holder,
                symbol: symbol_of(page).filter(|_| has_symbols),
                function: instruction.and_then(|address| function_of(*address)),
            })
        });
        let pages = pages.collect::<Result<_, HoldersError>>()?;
        Ok(Self::sorted(described, pages))
    }

    /// Counts the pages of each holder, and numbers the holders by that.
    fn sorted(described: &Pages, mut pages: Vec<TouchedPage>) -> Self {
        let mut in_chunk: BTreeMap<u64, BTreeSet<usize>> = BTreeMap::new();
        let mut counted: BTreeMap<usize, Holder> = BTreeMap::new();
        for page in &pages {
            in_chunk.entry(page.page / CHUNK_PAGES).or_default().insert(page.holder);
            let holder = counted.entry(page.holder).or_insert_with(|| Holder {
                name: described.holders[page.holder].clone(),
                pages: 0,
                written_pages: 0,
                chunks: 0,
                own_chunks: 0,
            });
            holder.pages += 1;
            holder.written_pages += u64::from(page.written);
        }
        for holders in in_chunk.values() {
            for index in holders {
                if let Some(holder) = counted.get_mut(index) {
                    holder.chunks += 1;
                    holder.own_chunks += u64::from(holders.len() == 1);
                }
            }
        }
        let mut holders: Vec<(usize, Holder)> = counted.into_iter().collect();
        holders.sort_by_key(|(_, holder)| std::cmp::Reverse(holder.pages));
        let new: HashMap<usize, usize> =
            holders.iter().enumerate().map(|(new, (old, _))| (*old, new)).collect();
        for page in &mut pages {
            page.holder = new[&page.holder];
        }
        Self { holders: holders.into_iter().map(|(_, holder)| holder).collect(), pages }
    }
}

/// The symbol that has most of a page of the kernel's image.
fn symbol_of(kernel: &KernelSymbols, page: u64) -> Option<String> {
    let start = page.checked_sub(kernel.page)?.checked_mul(PAGE_SIZE)?;
    let end = start.checked_add(PAGE_SIZE)?;
    let symbols = &kernel.symbols;
    let first = symbols.partition_point(|(at, _)| *at <= start).checked_sub(1)?;
    let bytes = |pair: &[(u64, String)]| pair[1].0.min(end).saturating_sub(pair[0].0.max(start));
    let inside = symbols[first..].windows(2).take_while(|pair| pair[0].0 < end);
    let (pair, most) = inside.map(|pair| (pair, bytes(pair))).max_by_key(|(_, bytes)| *bytes)?;
    // The last symbol has no end, and the image ends before the modules.
    (most > 0).then(|| pair[0].1.clone())
}

/// The kernel's function at a linear address.
fn function_of(kernel: &KernelSymbols, address: u64) -> Option<String> {
    let at = address.checked_sub(kernel.text)?;
    let index = kernel.symbols.partition_point(|(start, _)| *start <= at).checked_sub(1)?;
    Some(kernel.symbols[index].1.clone())
}

#[cfg(test)]
#[path = "holders_tests.rs"]
mod tests;
