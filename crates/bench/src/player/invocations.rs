//! The invocations of a trace, as the lists that the player replays.

use firn_memory::Leaf;
use firn_memory::trace::{Access, Again, GapUnit, Touch, Trace};
use firn_player::format::{self, Kind, PAGE, TOUCHED_WORD, Window};
use firn_snapshot::PageSet;

use super::memory::PlayerMemoryError;
use super::options::{GapFactor, Leaves, PlayerOptions, Repeats};

/// Offset of the word in a page that a first touch reads.
const WORD: u64 = TOUCHED_WORD * 8;
/// Instructions in an iteration of the player's loop for gaps.
const ITERATION_INSTRUCTIONS: u64 = 2;
/// Iterations of that loop in a nanosecond: an iteration takes one cycle, and 3 GHz is close enough
/// for gaps that were recorded in ns.
const ITERATIONS_PER_NS: u64 = 3;

/// One invocation.
#[derive(Debug)]
pub(super) struct Invocation {
    pub(super) touches: Vec<format::Touch>,
    /// How many of the touches are repeated accesses of the trace.
    pub(super) repeats: u64,
    /// Iterations of the player's gap loop before each touch.
    pub(super) gaps: Vec<u32>,
    /// The image pages that are written once the touches are done.
    pub(super) written: PageSet,
}

/// A trace's first invocation, a second one after it, and the number of touches of the first that
/// connect the guest.
pub(super) fn invocations(
    trace: &Trace,
    zero_map: &PageSet,
    options: &PlayerOptions,
    unchecked: (u64, u64),
) -> Result<(Invocation, Invocation, u64), PlayerMemoryError> {
    let repeats = options.again == Some(Repeats::Recorded);
    if repeats && trace.again().is_none() {
        return Err(PlayerMemoryError::NoRepeats(trace.origin().function.clone()));
    }
    let pages = PageSet::new(trace.layout().pages());
    let mut pass = Pass {
        trace,
        zero_map,
        leaves: options.leaves,
        unchecked,
        touched: pages.clone(),
        written: pages,
    };
    let first: Vec<(Touch, bool)> = if repeats {
        trace.accesses().collect()
    } else {
        trace.touches().iter().map(|touch| (*touch, false)).collect()
    };
    let repeated = first.iter().filter(|(_, repeat)| *repeat).count() as u64;
    let gaps = |touches: &[Touch]| gaps(trace.origin().gaps, options.gaps, touches);
    let mut all = |touches: &[Touch], repeats, read| {
        Ok::<_, PlayerMemoryError>(Invocation {
            touches: touches
                .iter()
                .map(|touch| pass.pack(touch, read))
                .collect::<Result<_, _>>()?,
            repeats,
            gaps: gaps(touches),
            written: pass.written.clone(),
        })
    };
    let touches: Vec<Touch> = first.into_iter().map(|(touch, _)| touch).collect();
    let first = all(&touches, repeated, Known::AnotherLine)?;
    let second = match trace.again() {
        Some(again) if repeats => all(&again.second, 0, Known::AnotherLine)?,
        Some(again) => all(&without_repeats(trace, again), 0, Known::AnotherLine)?,
        None => all(&touches, 0, Known::SameWord)?,
    };
    let connected = options.connect.unwrap_or_else(|| connected(trace, repeats));
    let connected = connected.min(first.touches.len() as u64);
    Ok((first, second, connected))
}

/// The accesses before the request, with or without the repeats among them; 0 if unknown.
fn connected(trace: &Trace, repeats: bool) -> u64 {
    let Some(again) = trace.again() else { return 0 };
    let before = trace.accesses().take(again.request);
    before.filter(|(_, repeat)| repeats || !repeat).count() as u64
}

