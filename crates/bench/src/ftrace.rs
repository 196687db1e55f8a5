//! Times of functions of the kernel, by its function graph tracer (kernel documentation,
//! trace/ftrace.rst). The tracer takes some time itself, also within the outer function of two.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Where the kernel's tracing is mounted.
const TRACEFS: &str = "/sys/kernel/tracing";
const GRAPH: &str = "function_graph";
const NO_TRACER: &str = "nop";
/// The name of the function stands at its end, too.
const TAIL: &str = "options/funcgraph-tail";
/// For each processor. A traced call takes less than 100 bytes.
const BUFFER_KIB: &str = "32768";

/// Why functions of the kernel cannot be timed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FtraceError {
    /// A file of the tracer cannot be read or written.
    #[error(
        "cannot use the kernel's function graph tracer: {path}; it needs root, and tracefs mounted there"
    )]
    File {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The tracer has another use.
    #[error("the kernel's tracer is in use ({0}): end that use first")]
    InUse(String),
    /// The kernel has no such function that can be traced.
    #[error("the kernel has no function {0:?} that can be traced")]
    NoFunction(&'static str),
    /// Calls were lost.
    #[error("the tracer lost {0} events: trace a shorter run")]
    Lost(u64),
}

/// The calls of a function.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Calls {
    pub(crate) count: u64,
    pub(crate) us: f64,
}

/// The tracer, which is on for one process at a time on a host. It is off again on drop.
#[derive(Debug)]
pub(crate) struct FunctionGraph {
    folder: PathBuf,
    /// The wanted functions by the kernel's names.
    names: BTreeMap<String, &'static str>,
}

impl FunctionGraph {
    /// Prepares the tracer for these functions. Each is a list of names, of which the first that
    /// the kernel has is taken: a compiler may have merged a function into its only caller.
    pub(crate) fn new(functions: &[&[&'static str]]) -> Result<Self, FtraceError> {
        Self::at(TRACEFS.as_ref(), functions)
    }

    fn at(folder: &Path, functions: &[&[&'static str]]) -> Result<Self, FtraceError> {
        let mut graph = Self { folder: folder.to_owned(), names: BTreeMap::new() };
        let all = graph.read("available_filter_functions")?;
        let mut wanted = BTreeMap::new();
        for names in functions {
            let found = names.iter().find_map(|name| Some((kernel_name(&all, name)?, *name)));
            let (found, name) =
                found.ok_or(FtraceError::NoFunction(names.first().unwrap_or(&"")))?;
            wanted.insert(found.to_owned(), name);
        }
        let current = graph.read("current_tracer")?;
        if current.trim() != NO_TRACER {
            return Err(FtraceError::InUse(current.trim().to_owned()));
        }
        // From here on its settings are this one's to reset.
        graph.names = wanted;
        let list: Vec<&str> = graph.names.keys().map(String::as_str).collect();
        graph.write("tracing_on", "0")?;
        graph.write("set_ftrace_filter", &list.join(" "))?;
        graph.write("buffer_size_kb", BUFFER_KIB)?;
        graph.write(TAIL, "1")?;
        graph.write("current_tracer", GRAPH)?;
        Ok(graph)
    }

    /// Begins to trace. What was traced before is forgotten.
    pub(crate) fn begin(&self) -> Result<(), FtraceError> {
        self.write("trace", "")?;
        self.write("tracing_on", "1")
    }

    /// Stops, and returns the calls of each function by the name that it was wanted by.
    pub(crate) fn end(&self) -> Result<BTreeMap<&'static str, Calls>, FtraceError> {
        self.write("tracing_on", "0")?;
        let lost = self.lost()?;
        if lost > 0 {
            return Err(FtraceError::Lost(lost));
        }
        let trace = self.read("trace")?;
        let mut calls: BTreeMap<&str, Calls> =
            self.names.values().map(|name| (*name, Calls::default())).collect();
        for (name, us) in trace.lines().filter_map(call) {
            if let Some(of) = self.names.get(name).and_then(|name| calls.get_mut(name)) {
                of.count += 1;
                of.us += us;
            }
        }
        Ok(calls)
    }

    /// Events that did not fit into the buffers.
    fn lost(&self) -> Result<u64, FtraceError> {
        let folder = self.folder.join("per_cpu");
        let failed = |source| FtraceError::File { path: folder.clone(), source };
        let mut lost = 0;
        for entry in fs::read_dir(&folder).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            let stats = self.read(&format!("per_cpu/{}/stats", name.to_string_lossy()))?;
            let overruns = stats.lines().filter_map(|line| line.strip_prefix("overrun: "));
            lost += overruns.filter_map(|number| number.trim().parse::<u64>().ok()).sum::<u64>();
        }
        Ok(lost)
    }

    fn read(&self, file: &str) -> Result<String, FtraceError> {
        let path = self.folder.join(file);
        fs::read_to_string(&path).map_err(|source| FtraceError::File { path, source })
    }

    fn write(&self, file: &str, text: &str) -> Result<(), FtraceError> {
        let path = self.folder.join(file);
        fs::write(&path, text).map_err(|source| FtraceError::File { path, source })
    }
}

impl Drop for FunctionGraph {
    fn drop(&mut self) {
        if self.names.is_empty() {
            return;
        }
        // The kernel's own settings after its start. An error leaves the tracer on, and there is
        // no more to be done about it.
        for (file, text) in [
            ("current_tracer", NO_TRACER),
            ("set_ftrace_filter", ""),
            (TAIL, "0"),
            ("buffer_size_kb", "1408"),
            ("tracing_on", "1"),
        ] {
            let _ = self.write(file, text);
        }
    }
}

/// The kernel's name of a function, in its list of those that can be traced. A compiler adds
/// endings such as `.isra.0`, and a module's name follows.
fn kernel_name<'a>(all: &'a str, name: &str) -> Option<&'a str> {
    let names = all.lines().filter_map(|line| line.split_whitespace().next());
    names.into_iter().find(|found| {
        found.strip_prefix(name).is_some_and(|end| end.is_empty() || end.starts_with('.'))
    })
}

/// A call that has returned: the function's name and its time in µs, of a line such as
/// ` 0) + 12.345 us   |  } /* kvm_mmu_page_fault [kvm] */` or ` 0)   0.581 us    |  name();`.
fn call(line: &str) -> Option<(&str, f64)> {
    let (left, right) = line.split_once('|')?;
    let (before, _) = left.split_once(" us")?;
    let us = before.split_whitespace().next_back()?.parse().ok()?;
    let right = right.trim();
    let name = match right.strip_prefix('}') {
        Some(tail) => tail.trim().strip_prefix("/*")?,
        None => right.strip_suffix(';')?,
    };
    let name = name.trim().split(['(', ' ']).next()?;
    Some((name, us))
}

#[cfg(test)]
#[path = "ftrace_tests.rs"]
mod tests;
