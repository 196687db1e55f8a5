//! A thread that zeroes free space ahead, so that a freeze writes no zero pages into it.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use super::pace::{Pace, lower_priority};
use crate::pool::Pool;

/// The thread. It ends when this value is dropped.
#[derive(Debug)]
pub(super) struct Zeroing {
    pool: Pool,
    thread: Option<JoinHandle<()>>,
}

impl Zeroing {
    pub(super) fn new(pool: Pool, pace: Arc<Pace>) -> io::Result<Self> {
        let working = pool.clone();
        pool.begin_zeroing();
        let thread = std::thread::Builder::new().name("zeroing".into()).spawn(move || {
            lower_priority();
            working.zero_free_space(|| pace.pauses().yield_to_starts());
        })?;
        Ok(Self { pool, thread: Some(thread) })
    }

    /// Waits until free space is zeroed.
    pub(super) fn settle(&self) {
        self.pool.settle_zeroing();
    }
}

impl Drop for Zeroing {
    fn drop(&mut self) {
        self.pool.end_zeroing();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
