//! Free space that is known to be zero, so that a freeze does not write zero pages there.
//!
//! The knowledge is in this process's memory alone: after an opening, no space is known to be zero.
//! Space loses the mark when it is allocated, because its holder may write any of it.
//!
//! In a pool that scrubs, an extent is zeros before it is free, and keeps that mark.

use std::io;
use std::ops::Range;

use firn_base::num::{u64_of, usize_of};

use super::inner::{Inner, State};
use crate::layout::GRANULE;
use crate::media::Medium;

/// Bytes that are zeroed at once. An allocation of the same space waits for it.
const UNIT: u64 = GRANULE;
/// The most bytes that are zeroed ahead. Nothing is gained by more than the next freezes need, and
/// it keeps the work after an opening of a large medium small.
const MAX_AHEAD: u64 = 16 << 30;

/// Which space is known to be zero.
#[derive(Debug, Default)]
pub(super) struct Zeroed {
    /// For each unit of the medium, from its beginning.
    units: Vec<bool>,
    /// The number of units that are zero.
    count: usize,
    /// All units before this one are zero or in use.
    next: usize,
    /// The unit that is being zeroed.
    busy: Option<usize>,
    /// A thread zeroes free space, or is about to.
    is_serving: bool,
    /// It should end, or cannot zero this medium.
    ended: bool,
}

impl Zeroed {
    /// Removes the mark of a range. Returns the parts that were zero.
    pub(super) fn take(&mut self, range: Range<u64>) -> Vec<Range<u64>> {
        let mut parts: Vec<Range<u64>> = Vec::new();
        for unit in units(&range) {
            let Some(zero) = self.units.get_mut(unit).filter(|zero| **zero) else { continue };
            *zero = false;
            self.count -= 1;
            let begin = u64_of(unit) * UNIT;
            match parts.last_mut() {
                Some(last) if last.end == begin => last.end += UNIT,
                _ => parts.push(begin..begin + UNIT),
            }
        }
        parts
    }

    /// Space was freed: it is free, and not known to be zero.
    pub(super) fn freed(&mut self, range: &Range<u64>) {
        self.next = self.next.min(units(range).start);
    }

    /// Space was freed that is known to be zero.
    pub(super) fn scrubbed(&mut self, range: &Range<u64>) {
        let units = units(range);
        if self.units.len() < units.end {
            self.units.resize(units.end, false);
        }
        let marks = &mut self.units[units];
        self.count += marks.iter().filter(|zero| !**zero).count();
        marks.fill(true);
    }

    /// Whether a part of the range is being zeroed.
    pub(super) fn is_busy(&self, range: &Range<u64>) -> bool {
        self.busy.is_some_and(|unit| units(range).contains(&unit))
    }

    /// Bytes that are known to be zero.
    pub(super) fn bytes(&self) -> u64 {
        u64_of(self.count) * UNIT
    }
}

/// The units of a range of bytes, which begins and ends with units.
fn units(range: &Range<u64>) -> Range<usize> {
    usize_of(range.start / UNIT)..usize_of(range.end / UNIT)
}

/// Makes a range zeros, durably.
pub(super) fn scrub(medium: &dyn Medium, range: &Range<u64>) -> io::Result<()> {
    const PIECE: u64 = 1 << 20;
    if medium.zero(range.start, range.end - range.start).is_err() {
        // The file system cannot do it without writing the bytes.
        let zeros = vec![0; usize_of(PIECE)];
        for at in (range.start..range.end).step_by(usize_of(PIECE)) {
            let part = &zeros[..usize_of(PIECE.min(range.end - at))];
            medium.store(at, part);
            medium.flush(at, u64_of(part.len()));
        }
    }
    medium.fence()
}

impl State {
    /// The next unit to zero.
    fn next_unit(&mut self, data: &Range<u64>, granule: u64) -> Option<usize> {
        let end = usize_of(data.end * granule / UNIT);
        if self.zeroed.units.len() < end {
            self.zeroed.units.resize(end, false);
        }
        let mut unit = self.zeroed.next.max(usize_of(data.start * granule / UNIT));
        while unit < end && self.zeroed.bytes() < MAX_AHEAD {
            let at = u64_of(unit) * UNIT / granule;
            let before = u32::try_from(at).ok().and_then(|at| self.held.range(..=at).next_back());
            match before {
                Some((_, held)) if held.granules.end > at => {
                    unit = usize_of(held.granules.end * granule / UNIT);
                }
                _ if self.zeroed.units[unit] => unit += 1,
                _ => {
                    self.zeroed.next = unit;
                    return Some(unit);
                }
            }
        }
        self.zeroed.next = unit;
        None
    }
}

impl Inner {
    /// A thread is about to call [`Inner::zero_free_space`].
    pub(super) fn begin_zeroing(&self) {
        self.state().zeroed.is_serving = true;
    }

    /// Zeroes free space, and waits for more, until [`Inner::end_zeroing`] is called or the medium
    /// cannot be zeroed. `pause` is called before each piece.
    pub(super) fn zero_free_space(&self, mut pause: impl FnMut()) {
        let data = self.superblock().data().unwrap_or_default();
        let granule = self.superblock().granule;
        loop {
            pause();
            let mut state = self.state();
            let unit = loop {
                if state.zeroed.ended {
                    state.zeroed.is_serving = false;
                    self.changed().notify_all();
                    return;
                }
                if let Some(unit) = state.next_unit(&data, granule) {
                    break unit;
                }
                self.changed().notify_all();
                self.changed().wait(&mut state);
            };
            state.zeroed.busy = Some(unit);
            drop(state);
            let done = self.medium().zero(u64_of(unit) * UNIT, UNIT);
            let mut state = self.state();
            state.zeroed.busy = None;
            if done.is_ok() {
                state.zeroed.units[unit] = true;
                state.zeroed.count += 1;
            } else {
                state.zeroed.ended = true;
            }
            self.changed().notify_all();
        }
    }

    /// Lets [`Inner::zero_free_space`] return, now or when it is called.
    pub(super) fn end_zeroing(&self) {
        self.state().zeroed.ended = true;
        self.changed().notify_all();
    }

    /// Waits until free space is zeroed.
    pub(super) fn settle_zeroing(&self) {
        let data = self.superblock().data().unwrap_or_default();
        let granule = self.superblock().granule;
        let mut state = self.state();
        while state.zeroed.is_serving
            && (state.zeroed.busy.is_some() || state.next_unit(&data, granule).is_some())
        {
            self.changed().wait(&mut state);
        }
    }
}
