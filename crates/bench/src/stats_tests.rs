use proptest::prelude::{prop_assert, prop_assert_eq, proptest};

use super::*;

/// Whether the interval contains a value.
fn holds(comparison: &Comparison, value: f64) -> bool {
    (comparison.low..=comparison.high).contains(&value)
}

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-9 * b.abs().max(1.0)
}

#[test]
fn known_values() {
    let values: Vec<f64> = (1..=20).map(f64::from).collect();
    let summary = Summary::of(&values).unwrap();
    assert_eq!((summary.min, summary.median, summary.max), (1.0, 10.5, 20.0));
    assert!(near(summary.p95, 19.05));
    assert!(near(summary.spread, 9.5 / 10.5));
    let one = Summary { median: 3.0, p95: 3.0, min: 3.0, max: 3.0, spread: 0.0, ci95: None };
    assert_eq!(Summary::of(&[3.0]), Some(one));
    assert_eq!(Summary::of(&[5.0, 1.0, 3.0]).unwrap().median, 3.0);
    assert_eq!(Summary::of(&[0.0, 0.0]).unwrap().spread, 0.0);
}

#[test]
fn there_is_no_summary_without_values() {
    assert_eq!(Summary::of(&[]), None);
    assert_eq!(Summary::of(&[1.0, f64::NAN]), None);
    assert_eq!(Comparison::of(&[f64::INFINITY]), None);
    assert_eq!(Comparison::of(&[]), None);
}

#[test]
fn intervals_match_published_tables() {
    // Conover's table of confidence intervals for the median: n, values outside at each end.
    for (n, skipped) in [(6, 0), (8, 0), (9, 1), (12, 2), (20, 5), (30, 9), (40, 13), (5000, 2430)]
    {
        let (found, confidence) = median_interval(n);
        assert_eq!(found, skipped, "{n}");
        assert!((0.95..1.0).contains(&confidence), "{n}: {confidence}");
    }
    assert_eq!(median_interval(1), (0, 0.0));
    assert_eq!(median_interval(2), (0, 0.5));
    assert!(near(median_interval(5).1, 1.0 - 2.0 / 32.0));
}

#[test]
fn a_comparison_has_a_confidence() {
    let ratios: Vec<f64> = (1..=30).map(|i| 0.9 + f64::from(i) * 0.01).collect();
    let comparison = Comparison::of(&ratios).unwrap();
    assert_eq!(comparison.pairs, 30);
    assert!(near(comparison.median, 1.055));
    assert!(near(comparison.low, 1.0) && near(comparison.high, 1.11));
    assert!(holds(&comparison, 1.05) && !holds(&comparison, 0.99));
}

proptest! {
    #[test]
    fn summaries_are_ordered(values in proptest::collection::vec(0.0..1e12_f64, 1..200)) {
        let summary = Summary::of(&values).unwrap();
        prop_assert!(summary.min <= summary.median);
        prop_assert!(summary.median <= summary.p95);
        prop_assert!(summary.p95 <= summary.max);
        prop_assert!(summary.spread >= 0.0);
        let mut shuffled = values.clone();
        shuffled.reverse();
        prop_assert_eq!(Summary::of(&shuffled), Some(summary));
        let scaled: Vec<f64> = values.iter().map(|value| value * 4.0).collect();
        prop_assert_eq!(Summary::of(&scaled).unwrap().median, summary.median * 4.0);
        let comparison = Comparison::of(&values).unwrap();
        prop_assert!(holds(&comparison, comparison.median));
        prop_assert!(comparison.confidence < 1.0);
        prop_assert_eq!(comparison.median, summary.median);
    }
}
