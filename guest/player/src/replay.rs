//! The timed loop.

use core::arch::asm;
use core::hint::cold_path;
use core::ops::Range;

use crate::check::{is_free_page, is_written_page};
use crate::format::{
    FIRST_TIME_NS, Header, Kind, LINE_WORDS, REPORTED_PAGES, STEP, TIMES, TOUCHED_WORD, Touch,
    Touches, time_class, word, written_word,
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

/// Replays touches, with their gaps if there are any.
pub(crate) fn replay(header: &Header, touches: &Touches, range: Range<u64>, wrong: &mut Wrong) {
    if touches.gaps == 0 {
        replay_with(header, touches, range, wrong, |_| {}, |touch| touch());
    } else {
        let gap = |index| spin(gap(touches, index));
        replay_with(header, touches, range, wrong, gap, |touch| touch());
    }
}

/// The times of touches, in ticks of the time-stamp counter.
pub(crate) struct Times {
    /// The total time of the touches minus their number times the fastest one.
    pub(crate) waited: u64,
    /// The number of touches of each class.
    pub(crate) classes: [u64; TIMES],
    /// The end of the first class.
    first: u64,
}

impl Times {
    /// No touches so far, with a counter of `khz`.
    pub(crate) fn new(khz: u64) -> Self {
        const KHZ_PER_GHZ: u64 = 1_000_000;
        Self { waited: 0, classes: [0; TIMES], first: khz * FIRST_TIME_NS / KHZ_PER_GHZ }
    }

    /// Same as [`replay`], and adds the times of the touches.
    pub(crate) fn replay(
        &mut self,
        header: &Header,
        touches: &Touches,
        range: Range<u64>,
        wrong: &mut Wrong,
    ) {
        let (mut sum, mut fastest, mut count) = (0, u64::MAX, 0);
        let timed = |touch: &mut dyn FnMut()| {
            let begin = time();
            touch();
            let ticks = time().wrapping_sub(begin);
            sum += ticks;
            fastest = fastest.min(ticks);
            count += 1;
            if let Some(class) = self.classes.get_mut(time_class(ticks, self.first)) {
                *class += 1;
            }
        };
        let work = |index| {
            if touches.gaps != 0 {
                spin(gap(touches, index));
            }
        };
        replay_with(header, touches, range, wrong, work, timed);
        self.waited += if count == 0 { 0 } else { sum - fastest * count };
    }
}

/// The work before a touch, in iterations of the loop.
#[inline(always)]
fn gap(touches: &Touches, index: u64) -> u32 {
    let place = (touches.gaps + index * 4) as *const u32;
    // SAFETY: the builder of the header wrote a word for each touch.
    unsafe { place.read_volatile() }
}

/// A touch of a list.
#[inline(always)]
fn touch_at(touches: &Touches, index: u64) -> Touch {
    let place = (touches.touches + index * 4) as *const u32;
    // SAFETY: the builder of the header wrote `count` touches.
    Touch::from_bits(unsafe { place.read_volatile() })
}

/// The work of invocations with repeated accesses at random, and the modelled medium.
pub(crate) struct Work {
    random: u64,
    left: u32,
    /// Repeated accesses at random so far.
    pub(crate) repeated: u64,
    /// Loads so far from pages that the invocation never writes.
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
    fn work(&mut self, header: &Header, touches: &Touches, mut turns_left: u32, touched: u64) {
        if header.again_every != 0 {
            while turns_left >= self.left {
                spin(self.left);
                turns_left -= self.left;
                self.left = turns(header.again_every);
                self.again(header, touches, touched);
            }
            self.left -= turns_left;
        }
        spin(turns_left);
    }

    /// Reads a random cache line of a random page among the first `touched` touches.
    fn again(&mut self, header: &Header, touches: &Touches, touched: u64) {
        let Some(index) = self.next().checked_rem(touched) else { return };
        let touch = touch_at(touches, index);
        let line = self.next() >> 58;
        let place = touch.address(line * LINE_WORDS) as *const u64;
        // SAFETY: the page tables map the trace's memory.
        unsafe { place.read_volatile() };
        self.repeated += 1;
        self.load(header, is_written_page(header, touches, touch.page()));
    }

    /// A load from a page was made.
    fn load(&mut self, header: &Header, written: bool) {
        if !written {
            self.read_only_loads += 1;
            spin(turns(header.medium_load));
        }
    }

    /// Replays touches of an invocation; the first `known` ones are of pages that were touched
    /// before it.
    pub(crate) fn replay(
        &mut self,
        header: &Header,
        touches: &Touches,
        range: Range<u64>,
        known: u64,
        wrong: &mut Wrong,
    ) {
        for index in range {
            if touches.gaps != 0 {
                self.work(header, touches, gap(touches, index), known.max(index));
            }
            let touch = touch_at(touches, index);
            if touch.writes() {
                if touch.kind() == Kind::Write {
                    spin(turns(header.medium_copy));
                }
                write(header, touch);
            } else {
                let found = read(touch, index);
                self.load(header, is_written_page(header, touches, touch.page()));
                compare(header, touch, index, found, wrong);
            }
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

/// Generic, so that the compiled loop without gaps contains no code for gaps, and the untimed loops
/// none for times.
#[inline(always)]
fn replay_with(
    header: &Header,
    touches: &Touches,
    range: Range<u64>,
    wrong: &mut Wrong,
    gap: impl Fn(u64),
    mut around: impl FnMut(&mut dyn FnMut()),
) {
    for index in range {
        gap(index);
        let touch = touch_at(touches, index);
        if touch.writes() {
            around(&mut || write(header, touch));
        } else {
            let mut found = 0;
            around(&mut || found = read(touch, index));
            compare(header, touch, index, found, wrong);
        }
    }
}

#[inline(always)]
fn write(header: &Header, touch: Touch) {
    let place = touch.address(TOUCHED_WORD) as *mut u64;
    // SAFETY: the page tables map the trace's memory in both windows, and this program uses none of
    // it.
    unsafe { place.write_volatile(written_word(header.seed, touch.page())) };
}

#[inline(always)]
fn read(touch: Touch, index: u64) -> u64 {
    let place = touch.address(touch.word(index)) as *const u64;
    // SAFETY: as in `write`.
    unsafe { place.read_volatile() }
}

/// Compares what a touch has read with what it must read.
#[inline(always)]
fn compare(header: &Header, touch: Touch, index: u64, found: u64, wrong: &mut Wrong) {
    let expected = match touch.kind() {
        Kind::Read | Kind::ReadAgain => word(header.seed, touch.page(), touch.word(index)),
        Kind::ReadWritten => written_word(header.seed, touch.page()),
        Kind::ReadUnknown => return,
        _ => 0,
    };
    if found != expected {
        cold_path();
        let overwritten = touch.kind() == Kind::ReadWritten;
        if overwritten || found != 0 || !is_free_page(header, touch.page()) {
            wrong.add(touch.page());
        }
    }
}

/// Executes two instructions per iteration. All work is this one loop: a copy that crosses a line
/// of the instruction cache would take two cycles for an iteration in place of one.
#[inline(never)]
fn spin(turns: u32) {
    if turns != 0 {
        // SAFETY: the loop changes one register and the flags.
        unsafe {
            asm!(
                ".p2align 5",
                "2: dec {0:e}",
                "jnz 2b",
                inout(reg) turns => _,
                options(nomem, nostack)
            );
        }
    }
}
