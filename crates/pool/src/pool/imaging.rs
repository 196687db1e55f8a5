//! Imaging: making the guest memory of a replica equal to that of its snapshot.

use std::ops::Range;
use std::time::{Duration, Instant};

use firn_base::PageRange;
use firn_base::num::{u64_of, usize_of};
use serde::{Deserialize, Serialize};

use crate::layout::PAGE;
use crate::media::Medium;

/// Bytes compared at a time: small enough to stay in the processor's cache.
const PIECE: usize = 64 << 10;
/// With a list of written pages, imaging also compares one piece in this many as a check of the
/// list.
const SAMPLE: u64 = 64;

/// What imaging a replica cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Imaging {
    /// Bytes compared.
    pub compared: u64,
    /// Bytes that differed and were copied, in pieces of at most 64 KiB.
    pub copied: u64,
    /// Duration.
    pub duration: Duration,
    /// How the bytes to compare were selected.
    #[serde(default)]
    pub by: ImagedBy,
}

/// How the bytes of a replica that may differ from its snapshot were selected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImagedBy {
    /// No selection: all of guest memory was compared.
    #[default]
    Comparing,
    /// A list of pages from KVM's dirty log and the monitor's own writes, plus a sample of the
    /// other pages.
    List,
    /// A list that the sample showed to be incomplete: all of guest memory was compared afterwards.
    WrongList,
}

/// Two equally large parts of a medium: a snapshot's guest memory and the replica to image from it.
#[derive(Clone, Copy)]
pub(super) struct Task<'a> {
    pub(super) medium: &'a dyn Medium,
    /// Offset of the snapshot's guest memory, bytes.
    pub(super) from: u64,
    /// Offset of the replica's guest memory, bytes.
    pub(super) to: u64,
    /// Bytes of guest memory.
    pub(super) size: u64,
}

impl<'a> Task<'a> {
    /// Compares all of guest memory and copies the pieces that differ. `stop` is called before each
    /// piece; the result is `None` if it returned true.
    pub(super) fn image_all(self, stop: impl FnMut() -> bool) -> Option<Imaging> {
        let begin = Instant::now();
        let mut work = Work::new(self, stop);
        work.image(0..self.size)?;
        Some(work.done(begin, ImagedBy::Comparing))
    }

    /// Compares the pages in `written` and a sample of the other pages. `list` is the number of the
    /// list; it selects the sample. If the sample finds a difference, the list is incomplete and
    /// all of guest memory is compared.
    pub(super) fn image_listed(
        self,
        written: &[PageRange],
        list: u64,
        stop: impl FnMut() -> bool,
    ) -> Option<Imaging> {
        let size = self.size;
        let pages = written.iter().fold(0_u64, |sum, range| sum.saturating_add(range.pages));
        if pages >= size / PAGE {
            return self.image_all(stop);
        }
        let begin = Instant::now();
        let mut work = Work::new(self, stop);
        for Range { start, end } in written.iter().map(PageRange::range) {
            let bytes = |pages: u64| pages.saturating_mul(PAGE).min(size);
            work.image(bytes(start)..bytes(end))?;
        }
        let listed = work.copied;
        let piece = u64_of(PIECE);
        let mut at = list % SAMPLE * piece;
        while at < size {
            work.image(at..size.min(at + piece))?;
            at += SAMPLE * piece;
        }
        if work.copied == listed {
            return Some(work.done(begin, ImagedBy::List));
        }
        work.image(0..size)?;
        Some(work.done(begin, ImagedBy::WrongList))
    }
}

/// Imaging in progress.
struct Work<'a, S> {
    task: Task<'a>,
    stop: S,
    snapshot: Vec<u8>,
    replica: Vec<u8>,
    compared: u64,
    copied: u64,
}

impl<'a, S: FnMut() -> bool> Work<'a, S> {
    fn new(task: Task<'a>, stop: S) -> Self {
        let (snapshot, replica) = (vec![0; PIECE], vec![0; PIECE]);
        Self { task, stop, snapshot, replica, compared: 0, copied: 0 }
    }

    /// Compares a range of guest memory piece by piece and copies the pieces that differ. Returns
    /// `None` when `stop` returns true.
    fn image(&mut self, range: Range<u64>) -> Option<()> {
        let Task { medium, from, to, .. } = self.task;
        let mut at = range.start;
        while at < range.end {
            if (self.stop)() {
                return None;
            }
            let len = usize_of((range.end - at).min(u64_of(PIECE)));
            let (snapshot, replica) = (&mut self.snapshot[..len], &mut self.replica[..len]);
            medium.load(from + at, snapshot);
            medium.load(to + at, replica);
            if snapshot != replica {
                medium.store(to + at, snapshot);
                self.copied += u64_of(len);
            }
            self.compared += u64_of(len);
            at += u64_of(len);
        }
        Some(())
    }

    fn done(&self, begin: Instant, by: ImagedBy) -> Imaging {
        Imaging { compared: self.compared, copied: self.copied, duration: begin.elapsed(), by }
    }
}
