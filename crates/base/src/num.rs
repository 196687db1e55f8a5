//! Conversions between `u64`, the type of sizes and addresses, and `usize`.

const _: () = assert!(usize::BITS == 64, "firn maps guest memory whole and needs 64-bit addresses");

/// A size or address as `usize`. The conversion is lossless because `usize` has 64 bits.
#[must_use]
#[expect(clippy::cast_possible_truncation, reason = "usize has 64 bits: asserted above")]
pub const fn usize_of(value: u64) -> usize {
    value as usize
}

/// A size or address as `u64`.
#[must_use]
pub const fn u64_of(value: usize) -> u64 {
    value as u64
}

/// `value` rounded up to a multiple of `align`; `None` on overflow.
#[must_use]
pub fn round_up(value: u64, align: u64) -> Option<u64> {
    value.checked_next_multiple_of(align)
}

/// `value` rounded down to a multiple of `align`.
#[must_use]
pub const fn round_down(value: u64, align: u64) -> u64 {
    value - value % align
}
