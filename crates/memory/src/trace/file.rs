//! The file format of a trace: deflated columns of small numbers.

use std::io::Read;

use firn_base::num::usize_of;
use firn_snapshot::{MemoryLayout, PageSet};
use flate2::Compression;
use flate2::read::{DeflateDecoder, DeflateEncoder};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::{Access, Again, Repeat, Touch, Toucher, Trace, TraceError, TraceOrigin};
use crate::plan::Leaf;

/// The version of the file format that this firn writes. It also reads earlier versions.
pub(super) const TRACE_VERSION: u32 = 3;

/// The first version. Its body ends with the columns and has no free pages.
const WITHOUT_FREE: u32 = 1;
/// The version whose body ends with the free pages and has no repeated accesses.
const WITHOUT_AGAIN: u32 = 2;

const MAGIC: [u8; 8] = *b"FIRNTRCE";
/// Magic, version and CRC-32 of the rest.
const HEADER_LEN: usize = 16;
/// The largest inflated body, in bytes: enough for a guest of 16 GiB with every page touched.
const MAX_BODY: u64 = 256 << 20;

/// Why a trace was not encoded.
#[derive(Debug, Error)]
pub enum EncodeTraceError {
    /// Its parts could not be encoded.
    #[error("cannot encode the trace's columns")]
    Columns(#[source] postcard::Error),
    /// It could not be compressed.
    #[error("cannot compress the trace")]
    Compress(#[source] std::io::Error),
    /// It is larger than the limit for reading.
    #[error(
        "the trace has {0} bytes, but only {MAX_BODY} can be read; record a shorter invocation"
    )]
    TooLarge(usize),
}

