//! What holds each page of the machine's memory, by its kernel's own account: the kernel's image in
//! /proc/iomem, except for the parts that the kernel has freed, the page tables of processes, and
//! the flags of pages (the kernel's Documentation/admin-guide/mm/pagemap.rst), in this order; and
//! the kernel's symbols.
//!
//! Nothing stops meanwhile: a page can be of a process that has just ended.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::maps::{Mapped, hex_range};
use crate::protocol::{KernelSymbols, Pages};

const PAGE_SIZE: u64 = 4096;

/// What `_text` begins in /proc/iomem.
const CODE: &str = "kernel: code";

/// Bits of a page's flags (`include/uapi/linux/kernel-page-flags.h`), and what they make a page,
/// the first that fits.
const KINDS: [(u32, &str); 6] = [
    (20, "no memory"),
    (10, "kernel: free"),
    (26, "kernel: page tables"),
    (7, "kernel: slab"),
    (RESERVED, "kernel: reserved"),
    (5, "page cache"),
];

/// The bit of pages that the page allocator never had.
const RESERVED: u32 = 32;

/// The bit of pages that belong to no file.
const ANONYMOUS: u32 = 12;

/// What pages are that fit no kind: stacks and per-CPU data of the kernel, its buffers, and pages
/// that a CPU keeps free.
const OTHER: &str = "kernel: other";

/// Reads what holds each page; `proc` is the mounted procfs. Needs root.
///
/// # Errors
/// A file cannot be read.
pub(super) fn read(proc: &Path) -> io::Result<Pages> {
    let (end, image) = places(&fs::read_to_string(proc.join("iomem"))?);
    let mapped = mapped(proc)?;
    let mut names = Names::default();
    let mut runs: Vec<(u32, u64)> = Vec::new();
    let flags = File::open(proc.join("kpageflags"))?;
    let mut page = 0;
    each_word(&flags, 0, end, |flags| {
        let is_image = |place: &&Place| flags & 1 << RESERVED != 0 && place.pages.contains(&page);
        let holder = match (image.iter().find(is_image), mapped.get(&page)) {
            (Some(place), _) => names.index(&place.name),
            (None, Some(mapping)) => names.index(&mapping.holder(flags & 1 << ANONYMOUS != 0)),
            (None, None) => {
                let kind = KINDS.iter().find(|(bit, _)| flags & 1 << bit != 0);
                names.index(kind.map_or(OTHER, |(_, name)| name))
            }
        };
        match runs.last_mut() {
            Some((last, pages)) if *last == holder => *pages += 1,
            _ => runs.push((holder, 1)),
        }
        page += 1;
    })?;
    let kernel = symbols(&fs::read_to_string(proc.join("kallsyms"))?, &image);
    Ok(Pages { holders: names.all, runs, kernel })
}

/// Holders, each once.
#[derive(Default)]
struct Names {
    all: Vec<String>,
    known: HashMap<String, u32>,
}

impl Names {
    fn index(&mut self, name: &str) -> u32 {
        if let Some(index) = self.known.get(name) {
            return *index;
        }
        let index = u32::try_from(self.all.len()).unwrap_or(u32::MAX);
        self.all.push(name.to_owned());
        self.known.insert(name.to_owned(), index);
        index
    }
}

/// A part of the kernel's image.
#[derive(Debug, PartialEq, Eq)]
struct Place {
    name: String,
    pages: Range<u64>,
}

/// The end of memory in pages, and the parts of the kernel's image.
fn places(iomem: &str) -> (u64, Vec<Place>) {
    let (mut end, mut image) = (0, Vec::new());
    for line in iomem.lines() {
        let Some((range, name)) = line.trim_start().split_once(" : ") else { continue };
        let Some(range) = hex_range(range) else { continue };
        // The last byte is part of the range.
        let pages = range.start / PAGE_SIZE..range.end / PAGE_SIZE + 1;
        if name == "System RAM" {
            end = end.max(pages.end);
        } else if let Some(part) = name.strip_prefix("Kernel ") {
            image.push(Place { name: format!("kernel: {part}"), pages });
        }
    }
    (end, image)
}

/// How processes map a page.
struct Mapping {
    /// The program's name.
    process: String,
    what: String,
}

impl Mapping {
    fn holder(&self, is_anonymous: bool) -> String {
        let own = if is_anonymous && self.what.starts_with('/') { ", written" } else { "" };
        format!("{}: {}{own}", self.process, self.what)
    }
}

