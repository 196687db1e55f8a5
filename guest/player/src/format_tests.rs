use proptest::prelude::{Just, any, prop_assert_eq, prop_oneof, proptest};

use super::{
    HEADER_WORDS, Header, Kind, LINE_WORDS, MOST_PAGES, PAGE, PAGE_WORDS, TIMES, TOUCHED_WORD,
    Touch, Window, time_class, word,
};

const KINDS: &[Kind] = &[
    Kind::Read,
    Kind::ReadZero,
    Kind::Write,
    Kind::ReadUnknown,
    Kind::ReadWritten,
    Kind::ReadAgain,
    Kind::ReadAgainZero,
    Kind::WriteAgain,
];

proptest! {
    #[test]
    fn touches_round_trip(
        page in 0..MOST_PAGES,
        kind in proptest::sample::select(KINDS),
        window in prop_oneof![Just(Window::Small), Just(Window::Large)],
    ) {
        let touch = Touch::from_bits(Touch::new(page, kind, window).unwrap().bits());
        prop_assert_eq!((touch.page(), touch.kind(), touch.window()), (page, kind, window));
        prop_assert_eq!(touch.address(3), window.base() + page * PAGE + 24);
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

#[test]
fn reads_of_known_pages_cover_every_cache_line_and_never_the_written_word() {
    for kind in [Kind::ReadAgain, Kind::ReadAgainZero] {
        let touch = Touch::new(7, kind, Window::Small).unwrap();
        let words = (0..1000).map(|index| touch.word(index));
        assert!(words.clone().all(|word| word < PAGE_WORDS && word != TOUCHED_WORD));
        for line in 0..PAGE_WORDS / LINE_WORDS {
            assert!(words.clone().any(|word| word / LINE_WORDS == line), "{line}");
        }
    }
}

#[test]
fn classes_of_times_double() {
    let class = |ticks| time_class(ticks, 500);
    assert_eq!([0, 499, 500, 999, 1000, 1999, 2000].map(class), [0, 0, 1, 1, 2, 2, 3]);
    assert_eq!((class(u64::MAX), time_class(u64::MAX, 0)), (TIMES - 1, 0));
}
