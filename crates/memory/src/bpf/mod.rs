//! BPF programs at the place where the kernel adds pages to the page cache: one records when each
//! page of a file enters, another one reads ahead ([`Prefetch`]). A third one, where block devices
//! are read, makes an emulated disk as slow as a real one ([`ReadDelay`]).
//!
//! SnapBPF (3.1) hooks the kernel where it adds pages to the page cache. Here the program runs at
//! the end of the function `filemap_add_folio` (fexit) where the kernel allows it, and otherwise at
//! the tracepoint `filemap:mm_filemap_add_to_page_cache` inside that function. The program has some
//! thirty instructions and is assembled here, so firn needs neither a compiler for BPF nor a
//! library that loads its output. Its map is an array with an entry for each page of the file: the
//! time of the first entry and, in the lowest bits, the order of the folio that starts at the page.

mod cost;
mod delay;
mod kernel_types;
mod module;
mod prefetch;
mod program;
mod syscalls;
mod tracepoint;

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use firn_base::PAGE_SIZE;
use rustix::fs::{Stat, fstat, major, minor};
use thiserror::Error;

use crate::map::Mapping;
pub use cost::{BpfCost, BpfCosts};
pub use delay::ReadDelay;
use kernel_types::AddFolio;
pub use prefetch::Prefetch;
use program::{ORDER_BITS, program};
use syscalls::{
    attach_to_function, attach_to_tracepoint, create_map, load_fexit, load_tracepoint, read_map,
};
use tracepoint::Tracepoint;

/// Why a BPF program cannot run.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BpfError {
    /// The tracepoint cannot be looked up.
    #[error("cannot look up the tracepoint {name}; run as root, on a kernel with tracepoints")]
    Tracepoint {
        /// The tracepoint.
        name: &'static str,
        /// The error of the system call.
        source: io::Error,
    },
    /// The tracepoint's record lacks a field.
    #[error("the tracepoint {name} has no field {field} on this kernel")]
    Field {
        /// The tracepoint.
        name: &'static str,
        /// The field.
        field: &'static str,
    },
    /// The file cannot be examined.
    #[error("cannot examine the file to watch")]
    File(#[source] io::Error),
    /// The kernel refuses the map or the program.
    #[error("the kernel refuses the BPF {what}; run as root, on a kernel with BPF")]
    Refused {
        /// Map or program.
        what: &'static str,
        /// The error of the system call.
        source: io::Error,
    },
    /// The program cannot be attached.
    #[error("cannot attach the BPF program to the tracepoint")]
    Attach(#[source] io::Error),
    /// No module has the function that reads ahead.
    #[error(
        "the kernel has no function by which a BPF program reads ahead: insert the module firn_snapbpf, which \
         `firn lab build --snapbpf` makes for the lab's kernel"
    )]
    NoModule,
    /// The kernel does not describe the function that adds pages to the page cache.
    #[error(
        "the kernel has no function filemap_add_folio that a BPF program can read the arguments of"
    )]
    NoFunction,
    /// There are too many ranges for a program.
    #[error("the profile has {ranges} ranges, and a BPF program issues at most {most}")]
    Ranges {
        /// Their number.
        ranges: usize,
        /// The largest number.
        most: usize,
    },
    /// The map cannot be read.
    #[error("cannot read the entries that the BPF program recorded")]
    Read(#[source] io::Error),
}

/// When a page entered the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entered {
    /// The time, ns of CLOCK_MONOTONIC.
    pub(crate) at_ns: u64,
    /// The number of pages that entered with it, itself included.
    pub(crate) pages: u64,
}

/// The attached program. It is detached on drop.
#[derive(Debug)]
pub(crate) struct Capture {
    map: OwnedFd,
    pages: u32,
    attached: Option<OwnedFd>,
}

impl Capture {
    /// Starts to watch the first `pages` pages of a file.
    pub(crate) fn start(hook: &Hook, file: &File, pages: u64) -> Result<Self, BpfError> {
        let stat = fstat(file).map_err(|errno| BpfError::File(errno.into()))?;
        let device = kernel_device(&stat);
        let pages = u32::try_from(pages).unwrap_or(u32::MAX).min(i32::MAX.unsigned_abs());
        let map = create_map(pages).map_err(|source| BpfError::Refused { what: "map", source })?;
        let program = program(hook, device, stat.st_ino, pages, map.as_raw_fd());
        let program = match hook {
            Hook::Function(function) => load_fexit(&program, function.id),
            Hook::Tracepoint(_) => load_tracepoint(&program),
        };
        let program = program.map_err(|source| BpfError::Refused { what: "program", source })?;
        let attached = match hook {
            Hook::Function(_) => attach_to_function(&program),
            Hook::Tracepoint(tracepoint) => attach_to_tracepoint(tracepoint.id, &program),
        };
        Ok(Self { map, pages, attached: Some(attached.map_err(BpfError::Attach)?) })
    }

    /// Stops watching.
    pub(crate) fn stop(&mut self) {
        self.attached = None;
    }

    /// The first entry of each page; `None` for a page that did not enter.
    pub(crate) fn entered(&self) -> Result<Vec<Option<Entered>>, BpfError> {
        let values = read_map(&self.map, self.pages).map_err(BpfError::Read)?;
        Ok(values.into_iter().map(entered).collect())
    }
}

/// Where the program is attached.
#[derive(Debug)]
pub(crate) enum Hook {
    Function(AddFolio),
    Tracepoint(Tracepoint),
}

impl Hook {
    /// Chooses the function where the kernel allows it, otherwise the tracepoint. The page cache
    /// must not hold pages of the file; its first page may be cached afterwards.
    pub(crate) fn find(file: &File) -> Result<Self, BpfError> {
        let function = AddFolio::find().map(Self::Function);
        match function.filter(|function| function.sees_a_fault(file).is_ok_and(|seen| seen)) {
            Some(function) => Ok(function),
            None => Ok(Self::Tracepoint(Tracepoint::find()?)),
        }
    }

    /// Whether a program at this place runs when a fault brings a page in. A kernel may refuse
    /// programs at functions, and its compiler may have inlined the function into its callers.
    fn sees_a_fault(&self, file: &File) -> Result<bool, BpfError> {
        let fault = || -> io::Result<()> {
            let page = Mapping::reserve(PAGE_SIZE, PAGE_SIZE)?;
            page.map_private(page.base(), PAGE_SIZE, file, 0)?;
            page.advise_random(page.base(), PAGE_SIZE)?;
            Ok(page.populate_read(page.base(), PAGE_SIZE)?)
        };
        let capture = Capture::start(self, file, 1)?;
        fault().map_err(BpfError::File)?;
        Ok(capture.entered()?.iter().flatten().count() == 1)
    }
}

impl fmt::Display for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Function(_) => "the end of filemap_add_folio (fexit)",
            Self::Tracepoint(_) => "the tracepoint filemap:mm_filemap_add_to_page_cache",
        })
    }
}

/// A file's device in the kernel's internal encoding, which differs from that of user space.
fn kernel_device(stat: &Stat) -> u32 {
    major(stat.st_dev) << 20 | minor(stat.st_dev)
}

/// Decodes an entry of the map.
fn entered(value: u64) -> Option<Entered> {
    let order = (1 << ORDER_BITS) - 1;
    let entered = Entered { at_ns: value >> ORDER_BITS, pages: 1 << (value & order).min(30) };
    (value != 0).then_some(entered)
}

#[cfg(test)]
mod tests;
