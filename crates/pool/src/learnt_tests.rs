use proptest::prelude::{Strategy, any, prop_assert, prop_assert_eq, proptest};

use super::*;

fn set(key: &str) -> LearntSet {
    let run = |first, pages| PageRange { first, pages };
    let (runs, state) = (vec![run(3, 2), run(7, 1)], vec![1, 2, 3]);
    LearntSet { key: key.to_owned(), runs, state, starts: 12, last_start: 1_700_000_000 }
}

fn sets() -> impl Strategy<Value = Vec<LearntSet>> {
    let runs = proptest::collection::vec((any::<u32>(), any::<u32>()), 0..20);
    let state = proptest::collection::vec(any::<u8>(), 0..40);
    let set = ("\\PC{0,20}", runs, state, any::<u64>(), any::<u64>());
    let set = set.prop_map(|(key, runs, state, starts, last_start)| LearntSet {
        key,
        runs: decode_runs(&runs),
        state,
        starts,
        last_start,
    });
    proptest::collection::vec(set, 0..6)
}

#[test]
fn encoding_matches_the_documentation() {
    let content = encode(&[set("k")]);
    assert_eq!(content[..12], [1, 0, 0, 0, 2, 0, 0, 0, 44, 0, 0, 0], "version, kind, length");
    assert_eq!(content[12..20], 12_u64.to_le_bytes());
    assert_eq!(content[20..28], 1_700_000_000_u64.to_le_bytes());
    assert_eq!(content[28..37], [1, 0, 0, 0, 2, 0, 0, 0, b'k']);
    assert_eq!(content[37..53], [3, 0, 0, 0, 2, 0, 0, 0, 7, 0, 0, 0, 1, 0, 0, 0]);
    assert_eq!(content[53..], [1, 2, 3]);
}

#[test]
fn entries_of_other_kinds_are_skipped_and_other_versions_are_not_read() {
    let mut content = encode(&[set("first")]);
    content.extend([9, 0, 0, 0, 5, 0, 0, 0]);
    content.extend(b"later");
    content.extend(&encode(&[set("second")])[4..]);
    assert_eq!(decode(&content), [set("first"), set("second")]);
    content[0] = 2;
    assert_eq!(decode(&content), []);
}

#[test]
fn sets_of_chunks_are_read_as_pages() {
    let mut content = encode(&[set("k")]);
    content[4] = 1;
    let run = |first: u64, pages: u64| PageRange { first: first * 512, pages: pages * 512 };
    let runs = vec![run(3, 2), run(7, 1)];
    assert_eq!(decode(&content), [LearntSet { runs, ..set("k") }]);
}

#[test]
fn sets_that_do_not_fit_are_left_out() {
    let large = |key| LearntSet { state: vec![7; ANNEX_ROOM / 2 - 200], ..set(key) };
    let content = encode(&[large("first"), large("second"), large("third"), set("small")]);
    assert!(content.len() <= ANNEX_ROOM);
    assert_eq!(decode(&content), [large("first"), large("second"), set("small")]);
}

#[test]
fn listing_counts_bytes() {
    let listed = set("k").listed();
    assert_eq!((listed.bytes, listed.starts, listed.last_start), (3 * 4096, 12, 1_700_000_000));
}

proptest! {
    #[test]
    fn sets_round_trip(sets in sets()) {
        let content = encode(&sets);
        prop_assert_eq!(decode(&content), sets);
    }

    #[test]
    fn content_cut_short_has_the_entries_before_the_cut(sets in sets(), cut in any::<usize>()) {
        let content = encode(&sets);
        let found = decode(&content[..cut % content.len()]);
        prop_assert!(found.len() <= sets.len());
        prop_assert_eq!(&found, &sets[..found.len()]);
    }

    #[test]
    fn random_bytes_are_no_sets(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let mut content = LEARNT_VERSION.to_le_bytes().to_vec();
        content.extend(bytes);
        for set in decode(&content) {
            prop_assert!(set.key.len() + 8 * set.runs.len() + set.state.len() < content.len());
        }
    }
}
