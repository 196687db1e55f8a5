//! Statistics of measurements: median, tail and spread, and the comparison of pairs.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::bootstrap;

/// Measurements of one quantity, in its unit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The median.
    pub median: f64,
    /// The 95th percentile.
    pub p95: f64,
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
    /// The interquartile range divided by the median; 0 if the median is 0.
    pub spread: f64,
    /// The 95 % bootstrap interval of the median; `None` with fewer than 11 runs, or if it is not
    /// known which measurements are of one run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ci95: Option<[f64; 2]>,
}

impl Summary {
    /// Of the measurements of each run; `None` as [`Self::of`]. Measurements of one run may depend
    /// on each other.
    #[must_use]
    pub fn of_runs(runs: &[Vec<f64>]) -> Option<Self> {
        Some(Self { ci95: bootstrap::median(runs), ..Self::of(&runs.concat())? })
    }

    /// The interval of the median if there is one, otherwise minimum to maximum.
    #[must_use]
    pub fn interval(&self) -> [f64; 2] {
        self.ci95.unwrap_or([self.min, self.max])
    }

    /// Of measurements in any order; `None` without measurements, or if one is not a finite number.
    #[must_use]
    pub fn of(values: &[f64]) -> Option<Self> {
        let sorted = sorted(values)?;
        let median = quantile(&sorted, 0.5);
        let range = quantile(&sorted, 0.75) - quantile(&sorted, 0.25);
        Some(Self {
            median,
            p95: quantile(&sorted, 0.95),
            min: sorted[0],
            max: sorted[sorted.len() - 1],
            spread: if median == 0.0 { 0.0 } else { range / median },
            ci95: None,
        })
    }
}

/// The median of the ratios or differences of pairs of measurements, with its confidence interval.
///
/// The two measurements of a pair follow each other, so a slow change of the host's load affects
/// both.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// Number of pairs.
    pub pairs: u64,
    /// The median over the pairs.
    pub median: f64,
    /// Lower end of the median's confidence interval.
    pub low: f64,
    /// Upper end of the median's confidence interval.
    pub high: f64,
    /// Confidence of the interval: 0.95 or a little more for six pairs or more, less for fewer
    /// pairs.
    pub confidence: f64,
}

impl Comparison {
    /// Of one value for each pair. The interval lies between two order statistics, which assumes
    /// nothing about the distribution of the values (sign test; Conover, Practical Nonparametric
    /// Statistics, 3.2).
    ///
    /// `None` without pairs, or if a value is not a finite number.
    #[must_use]
    pub fn of(values: &[f64]) -> Option<Self> {
        let sorted = sorted(values)?;
        let (skipped, confidence) = median_interval(sorted.len());
        Some(Self {
            pairs: sorted.len() as u64,
            median: quantile(&sorted, 0.5),
            low: sorted[skipped],
            high: sorted[sorted.len() - 1 - skipped],
            confidence,
        })
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { median, low, high, confidence, .. } = self;
        let confidence = confidence * 100.0;
        write!(f, "{median:.3} ({low:.3} to {high:.3} with {confidence:.0} % confidence)")
    }
}

/// The narrowest interval between order statistics of `n` values that contains their median with a
/// probability of at least 0.95: the number of values outside at each end, and that probability.
/// With too few values the interval spans all of them.
fn median_interval(n: usize) -> (usize, f64) {
    // The probability that at most `skipped` of n values are below the median: a sum of terms of
    // the binomial distribution. It uses logarithms, because 0.5^n underflows for large n.
    let mut term = -(n as f64);
    let mut at_most = term.exp2();
    let mut skipped = 0;
    loop {
        let confidence = 1.0 - 2.0 * at_most;
        term += ((n - skipped) as f64 / (skipped + 1) as f64).log2();
        at_most += term.exp2();
        if 1.0 - 2.0 * at_most < 0.95 {
            return (skipped, confidence.max(0.0));
        }
        skipped += 1;
    }
}

/// The values in ascending order; `None` without values, or if one is not a finite number.
pub(crate) fn sorted(values: &[f64]) -> Option<Vec<f64>> {
    if values.is_empty() || !values.iter().all(|value| value.is_finite()) {
        return None;
    }
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    Some(sorted)
}

/// A quantile of ascending values, interpolated linearly (Hyndman and Fan's type 7, the default of
/// NumPy and R).
pub(crate) fn quantile(sorted: &[f64], part: f64) -> f64 {
    let at = (sorted.len() - 1) as f64 * part;
    let below = (0..sorted.len()).rev().find(|&index| index as f64 <= at).unwrap_or(0);
    let above = (below + 1).min(sorted.len() - 1);
    sorted[below] + (sorted[above] - sorted[below]) * (at - below as f64)
}

#[cfg(test)]
#[path = "stats_tests.rs"]
mod tests;
