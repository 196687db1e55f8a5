//! The timed loop.

use core::arch::asm;
use core::hint::cold_path;

use crate::check::is_free_page;
use crate::format::{Header, Input, Kind, REPORTED_PAGES, TOUCHED_WORD, Touch, word, written_word};
use crate::time::time;

/// Wrong pages: their number, and the first of them.
pub(crate) struct Wrong {
    pub(crate) count: u64,
    pages: [u64; REPORTED_PAGES],
}

impl Wrong {
    pub(crate) const fn none() -> Self {
        Self { count: 0, pages: [0; REPORTED_PAGES] }
    }

    #[cold]
    pub(crate) fn add(&mut self, page: u64) {
        let place = usize::try_from(self.count).ok().and_then(|index| self.pages.get_mut(index));
        if let Some(place) = place {
            *place = page;
        }
        self.count += 1;
    }

    /// The first of the wrong pages.
    pub(crate) fn pages(&self) -> impl Iterator<Item = u64> + '_ {
        let known = usize::try_from(self.count).unwrap_or(usize::MAX);
        self.pages.iter().copied().take(known)
    }
}

/// Replays all touches of an input, with their gaps if there are any.
pub(crate) fn replay(header: &Header, input: &Input, wrong: &mut Wrong) {
    if input.gaps == 0 {
        replay_with(header, input, wrong, |_| {}, |touch| touch());
    } else {
        replay_with(header, input, wrong, |index| gap(input, index), |touch| touch());
    }
}

/// Same as [`replay`], and returns the total time of the touches minus their number times the
/// fastest one, in ticks of the time-stamp counter.
pub(crate) fn replay_timed(header: &Header, input: &Input, wrong: &mut Wrong) -> u64 {
    let (mut sum, mut fastest, mut count) = (0, u64::MAX, 0);
    let timed = |touch: &mut dyn FnMut()| {
        let begin = time();
        touch();
        let ticks = time().wrapping_sub(begin);
        sum += ticks;
        fastest = fastest.min(ticks);
        count += 1;
    };
    let work = |index| {
        if input.gaps != 0 {
            gap(input, index);
        }
    };
    replay_with(header, input, wrong, work, timed);
    if count == 0 { 0 } else { sum - fastest * count }
}

/// The work before a touch.
#[inline(always)]
fn gap(input: &Input, index: u64) {
    let place = (input.gaps + index * 4) as *const u32;
    // SAFETY: the builder of the header wrote a word for each touch.
    spin(unsafe { place.read_volatile() });
}

/// Generic, so that the compiled loop without gaps contains no code for gaps, and the untimed loops
/// none for times.
#[inline(always)]
fn replay_with(
    header: &Header,
    input: &Input,
    wrong: &mut Wrong,
    gap: impl Fn(u64),
    mut around: impl FnMut(&mut dyn FnMut()),
) {
    let (Header { seed, .. }, Input { touches, touch_count, .. }) = (*header, *input);
    for index in 0..touch_count {
        gap(index);
        let place = (touches + index * 4) as *const u32;
        // SAFETY: the builder of the header wrote `touch_count` touches.
        let touch = Touch::from_bits(unsafe { place.read_volatile() });
        let place = touch.address() as *mut u64;
        let expected = match touch.kind() {
            Kind::Read => word(seed, touch.page(), TOUCHED_WORD),
            Kind::ReadZero | Kind::ReadUnknown => 0,
            Kind::Write => {
                let written = written_word(seed, touch.page());
                // SAFETY: the page tables map the trace's memory in both windows, and this program
                // uses none of it.
                around(&mut || unsafe { place.write_volatile(written) });
                continue;
            }
        };
        let mut found = 0;
        // SAFETY: as above.
        around(&mut || found = unsafe { place.read_volatile() });
        if found != expected && touch.kind() != Kind::ReadUnknown {
            cold_path();
            if found != 0 || !is_free_page(header, touch.page()) {
                wrong.add(touch.page());
            }
        }
    }
}

/// Executes two instructions per iteration.
#[inline(always)]
fn spin(turns: u32) {
    if turns != 0 {
        // SAFETY: the loop changes one register and the flags.
        unsafe {
            asm!("2: dec {0:e}", "jnz 2b", inout(reg) turns => _, options(nomem, nostack));
        }
    }
}
