//! Which chunks the next run is expected to write.

use std::collections::BTreeMap;

use firn_base::PageRange;
use firn_snapshot::CHUNK_PAGES;

/// The highest score of a chunk, and the initial score of a chunk that the profile selects.
const FULL: u8 = 8;
/// A chunk is expected to be written from this score on.
const EXPECTED: u8 = 4;
/// The increase for a run that wrote the chunk. One such run is not enough, two in a row are.
const GAIN: u8 = 3;

/// Scores of chunks, by the runs so far. Each run that does not write a chunk lowers its score: a
/// chunk that the profile selected is not expected any more after five such runs.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Prediction {
    scores: BTreeMap<u32, u8>,
}

/// The first of some chunks that follow each other, how many they are, and their score.
type ScoredRun = (u32, u32, u8);

impl Prediction {
    /// Starts with the chunks that a profile selects.
    pub(super) fn of(chunks: &[u32]) -> Self {
        Self { scores: chunks.iter().map(|chunk| (*chunk, FULL)).collect() }
    }

    /// Learns from a run that wrote these chunks.
    pub(super) fn observe(&mut self, written: &[u32]) {
        for score in self.scores.values_mut() {
            *score -= 1;
        }
        for chunk in written {
            // One more, for what every known chunk has just lost.
            let known = |score: &mut u8| *score = score.saturating_add(GAIN + 1).min(FULL);
            self.scores.entry(*chunk).and_modify(known).or_insert(GAIN);
        }
        self.scores.retain(|_, score| *score > 0);
    }

    /// The chunks that the next run is expected to write, as image pages, ascending.
    pub(super) fn expected(&self) -> Vec<PageRange> {
        let expected = self.scores.iter().filter(|(_, score)| **score >= EXPECTED);
        let first = expected.map(|(chunk, _)| u64::from(*chunk) * CHUNK_PAGES);
        first.map(|first| PageRange { first, pages: CHUNK_PAGES }).collect()
    }

    /// The state, for a pool's manager to store.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut runs: Vec<ScoredRun> = Vec::new();
        for (chunk, score) in &self.scores {
            match runs.last_mut() {
                Some((first, count, of)) if *first + *count == *chunk && of == score => *count += 1,
                _ => runs.push((*chunk, 1, *score)),
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
            let end = first.checked_add(count).filter(|end| u64::from(*end) <= MAX_CHUNKS)?;
            if !(1..=FULL).contains(&score) {
                return None;
            }
            scores.extend((first..end).map(|chunk| (chunk, score)));
        }
        rest.is_empty().then_some(Self { scores })
    }
}

/// The number of chunks of the largest guest memory.
const MAX_CHUNKS: u64 = firn_snapshot::MAX_MEMORY / firn_snapshot::CHUNK_SIZE;

/// The numbers of the whole chunks in ascending runs of image pages, out of `pages`.
pub(super) fn chunks_of(runs: &[PageRange], pages: u64) -> Vec<u32> {
    let whole =
        |run: &PageRange| run.first.div_ceil(CHUNK_PAGES)..run.range().end.min(pages) / CHUNK_PAGES;
    runs.iter().flat_map(whole).filter_map(|chunk| u32::try_from(chunk).ok()).collect()
}

#[cfg(test)]
#[path = "prediction_tests.rs"]
mod tests;
