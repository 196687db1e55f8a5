//! The timed loop.

use core::arch::asm;
use core::hint::cold_path;
use core::ops::Range;

use crate::check::{is_free_page, is_written_page};
use crate::format::{
    Header, Input, Kind, PAGE, REPORTED_PAGES, STEP, TOUCHED_WORD, Touch, word, written_word,
};
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

/// Replays touches of an input, with their gaps if there are any.
pub(crate) fn replay(header: &Header, input: &Input, touches: Range<u64>, wrong: &mut Wrong) {
    if input.gaps == 0 {
        replay_with(header, input, touches, wrong, |_| {}, |touch| touch());
    } else {
        let gap = |index| spin(gap(input, index));
        replay_with(header, input, touches, wrong, gap, |touch| touch());
    }
}

/// Same as [`replay`], and returns the total time of the touches minus their number times the
/// fastest one, in ticks of the time-stamp counter.
pub(crate) fn replay_timed(
    header: &Header,
    input: &Input,
    touches: Range<u64>,
    wrong: &mut Wrong,
) -> u64 {
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
            spin(gap(input, index));
        }
    };
    replay_with(header, input, touches, wrong, work, timed);
    if count == 0 { 0 } else { sum - fastest * count }
}

/// The work before a touch, in iterations of the loop.
#[inline(always)]
fn gap(input: &Input, index: u64) -> u32 {
    let place = (input.gaps + index * 4) as *const u32;
    // SAFETY: the builder of the header wrote a word for each touch.
    unsafe { place.read_volatile() }
}

/// A touch of an input.
#[inline(always)]
fn touch_at(input: &Input, index: u64) -> Touch {
    let place = (input.touches + index * 4) as *const u32;
    // SAFETY: the builder of the header wrote `touch_count` touches.
    Touch::from_bits(unsafe { place.read_volatile() })
}

/// The work of an invocation with repeated accesses, and the modelled medium.
pub(crate) struct Work {
    random: u64,
    left: u32,
    /// Repeated accesses so far.
    pub(crate) repeated: u64,
    /// Loads so far from pages that the input never writes.
    pub(crate) read_only_loads: u64,
}

impl Work {
    pub(crate) fn new(header: &Header) -> Self {
        // Every player draws the same pages.
        let random = header.seed | 1;
        Self { random, left: turns(header.again_every), repeated: 0, read_only_loads: 0 }
    }

    /// The work before a touch. A repeated access follows every `again_every` iterations; it is of
    /// a page among the first `touched` touches.
    fn work(&mut self, header: &Header, input: &Input, mut turns_left: u32, touched: u64) {
        if header.again_every != 0 {
            while turns_left >= self.left {
                spin(self.left);
                turns_left -= self.left;
                self.left = turns(header.again_every);
                self.again(header, input, touched);
            }
            self.left -= turns_left;
        }
        spin(turns_left);
    }

    /// Reads a random cache line of a random page among the first `touched` touches.
    fn again(&mut self, header: &Header, input: &Input, touched: u64) {
        let Some(index) = self.next().checked_rem(touched) else { return };
        let touch = touch_at(input, index);
        let line = self.next() >> 58;
        let place = (touch.address() / PAGE * PAGE + line * 64) as *const u64;
        // SAFETY: the page tables map the trace's memory.
        unsafe { place.read_volatile() };
        self.repeated += 1;
        self.load(header, is_written_page(header, input, touch.page()));
    }

    /// A load from a page was made.
    fn load(&mut self, header: &Header, written: bool) {
        if !written {
            self.read_only_loads += 1;
            spin(turns(header.medium_load));
        }
    }

    /// Marsaglia's xorshift64*.
    fn next(&mut self) -> u64 {
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        self.random.wrapping_mul(STEP)
    }
}

fn turns(word: u64) -> u32 {
    u32::try_from(word).unwrap_or(u32::MAX)
}

/// Replays touches of an input with repeated accesses and the modelled medium. With `SECOND` it is
/// a second, identical invocation: the written pages have their new content, and writes find them
/// in DRAM.
pub(crate) fn replay_worked<const SECOND: bool>(
    header: &Header,
    input: &Input,
    touches: Range<u64>,
    wrong: &mut Wrong,
    work: &mut Work,
) {
    for index in touches {
        if input.gaps != 0 {
            let touched = if SECOND { input.touch_count } else { index };
            work.work(header, input, gap(input, index), touched);
        }
        let touch = touch_at(input, index);
        let (page, place) = (touch.page(), touch.address() as *mut u64);
        if touch.kind() == Kind::Write {
            if !SECOND {
                spin(turns(header.medium_copy));
            }
            // SAFETY: the page tables map the trace's memory, and this program uses none of it.
            unsafe { place.write_volatile(written_word(header.seed, page)) };
            continue;
        }
        let written = is_written_page(header, input, page);
        let expected = match touch.kind() {
            _ if SECOND && written => written_word(header.seed, page),
            Kind::Read => word(header.seed, page, TOUCHED_WORD),
            Kind::ReadZero | Kind::ReadUnknown | Kind::Write => 0,
        };
        // SAFETY: as above.
        let found = unsafe { place.read_volatile() };
        work.load(header, written);
        if found != expected && touch.kind() != Kind::ReadUnknown {
            cold_path();
            let overwritten = SECOND && written;
            if overwritten || found != 0 || !is_free_page(header, page) {
                wrong.add(page);
            }
        }
    }
}

/// Generic, so that the compiled loop without gaps contains no code for gaps, and the untimed loops
/// none for times.
#[inline(always)]
fn replay_with(
    header: &Header,
    input: &Input,
    touches: Range<u64>,
    wrong: &mut Wrong,
    gap: impl Fn(u64),
    mut around: impl FnMut(&mut dyn FnMut()),
) {
    let Header { seed, .. } = *header;
    for index in touches {
        gap(index);
        let touch = touch_at(input, index);
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
