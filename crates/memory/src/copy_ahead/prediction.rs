//! Which granules the next run is expected to use.

use std::collections::BTreeMap;

use firn_base::PageRange;

/// The highest score of a granule, and the initial score of one that the profile selects.
const FULL: u8 = 8;
/// A granule is expected from this score on.
const EXPECTED: u8 = 4;
/// The increase for a run that used the granule. One such run is not enough, two in a row are.
const GAIN: u8 = 3;

/// Scores of granules, by the runs so far. Each run that does not use a granule lowers its score: a
/// granule that the profile selected is not expected any more after five such runs.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Prediction {
    scores: BTreeMap<u32, u8>,
}

/// The first of some granules that follow each other, how many they are, and their score.
type ScoredRun = (u32, u32, u8);

impl Prediction {
    /// Starts with the granules that a profile selects.
    pub(super) fn of(granules: &[u32]) -> Self {
        Self { scores: granules.iter().map(|granule| (*granule, FULL)).collect() }
    }

    /// Learns from a run that used these granules.
    pub(super) fn observe(&mut self, used: &[u32]) {
        for score in self.scores.values_mut() {
            *score -= 1;
        }
        for granule in used {
            // One more, for what every known granule has just lost.
            let known = |score: &mut u8| *score = score.saturating_add(GAIN + 1).min(FULL);
            self.scores.entry(*granule).and_modify(known).or_insert(GAIN);
        }
        self.scores.retain(|_, score| *score > 0);
    }

    /// The granules that the next run is expected to use, as runs of image pages, ascending.
    /// `pages` is the number of pages of a granule.
    pub(super) fn expected(&self, pages: u64) -> Vec<PageRange> {
        let expected = self.scores.iter().filter(|(_, score)| **score >= EXPECTED);
        let mut runs: Vec<PageRange> = Vec::new();
        for first in expected.map(|(granule, _)| u64::from(*granule) * pages) {
            match runs.last_mut() {
                Some(last) if last.range().end == first => last.pages += pages,
                _ => runs.push(PageRange { first, pages }),
            }
        }
        runs
    }

    /// The state, for a pool's manager to store.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut runs: Vec<ScoredRun> = Vec::new();
        for (granule, score) in &self.scores {
            match runs.last_mut() {
                Some((first, count, of)) if *first + *count == *granule && of == score => {
                    *count += 1;
                }
                _ => runs.push((*granule, 1, *score)),
            }
        }
        // Encoding integers into memory cannot fail; an empty state would only start the prediction
        // anew.
        postcard::to_stdvec(&runs).unwrap_or_default()
    }

    /// The state that [`Self::encode`] wrote; `None` where it is not valid.
    pub(super) fn decode(state: &[u8]) -> Option<Self> {
        let (runs, rest): (Vec<ScoredRun>, _) = postcard::take_from_bytes(state).ok()?;
        let mut scores = BTreeMap::new();
        for (first, count, score) in runs {
            let end = first.checked_add(count).filter(|_| count <= MAX_GRANULES)?;
            if !(1..=FULL).contains(&score) {
                return None;
            }
            scores.extend((first..end).map(|granule| (granule, score)));
        }
        rest.is_empty().then_some(Self { scores })
    }
}

/// Maximum length of a run of granules in a state: 64 GiB of granules of 16 KiB.
const MAX_GRANULES: u32 = 1 << 22;

/// The numbers of granules of `unit` pages that are wholly within `pages` pages of guest memory.
pub(super) fn within(granules: Vec<u64>, unit: u64, pages: u64) -> Vec<u32> {
    let granules = granules.into_iter().filter(|granule| *granule < pages / unit);
    granules.filter_map(|granule| u32::try_from(granule).ok()).collect()
}

#[cfg(test)]
#[path = "prediction_tests.rs"]
mod tests;
