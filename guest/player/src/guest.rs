//! The guest's program, from its first instruction to its last.

use core::arch::asm;

use crate::check::{check, fill, own_digest};
use crate::console;
use crate::format::{Header, Input, OWN, REPORT, REPORTED_PAGES, mode, register};
use crate::replay::{Times, Work, Wrong, replay};
use crate::time::time;

/// Runs the guest to its end.
///
/// `digest` is the digest of the first `len` bytes of the player's own region. `input` is the
/// number of the input to replay; with reports to a serial port it is always the first. `modes` are
/// bits of [`mode`]. A guest that measures the time of each touch makes no repeated accesses, and
/// has no modelled medium.
///
/// # Safety
/// Memory has the layout that [`format`](mod@crate::format) describes, and only this function uses
/// it.
pub unsafe fn run(digest: u64, len: u64, input: u64, modes: u64) -> ! {
    let header = Header::from_words(|index| {
        let place = (OWN as *const u64).wrapping_add(index);
        // SAFETY: the caller guarantees the layout of memory.
        unsafe { place.read_volatile() }
    });
    let own_is_right = || own_digest(len) == digest;
    // The boot code for other monitors leaves another value in the register.
    let input = if header.reports == 0 { input } else { 0 };
    let Some(input) = usize::try_from(input).ok().and_then(|input| header.inputs.get(input)) else {
        end()
    };
    match header.reports {
        0 => report_to_registers(&header, input, modes, own_is_right),
        _ => report_to_console(&header, input, own_is_right),
    }
}

/// Ends the guest by a triple fault: an undefined instruction without a handler.
pub fn end() -> ! {
    // SAFETY: the instruction does not return.
    unsafe { asm!("ud2", options(noreturn)) };
}

fn report_to_registers(
    header: &Header,
    input: &Input,
    modes: u64,
    own_is_right: impl Fn() -> bool,
) -> ! {
    let (mut wrong, mut work) = (Wrong::none(), Work::new(header));
    let works = header.again_every | header.medium_load | header.medium_copy != 0;
    let mut times = Times::new(modes >> mode::KHZ_SHIFT);
    let mut part = |range| {
        if modes & mode::TIMED != 0 {
            times.replay(header, &input.first, range, &mut wrong);
        } else if works {
            work.replay(header, &input.first, range, 0, &mut wrong);
        } else {
            replay(header, &input.first, range, &mut wrong);
        }
    };
    let begin = time();
    let mut connected = 0;
    if input.connected != 0 {
        part(0..input.connected);
        connected = time().wrapping_sub(begin);
    }
    part(input.connected..input.first.count);
    // The monitor stops its clock here.
    report(register::DONE, wrong.count);
    wrong.pages().for_each(|page| report(register::WRONG_IN_LOOP, page));
    report(register::WAITED, times.waited);
    if modes & mode::TIMED != 0 {
        for (class, count) in (0..).zip(times.classes) {
            report(register::TOUCH_TIMES, class << register::CLASS_SHIFT | count);
        }
    }
    report(register::TOUCHES, input.first.count - input.first.repeats);
    report(register::PAGES, input.pages);
    report(register::CONNECTED, connected);
    report(register::REPEATED, work.repeated + input.first.repeats);
    report(register::READ_ONLY_LOADS, work.read_only_loads);
    let mut last = &input.first;
    if modes & mode::TWICE != 0 {
        last = &input.second;
        let begin = time();
        work.replay(header, last, 0..last.count, last.count, &mut wrong);
        report(register::WARM, time().wrapping_sub(begin));
        report(register::DONE, wrong.count);
        wrong.pages().for_each(|page| report(register::WRONG_IN_LOOP, page));
    }
    let mut reported = 0;
    let wrong_page = |page| {
        if reported < REPORTED_PAGES {
            report(register::WRONG_IN_PASS, page);
            reported += 1;
        }
    };
    let count = if modes & mode::UNCHECKED == 0 { check(header, last, wrong_page) } else { 0 };
    if !own_is_right() {
        report(register::WRONG_OWN, 1);
    }
    report(register::END, count);
    end()
}

fn report(register: u64, value: u64) {
    // SAFETY: the page tables map the registers, which are not memory.
    unsafe { ((REPORT + register) as *mut u64).write_volatile(value) };
}

fn report_to_console(header: &Header, input: &Input, own_is_right: impl Fn() -> bool) -> ! {
    fill(header);
    console::line(b"READY", &[]);
    console::wait();
    let mut wrong = Wrong::none();
    let begin = time();
    replay(header, &input.first, 0..input.first.count, &mut wrong);
    let ticks = time().wrapping_sub(begin);
    console::line(b"DONE", &[input.pages, nanoseconds(ticks, header.tsc_khz)]);
    wrong.pages().for_each(|page| console::line(b"BAD", &[page]));
    let count = check(header, &input.first, |page| console::line(b"BAD", &[page]));
    if own_is_right() {
        console::line(b"END", &[wrong.count.max(count)]);
    } else {
        console::line(b"BAD player", &[]);
    }
    loop {
        core::hint::spin_loop();
    }
}

/// Computed in two parts to avoid overflow.
fn nanoseconds(ticks: u64, khz: u64) -> u64 {
    const SCALE: u64 = 1_000_000;
    let Some(whole) = ticks.checked_div(khz) else { return 0 };
    whole * SCALE + ticks % khz * SCALE / khz
}
