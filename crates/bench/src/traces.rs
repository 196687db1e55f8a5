//! Traces by name: built-in traces, generated traces, and files.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use firn_base::PAGE_SIZE;
use firn_memory::Leaf;
use firn_memory::trace::{
    Access, DecodeTraceError, GapUnit, Touch, Toucher, Trace, TraceError, TraceOrigin,
};
use firn_snapshot::{LayoutError, MemoryLayout, PageSet};

/// The built-in traces: names and contents.
const EMBEDDED: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/traces.rs"));

const SEQUENTIAL_READ: &str = "sequential-read";
const SEQUENTIAL_WRITE: &str = "sequential-write";

/// The inputs of other sizes than that of a function's record phase: their size relative to it, and
/// what the names of their traces end with.
pub(crate) const SIZES: [(&str, &str); 5] =
    [("1/4", "quarter"), ("1/2", "half"), ("1", "same"), ("2", "double"), ("4", "fourfold")];
/// What the name of the record phase's trace ends with.
pub(crate) const BASE: &str = "base";

/// A trace and its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedTrace {
    /// The requested name; for a file, its name without folder and extension.
    pub name: String,
    /// The trace.
    pub trace: Trace,
}

/// Why a trace cannot be loaded.
#[derive(Debug, Error)]
pub enum LoadTraceError {
    /// No trace has this name.
    #[error(
        "there is no trace {name:?}: use one of {known}, or the path of a file that ends in .trace"
    )]
    Unknown {
        /// The name.
        name: String,
        /// The known names.
        known: String,
    },
    /// A file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// A file is not a valid trace.
    #[error("{name} is not a valid trace")]
    Decode {
        /// The file, or the name.
        name: String,
        /// The reason.
        source: DecodeTraceError,
    },
    /// The size of a generated trace is not valid.
    #[error(
        "{0:?} is not a valid size: expected bytes with an optional suffix K, M or G, such as 64M"
    )]
    Size(String),
    /// Guest memory cannot have that size.
    #[error("cannot generate {name}")]
    Layout {
        /// The name.
        name: String,
        /// The reason.
        source: LayoutError,
    },
    /// The generated touches are not a valid trace: a defect.
    #[error("cannot generate {name}")]
    Touches {
        /// The name.
        name: String,
        /// The reason.
        source: TraceError,
    },
}

/// The names that [`load`] knows: the built-in traces, and the forms of generated ones.
pub(crate) fn names() -> impl Iterator<Item = String> {
    let embedded = EMBEDDED.iter().map(|(name, _)| (*name).to_owned());
    let made = [SEQUENTIAL_READ, SEQUENTIAL_WRITE].map(|name| format!("{name}:SIZE"));
    embedded.chain(made)
}

/// Loads a built-in trace, a generated one, or the file at a path. The generated traces
/// `sequential-read:SIZE` and `sequential-write:SIZE` touch all of a memory without zero pages
/// once, in order.
///
/// # Errors
/// See [`LoadTraceError`].
pub fn load(name: &str) -> Result<NamedTrace, LoadTraceError> {
    if let Some((_, bytes)) = EMBEDDED.iter().find(|(embedded, _)| *embedded == name) {
        return decode(name.to_owned(), bytes);
    }
    match name.split_once(':') {
        Some((SEQUENTIAL_READ, size)) => return sequential(name, size, Access::Read),
        Some((SEQUENTIAL_WRITE, size)) => return sequential(name, size, Access::Write),
        _ => {}
    }
    let path = Path::new(name);
    if path.extension().is_none_or(|extension| extension != "trace") {
        let known: Vec<String> = names().collect();
        return Err(LoadTraceError::Unknown { name: name.to_owned(), known: known.join(", ") });
    }
    let bytes = std::fs::read(path)
        .map_err(|source| LoadTraceError::Read { path: path.to_owned(), source })?;
    let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    decode(stem, &bytes)
}

fn decode(name: String, bytes: &[u8]) -> Result<NamedTrace, LoadTraceError> {
    match Trace::decode(bytes) {
        Ok(trace) => Ok(NamedTrace { name, trace }),
        Err(source) => Err(LoadTraceError::Decode { name, source }),
    }
}

fn sequential(name: &str, size: &str, access: Access) -> Result<NamedTrace, LoadTraceError> {
    let bytes = firn_base::parse_size(size).map_err(|_| LoadTraceError::Size(size.to_owned()))?;
    let layout = MemoryLayout::for_size(bytes)
        .map_err(|source| LoadTraceError::Layout { name: name.to_owned(), source })?;
    let pages = layout.regions().flat_map(|region| {
        region.guest_range().start / PAGE_SIZE..region.guest_range().end / PAGE_SIZE
    });
    let (by, leaf, gap) = (Toucher::Instruction, Leaf::Size4K, 0);
    let touches = pages.map(|page| Touch { page, access, by, leaf, gap }).collect();
    let origin = TraceOrigin {
        function: name.to_owned(),
        input: String::new(),
        command: format!("firn player --trace {name}"),
        host: "generated, not recorded".to_owned(),
        gaps: GapUnit::Instructions,
    };
    let zero_map = PageSet::new(layout.pages());
    let trace = Trace::new(origin, layout, zero_map, touches)
        .map_err(|source| LoadTraceError::Touches { name: name.to_owned(), source })?;
    Ok(NamedTrace { name: name.to_owned(), trace })
}

#[cfg(test)]
#[path = "traces_tests.rs"]
mod tests;
