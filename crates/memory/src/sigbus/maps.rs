//! /proc/self/maps, read without heap allocation: the signal handler reads it, too.

use rustix::io::{Errno, pread, retry_on_intr};

use crate::own_files::OwnFiles;

/// Bytes of the longest line: a path of `PATH_MAX` and the fields before it.
const MAX_LINE: usize = 4096 + 128;

/// A mapping. Addresses are host-virtual, in bytes.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Mapped<'a> {
    pub(super) start: u64,
    pub(super) end: u64,
    /// The offset of its first byte in the file.
    pub(super) offset: u64,
    /// The inode of the file; 0 for anonymous memory.
    pub(super) inode: u64,
    /// The file's path, empty for anonymous memory.
    pub(super) path: &'a [u8],
}

/// Calls `visit` for each mapping of this process until it returns `true`. Async-signal-safe if
/// `visit` is. Visits nothing before this process has opened its [files](OwnFiles).
pub(super) fn scan(mut visit: impl FnMut(&Mapped<'_>) -> bool) -> rustix::io::Result<()> {
    let Some(maps) = OwnFiles::opened().and_then(OwnFiles::maps) else { return Ok(()) };
    let mut buffer = [0; MAX_LINE];
    let (mut filled, mut at) = (0, 0);
    loop {
        let count = retry_on_intr(|| pread(maps, &mut buffer[filled..], at))?;
        if count == 0 {
            return Ok(());
        }
        filled += count;
        at += count as u64;
        let mut begin = 0;
        while let Some(len) = buffer[begin..filled].iter().position(|byte| *byte == b'\n') {
            if parse(&buffer[begin..begin + len]).is_some_and(|mapped| visit(&mapped)) {
                return Ok(());
            }
            begin += len + 1;
        }
        buffer.copy_within(begin..filled, 0);
        filled -= begin;
        if filled == buffer.len() {
            return Err(Errno::NAMETOOLONG);
        }
    }
}

/// `start-end permissions offset device inode path`.
fn parse(line: &[u8]) -> Option<Mapped<'_>> {
    let mut rest = line;
    let mut next = |end: u8| {
        let len = rest.iter().position(|byte| *byte == end)?;
        let field = &rest[..len];
        rest = &rest[len + 1..];
        Some(field)
    };
    let (start, end) = (hexadecimal(next(b'-')?)?, hexadecimal(next(b' ')?)?);
    next(b' ')?;
    let offset = hexadecimal(next(b' ')?)?;
    next(b' ')?;
    // A space ends the inode of an anonymous mapping, too.
    let inode = std::str::from_utf8(next(b' ')?).ok()?.parse().ok()?;
    let path = rest.trim_ascii_start();
    // Special mappings such as `[heap]` are not files.
    let path = if path.starts_with(b"/") { path } else { &[] };
    Some(Mapped { start, end, offset, inode, path })
}

fn hexadecimal(digits: &[u8]) -> Option<u64> {
    u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
}

#[cfg(test)]
#[path = "maps_tests.rs"]
mod tests;