/// The pages that processes map.
fn mapped(proc: &Path) -> io::Result<HashMap<u64, Mapping>> {
    let mut mapped: HashMap<u64, Mapping> = HashMap::new();
    for entry in fs::read_dir(proc)? {
        let folder = entry?.path();
        let is_process = folder.file_name().and_then(|name| name.to_str()?.parse::<u32>().ok());
        // A process may end at any time.
        let files = || {
            let read = |name| fs::read_to_string(folder.join(name)).ok();
            Some((read("comm")?, read("smaps")?, File::open(folder.join("pagemap")).ok()?))
        };
        let Some((process, smaps, pagemap)) = is_process.and_then(|_| files()) else { continue };
        let process = process.trim_end();
        for (pages, what) in resident(&smaps) {
            let read = each_word(&pagemap, pages.start, pages.end - pages.start, |entry| {
                let (is_present, frame) = (entry & 1 << 63 != 0, entry & ((1 << 55) - 1));
                if is_present {
                    mapped
                        .entry(frame)
                        .and_modify(|earlier| {
                            if earlier.process != process {
                                "several".clone_into(&mut earlier.process);
                            }
                        })
                        .or_insert_with(|| Mapping {
                            process: process.to_owned(),
                            what: what.to_owned(),
                        });
                }
            });
            if read.is_err() {
                break;
            }
        }
    }
    Ok(mapped)
}

/// The mappings with pages in memory, from a process' smaps: their pages, and what they map.
fn resident(smaps: &str) -> Vec<(Range<u64>, &str)> {
    let mut mappings: Vec<(Range<u64>, &str)> = Vec::new();
    let mut last = None;
    for line in smaps.lines() {
        if let Some(Mapped { addresses, path, .. }) = Mapped::parse(line) {
            let pages = addresses.start / PAGE_SIZE..addresses.end / PAGE_SIZE;
            last = Some((pages, what(path)));
        } else if line.strip_prefix("Rss:").is_some_and(|size| size.trim() != "0 kB") {
            mappings.extend(last.take());
        }
    }
    mappings
}

fn what(path: &str) -> &str {
    match path {
        "[heap]" => "heap",
        "[stack]" => "stack",
        path if path.is_empty() || path.starts_with("[anon") => "anonymous",
        path => path,
    }
}

/// Passes words of a file of 64-bit words to `each`, up to the file's end.
fn each_word(file: &File, first: u64, words: u64, mut each: impl FnMut(u64)) -> io::Result<()> {
    let mut bytes = [0; 32 << 10];
    let (mut at, end) = (first * 8, (first + words) * 8);
    while at < end {
        let len = usize::try_from(end - at).map_or(bytes.len(), |left| left.min(bytes.len()));
        let read = file.read_at(&mut bytes[..len], at)?;
        if read == 0 {
            break;
        }
        let (words, _) = bytes[..read].as_chunks();
        words.iter().for_each(|word| each(u64::from_ne_bytes(*word)));
        at += read as u64;
    }
    Ok(())
}

/// The kernel's symbols.
fn symbols(kallsyms: &str, image: &[Place]) -> Option<KernelSymbols> {
    let all: Vec<_> = kallsyms.lines().filter_map(symbol).collect();
    let (text, _) = *all.iter().find(|(_, name)| name == "_text")?;
    // Without the right to know them, addresses are zero.
    (text != 0).then_some(())?;
    let code = image.iter().find(|place| place.name == CODE)?;
    // What lies before the image is no address, but an offset in per-CPU data.
    let after = |(address, name): (u64, String)| Some((address.checked_sub(text)?, name));
    let mut symbols: Vec<_> = all.into_iter().filter_map(after).collect();
    symbols.sort_unstable();
    Some(KernelSymbols { text, page: code.pages.start, symbols })
}

/// The address and the name in a line of /proc/kallsyms, of a function or a variable.
fn symbol(line: &str) -> Option<(u64, String)> {
    let mut fields = line.split_ascii_whitespace();
    let (address, kind, name) = (fields.next()?, fields.next()?, fields.next()?);
    let is_wanted = matches!(kind, "t" | "T" | "w" | "W" | "d" | "D" | "b" | "B");
    // The space for patches before each function.
    (is_wanted && !name.starts_with("__pfx_")).then_some(())?;
    let module = fields.next().map(|module| format!(" {module}")).unwrap_or_default();
    Some((u64::from_str_radix(address, 16).ok()?, format!("{name}{module}")))
}

#[cfg(test)]
#[path = "pages_tests.rs"]
mod tests;
