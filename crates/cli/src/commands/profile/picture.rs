//! Guest memory as a picture: a row for each 2 MiB, a cell for each page.

use firn_base::PageRange;
use firn_bench::picture::{Anchor, Picture, Style};
use firn_snapshot::{PageSet, Profile};

/// Pages in a row: 2 MiB.
const ROW: u64 = 512;
/// Width of a cell.
const CELL: u64 = 2;
const MARGIN: f64 = 24.0;
const HEAD: f64 = 96.0;
/// The height from which rows get thinner.
const TALL: u64 = 1600;
const THICKEST: u64 = 12;

const INK: &str = "#1f2933";
const ZERO: &str = "#eef1f5";
const UNTOUCHED: &str = "#c3ccd6";
const FREE: &str = "#9cc9a0";
const AHEAD: &str = "#ecd9a0";
const WRITTEN: &str = "#b4441f";
/// Pages that were read, from the first to the last: by the order of faults, or by groups if that
/// is unknown.
const READ: [&str; 6] = ["#0d3b66", "#1f5a8c", "#2f6f9f", "#5b95c2", "#8fb9dc", "#b9d6ee"];

/// The state of a page. If several apply, a cell shows the last of them in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Untouched,
    Zero,
    Free,
    /// In a group, but not touched.
    Ahead,
    /// Read; the shade stands for the time.
    Read(usize),
    Written,
}

impl State {
    fn colour(self) -> &'static str {
        match self {
            Self::Untouched => UNTOUCHED,
            Self::Zero => ZERO,
            Self::Free => FREE,
            Self::Ahead => AHEAD,
            Self::Read(shade) => READ[shade.min(READ.len() - 1)],
            Self::Written => WRITTEN,
        }
    }
}

/// The picture as SVG.
pub(super) fn draw(profile: &Profile, zero: &PageSet, title: &str) -> String {
    let states = states(profile, zero);
    let rows = zero.pages().div_ceil(ROW).max(1);
    let thickness = (TALL / rows).clamp(1, THICKEST) as f64;
    let width = (ROW * CELL) as f64 + 2.0 * MARGIN;
    let mut picture = Picture::new(width, HEAD + rows as f64 * thickness + MARGIN);
    let style = |size| Style { size, colour: INK };
    picture.text((MARGIN, 34.0), style(18.0), Anchor::Start, title);
    let mut at = MARGIN;
    for (name, colours) in [
        ("zero", &[ZERO][..]),
        ("not touched", &[UNTOUCHED]),
        ("free at the freeze", &[FREE]),
        ("read ahead", &[AHEAD]),
        ("read, first to last", &READ),
        ("written", &[WRITTEN]),
    ] {
        for colour in colours {
            picture.rectangle((at, 52.0), (14.0, 14.0), colour, None);
            at += 14.0;
        }
        picture.text((at + 6.0, 64.0), style(13.0), Anchor::Start, name);
        at += 32.0 + 7.0 * name.len() as f64;
    }
    let legend = "each row is 2 MiB of guest memory, each cell a page";
    picture.text((MARGIN, HEAD - 8.0), style(12.0), Anchor::Start, legend);
    let mut page = 0;
    for (row, cells) in states.chunks(512).enumerate() {
        for run in cells.chunk_by(|a, b| a == b) {
            let x = MARGIN + ((page % ROW) * CELL) as f64;
            let place = (x, HEAD + row as f64 * thickness);
            let size = ((run.len() as u64 * CELL) as f64, thickness);
            picture.rectangle(place, size, run[0].colour(), None);
            page += run.len() as u64;
        }
    }
    picture.into_svg()
}

fn states(profile: &Profile, zero: &PageSet) -> Vec<State> {
    let pages = usize::try_from(zero.pages()).unwrap_or(usize::MAX);
    let mut states = vec![State::Untouched; pages];
    let mut paint = |runs: &mut dyn Iterator<Item = &PageRange>, state: State| {
        for page in runs.flat_map(PageRange::range).filter_map(|page| usize::try_from(page).ok()) {
            if let Some(place) = states.get_mut(page) {
                *place = state;
            }
        }
    };
    let zero: Vec<PageRange> = zero.to_ranges();
    paint(&mut zero.iter(), State::Zero);
    paint(&mut profile.free.iter().flatten(), State::Free);
    let groups = profile.groups.as_deref().unwrap_or_default();
    let shade = |group: usize| group * READ.len() / groups.len().max(1);
    // Without the order of faults it is unknown which pages of a group were touched.
    for (number, group) in groups.iter().enumerate() {
        let state =
            if profile.faults.is_some() { State::Ahead } else { State::Read(shade(number)) };
        paint(&mut group.iter(), state);
    }
    paint(&mut profile.cached.iter().flatten().map(|cached| &cached.run), State::Read(0));
    if let Some(faults) = &profile.faults {
        let count = faults.len().max(1);
        for (number, run) in faults.iter().enumerate() {
            paint(&mut std::iter::once(run), State::Read(number * READ.len() / count));
        }
    }
    paint(&mut profile.written.iter().flatten(), State::Written);
    states
}
