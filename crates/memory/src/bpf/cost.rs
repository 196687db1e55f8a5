//! What BPF programs cost a start (SnapBPF 4, "Overheads").

use std::fs::File;
use std::time::Instant;

use firn_base::ns_since;
use firn_snapshot::CachedRun;

use super::syscalls::{create_map, write_entry, write_map};
use super::{BpfError, Capture, Hook};

/// Measures the cost of BPF programs for one image.
#[derive(Debug)]
pub struct BpfCosts<'a> {
    image: &'a File,
    pages: u64,
    hook: Hook,
}

/// The cost of BPF programs in one start, ns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BpfCost {
    /// Making a map and writing the recorded ranges into it, in one call.
    pub map_ns: u64,
    /// The same with a call for each range.
    pub map_each_ns: u64,
    /// Making the map of the capturing program, and loading and attaching the program.
    pub attach_ns: u64,
}

impl<'a> BpfCosts<'a> {
    /// Finds the place of the program in the kernel. The page cache must hold no page of the image,
    /// which has `pages` pages.
    ///
    /// # Errors
    ///
    /// [`BpfError`].
    pub fn new(image: &'a File, pages: u64) -> Result<Self, BpfError> {
        Ok(Self { image, pages, hook: Hook::find(image)? })
    }

    /// Measures once.
    ///
    /// # Errors
    ///
    /// [`BpfError`].
    pub fn measure(&self, runs: &[CachedRun]) -> Result<BpfCost, BpfError> {
        let refused = |source| BpfError::Refused { what: "map", source };
        // First page and number of pages, as SnapBPF's map has them.
        let values: Vec<u64> =
            runs.iter().map(|cached| cached.run.first << 32 | cached.run.pages).collect();
        let entries = u32::try_from(values.len()).unwrap_or(u32::MAX);
        let begin = Instant::now();
        let map = create_map(entries).map_err(refused)?;
        write_map(&map, &values).map_err(refused)?;
        let map_ns = ns_since(begin);
        drop(map);
        let begin = Instant::now();
        let map = create_map(entries).map_err(refused)?;
        for (key, value) in (0..).zip(&values) {
            write_entry(&map, key, *value).map_err(refused)?;
        }
        let map_each_ns = ns_since(begin);
        let begin = Instant::now();
        let capture = Capture::start(&self.hook, self.image, self.pages)?;
        let attach_ns = ns_since(begin);
        drop(capture);
        Ok(BpfCost { map_ns, map_each_ns, attach_ns })
    }
}
