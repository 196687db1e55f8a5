use std::num::NonZero;

use super::{GapFactor, Leaves, Repeats};

#[test]
fn leaves_are_parsed_from_their_text() {
    for leaves in [Leaves::Recorded, Leaves::All4K, Leaves::All2M] {
        assert_eq!(leaves.to_string().parse(), Ok(leaves));
    }
    assert!("1g".parse::<Leaves>().is_err());
}

#[test]
fn factors_are_exact_to_a_thousandth() {
    for (text, gap) in [("0", 0), ("1", 1000), ("0.5", 500), ("2.25", 2250), ("0.001", 1)] {
        assert_eq!(text.parse::<GapFactor>().unwrap().scale(1000), gap, "{text}");
    }
    assert_eq!("1000".parse::<GapFactor>().unwrap().scale(u64::MAX), u64::MAX);
    assert_eq!("0.25".parse::<GapFactor>().unwrap().to_string(), "0.250");
    for text in ["", ".5", "-1", "1.2345", "1001", "0.5x", "+1", "1e3", "nan", "4294967296"] {
        assert!(text.parse::<GapFactor>().is_err(), "{text}");
    }
}

#[test]
fn repeats_are_recorded_or_at_a_rate() {
    assert_eq!("recorded".parse(), Ok(Repeats::Recorded));
    assert_eq!("7".parse(), Ok(Repeats::Random(NonZero::new(7).unwrap())));
    for text in ["", "0", "-1", "all", "4294967296"] {
        assert!(text.parse::<Repeats>().is_err(), "{text}");
    }
}
