//! Sizes in bytes: the page size, parsing and formatting.

use parse_size::Config;
use thiserror::Error;

/// Bytes in a page of guest memory.
pub const PAGE_SIZE: u64 = 4096;

/// A text that [`parse_size()`] does not accept.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0:?} is not a size: expected a whole number of bytes with an optional suffix K, M or G")]
pub struct ParseSizeError(String);

/// Parses a size in bytes, such as `1048576`, `256M` or `2GiB`.
///
/// The suffixes are powers of 1024, with or without `B` or `iB`, in either case.
///
/// # Errors
/// [`ParseSizeError`] when `text` is not a whole number with an optional suffix, or when the size
/// does not fit in 64 bits.
pub fn parse_size(text: &str) -> Result<u64, ParseSizeError> {
    let error = || ParseSizeError(text.to_owned());
    if !text.chars().all(|c| c.is_ascii_alphanumeric()) {
        return Err(error());
    }
    Config::new().with_binary().parse_size(text).map_err(|_| error())
}

/// A size in the largest unit that leaves a whole part, rounded down to a tenth, such as `1.5 MiB`.
#[must_use]
pub fn format_bytes(bytes: u64) -> String {
    const UNITS: [(&str, u32); 3] = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    for (unit, shift) in UNITS {
        if bytes >= 1 << shift {
            let whole = bytes >> shift;
            let tenth = ((bytes & ((1 << shift) - 1)) * 10) >> shift;
            return format!("{whole}.{tenth} {unit}");
        }
    }
    format!("{bytes} B")
}

#[cfg(test)]
#[path = "size_tests.rs"]
mod tests;
