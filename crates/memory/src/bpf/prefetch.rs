//! SnapBPF's prefetch (3.1): a BPF program that reads ahead.
//!
//! The program is attached where the kernel adds pages to the page cache. The first page of the
//! image that enters has it issue all ranges of a plan, in order, by the kernel function
//! `snapbpf_prefetch` of a module (`lab/snapbpf`); then it does nothing more. The ranges are in a
//! BPF map.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};

use firn_base::PAGE_SIZE;
use rustix::fs::fstat;

use super::kernel_types::AddFolio;
use super::module::ModuleFunction;
use super::program::prefetching;
use super::syscalls::{attach_to_function, create_map, load_fexit_with, write_map};
use super::{BpfError, kernel_device};
use crate::plan::{Plan, Work};

const MODULE: &str = "firn_snapbpf";
const FUNCTION: &str = "snapbpf_prefetch";
/// The kernel checks each turn of the program's loop, and gives up where there are more.
const MAX_RANGES: usize = 6_000;

/// An attached program. It is detached on drop.
#[derive(Debug)]
pub struct Prefetch {
    _attached: OwnedFd,
}

impl Prefetch {
    /// Attaches the program for the ranges that a plan leaves to the kernel, in the order of the
    /// plan; `None` where it leaves none. The loader of the plan then reads the first page.
    ///
    /// # Errors
    ///
    /// [`BpfError`]: the kernel has no such function, or refuses the program.
    pub fn attach(plan: &Plan, image: &File) -> Result<Option<Self>, BpfError> {
        // The first page of a range and its pages.
        let ranges = plan.schedule.iter().filter_map(|step| match step.work {
            Work::Prefetch { image } => {
                Some(((image.offset / PAGE_SIZE) << 32) | (image.len / PAGE_SIZE))
            }
            _ => None,
        });
        let ranges: Vec<u64> = ranges.collect();
        if ranges.is_empty() {
            return Ok(None);
        }
        if ranges.len() > MAX_RANGES {
            return Err(BpfError::Ranges { ranges: ranges.len(), most: MAX_RANGES });
        }
        let refused = |what| move |source| BpfError::Refused { what, source };
        let found = ModuleFunction::find(MODULE, FUNCTION).map_err(refused("types"))?;
        let function = found.ok_or(BpfError::NoModule)?;
        let at = AddFolio::find().ok_or(BpfError::NoFunction)?;
        let stat = fstat(image).map_err(|errno| BpfError::File(errno.into()))?;
        let count = u32::try_from(ranges.len()).unwrap_or(u32::MAX);
        // The first entry is whether the ranges were issued.
        let map = create_map(count.saturating_add(1)).map_err(refused("map"))?;
        let entries: Vec<u64> = std::iter::once(0).chain(ranges).collect();
        write_map(&map, &entries).map_err(refused("map"))?;
        let device = kernel_device(&stat);
        let program = prefetching(&at, device, stat.st_ino, count, map.as_raw_fd(), function.id);
        let program = load_fexit_with(&program, at.id, &function.types);
        let program = program.map_err(refused("program"))?;
        let attached = attach_to_function(&program).map_err(BpfError::Attach)?;
        Ok(Some(Self { _attached: attached }))
    }
}

#[cfg(test)]
#[path = "prefetch_tests.rs"]
mod tests;
