//! The memory format shared by the player and the builder of its memory.
//!
//! Guest memory consists of the trace's memory, filled according to page number and seed, and one
//! more region above it, the player's own region. The own region holds the header, the program,
//! bitmaps of zero and of free pages; touches, gaps and a bitmap of written pages for each
//! invocation of each input; page tables and the stack. The page tables map the own region at
//! [`OWN`], and the trace's memory twice, at the windows of [`Window`], with leaves of different
//! sizes.

/// Bytes of a page.
pub const PAGE: u64 = 4096;
/// Words of 8 bytes in a page.
pub const PAGE_WORDS: u64 = PAGE / 8;
/// Virtual address of the player's own region: first the [`Header`], then the program.
pub const OWN: u64 = 0x4000_0000;
/// Offset of the program, and of its first instruction, in the own region.
pub const PROGRAM: u64 = PAGE;
/// Offset in the own region of a task state segment that allows ring 3 all ports below 0x400. It
/// follows the header in the same page.
pub const TASK_STATE: u64 = 0x800;
/// Offset in the task state segment of the two-byte offset of its port bitmap: [`PORTS`].
pub const PORTS_BASE: u64 = 102;
/// Offset in the task state segment of the port bitmap, in which a 0 bit allows access.
pub const PORTS: u64 = 104;
/// Bytes of the port bitmap. A byte of ones must follow it.
pub const PORTS_LEN: u64 = 0x400 / 8;
/// Bytes of the stack.
pub const STACK: u64 = 16 * PAGE;
/// Virtual address of the report registers.
pub const REPORT: u64 = 0x7ffe_0000;
/// Guest-physical address of the report registers, which are not memory.
pub const REPORT_ADDRESS: u64 = 0xd800_0000;

/// The word of a page that the timed loop reads or writes. It is not the first word, because
/// monitors write a generation id at the start of a page.
pub const TOUCHED_WORD: u64 = PAGE_WORDS / 2;
/// Maximum number of wrong pages reported by number, for each of the two checks.
pub const REPORTED_PAGES: usize = 16;

/// Number of classes of touches by their time, for guests that measure it.
pub const TIMES: usize = 18;
/// The times of the first class are below this, ns. Each class after it ends at twice the end of
/// the one before, and the last has no end.
pub const FIRST_TIME_NS: u64 = 250;

/// The class of a touch that took `ticks`, if the first class ends at `first` ticks.
#[inline]
#[must_use]
pub fn time_class(ticks: u64, first: u64) -> usize {
    let doubled = ticks.checked_div(first).and_then(u64::checked_ilog2);
    let class = doubled.and_then(|log| usize::try_from(log + 1).ok());
    class.unwrap_or(0).min(TIMES - 1)
}

/// Maximum number of regions of a trace's memory.
pub const REGIONS: usize = 4;
/// Maximum number of inputs of a player, each with its own trace.
pub const INPUTS: usize = 4;

/// Content of word `index` of guest page `page`, for a page that is not zero. All words of a memory
/// have different values: the factor is odd, so the product is a permutation.
#[inline]
#[must_use]
pub const fn word(seed: u64, page: u64, index: u64) -> u64 {
    seed.wrapping_add((page * PAGE_WORDS + index + 1).wrapping_mul(STEP))
}

/// Difference between consecutive words.
pub const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The value that a write stores into [`TOUCHED_WORD`] of its page.
#[inline]
#[must_use]
pub const fn written_word(seed: u64, page: u64) -> u64 {
    !word(seed, page, TOUCHED_WORD)
}

/// The kind of a touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Reads a word and compares it with the page's content.
    Read,
    /// Reads a word and compares it with zero.
    ReadZero,
    /// Writes a word, the first write to the page.
    Write,
    /// Reads a word of unknown content.
    ReadUnknown,
    /// Reads the word that a touch before it wrote.
    ReadWritten,
    /// Reads a word of a page that was accessed before, and compares it with the page's content.
    ReadAgain,
    /// Reads a word of a page that was accessed before, and compares it with zero.
    ReadAgainZero,
    /// Writes a word to a page that was written before.
    WriteAgain,
}

