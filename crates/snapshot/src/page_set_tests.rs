use std::collections::BTreeSet;

use proptest::prelude::{prop_assert, prop_assert_eq, proptest};

use super::PageSet;

#[test]
fn split_covers_a_range_without_gaps() {
    let mut set = PageSet::new(300);
    set.insert_range(60..130);
    set.insert(299);
    let spans: Vec<_> = set.split(10..400).collect();
    let span = |pages, set| (pages, set);
    assert_eq!(
        spans,
        [span(10..60, false), span(60..130, true), span(130..299, false), span(299..300, true)]
    );
    assert_eq!(set.ranges().collect::<Vec<_>>(), [60..130, 299..300]);
    assert_eq!(set.gaps().collect::<Vec<_>>(), [0..60, 130..299]);
    assert_eq!(set.count(), 71);
}

#[test]
fn pages_past_the_end_are_not_in_a_set() {
    let mut set = PageSet::new(64);
    set.insert_range(0..64);
    assert!(set.get(63));
    assert!(!set.get(64));
    assert!(!set.get(u64::MAX));
    assert_eq!(PageSet::new(0).ranges().count(), 0);
}

#[test]
#[should_panic(expected = "pages up to 65 of a set of 64")]
fn insert_past_the_end_panics() {
    PageSet::new(64).insert(64);
}

#[test]
fn bytes_of_another_length_or_with_bits_past_the_end_are_refused() {
    assert!(PageSet::from_bytes(&[0xff, 0x01], 9).is_some());
    assert!(PageSet::from_bytes(&[0xff, 0x02], 9).is_none());
    assert!(PageSet::from_bytes(&[0xff], 9).is_none());
    assert!(PageSet::from_bytes(&[0xff, 0x01, 0], 9).is_none());
    assert!(PageSet::from_bytes(&[0xff; 8], 64).is_some());
    assert!(PageSet::from_bytes(&[], 0).is_some());
}

proptest! {
    #[test]
    fn a_page_set_equals_a_set_of_numbers(
        pages in 1_u64..400,
        edits in proptest::collection::vec((0_u64..400, 0_u64..100), 0..12),
    ) {
        let mut set = PageSet::new(pages);
        let mut model = BTreeSet::new();
        for (start, len) in edits {
            let range = start.min(pages)..(start + len).min(pages);
            set.insert_range(range.clone());
            model.extend(range);
        }
        prop_assert_eq!(set.iter().collect::<BTreeSet<_>>(), model.clone());
        prop_assert_eq!(set.count(), model.len() as u64);
        prop_assert!((0..pages).all(|page| set.get(page) == model.contains(&page)));
        prop_assert_eq!(PageSet::from_bytes(&set.to_bytes(), pages), Some(set.clone()));
        let spans: Vec<_> = set.split(0..pages).collect();
        for pair in spans.windows(2) {
            prop_assert_eq!(pair[0].0.end, pair[1].0.start);
            prop_assert_eq!(pair[0].1, !pair[1].1);
        }
    }
}
