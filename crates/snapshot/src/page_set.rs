//! A set of pages, as a bitmap.

use std::ops::Range;

use firn_base::PageRange;

/// Pages that one word of the bitmap holds.
const WORD_BITS: u64 = 64;

/// A set of pages out of `0..pages`, as a bitmap.
///
/// The zero map of a snapshot is one: page `n` of the image is in the set when it is all zero.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageSet {
    /// Bit `n % 64` of word `n / 64` represents page `n`; bits past `pages` are 0.
    words: Vec<u64>,
    pages: u64,
}

impl PageSet {
    /// The empty set out of `pages` pages. It uses `pages / 8` bytes of memory.
    ///
    /// # Panics
    /// When the bitmap exceeds the address space; [`crate::MAX_MEMORY`] keeps layouts far below.
    #[must_use]
    #[expect(clippy::expect_used, reason = "a bitmap above the address space is a caller's bug")]
    pub fn new(pages: u64) -> Self {
        let words = usize::try_from(pages.div_ceil(WORD_BITS)).expect("bitmap fits in memory");
        Self { words: vec![0; words], pages }
    }

    /// The pages of `ranges`, out of `pages` pages. Pages beyond are left out.
    #[must_use]
    pub fn of<'a>(ranges: impl IntoIterator<Item = &'a PageRange>, pages: u64) -> Self {
        let mut set = Self::new(pages);
        for Range { start, end } in ranges.into_iter().map(PageRange::range) {
            if start < pages {
                set.insert_range(start..end.min(pages));
            }
        }
        set
    }

    /// The number of pages that the set is out of: members are in `0..pages()`.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Whether `page` is in the set; `false` for pages at or after `pages()`.
    #[must_use]
    pub fn get(&self, page: u64) -> bool {
        page < self.pages && self.words[word_index(page)] & bit(page) != 0
    }

    /// Adds `page` to the set.
    ///
    /// # Panics
    /// When `page` is not below `pages()`.
    pub fn insert(&mut self, page: u64) {
        self.insert_range(page..page + 1);
    }

    /// Adds all of `range` to the set.
    ///
    /// # Panics
    /// When `range` ends past `pages()`.
    pub fn insert_range(&mut self, range: Range<u64>) {
        assert!(range.end <= self.pages, "pages up to {} of a set of {}", range.end, self.pages);
        let mut page = range.start;
        while page < range.end {
            let (mask, next) = word_mask(page, range.end);
            self.words[word_index(page)] |= mask;
            page = next;
        }
    }

    /// The number of pages in the set.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// Splits `range`, cut at `pages()`, into maximal ranges of pages in the set and not in it:
    /// ascending, each with whether it is in the set.
    pub fn split(&self, range: Range<u64>) -> impl Iterator<Item = (Range<u64>, bool)> + '_ {
        let end = range.end.min(self.pages);
        let mut page = range.start;
        std::iter::from_fn(move || {
            let start = page;
            let set = (start < end).then(|| self.get(start))?;
            page = self.run_end(start, end, set);
            Some((start..page, set))
        })
    }

    /// The maximal ranges of pages of `range` in the set, ascending.
    pub fn ranges_in(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        self.split(range).filter(|(_, set)| *set).map(|(pages, _)| pages)
    }

    /// The maximal ranges of pages of `range` not in the set, ascending.
    pub fn gaps_in(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        self.split(range).filter(|(_, set)| !set).map(|(pages, _)| pages)
    }

    /// The maximal ranges of pages in the set, ascending.
    pub fn ranges(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.ranges_in(0..self.pages)
    }

    /// The maximal ranges of pages not in the set, ascending.
    pub fn gaps(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.gaps_in(0..self.pages)
    }

    /// The set as a list of page ranges, ascending.
    #[must_use]
    pub fn to_ranges(&self) -> Vec<PageRange> {
        self.ranges().map(PageRange::from).collect()
    }

    /// The pages in the set, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        self.ranges().flatten()
    }

    /// The first page at or after `start`, at most `end`, whose membership is not `set`.
    fn run_end(&self, start: u64, end: u64, set: bool) -> u64 {
        let mut page = start;
        while page < end {
            let (mask, next) = word_mask(page, end);
            let word = self.words[word_index(page)];
            let others = if set { !word & mask } else { word & mask };
            if others != 0 {
                return page - page % WORD_BITS + u64::from(others.trailing_zeros());
            }
            page = next;
        }
        end
    }

    /// Bytes that [`Self::to_bytes`] returns for a set out of `pages` pages.
    pub(crate) fn encoded_len(pages: u64) -> u64 {
        pages.div_ceil(8)
    }

    /// The bitmap: bit `n % 8` of byte `n / 8` represents page `n`; bits past the last page are 0.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes: Vec<u8> = self.words.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.truncate(usize::try_from(Self::encoded_len(self.pages)).unwrap_or(usize::MAX));
        bytes
    }

    /// The set out of `pages` pages that [`Self::to_bytes`] encoded; `None` when `bytes` has
    /// another length or bits past the last page.
    pub(crate) fn from_bytes(bytes: &[u8], pages: u64) -> Option<Self> {
        if u64::try_from(bytes.len()) != Ok(Self::encoded_len(pages)) {
            return None;
        }
        let words = bytes
            .chunks(8)
            .map(|chunk| {
                let mut word = [0; 8];
                word[..chunk.len()].copy_from_slice(chunk);
                u64::from_le_bytes(word)
            })
            .collect::<Vec<_>>();
        let stray = match (words.last(), pages % WORD_BITS) {
            (Some(last), used @ 1..) => last >> used != 0,
            _ => false,
        };
        (!stray).then_some(Self { words, pages })
    }
}

fn word_index(page: u64) -> usize {
    // The conversion is lossless: the word of a page in an existing bitmap is in memory.
    usize::try_from(page / WORD_BITS).unwrap_or(usize::MAX)
}

fn bit(page: u64) -> u64 {
    1 << (page % WORD_BITS)
}

/// The bits of `page`'s word that represent `page..end`, and the first page after them.
fn word_mask(page: u64, end: u64) -> (u64, u64) {
    let first = page % WORD_BITS;
    let next = (page - first + WORD_BITS).min(end);
    let bits = next - page;
    let ones = if bits == WORD_BITS { u64::MAX } else { (1 << bits) - 1 };
    (ones << first, next)
}

#[cfg(test)]
#[path = "page_set_tests.rs"]
mod tests;
