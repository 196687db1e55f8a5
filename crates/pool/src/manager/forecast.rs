//! Which chunks the next run is expected to write.

use std::collections::BTreeMap;

/// What a chunk's score is at most, and where a profile names it.
const FULL: u8 = 8;
/// A chunk is expected to be written from this score on.
const EXPECTED: u8 = 4;
/// What a run that wrote a chunk adds. One such run is not enough, two in a row are.
const GAIN: u8 = 3;

/// A set of chunks that is learnt from runs, and forgotten where they stop to write them: a chunk that a profile named is
/// given up after five runs that did not write it.
#[derive(Debug, Default)]
pub(super) struct Forecast {
    /// What the profile named.
    seed: Vec<u32>,
    scores: BTreeMap<u32, u8>,
}

impl Forecast {
    /// Begins with what a profile names. The same profile again changes nothing; another one's chunks come in.
    pub(super) fn seed(&mut self, seed: &[u32]) {
        if self.seed != seed {
            self.scores.extend(seed.iter().map(|chunk| (*chunk, FULL)));
            self.seed = seed.to_vec();
        }
    }

    /// Learns from a run that wrote these chunks.
    pub(super) fn observe(&mut self, written: &[u32]) {
        for score in self.scores.values_mut() {
            *score -= 1;
        }
        for chunk in written {
            // One more for what all that were known have just lost.
            let known = |score: &mut u8| *score = score.saturating_add(GAIN + 1).min(FULL);
            self.scores.entry(*chunk).and_modify(known).or_insert(GAIN);
        }
        self.scores.retain(|_, score| *score > 0);
    }

    /// The chunks, ascending.
    pub(super) fn expected(&self) -> Vec<u32> {
        let expected = self.scores.iter().filter(|(_, score)| **score >= EXPECTED);
        expected.map(|(chunk, _)| *chunk).collect()
    }
}

#[cfg(test)]
#[path = "forecast_tests.rs"]
mod tests;