/// Words of 8 bytes in a cache line.
pub const LINE_WORDS: u64 = 8;

/// The mapping that a touch uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    /// Leaves of 4 KiB.
    Small,
    /// Leaves of 2 MiB.
    Large,
}

impl Window {
    /// Virtual address of the trace's guest-physical address 0.
    #[inline]
    #[must_use]
    pub const fn base(self) -> u64 {
        match self {
            Self::Small => SMALL,
            Self::Large => SMALL << 1,
        }
    }
}

const SMALL: u64 = 1 << 45;
const KIND_BITS: u32 = 3;
const WINDOW_BIT: u32 = 1 << KIND_BITS;
const PAGE_SHIFT: u32 = KIND_BITS + 1;
/// Maximum number of guest pages that a touch can address: 1 TiB.
pub const MOST_PAGES: u64 = 1 << (32 - PAGE_SHIFT);

/// A touch, packed into four bytes, so that the page faults on the list itself cost less than 4 ns
/// per touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Touch(u32);

impl Touch {
    /// Packs a touch; `None` for a page from [`MOST_PAGES`] on.
    #[must_use]
    pub fn new(page: u64, kind: Kind, window: Window) -> Option<Self> {
        let page = u32::try_from(page).ok().filter(|page| u64::from(*page) < MOST_PAGES)?;
        let kind = match kind {
            Kind::Read => 0,
            Kind::ReadZero => 1,
            Kind::Write => 2,
            Kind::ReadUnknown => 3,
            Kind::ReadWritten => 4,
            Kind::ReadAgain => 5,
            Kind::ReadAgainZero => 6,
            Kind::WriteAgain => 7,
        };
        let window = match window {
            Window::Small => 0,
            Window::Large => WINDOW_BIT,
        };
        Some(Self(page << PAGE_SHIFT | window | kind))
    }

    /// Decodes a touch.
    #[inline]
    #[must_use]
    pub const fn from_bits(bits: u32) -> Self {
        Self(bits)
    }

    /// Encodes the value.
    #[must_use]
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// The guest page.
    #[inline]
    #[must_use]
    pub fn page(self) -> u64 {
        u64::from(self.0 >> PAGE_SHIFT)
    }

    /// The kind.
    #[inline]
    #[must_use]
    pub fn kind(self) -> Kind {
        match self.0 & (WINDOW_BIT - 1) {
            0 => Kind::Read,
            1 => Kind::ReadZero,
            2 => Kind::Write,
            3 => Kind::ReadUnknown,
            4 => Kind::ReadWritten,
            5 => Kind::ReadAgain,
            6 => Kind::ReadAgainZero,
            _ => Kind::WriteAgain,
        }
    }

    /// The mapping that it uses.
    #[inline]
    #[must_use]
    pub fn window(self) -> Window {
        if self.0 & WINDOW_BIT == 0 { Window::Small } else { Window::Large }
    }

    /// Whether it writes.
    #[inline]
    #[must_use]
    pub fn writes(self) -> bool {
        matches!(self.kind(), Kind::Write | Kind::WriteAgain)
    }

    /// The word that it reads or writes. A read of a page that was accessed before is of another
    /// cache line each time, by the touch's index in its list, and never of [`TOUCHED_WORD`], which
    /// may have been written.
    #[inline]
    #[must_use]
    pub fn word(self, index: u64) -> u64 {
        match self.kind() {
            Kind::ReadAgain | Kind::ReadAgainZero => {
                (index.wrapping_mul(STEP) >> 58) * LINE_WORDS + 1
            }
            _ => TOUCHED_WORD,
        }
    }

    /// The virtual address of a word of its page.
    #[inline]
    #[must_use]
    pub fn address(self, word: u64) -> u64 {
        self.window().base() + self.page() * PAGE + word * 8
    }
}