/// The first accesses and first writes of a second invocation, with all of its work up to the last
/// of them.
fn without_repeats(trace: &Trace, again: &Again) -> Vec<Touch> {
    let pages = PageSet::new(trace.layout().pages());
    let (mut touched, mut written) = (pages.clone(), pages);
    let mut gap = 0_u64;
    let mut touches = Vec::new();
    for touch in &again.second {
        gap = gap.saturating_add(touch.gap);
        let image = image_page(trace, touch.page);
        let known =
            if touch.access == Access::Read { touched.get(image) } else { written.get(image) };
        if !known {
            touches.push(Touch { gap: std::mem::take(&mut gap), ..*touch });
        }
        touched.insert(image);
        if touch.access != Access::Read {
            written.insert(image);
        }
    }
    touches
}

/// What a read of a page reads that was accessed before.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Known {
    /// The word that the first touch read or wrote.
    SameWord,
    /// A word in another cache line each time.
    AnotherLine,
}

/// A pass over touches in order.
struct Pass<'a> {
    trace: &'a Trace,
    zero_map: &'a PageSet,
    leaves: Leaves,
    /// Guest-physical start and length of the memory that the player does not check.
    unchecked: (u64, u64),
    /// The image pages that were touched, and written, so far.
    touched: PageSet,
    written: PageSet,
}

impl Pass<'_> {
    /// A touch in the player's encoding.
    fn pack(&mut self, touch: &Touch, read: Known) -> Result<format::Touch, PlayerMemoryError> {
        let window = match (self.leaves, touch.leaf) {
            (Leaves::All4K, _) | (Leaves::Recorded, Leaf::Size4K) => Window::Small,
            (Leaves::All2M, _) | (Leaves::Recorded, Leaf::Size2M | Leaf::Size1G) => Window::Large,
        };
        let image = image_page(self.trace, touch.page);
        let (touched, written) = (self.touched.get(image), self.written.get(image));
        let zero = self.zero_map.get(image);
        let kind = match touch.access {
            Access::Write | Access::LaterWrite if written => Kind::WriteAgain,
            Access::Write | Access::LaterWrite => Kind::Write,
            Access::Read
                if self.is_unchecked(touch.page, touched && read == Known::AnotherLine) =>
            {
                Kind::ReadUnknown
            }
            Access::Read if touched && read == Known::AnotherLine => {
                if zero {
                    Kind::ReadAgainZero
                } else {
                    Kind::ReadAgain
                }
            }
            Access::Read if written => Kind::ReadWritten,
            Access::Read if zero => Kind::ReadZero,
            Access::Read => Kind::Read,
        };
        self.touched.insert(image);
        if touch.access != Access::Read {
            self.written.insert(image);
        }
        format::Touch::new(touch.page, kind, window).ok_or(PlayerMemoryError::TooHigh(touch.page))
    }

    /// Whether a read is of memory that the player does not check: of the first touch's word, or of
    /// any word.
    fn is_unchecked(&self, page: u64, any: bool) -> bool {
        let (start, len) = self.unchecked;
        let (first, last) = if any { (0, PAGE - 1) } else { (WORD, WORD) };
        len > 0 && page * PAGE + first < start + len && start <= page * PAGE + last
    }
}

/// The image page of a guest page of a trace, which checked that there is one.
fn image_page(trace: &Trace, page: u64) -> u64 {
    trace.layout().image_offset(page * PAGE).unwrap_or_default() / PAGE
}

/// Iterations of the player's gap loop before each touch.
fn gaps(unit: GapUnit, factor: GapFactor, touches: &[Touch]) -> Vec<u32> {
    let iterations = |gap| iterations(unit, factor.scale(gap));
    let gaps = touches.iter().map(|touch| iterations(touch.gap));
    gaps.map(|gap| u32::try_from(gap).unwrap_or(u32::MAX)).collect()
}

/// Iterations of the player's gap loop for an amount of work.
pub(super) fn iterations(unit: GapUnit, work: u64) -> u64 {
    match unit {
        GapUnit::Instructions => work / ITERATION_INSTRUCTIONS,
        GapUnit::Nanoseconds => work.saturating_mul(ITERATIONS_PER_NS),
    }
}

#[cfg(test)]
#[path = "invocations_tests.rs"]
mod tests;
