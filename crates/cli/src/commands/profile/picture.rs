//! Guest memory as a picture: a row for each 2 MiB, a cell for each page.

use std::fmt::Write;

use firn_snapshot::{PageSet, Profile, Run};

/// Pages in a row: 2 MiB.
const ROW: u64 = 512;
/// Width of a cell.
const CELL: u64 = 2;
const MARGIN: u64 = 24;
const HEAD: u64 = 96;
/// A tall picture's rows get thinner.
const TALL: u64 = 1600;
const THICKEST: u64 = 12;

const ZERO: &str = "#eef1f5";
const UNTOUCHED: &str = "#c3ccd6";
const FREE: &str = "#9cc9a0";
const AHEAD: &str = "#ecd9a0";
const WRITTEN: &str = "#b4441f";
/// What was read, from the first to the last: by the order of faults, or by groups where that is not known.
const READ: [&str; 6] = ["#0d3b66", "#1f5a8c", "#2f6f9f", "#5b95c2", "#8fb9dc", "#b9d6ee"];

/// What a cell shows. Where several hold, the last in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Untouched,
    Zero,
    Free,
    /// In a group, and not touched.
    Ahead,
    /// The shade of its time.
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
    let thickness = (TALL / rows).clamp(1, THICKEST);
    let (width, height) = (ROW * CELL + 2 * MARGIN, HEAD + rows * thickness + MARGIN);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
         height=\"{height}\" font-family=\"Helvetica, Arial, sans-serif\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>\n"
    );
    text(&mut svg, MARGIN, 34, 18, title);
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
            rectangle(&mut svg, (at, 52), (14, 14), colour);
            at += 14;
        }
        text(&mut svg, at + 6, 64, 13, name);
        at += 32 + 7 * name.len() as u64;
    }
    text(&mut svg, MARGIN, HEAD - 8, 12, "each row is 2 MiB of guest memory, each cell a page");
    let mut page = 0;
    for (row, cells) in (0..).zip(states.chunks(512)) {
        for run in cells.chunk_by(|a, b| a == b) {
            let place = (MARGIN + (page % ROW) * CELL, HEAD + row * thickness);
            let size = (run.len() as u64 * CELL, thickness);
            rectangle(&mut svg, place, size, run[0].colour());
            page += run.len() as u64;
        }
    }
    svg.push_str("</svg>\n");
    svg
}

fn states(profile: &Profile, zero: &PageSet) -> Vec<State> {
    let pages = usize::try_from(zero.pages()).unwrap_or(usize::MAX);
    let mut states = vec![State::Untouched; pages];
    let mut paint = |runs: &mut dyn Iterator<Item = &Run>, state: State| {
        for page in runs.flat_map(Run::range).filter_map(|page| usize::try_from(page).ok()) {
            if let Some(place) = states.get_mut(page) {
                *place = state;
            }
        }
    };
    let zero: Vec<Run> = zero.runs().map(Run::from).collect();
    paint(&mut zero.iter(), State::Zero);
    paint(&mut profile.free.iter().flatten(), State::Free);
    let groups = profile.groups.as_deref().unwrap_or_default();
    let shade = |group: usize| group * READ.len() / groups.len().max(1);
    // Without the fault order nobody knows what of a group was touched.
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

fn rectangle(svg: &mut String, (x, y): (u64, u64), (width, height): (u64, u64), colour: &str) {
    let _ = writeln!(
        svg,
        "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" fill=\"{colour}\"/>"
    );
}

fn text(svg: &mut String, x: u64, y: u64, size: u64, text: &str) {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let _ = writeln!(
        svg,
        "<text x=\"{x}\" y=\"{y}\" font-size=\"{size}\" fill=\"#1f2933\">{text}</text>"
    );
}