/// The digest of the player's own region up to its stack, word by word: `digest = digested(digest,
/// word)`, starting at 0. The player receives the expected digest in a register, which a restore of
/// memory cannot change.
#[inline]
#[must_use]
pub const fn digested(digest: u64, word: u64) -> u64 {
    (digest ^ word).wrapping_mul(STEP).rotate_left(29)
}

/// A region of the trace's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Region {
    /// First guest page.
    pub page: u64,
    /// Number of pages; 0 for an unused entry.
    pub pages: u64,
}

/// The touches of one invocation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Touches {
    /// Virtual address of the touches, four bytes each.
    pub touches: u64,
    /// Number of touches.
    pub count: u64,
    /// Number of them that are repeated accesses of the trace.
    pub repeats: u64,
    /// Virtual address of the gaps, four bytes for each touch: iterations of a two-instruction loop
    /// before it. 0: no gaps.
    pub gaps: u64,
    /// Bitmap of the pages that are written once the touches are done.
    pub written_map: u64,
}

/// One input of the function. A player replays one of its inputs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Input {
    /// The first invocation.
    pub first: Touches,
    /// A second invocation after the first, in the same memory.
    pub second: Touches,
    /// Number of pages that the first invocation touches.
    pub pages: u64,
    /// Index of the first touch that serves the request; the touches before it connect the guest.
    /// 0: unknown.
    pub connected: u64,
}

