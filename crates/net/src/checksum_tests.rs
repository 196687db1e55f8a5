use proptest::prelude::*;
use smoltcp::wire::checksum;

use super::sum;

/// Both zeros of ones' complement count as one.
fn normal(sum: u16) -> u16 {
    if sum == u16::MAX { 0 } else { sum }
}

proptest! {
    #[test]
    fn it_is_smoltcps(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert_eq!(normal(sum(&bytes)), normal(checksum::data(&bytes)));
    }
}

#[test]
fn the_longest_segment_of_ones_does_not_overflow() {
    assert_eq!(sum(&[0xff; 65_535]), checksum::data(&[0xff; 65_535]));
}