/// Why bytes are not a valid trace.
#[derive(Debug, Error)]
pub enum DecodeTraceError {
    /// The magic is missing.
    #[error("this is not a trace: it does not start with {:?}", String::from_utf8_lossy(&MAGIC))]
    Magic,
    /// The version is not supported.
    #[error(
        "the trace has version {0}, but this firn reads {WITHOUT_FREE} to {TRACE_VERSION}; record it again, or use a newer firn"
    )]
    Version(u32),
    /// The bytes changed since they were written.
    #[error("the trace is damaged: its checksum is wrong")]
    Checksum,
    /// The body cannot be inflated.
    #[error("the trace's body cannot be inflated")]
    Inflate(#[source] std::io::Error),
    /// The inflated body is larger than any trace.
    #[error("the trace's body is larger than {MAX_BODY} bytes")]
    TooLarge,
    /// The columns cannot be read.
    #[error("the trace's columns cannot be read")]
    Columns(#[source] postcard::Error),
    /// The columns contradict each other.
    #[error("the trace's columns contradict each other: {0}")]
    Contradiction(&'static str),
    /// The touches are not valid.
    #[error("the trace's touches are not valid")]
    Touches(#[from] TraceError),
}

/// The start of the body. From version 2 on, the optional runs of the free set follow; from version
/// 3 on, the optional [`AgainColumns`]. Columns compress far better than rows.
#[derive(Serialize, Deserialize)]
struct Columns {
    origin: TraceOrigin,
    layout: MemoryLayout,
    /// The zero map, as [`runs`].
    runs: Vec<u64>,
    touches: TouchColumns,
}

#[derive(Serialize, Deserialize)]
struct TouchColumns {
    /// The difference of each page to the previous page.
    pages: Vec<i64>,
    /// Access, toucher and leaf of each touch.
    kinds: Vec<u8>,
    gaps: Vec<u64>,
}

#[derive(Serialize, Deserialize)]
struct AgainColumns {
    period: u64,
    request: u64,
    /// For each repeat, the number of touches since the previous repeat.
    steps: Vec<u64>,
    repeats: TouchColumns,
    second: TouchColumns,
}

impl Trace {
    /// Encodes the trace as the bytes of a file.
    ///
    /// # Errors
    /// See [`EncodeTraceError`].
    pub fn encode(&self) -> Result<Vec<u8>, EncodeTraceError> {
        let columns = Columns {
            origin: self.origin.clone(),
            layout: self.layout.clone(),
            runs: runs(&self.zero_map),
            touches: TouchColumns::of(self.touches.iter()),
        };
        let free = self.free.as_ref().map(runs);
        let again = self.again.as_ref().map(AgainColumns::of);
        let body =
            postcard::to_stdvec(&(columns, free, again)).map_err(EncodeTraceError::Columns)?;
        if body.len() as u64 > MAX_BODY {
            return Err(EncodeTraceError::TooLarge(body.len()));
        }
        let mut packed = Vec::new();
        DeflateEncoder::new(&*body, Compression::best())
            .read_to_end(&mut packed)
            .map_err(EncodeTraceError::Compress)?;
        let mut file = MAGIC.to_vec();
        file.extend(TRACE_VERSION.to_le_bytes());
        file.extend(crc32fast::hash(&packed).to_le_bytes());
        file.extend(packed);
        Ok(file)
    }

    /// Decodes a trace from the bytes of a file.
    ///
    /// # Errors
    /// See [`DecodeTraceError`].
    pub fn decode(file: &[u8]) -> Result<Self, DecodeTraceError> {
        let (header, packed) =
            file.split_first_chunk::<HEADER_LEN>().ok_or(DecodeTraceError::Magic)?;
        if header[..8] != MAGIC {
            return Err(DecodeTraceError::Magic);
        }
        let word = |at: usize| {
            u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
        };
        if !(WITHOUT_FREE..=TRACE_VERSION).contains(&word(8)) {
            return Err(DecodeTraceError::Version(word(8)));
        }
        if word(12) != crc32fast::hash(packed) {
            return Err(DecodeTraceError::Checksum);
        }
        let mut body = Vec::new();
        DeflateDecoder::new(packed)
            .take(MAX_BODY + 1)
            .read_to_end(&mut body)
            .map_err(DecodeTraceError::Inflate)?;
        if body.len() as u64 > MAX_BODY {
            return Err(DecodeTraceError::TooLarge);
        }
        let (columns, rest) =
            postcard::take_from_bytes::<Columns>(&body).map_err(DecodeTraceError::Columns)?;
        let mut trace = columns.into_trace()?;
        if word(8) == WITHOUT_FREE {
            return Ok(trace);
        }
        let (free, rest) = postcard::take_from_bytes::<Option<Vec<u64>>>(rest)
            .map_err(DecodeTraceError::Columns)?;
        if let Some(free) = free {
            let free = page_set(&free, trace.layout.pages()).ok_or(
                DecodeTraceError::Contradiction("its free set is not as long as its memory"),
            )?;
            trace = trace.with_free(free)?;
        }
        if word(8) == WITHOUT_AGAIN {
            return Ok(trace);
        }
        let (again, rest) = postcard::take_from_bytes::<Option<AgainColumns>>(rest)
            .map_err(DecodeTraceError::Columns)?;
        if !rest.is_empty() {
            return Err(DecodeTraceError::Contradiction("bytes follow them"));
        }
        match again {
            Some(again) => Ok(trace.with_again(again.into_again()?)?),
            None => Ok(trace),
        }
    }
}

impl Columns {
    fn into_trace(self) -> Result<Trace, DecodeTraceError> {
        let Self { origin, layout, runs, touches } = self;
        let zero_map = page_set(&runs, layout.pages())
            .ok_or(DecodeTraceError::Contradiction("its zero map is not as long as its memory"))?;
        Ok(Trace::new(origin, layout, zero_map, touches.into_touches()?)?)
    }
}

impl TouchColumns {
    fn of<'a>(touches: impl Iterator<Item = &'a Touch> + Clone) -> Self {
        let mut before = 0;
        let pages = touches.clone().map(|touch| {
            let step = touch.page.cast_signed() - before;
            before = touch.page.cast_signed();
            step
        });
        Self {
            pages: pages.collect(),
            kinds: touches.clone().copied().map(kind).collect(),
            gaps: touches.map(|touch| touch.gap).collect(),
        }
    }

    fn into_touches(self) -> Result<Vec<Touch>, DecodeTraceError> {
        let Self { pages, kinds, gaps } = self;
        if pages.len() != kinds.len() || pages.len() != gaps.len() {
            return Err(DecodeTraceError::Contradiction("they differ in length"));
        }
        let mut touches = Vec::with_capacity(pages.len());
        let mut page = 0_u64;
        for ((step, kind), gap) in pages.into_iter().zip(kinds).zip(gaps) {
            page = page
                .checked_add_signed(step)
                .ok_or(DecodeTraceError::Contradiction("a page before the first"))?;
            let (access, by, leaf) =
                parts(kind).ok_or(DecodeTraceError::Contradiction("an unknown kind of touch"))?;
            touches.push(Touch { page, access, by, leaf, gap });
        }
        Ok(touches)
    }
}

impl AgainColumns {
    fn of(again: &Again) -> Self {
        let mut before = 0;
        let steps = again.repeats.iter().map(|repeat| {
            let step = repeat.after - before;
            before = repeat.after;
            step as u64
        });
        Self {
            period: again.period,
            request: again.request as u64,
            steps: steps.collect(),
            repeats: TouchColumns::of(again.repeats.iter().map(|repeat| &repeat.touch)),
            second: TouchColumns::of(again.second.iter()),
        }
    }

    fn into_again(self) -> Result<Again, DecodeTraceError> {
        let Self { period, request, steps, repeats, second } = self;
        let touches = repeats.into_touches()?;
        if steps.len() != touches.len() {
            return Err(DecodeTraceError::Contradiction("they differ in length"));
        }
        let mut after = 0_u64;
        let mut repeats = Vec::with_capacity(touches.len());
        for (step, touch) in steps.into_iter().zip(touches) {
            after = after.saturating_add(step);
            repeats.push(Repeat { after: usize_of(after), touch });
        }
        let second = second.into_touches()?;
        Ok(Again { period, request: usize_of(request), repeats, second })
    }
}

/// The lengths of alternating runs of pages in the set and not in it, starting with pages in it
/// (possibly 0).
fn runs(set: &PageSet) -> Vec<u64> {
    let mut runs = Vec::new();
    for (pages, set) in set.split(0..set.pages()) {
        if runs.is_empty() && !set {
            runs.push(0);
        }
        runs.push(pages.end - pages.start);
    }
    runs
}

fn page_set(runs: &[u64], pages: u64) -> Option<PageSet> {
    let mut map = PageSet::new(pages);
    let mut start = 0_u64;
    for (index, run) in runs.iter().enumerate() {
        let end = start.checked_add(*run).filter(|end| *end <= pages)?;
        if index.is_multiple_of(2) {
            map.insert_range(start..end);
        }
        start = end;
    }
    (start == pages).then_some(map)
}

const ACCESSES: [Access; 3] = [Access::Read, Access::Write, Access::LaterWrite];
const TOUCHERS: [Toucher; 3] = [Toucher::Instruction, Toucher::Walk, Toucher::Device];
const LEAVES: [Leaf; 3] = [Leaf::Size4K, Leaf::Size2M, Leaf::Size1G];

/// Access in bits 0 and 1, toucher in bits 2 and 3, leaf in bits 4 and 5, as indexes of the lists
/// above.
fn kind(touch: Touch) -> u8 {
    let access = match touch.access {
        Access::Read => 0,
        Access::Write => 1,
        Access::LaterWrite => 2,
    };
    let by = match touch.by {
        Toucher::Instruction => 0,
        Toucher::Walk => 1,
        Toucher::Device => 2,
    };
    let leaf = match touch.leaf {
        Leaf::Size4K => 0,
        Leaf::Size2M => 1,
        Leaf::Size1G => 2,
    };
    access | by << 2 | leaf << 4
}

fn parts(kind: u8) -> Option<(Access, Toucher, Leaf)> {
    let place = |shift: u8| usize::from(kind >> shift & 3);
    (kind < 1 << 6).then_some(())?;
    Some((*ACCESSES.get(place(0))?, *TOUCHERS.get(place(2))?, *LEAVES.get(place(4))?))
}