macro_rules! header {
    ($($(#[$doc:meta])* $field:ident,)*) => {
        /// The player's parameters: at the start of its own region, as little-endian words.
        ///
        /// Addresses are virtual. Bit `n` of a bitmap is page `n` of the trace's memory, whose
        /// regions are numbered consecutively.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Header {
            $($(#[$doc])* pub $field: u64,)*
            /// The traces' memory.
            pub regions: [Region; REGIONS],
            /// The inputs; unused entries are all zeros.
            pub inputs: [Input; INPUTS],
        }

        /// Words of a header.
        pub const HEADER_WORDS: usize = [$(stringify!($field)),*].len() + 2 * REGIONS + 12 * INPUTS;

        impl Header {
            /// Encodes the value.
            #[must_use]
            pub fn to_words(&self) -> [u64; HEADER_WORDS] {
                let mut words = [0; HEADER_WORDS];
                let fields = [$(self.$field),*].into_iter();
                let regions = self.regions.iter().flat_map(|region| [region.page, region.pages]);
                let list = |list: &Touches| {
                    [list.touches, list.count, list.repeats, list.gaps, list.written_map]
                };
                let inputs = self.inputs.iter().flat_map(|input| {
                    let lists = list(&input.first).into_iter().chain(list(&input.second));
                    lists.chain([input.pages, input.connected])
                });
                let all = fields.chain(regions).chain(inputs);
                words.iter_mut().zip(all).for_each(|(word, value)| *word = value);
                words
            }

            /// Decodes a header: `word` returns the word of an index.
            pub fn from_words(word: impl Fn(usize) -> u64) -> Self {
                let mut index = 0;
                let mut next = || {
                    index += 1;
                    word(index - 1)
                };
                Self {
                    $($field: next(),)*
                    regions: core::array::from_fn(|_| Region { page: next(), pages: next() }),
                    inputs: core::array::from_fn(|_| {
                        let mut list = || Touches {
                            touches: next(),
                            count: next(),
                            repeats: next(),
                            gaps: next(),
                            written_map: next(),
                        };
                        let (first, second) = (list(), list());
                        Input { first, second, pages: next(), connected: next() }
                    }),
                }
            }
        }
    };
}

header! {
    /// Seed of the content of memory.
    seed,
    /// Bitmap of the pages that are zero.
    zero_map,
    /// Bitmap of free pages: they may hold their content or zeros. 0: no free pages.
    free_map,
    /// Guest-physical start of a range that monitors write, which cannot be checked.
    unchecked_start,
    /// Length of that range in bytes, a multiple of 8. A page that lies completely in it is neither
    /// filled nor checked.
    unchecked_len,
    /// Destination of reports: 0 for the registers at [`REPORT`], 1 for the serial port, as text.
    reports,
    /// Frequency of the time-stamp counter in kHz, for reports in ns on the serial port.
    tsc_khz,
    /// Iterations of the gap loop between repeated accesses at random; 0: none. Only gaps contain
    /// them.
    again_every,
    /// Iterations of the gap loop for each load from a page that is on the modelled medium; 0: no
    /// model.
    medium_load,
    /// Iterations of the gap loop for the copy of a page from the modelled medium, at its first
    /// write.
    medium_copy,
}

/// The boot code for other monitors: `boot.S`, a flat image. Offsets are relative to it.
pub mod boot {
    /// Guest-physical and virtual address of the image.
    pub const START: u64 = 0x10_0000;
    /// Offset of five words: guest-physical address of the top page table; and the player's first
    /// instruction, stack and two arguments.
    pub const WORDS: u64 = 0;
    /// Offset of the entry by the 64-bit Linux boot protocol.
    pub const ENTRY: u64 = 0x100;
    /// Offset of the entry by the PVH protocol.
    pub const PVH_ENTRY: u64 = 0x280;
    /// Offset of a copy of the top page table.
    pub const LOW_TABLE: u64 = 0x1000;
    /// Bytes of the image, its stack included.
    pub const LEN: u64 = 0x3000;
}

/// Registers at [`REPORT`], 8 bytes each, write-only.
pub mod register {
    /// The timed loop has ended; the value is the number of wrong pages in it. After a second
    /// invocation it is reported again, with the wrong pages of both.
    pub const DONE: u64 = 0;
    /// The value is a guest page that was wrong in the timed loop.
    pub const WRONG_IN_LOOP: u64 = 8;
    /// The value is a guest page that was wrong in the second pass.
    pub const WRONG_IN_PASS: u64 = 16;
    /// The value is the number of touches of the first invocation, without repeated accesses.
    pub const TOUCHES: u64 = 24;
    /// The value is the number of pages that were touched.
    pub const PAGES: u64 = 32;
    /// The player's own region is damaged (its lists, program or page tables), so all other reports
    /// are invalid.
    pub const WRONG_OWN: u64 = 40;
    /// The second pass has ended; the value is the number of wrong pages in it. It is the last
    /// report.
    pub const END: u64 = 48;
    /// The total time of the touches minus their number times the fastest one, in ticks of the
    /// time-stamp counter, if requested.
    pub const WAITED: u64 = 56;
    /// The value is the time from the start to the first touch that serves the request, in ticks of
    /// the time-stamp counter; 0 if that touch is unknown.
    pub const CONNECTED: u64 = 64;
    /// The second invocation has ended; the value is its time in ticks of the time-stamp counter.
    pub const WARM: u64 = 72;
    /// The value is the number of repeated accesses of the first invocation.
    pub const REPEATED: u64 = 80;
    /// The value is the number of loads of the first invocation from pages that it never writes.
    pub const READ_ONLY_LOADS: u64 = 88;
    /// The number of touches of the first invocation in a class of times, with the class from bit
    /// [`CLASS_SHIFT`] on, if the guest measures times.
    pub const TOUCH_TIMES: u64 = 96;
    /// See [`TOUCH_TIMES`].
    pub const CLASS_SHIFT: u32 = 56;
}

/// Bits of the guest's fourth argument. The bits from [`KHZ_SHIFT`](mode::KHZ_SHIFT) on are the
/// frequency of the time-stamp counter in kHz.
pub mod mode {
    /// First bit of the frequency of the time-stamp counter.
    pub const KHZ_SHIFT: u32 = 32;
    /// The guest measures the time of its touches.
    pub const TIMED: u64 = 1;
    /// The guest serves a second invocation after the first.
    pub const TWICE: u64 = 2;
    /// The guest checks no memory after the timed loops; each touch is checked all the same.
    pub const UNCHECKED: u64 = 4;
}

#[cfg(test)]
#[path = "format_tests.rs"]
mod tests;
