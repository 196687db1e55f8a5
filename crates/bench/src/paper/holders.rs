//! The table of what holds the pages that functions touch: of the files in `traces/holders`, which
//! `make traces FUNCTIONS=NAME-holders` records.
//!
//! [`read`] reads such a recording, of any kind.

use std::collections::HashSet;
use std::fs;
use std::path::Path;

use firn_memory::trace::Trace;
use firn_snapshot::CHUNK_PAGES;
use serde_json::Value;

use crate::text::{markdown, number};

/// Whether a row has the pages of a holder.
type IsOf = fn(&str) -> bool;

const ROWS: [(&str, IsOf); 12] = [
    ("kernel: code", |holder| holder == "kernel: code"),
    ("kernel: read-only data", |holder| holder == "kernel: rodata"),
    ("kernel: variables", |holder| matches!(holder, "kernel: data" | "kernel: bss")),
    ("kernel: slab", |holder| holder == "kernel: slab"),
    ("kernel: reserved", |holder| holder == "kernel: reserved"),
    ("kernel: page tables", |holder| holder == "kernel: page tables"),
    ("kernel: other", |holder| holder == "kernel: other"),
    ("agent", |holder| holder.starts_with("init: ")),
    ("Python: files", |holder| holder.starts_with("python3: /")),
    ("Python: memory", |holder| holder.starts_with("python3: ") && !holder.contains('/')),
    ("page cache", |holder| holder == "page cache"),
    ("**all**", |_| true),
];

/// What was recorded of one function.
struct Recorded {
    function: String,
    /// The holder and whether it was written, of each page.
    pages: Vec<(String, bool)>,
    chunks: usize,
    instructions: u64,
}

impl Recorded {
    fn read(function: &str) -> Option<Self> {
        let (trace, recorded) = read("holders", &format!("{function}-a"))?;
        let (mut pages, mut chunks) = (Vec::new(), HashSet::new());
        for page in recorded["pages"].as_array()? {
            let holder = usize::try_from(page["holder"].as_u64()?).ok()?;
            let holder = recorded["holders"][holder]["name"].as_str()?;
            if ROWS.iter().filter(|(_, is_of)| is_of(holder)).count() != 2 {
                return None;
            }
            pages.push((holder.to_owned(), page["written"].as_bool()?));
            chunks.insert(page["page"].as_u64()? / CHUNK_PAGES);
        }
        let (function, chunks) = (function.to_owned(), chunks.len());
        Some(Self { function, pages, chunks, instructions: trace.work() })
    }

    /// The pages of some holders, in brackets those that are written.
    fn cell(&self, is_of: IsOf) -> String {
        let of: Vec<bool> =
            self.pages.iter().filter(|(holder, _)| is_of(holder)).map(|page| page.1).collect();
        match of.iter().filter(|written| **written).count() {
            0 => of.len().to_string(),
            written => format!("{} ({written})", of.len()),
        }
    }
}

/// A trace in a folder of `traces`, and what was recorded beside it. `None` if a file is missing or
/// not valid.
pub(super) fn read(kind: &str, name: &str) -> Option<(Trace, Value)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../traces").join(kind);
    let file = |ending| fs::read(folder.join(format!("{name}.{ending}"))).ok();
    let recorded = serde_json::from_slice(&file("json")?).ok()?;
    Some((Trace::decode(&file("trace")?).ok()?, recorded))
}

/// The table of functions whose names are separated by spaces. `None` if a file is missing or not
/// valid, or a page is not in one row and the last.
pub(super) fn table(functions: &str) -> Option<String> {
    let recorded: Vec<_> = functions.split(' ').map(Recorded::read).collect::<Option<_>>()?;
    let row = |text: &str, cell: &dyn Fn(&Recorded) -> String| {
        std::iter::once(text.to_owned()).chain(recorded.iter().map(cell)).collect::<Vec<_>>()
    };
    let mut rows: Vec<_> =
        ROWS.iter().map(|(text, is_of)| row(text, &|one| one.cell(*is_of))).collect();
    rows.push(row("chunks of 2 MiB", &|one| one.chunks.to_string()));
    rows.push(row("million instructions", &|one| number(one.instructions as f64 / 1e6)));
    let head: Vec<&str> =
        std::iter::once("holder").chain(recorded.iter().map(|one| one.function.as_str())).collect();
    Some(markdown(&head, &rows))
}
