use proptest::prelude::{Just, any, prop_assert_eq, prop_oneof, proptest};

use super::{HEADER_WORDS, Header, Kind, MOST_PAGES, PAGE, TOUCHED_WORD, Touch, Window, word};

proptest! {
    #[test]
    fn touches_round_trip(
        page in 0..MOST_PAGES,
        kind in prop_oneof![Just(Kind::Read), Just(Kind::ReadZero), Just(Kind::Write), Just(Kind::ReadUnknown)],
        window in prop_oneof![Just(Window::Small), Just(Window::Large)],
    ) {
        let touch = Touch::from_bits(Touch::new(page, kind, window).unwrap().bits());
        prop_assert_eq!((touch.page(), touch.kind(), touch.window()), (page, kind, window));
        prop_assert_eq!(touch.address(), window.base() + page * PAGE + TOUCHED_WORD * 8);
    }

    #[test]
    fn headers_round_trip(words in proptest::collection::vec(any::<u64>(), HEADER_WORDS)) {
        let header = Header::from_words(|index| words[index]);
        prop_assert_eq!(&header.to_words()[..], &words[..]);
    }

    #[test]
    fn words_differ(seed: u64, page in 0..MOST_PAGES, other in 0..MOST_PAGES, index in 0..512u64) {
        if page != other {
            assert_ne!(word(seed, page, index), word(seed, other, index));
        }
        assert_ne!(word(seed, page, index), word(seed, page, index + 1));
    }
}

#[test]
fn page_numbers_out_of_range_are_refused() {
    assert!(Touch::new(MOST_PAGES, Kind::Read, Window::Small).is_none());
    assert!(Touch::new(u64::MAX, Kind::Read, Window::Small).is_none());
}
