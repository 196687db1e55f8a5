//! What is said of many measurements: median, tail, spread; and of pairs: the ratio of what belongs together.

use serde::{Deserialize, Serialize};

/// Measurements of one quantity, in its unit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Half of the measurements are not above it.
    pub median: f64,
    /// 95 % of the measurements are not above it.
    pub p95: f64,
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
    /// The distance between the first and the third quartile, as a part of the median: 0.1 says that the
    /// middle half of the measurements lies within a tenth of the median. 0 where the median is 0.
    pub spread: f64,
}

impl Summary {
    /// Of measurements in any order; `None` where there are none, or one is no number.
    #[must_use]
    pub fn of(values: &[f64]) -> Option<Self> {
        let sorted = sorted(values)?;
        let median = quantile(&sorted, 0.5);
        let middle = quantile(&sorted, 0.75) - quantile(&sorted, 0.25);
        Some(Self {
            median,
            p95: quantile(&sorted, 0.95),
            min: sorted[0],
            max: sorted[sorted.len() - 1],
            spread: if median == 0.0 { 0.0 } else { middle / median },
        })
    }
}

/// What pairs of measurements say of b compared with a: the median of the pairs' ratios or differences, and
/// how sure it is.
///
/// Pairs are measured one behind the other, so what changes slowly on the host changes both.
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
    /// How sure the interval is: 0.95 or a little more where there are six pairs or more, less below.
    pub confidence: f64,
}

impl Comparison {
    /// Of one value for each pair. The interval is the one between two order statistics, which assumes nothing
    /// of how the values are distributed (sign test; Conover, Practical Nonparametric Statistics, 3.2).
    ///
    /// `None` where there are no pairs, or a value is no number.
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

    /// Whether the interval holds a value.
    #[must_use]
    pub fn holds(&self, value: f64) -> bool {
        (self.low..=self.high).contains(&value)
    }
}

/// How many values lie outside at each end of the narrowest interval between order statistics of `n` values
/// that holds their median with a probability of at least 0.95, and that probability. With too few values it
/// is all of them.
fn median_interval(n: usize) -> (usize, f64) {
    // The probability that at most `skipped` of n values are below the median: a sum of terms of the binomial
    // distribution, by their logarithms, because 0.5^n is nothing for large n.
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

/// Ascending; `None` where there is nothing to sort, or nothing to sort it by.
pub(crate) fn sorted(values: &[f64]) -> Option<Vec<f64>> {
    if values.is_empty() || !values.iter().all(|value| value.is_finite()) {
        return None;
    }
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    Some(sorted)
}

/// The quantile of ascending values, between two of them by their distance (Hyndman and Fan's type 7, as in
/// NumPy and R).
pub(crate) fn quantile(sorted: &[f64], part: f64) -> f64 {
    let at = (sorted.len() - 1) as f64 * part;
    // The whole part of an index is one.
    let below = (0..sorted.len()).rev().find(|&index| index as f64 <= at).unwrap_or(0);
    let above = (below + 1).min(sorted.len() - 1);
    sorted[below] + (sorted[above] - sorted[below]) * (at - below as f64)
}

#[cfg(test)]
#[path = "stats_tests.rs"]
mod tests;
