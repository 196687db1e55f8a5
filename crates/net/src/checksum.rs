//! The Internet checksum (RFC 1071) of long segments.

/// The ones' complement sum of 16-bit words in network order; a last byte is followed by a zero.
pub(crate) fn sum(bytes: &[u8]) -> u16 {
    // Words of any size, and in the processor's order, have the same sum but for the order of its
    // two bytes.
    let (words, rest) = bytes.as_chunks::<4>();
    let mut last = [0; 4];
    last[..rest.len()].copy_from_slice(rest);
    let wide = |word: &[u8; 4]| u64::from(u32::from_ne_bytes(*word));
    let mut total = words.iter().map(wide).sum::<u64>() + wide(&last);
    while let carry @ 1.. = total >> 16 {
        total = (total & 0xffff) + carry;
    }
    u16::from_be(u16::try_from(total).unwrap_or_default())
}

#[cfg(test)]
#[path = "checksum_tests.rs"]
mod tests;
