//! Sizes between a medium's `u64` and this process's `usize`.

const _: () = assert!(usize::BITS == 64, "firn maps a medium whole and needs 64-bit addresses");

/// A size or address as `usize`, which is 64 bits wide here.
#[expect(clippy::cast_possible_truncation, reason = "usize has 64 bits: asserted above")]
pub(crate) const fn usize_of(value: u64) -> usize {
    value as usize
}

/// A size or address as `u64`.
pub(crate) const fn u64_of(value: usize) -> u64 {
    value as u64
}

/// `value` rounded up to a multiple of `align`, or nothing where that is more than can be counted.
pub(crate) fn round_up(value: u64, align: u64) -> Option<u64> {
    value.checked_next_multiple_of(align)
}

/// `value` rounded down to a multiple of `align`.
pub(crate) const fn round_down(value: u64, align: u64) -> u64 {
    value - value % align
}
