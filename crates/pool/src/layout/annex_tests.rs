use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};

use super::*;
use crate::layout::GRANULE;

/// The extent of one granule of guest memory and this tail.
fn extent(tail_bytes: u64) -> Extent {
    Extent {
        offset: 8 * GRANULE,
        guest_bytes: GRANULE,
        tail_offset: 9 * GRANULE,
        tail_bytes,
        len: GRANULE + tail_bytes.next_multiple_of(GRANULE),
        generation: 1 << 40,
    }
}

#[test]
fn encoding_matches_the_documentation() {
    let copy = encode_annex(Uuid::nil(), 1 << 40, 7, b"snow");
    assert_eq!(copy.len(), 20);
    assert_eq!(copy[..4], [7, 0, 0, 0], "sequence number");
    assert_eq!(copy[8..16], [4, 0, 0, 0, 0, 0, 0, 0], "length");
    assert_eq!(copy[16..], *b"snow");
    let mut covered = Uuid::nil().as_bytes().to_vec();
    covered.extend((1_u64 << 40).to_le_bytes());
    covered.extend(7_u32.to_le_bytes());
    covered.extend(&copy[8..]);
    assert_eq!(copy[4..8], crc32fast::hash(&covered).to_le_bytes());
    assert_eq!(annex_copy_len(&copy[..16].try_into().unwrap()), Some(20));
    assert_eq!(decode_annex(&copy, Uuid::nil(), 1 << 40), Some((7, &b"snow"[..])));
}

#[test]
fn copy_of_another_extent_is_not_valid() {
    let copy = encode_annex(Uuid::nil(), 5, 1, b"snow");
    assert!(decode_annex(&copy, Uuid::nil(), 5).is_some());
    assert_eq!(decode_annex(&copy, Uuid::nil(), 6), None);
    assert_eq!(decode_annex(&copy, Uuid::from_u128(1), 5), None);
    assert_eq!(annex_copy_len(&[0; ANNEX_HEAD]), None, "an empty medium");
    assert_eq!(annex_copy_len(&[0xff; ANNEX_HEAD]), None, "longer than a copy");
}

#[test]
fn extents_without_a_tail_or_without_room_have_no_annex() {
    assert_eq!(annex_at(&extent(100)), Some(10 * GRANULE - ANNEX_BYTES));
    assert_eq!(annex_at(&extent(0)), None);
    assert_eq!(annex_at(&extent(GRANULE - ANNEX_BYTES)), Some(10 * GRANULE - ANNEX_BYTES));
    assert_eq!(annex_at(&extent(GRANULE - ANNEX_BYTES + 1)), None);
    assert_eq!(annex_at(&extent(GRANULE)), None);
}

proptest! {
    #[test]
    fn new_tail_always_leaves_room(granules in 0..4_u64, rest in 0..GRANULE) {
        let tail = granules * GRANULE + rest;
        let enlarged = tail_with_annex(tail, GRANULE);
        prop_assert!(enlarged >= tail);
        prop_assert_eq!(annex_at(&extent(enlarged)).is_some(), tail > 0);
        prop_assert_eq!(tail_with_annex(enlarged, GRANULE), enlarged);
    }

    #[test]
    fn changed_byte_is_detected(
        content in proptest::collection::vec(any::<u8>(), 0..200),
        at in any::<usize>(),
        change in 1_u8..,
    ) {
        let mut copy = encode_annex(Uuid::nil(), 5, 3, &content);
        prop_assert_eq!(decode_annex(&copy, Uuid::nil(), 5), Some((3, &content[..])));
        let at = at % copy.len();
        copy[at] ^= change;
        prop_assert_eq!(decode_annex(&copy, Uuid::nil(), 5), None);
    }
}
