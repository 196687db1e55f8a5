//! The second pass: every byte of the trace's memory, and filling it in the first place.

use crate::format::{
    Header, Input, OWN, PAGE, PAGE_WORDS, STEP, TOUCHED_WORD, Window, digested, word, written_word,
};

/// The pages of the trace's memory, each with its number among them, but for those of which nothing can be
/// checked.
fn pages(header: &Header) -> impl Iterator<Item = (u64, u64)> + '_ {
    let pages = header.regions.iter().flat_map(|region| region.page..region.page + region.pages);
    let unchecked = header.unchecked_start..header.unchecked_start + header.unchecked_len;
    (0..)
        .zip(pages)
        .filter(move |(_, page)| page * PAGE < unchecked.start || (page + 1) * PAGE > unchecked.end)
}

/// Where a word of a page is.
fn address(page: u64, index: u64) -> u64 {
    Window::Large.base() + page * PAGE + index * 8
}

/// Whether bit `index` of a bitmap is set.
fn bit(map: u64, index: u64) -> bool {
    let place = (map + index / 8) as *const u8;
    // SAFETY: the header's builder made a bit for every page of the trace's memory.
    let byte = unsafe { place.read_volatile() };
    byte >> (index % 8) & 1 == 1
}

/// A page's first word and the difference from each word to the next, before the touches.
fn content(header: &Header, index: u64, page: u64) -> (u64, u64) {
    if bit(header.zero_map, index) { (0, 0) } else { (word(header.seed, page, 0), STEP) }
}

/// Whether a page may be zero whatever it held: `index` is its number among the trace's.
fn is_free(header: &Header, index: u64) -> bool {
    header.free_map != 0 && bit(header.free_map, index)
}

/// The same of a guest page.
pub(crate) fn is_free_page(header: &Header, page: u64) -> bool {
    let mut before = 0;
    for region in header.regions {
        if (region.page..region.page + region.pages).contains(&page) {
            return is_free(header, before + page - region.page);
        }
        before += region.pages;
    }
    false
}

/// Gives every page its content.
pub(crate) fn fill(header: &Header) {
    for (index, page) in pages(header) {
        let (mut value, step) = content(header, index, page);
        for index in 0..PAGE_WORDS {
            let place = address(page, index) as *mut u64;
            // SAFETY: the page tables map the trace's memory, and nothing of this program lies there.
            unsafe { place.write_volatile(value) };
            value = value.wrapping_add(step);
        }
    }
}

/// Compares every word with what it must hold after the touches of an input; calls `wrong` with each page that
/// differs and returns how many do.
pub(crate) fn check(header: &Header, input: &Input, mut wrong: impl FnMut(u64)) -> u64 {
    let mut count = 0;
    for (index, page) in pages(header) {
        if !is_right(header, input, index, page) {
            wrong(page);
            count += 1;
        }
    }
    count
}

/// The digest of the first `len` bytes of the player's own region.
pub(crate) fn own_digest(len: u64) -> u64 {
    (0..len / 8).fold(0, |digest, index| {
        let place = (OWN + index * 8) as *const u64;
        // SAFETY: the page tables map the player's region.
        digested(digest, unsafe { place.read_volatile() })
    })
}

fn is_right(header: &Header, input: &Input, index: u64, page: u64) -> bool {
    let (mut value, step) = content(header, index, page);
    let written = bit(input.written_map, index);
    // Offsets in this page of what the monitor writes; nothing where that is elsewhere.
    let unchecked = header.unchecked_start.wrapping_sub(page * PAGE);
    // From its content, and from zeros.
    let (mut difference, mut not_zero) = (0, 0);
    let free = is_free(header, index);
    for index in 0..PAGE_WORDS {
        let [expected, zero] = match index {
            TOUCHED_WORD if written => [written_word(header.seed, page); 2],
            _ => [value, 0],
        };
        let place = address(page, index) as *const u64;
        // SAFETY: the page tables map the trace's memory.
        let found = unsafe { place.read_volatile() };
        if (index * 8).wrapping_sub(unchecked) >= header.unchecked_len {
            difference |= found ^ expected;
            not_zero |= found ^ zero;
        }
        value = value.wrapping_add(step);
    }
    difference == 0 || (free && not_zero == 0)
}
