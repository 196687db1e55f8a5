//! Chunks as runs and one by one.

use crate::learnt::ChunkRun;

/// Maximum number of chunks in a request: those of 1 TiB.
const MAX_CHUNKS: usize = 1 << 19;

/// Expands runs into ascending chunks, limited to `MAX_CHUNKS` per run.
pub(super) fn chunks_of(runs: &[ChunkRun]) -> Vec<u32> {
    let mut chunks: Vec<u32> = Vec::new();
    for (first, count) in runs {
        let room = MAX_CHUNKS.saturating_sub(chunks.len());
        chunks.extend((*first..first.saturating_add(*count)).take(room));
    }
    chunks.sort_unstable();
    chunks.dedup();
    chunks
}

/// Combines ascending chunks into runs.
pub(super) fn runs_of(chunks: &[u32]) -> Vec<ChunkRun> {
    let mut runs: Vec<ChunkRun> = Vec::new();
    for chunk in chunks {
        match runs.last_mut() {
            Some((first, count)) if *first + *count == *chunk => *count += 1,
            _ => runs.push((*chunk, 1)),
        }
    }
    runs
}
