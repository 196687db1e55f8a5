//! The second pass, which checks every byte of the trace's memory; and filling that memory.

use crate::format::{
    Header, OWN, PAGE, PAGE_WORDS, STEP, TOUCHED_WORD, Touches, Window, digested, word,
    written_word,
};

/// The pages of the trace's memory, each with its index, without the pages that cannot be checked.
fn pages(header: &Header) -> impl Iterator<Item = (u64, u64)> + '_ {
    let pages = header.regions.iter().flat_map(|region| region.page..region.page + region.pages);
    let unchecked = header.unchecked_start..header.unchecked_start + header.unchecked_len;
    (0..)
        .zip(pages)
        .filter(move |(_, page)| page * PAGE < unchecked.start || (page + 1) * PAGE > unchecked.end)
}

/// Virtual address of a word of a page.
fn address(page: u64, index: u64) -> u64 {
    Window::Large.base() + page * PAGE + index * 8
}

/// Whether bit `index` of a bitmap is set.
fn bit(map: u64, index: u64) -> bool {
    let place = (map + index / 8) as *const u8;
    // SAFETY: the builder of the header wrote a bit for every page of the trace's memory.
    let byte = unsafe { place.read_volatile() };
    byte >> (index % 8) & 1 == 1
}

/// A page's first word before the touches, and the difference between consecutive words.
fn content(header: &Header, index: u64, page: u64) -> (u64, u64) {
    if bit(header.zero_map, index) { (0, 0) } else { (word(header.seed, page, 0), STEP) }
}

/// Whether a page may be zero instead of its content. `index` is its index in the trace's memory.
fn is_free(header: &Header, index: u64) -> bool {
    header.free_map != 0 && bit(header.free_map, index)
}

/// The index of a guest page in the trace's memory.
fn index_of(header: &Header, page: u64) -> Option<u64> {
    let mut before = 0;
    for region in header.regions {
        if (region.page..region.page + region.pages).contains(&page) {
            return Some(before + page - region.page);
        }
        before += region.pages;
    }
    None
}

/// Same as [`is_free`], for a guest page number.
pub(crate) fn is_free_page(header: &Header, page: u64) -> bool {
    index_of(header, page).is_some_and(|index| is_free(header, index))
}

/// Whether the touches write a guest page.
pub(crate) fn is_written_page(header: &Header, touches: &Touches, page: u64) -> bool {
    index_of(header, page).is_some_and(|index| bit(touches.written_map, index))
}

/// Fills every page with its content.
pub(crate) fn fill(header: &Header) {
    for (index, page) in pages(header) {
        let (mut value, step) = content(header, index, page);
        for index in 0..PAGE_WORDS {
            let place = address(page, index) as *mut u64;
            // SAFETY: the page tables map the trace's memory, and this program uses none of it.
            unsafe { place.write_volatile(value) };
            value = value.wrapping_add(step);
        }
    }
}

/// Compares every word with its expected value after the touches. Calls `wrong` with
/// each page that differs and returns their number.
pub(crate) fn check(header: &Header, touches: &Touches, mut wrong: impl FnMut(u64)) -> u64 {
    let mut count = 0;
    for (index, page) in pages(header) {
        if !is_right(header, touches, index, page) {
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

fn is_right(header: &Header, touches: &Touches, index: u64, page: u64) -> bool {
    let unchecked = header.unchecked_start..header.unchecked_start + header.unchecked_len;
    let reached = unchecked.start < (page + 1) * PAGE && unchecked.end > page * PAGE;
    let (from_content, from_zeros) = if reached {
        differences(header, touches, index, page, |address| !unchecked.contains(&address))
    } else {
        differences(header, touches, index, page, |_| true)
    };
    from_content == 0 || (from_zeros == 0 && is_free(header, index))
}

/// Differences of the words of a page from its content after the touches, and from zeros: 0 if
/// there are none. Only words whose guest-physical address is `checked` count. The second pass runs
/// these loops over all memory, so they contain no decision that can be made beforehand.
#[inline(always)]
fn differences(
    header: &Header,
    touches: &Touches,
    index: u64,
    page: u64,
    checked: impl Fn(u64) -> bool,
) -> (u64, u64) {
    let (mut value, step) = content(header, index, page);
    let written = bit(touches.written_map, index).then(|| written_word(header.seed, page));
    let (mut from_content, mut from_zeros) = (0, 0);
    let mut compare = |index: u64, content: u64, zero: u64| {
        let place = address(page, index) as *const u64;
        // SAFETY: the page tables map the trace's memory.
        let found = unsafe { place.read_volatile() };
        if checked(page * PAGE + index * 8) {
            from_content |= found ^ content;
            from_zeros |= found ^ zero;
        }
    };
    for index in 0..TOUCHED_WORD {
        compare(index, value, 0);
        value = value.wrapping_add(step);
    }
    compare(TOUCHED_WORD, written.unwrap_or(value), written.unwrap_or_default());
    for index in TOUCHED_WORD + 1..PAGE_WORDS {
        value = value.wrapping_add(step);
        compare(index, value, 0);
    }
    (from_content, from_zeros)
}
