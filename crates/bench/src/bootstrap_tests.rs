use super::*;
use crate::stats::Summary;

/// Runs of one microVM each.
fn runs(values: impl IntoIterator<Item = f64>) -> Vec<Vec<f64>> {
    values.into_iter().map(|value| vec![value]).collect()
}

/// Draws as many values from one distribution, with a heavy tail, as a session has.
fn session(random: &mut Rng, scale: f64) -> Vec<Vec<f64>> {
    runs((0..21).map(|_| scale / (0.1 + random.f64())))
}

#[test]
fn an_interval_needs_eleven_runs() {
    let ten = runs((1..=10).map(f64::from));
    assert_eq!((median(&ten), ratio(&ten, &ten)), (None, None));
    let eleven = runs((1..=11).map(f64::from));
    let [low, high] = median(&eleven).unwrap();
    assert!((2.0..=4.0).contains(&low) && (8.0..=10.0).contains(&high), "{low} to {high}");
    assert_eq!(median(&eleven), Some([low, high]), "it depends on nothing but the runs");
    assert_eq!(ratio(&ten, &eleven), None);
    assert_eq!(ratio(&runs([0.0; 11]), &eleven), None);
}

/// One outlier among many runs does not move the interval of the median, and equal runs have none.
#[test]
fn outliers_are_kept_and_do_not_matter() {
    let mut values = [3.0; 20];
    assert_eq!(median(&runs(values)), Some([3.0, 3.0]));
    values[7] = 1e6;
    assert_eq!(median(&runs(values)), Some([3.0, 3.0]));
    let summary = Summary::of_runs(&runs(values)).unwrap();
    assert_eq!((summary.max, summary.ci95), (1e6, Some([3.0, 3.0])));
}

/// Ten microVMs of one run that share their fate are one observation, not ten.
#[test]
fn runs_are_drawn_whole() {
    let together: Vec<Vec<f64>> = (1..=11).map(|run| vec![f64::from(run); 10]).collect();
    let alone = runs((1..=11).map(f64::from));
    let apart = runs((1..=11).flat_map(|run| [f64::from(run); 10]));
    let width = |runs: &[Vec<f64>]| median(runs).map(|[low, high]| high - low).unwrap();
    assert_eq!(width(&together), width(&alone));
    assert!(width(&apart) < width(&alone) * 0.6, "{} of {}", width(&apart), width(&alone));
}

/// The interval contains the true median, and the true ratio, in about 95 % of the sessions.
#[test]
fn intervals_cover_the_truth() {
    let mut random = Rng::with_seed(7);
    let truth = 1.0 / 0.6;
    let (mut medians, mut ratios) = (0, 0);
    for _ in 0..200 {
        let (old, new) = (session(&mut random, 1.0), session(&mut random, 2.0));
        let holds = |[low, high]: [f64; 2], value| (low..=high).contains(&value);
        medians += u32::from(holds(median(&old).unwrap(), truth));
        ratios += u32::from(holds(ratio(&old, &new).unwrap(), 2.0));
    }
    assert!((180..=199).contains(&medians) && (180..=200).contains(&ratios), "{medians} {ratios}");
}
