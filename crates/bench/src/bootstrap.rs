//! The bootstrap of medians: percentiles of the medians of resampled runs (Efron and Tibshirani, An
//! Introduction to the Bootstrap, chapter 13).
//!
//! Runs are drawn whole, because microVMs that started together are not independent of each other.

use fastrand::Rng;

use crate::stats::{quantile, sorted};

/// The fewest runs that an interval is computed of.
pub(crate) const FEWEST_RUNS: usize = 11;
const RESAMPLES: usize = 2000;
/// The seeds of two samples whose medians are compared differ, so that they are drawn
/// independently.
const SEEDS: [u64; 2] = [1, 2];

/// The 95 % interval of the median of all measurements; `None` with fewer runs than
/// [`FEWEST_RUNS`].
pub(crate) fn median(runs: &[Vec<f64>]) -> Option<[f64; 2]> {
    interval(&medians(runs, SEEDS[0])?)
}

/// The 95 % interval of the median of `new` divided by that of `old`; `None` if either has fewer
/// runs than [`FEWEST_RUNS`], or a median is 0.
pub(crate) fn ratio(old: &[Vec<f64>], new: &[Vec<f64>]) -> Option<[f64; 2]> {
    let (old, new) = (medians(old, SEEDS[0])?, medians(new, SEEDS[1])?);
    interval(&new.iter().zip(&old).map(|(new, old)| new / old).collect::<Vec<_>>())
}

/// The medians of resampled runs.
fn medians(runs: &[Vec<f64>], seed: u64) -> Option<Vec<f64>> {
    if runs.len() < FEWEST_RUNS {
        return None;
    }
    let mut random = Rng::with_seed(seed);
    let mut medians = || {
        let drawn = runs.iter().filter_map(|_| random.choice(runs)).flatten();
        Some(quantile(&sorted(&drawn.copied().collect::<Vec<_>>())?, 0.5))
    };
    (0..RESAMPLES).map(|_| medians()).collect()
}

fn interval(values: &[f64]) -> Option<[f64; 2]> {
    let sorted = sorted(values)?;
    Some([0.025, 0.975].map(|part| quantile(&sorted, part)))
}

#[cfg(test)]
#[path = "bootstrap_tests.rs"]
mod tests;
