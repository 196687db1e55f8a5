//! What clients learnt about a snapshot, as stored in the annex of its extent.
//!
//! `docs/reference/pool-format.md` specifies the bytes: a version, then entries of a kind and a
//! length. A reader skips entries of kinds that it does not know.

use firn_base::PageRange;
use firn_base::num::usize_of;
use serde::{Deserialize, Serialize};

use crate::layout::{ANNEX_ROOM, u32_at, u64_at};
use crate::runs::{bytes_of, decode_runs, encode_runs};

/// The version of the content of an annex.
const LEARNT_VERSION: u32 = 1;
/// Bytes of an entry's kind and length.
const ENTRY_HEAD: usize = 8;
/// The kind of a copy set whose runs are of chunks of 2 MiB: an earlier firn stored it.
const CHUNK_SET: u32 = 1;
/// The kind of a copy set whose runs are of pages.
const PAGE_SET: u32 = 2;
/// Pages of a chunk.
const CHUNK_PAGES: u64 = 512;
/// Bytes of a copy set before its key.
const SET_HEAD: usize = 24;

/// What is learnt about a snapshot under a client's key, as listed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Learnt {
    /// The client's key.
    pub key: String,
    /// Bytes of guest memory in a copy for the next run.
    pub bytes: u64,
    /// Number of starts that requested a copy.
    pub starts: u64,
    /// Time of the last of these starts, seconds since 1970; 0 without a start.
    pub last_start: u64,
}

/// A copy set as stored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LearntSet {
    /// The client's key.
    pub(crate) key: String,
    /// The pages to copy, ascending.
    pub(crate) runs: Vec<PageRange>,
    /// The client's own state.
    pub(crate) state: Vec<u8>,
    /// Number of starts that requested a copy.
    pub(crate) starts: u64,
    /// Time of the last of them, seconds since 1970.
    pub(crate) last_start: u64,
}

impl LearntSet {
    /// The set as listed.
    pub(crate) fn listed(self) -> Learnt {
        let Self { key, runs, starts, last_start, .. } = self;
        Learnt { key, bytes: bytes_of(&runs), starts, last_start }
    }

    fn encode(&self) -> Vec<u8> {
        let mut entry = Vec::new();
        entry.extend(self.starts.to_le_bytes());
        entry.extend(self.last_start.to_le_bytes());
        entry.extend(length(self.key.len()));
        let runs = encode_runs(&self.runs);
        entry.extend(length(runs.len()));
        entry.extend(self.key.as_bytes());
        for (first, pages) in runs {
            entry.extend(first.to_le_bytes());
            entry.extend(pages.to_le_bytes());
        }
        entry.extend(&self.state);
        entry
    }

    /// Decodes an entry whose runs are of units of `unit` pages.
    fn decode(entry: &[u8], unit: u64) -> Option<Self> {
        let (head, rest) = entry.split_at_checked(SET_HEAD)?;
        let (key, rest) = rest.split_at_checked(usize_of(u64::from(u32_at(head, 16))))?;
        let runs = usize_of(u64::from(u32_at(head, 20)));
        let (runs, state) = rest.split_at_checked(runs.checked_mul(8)?)?;
        let runs: Vec<_> =
            runs.as_chunks::<8>().0.iter().map(|run| (u32_at(run, 0), u32_at(run, 4))).collect();
        let mut runs = decode_runs(&runs);
        for run in &mut runs {
            *run = PageRange { first: run.first * unit, pages: run.pages * unit };
        }
        Some(Self {
            key: std::str::from_utf8(key).ok()?.to_owned(),
            runs,
            state: state.to_vec(),
            starts: u64_at(head, 0),
            last_start: u64_at(head, 8),
        })
    }
}

/// Encodes copy sets for an annex, the most important first. Sets that do not fit are left out.
pub(crate) fn encode(sets: &[LearntSet]) -> Vec<u8> {
    let mut content = LEARNT_VERSION.to_le_bytes().to_vec();
    for set in sets {
        let entry = set.encode();
        if content.len() + ENTRY_HEAD + entry.len() <= ANNEX_ROOM {
            content.extend(PAGE_SET.to_le_bytes());
            content.extend(length(entry.len()));
            content.extend(entry);
        }
    }
    content
}

/// Decodes the copy sets of an annex. Returns none for another version, and none after an entry
/// that is not valid.
pub(crate) fn decode(content: &[u8]) -> Vec<LearntSet> {
    let mut sets = Vec::new();
    let Some((version, mut rest)) = content.split_first_chunk() else { return sets };
    if u32::from_le_bytes(*version) != LEARNT_VERSION {
        return sets;
    }
    while let Some((head, entries)) = rest.split_at_checked(ENTRY_HEAD) {
        let len = usize_of(u64::from(u32_at(head, 4)));
        let Some((entry, next)) = entries.split_at_checked(len) else { break };
        match u32_at(head, 0) {
            CHUNK_SET => sets.extend(LearntSet::decode(entry, CHUNK_PAGES)),
            PAGE_SET => sets.extend(LearntSet::decode(entry, 1)),
            _ => {}
        }
        rest = next;
    }
    sets
}

/// A length as stored. Nothing in an annex is longer than [`ANNEX_ROOM`]; what is longer is left
/// out.
fn length(len: usize) -> [u8; 4] {
    u32::try_from(len).unwrap_or(u32::MAX).to_le_bytes()
}

#[cfg(test)]
#[path = "learnt_tests.rs"]
mod tests;
