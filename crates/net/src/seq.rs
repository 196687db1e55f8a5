//! TCP sequence numbers: 32 bits that wrap (RFC 9293, 3.4).

use std::ops::{Add, AddAssign};

use serde::{Deserialize, Serialize};
use smoltcp::wire::TcpSeqNumber;

/// A sequence number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Seq(pub(crate) u32);

impl Seq {
    /// The distance from `earlier` to this number; negative if this one is before it.
    pub(crate) fn since(self, earlier: Self) -> i64 {
        self.0.wrapping_sub(earlier.0).cast_signed().into()
    }

    /// Bytes from `earlier` to this number; 0 if this one is before it.
    pub(crate) fn bytes_since(self, earlier: Self) -> usize {
        usize::try_from(self.since(earlier)).unwrap_or(0)
    }

    pub(crate) fn is_before(self, other: Self) -> bool {
        self.since(other) < 0
    }

    pub(crate) fn latest(self, other: Self) -> Self {
        if self.is_before(other) { other } else { self }
    }
}

impl Add<usize> for Seq {
    type Output = Self;

    /// Only the low 32 bits of `bytes` count, as in all arithmetic of sequence numbers.
    fn add(self, bytes: usize) -> Self {
        let [a, b, c, d, ..] = bytes.to_le_bytes();
        Self(self.0.wrapping_add(u32::from_le_bytes([a, b, c, d])))
    }
}

impl AddAssign<usize> for Seq {
    fn add_assign(&mut self, bytes: usize) {
        *self = *self + bytes;
    }
}

impl From<TcpSeqNumber> for Seq {
    fn from(number: TcpSeqNumber) -> Self {
        Self(number.0.cast_unsigned())
    }
}

impl From<Seq> for TcpSeqNumber {
    fn from(seq: Seq) -> Self {
        Self(seq.0.cast_signed())
    }
}

#[cfg(test)]
#[path = "seq_tests.rs"]
mod tests;
