//! Lines of /proc/PID/maps and the first lines of mappings in /proc/PID/smaps (proc_pid_maps(5)).

use std::ops::Range;

/// A mapping of a process.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Mapped<'a> {
    pub(super) addresses: Range<u64>,
    /// Such as `r-xp`.
    pub(super) rights: &'a str,
    /// In the file, bytes.
    pub(super) offset: u64,
    /// `MAJOR:MINOR`, of the file.
    pub(super) device: &'a str,
    /// Of the file; 0 without one.
    pub(super) inode: &'a str,
    /// The file's, a name in brackets, or empty.
    pub(super) path: &'a str,
}

impl<'a> Mapped<'a> {
    /// `None` if the line is none of a mapping.
    pub(super) fn parse(line: &'a str) -> Option<Self> {
        // The path is after spaces, and may contain some.
        let mut fields = line.splitn(6, ' ');
        Some(Self {
            addresses: hex_range(fields.next()?)?,
            rights: fields.next()?,
            offset: u64::from_str_radix(fields.next()?, 16).ok()?,
            device: fields.next()?,
            inode: fields.next()?,
            path: fields.next().unwrap_or_default().trim_start(),
        })
    }
}

/// A range in hexadecimal digits, as /proc writes it.
pub(super) fn hex_range(text: &str) -> Option<Range<u64>> {
    let (start, end) = text.split_once('-')?;
    let number = |digits| u64::from_str_radix(digits, 16).ok();
    Some(number(start)?..number(end)?)
}
