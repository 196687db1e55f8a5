//! The Internet checksum (RFC 1071) of long segments.

/// The ones' complement sum of 16-bit words in network order; a last byte is followed by a zero.
pub(crate) fn sum(bytes: &[u8]) -> u16 {
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: this processor has the instructions.
        unsafe { sum_avx2(bytes) }
    } else {
        sum_words(bytes)
    }
}

/// [`sum_words`], compiled for processors with AVX2: it takes half the time.
#[target_feature(enable = "avx2")]
fn sum_avx2(bytes: &[u8]) -> u16 {
    sum_words(bytes)
}

#[inline(always)]
fn sum_words(bytes: &[u8]) -> u16 {
    // Words of any size, and in the processor's order, have the same sum but for the order of its
    // two bytes.
    let (words, rest) = bytes.as_chunks::<8>();
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    let halves = |word: &[u8; 8]| {
        let word = u64::from_ne_bytes(*word);
        (word & 0xffff_ffff, word >> 32)
    };
    let (mut low, mut high) = halves(&last);
    for word in words {
        let (word_low, word_high) = halves(word);
        low += word_low;
        high += word_high;
    }
    let mut total = low + high;
    while let carry @ 1.. = total >> 16 {
        total = (total & 0xffff) + carry;
    }
    u16::from_be(u16::try_from(total).unwrap_or_default())
}

#[cfg(test)]
#[path = "checksum_tests.rs"]
mod tests;
