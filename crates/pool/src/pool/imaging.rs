//! Imaging: making the guest memory of a replica equal to that of its snapshot.
//!
//! All of it is compared. Only the process that ran in a replica knows what it wrote there, and a
//! guest may have taken that process over.

use std::time::{Duration, Instant};

use firn_base::num::{u64_of, usize_of};
use serde::{Deserialize, Serialize};

use crate::media::Medium;

/// Bytes compared at a time: small enough to stay in the processor's cache.
const PIECE: usize = 64 << 10;

/// What imaging a replica cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Imaging {
    /// Bytes compared.
    pub compared: u64,
    /// Bytes that differed and were copied, in pieces of at most 64 KiB.
    pub copied: u64,
    /// Duration.
    pub duration: Duration,
}

/// Compares the `size` bytes at `to` of a medium with those at `from`, and copies the pieces that
/// differ. `stop` is called before each piece; the result is `None` if it returned true.
pub(super) fn image(
    medium: &dyn Medium,
    from: u64,
    to: u64,
    size: u64,
    mut stop: impl FnMut() -> bool,
) -> Option<Imaging> {
    let begin = Instant::now();
    let mut pieces = [vec![0; PIECE], vec![0; PIECE]];
    let mut copied = 0;
    for at in (0..size).step_by(PIECE) {
        if stop() {
            return None;
        }
        let len = usize_of((size - at).min(u64_of(PIECE)));
        let [snapshot, replica] = pieces.each_mut().map(|piece| &mut piece[..len]);
        medium.load(from + at, snapshot);
        medium.load(to + at, replica);
        if snapshot != replica {
            medium.store(to + at, snapshot);
            copied += u64_of(len);
        }
    }
    Some(Imaging { compared: size, copied, duration: begin.elapsed() })
}
