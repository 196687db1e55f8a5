//! Numbers of several runs.

use serde_json::{Value, json};

/// The runs of one figure.
#[derive(Default)]
pub(crate) struct Runs(Vec<f64>);

impl Runs {
    pub(crate) fn add(&mut self, value: f64) {
        self.0.push(value);
    }

    fn sorted(&self) -> Vec<f64> {
        let mut values = self.0.clone();
        values.sort_by(f64::total_cmp);
        values
    }

    pub(crate) fn median(&self) -> f64 {
        let values = self.sorted();
        let middle = values.len() / 2;
        if values.len().is_multiple_of(2) {
            f64::midpoint(values[middle - 1], values[middle])
        } else {
            values[middle]
        }
    }

    /// Each run divided by the run of `other` that was next to it.
    pub(crate) fn over(&self, other: &Self) -> Self {
        Self(self.0.iter().zip(&other.0).map(|(own, other)| own / other).collect())
    }

    pub(crate) fn json(&self) -> Value {
        let values = self.sorted();
        let (min, max) = (values.first(), values.last());
        json!({ "median": self.median(), "min": min, "max": max })
    }

    /// The median, and the smallest and the largest value.
    pub(crate) fn text(&self) -> String {
        let values = self.sorted();
        format!("{:.2} ({:.2}–{:.2})", self.median(), values[0], values[values.len() - 1])
    }
}

/// The value below which `share` of the sorted values are.
pub(crate) fn quantile(sorted: &[f64], per_mille: usize) -> f64 {
    sorted[(sorted.len() * per_mille / 1000).min(sorted.len() - 1)]
}
