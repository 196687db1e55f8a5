//! Charts: panels of horizontal bars, and of lines over a scale.

use super::{Anchor, Picture, Style};
use crate::text::number;

const WIDTH: f64 = 1000.0;
/// Space for the title and the legend, and for each line of remarks.
const TITLE: f64 = 50.0;
const REMARK: f64 = 18.0;
/// Space above and below the marks of a panel.
const PANEL_TOP: f64 = 34.0;
const PANEL_BOTTOM: f64 = 56.0;
const FOOT: f64 = 34.0;
/// Height of a panel of lines.
const LINES: f64 = 260.0;
/// Distance between the points of two lines at one place.
const APART: f64 = 5.0;
/// Width of a letter of the names of places.
const LETTER: f64 = 6.0;

const INK: &str = "#1f2933";
const GREY: &str = "#66727f";
const GRID: &str = "#e3e8ee";
/// Colours of parts and lines, in order: those of Okabe and Ito, which people with any colour
/// vision can tell apart, and others.
const COLOURS: [&str; 10] = [
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#5b6770", "#000000",
    "#7b5ea7", "#a6761d",
];

/// A chart.
#[derive(Clone, Debug)]
pub(crate) struct Chart {
    /// Title of the chart.
    pub(crate) title: String,
    /// Names of the parts of the bars, in the order of their colours.
    pub(crate) legend: Vec<String>,
    /// Text after the legend: the first line beside it, the others below.
    pub(crate) remarks: Vec<String>,
    /// Panels, row by row.
    pub(crate) panels: Vec<Panel>,
    /// Panels in a row.
    pub(crate) columns: usize,
    /// Text at the bottom: the host.
    pub(crate) foot: String,
}

/// Bars or lines that share a scale.
#[derive(Clone, Debug)]
pub(crate) struct Panel {
    /// Title of the panel.
    pub(crate) title: String,
    /// Unit of the scale.
    pub(crate) unit: String,
    /// Its bars or lines.
    pub(crate) marks: Marks,
}

/// How values are shown.
#[derive(Clone, Debug)]
pub(crate) enum Marks {
    /// One bar for each compared item.
    Bars(Vec<Bar>),
    /// One line for each compared item.
    Lines(Lines),
}

/// Lines over places.
#[derive(Clone, Debug)]
pub(crate) struct Lines {
    /// Names of the places on the scale.
    pub(crate) places: Vec<String>,
    /// One line over them for each compared item.
    pub(crate) lines: Vec<Line>,
    /// Whether the values have a logarithmic scale.
    pub(crate) log: bool,
    /// Whether the points of a line are joined: the places have an order.
    pub(crate) joined: bool,
}

/// A bar.
#[derive(Clone, Debug)]
pub(crate) struct Bar {
    /// Name of the compared item.
    pub(crate) name: String,
    /// Lengths of its parts, each with its index in the legend.
    pub(crate) parts: Vec<(usize, f64)>,
    /// Start and end of its whisker.
    pub(crate) whisker: Option<(f64, f64)>,
    /// Text after it.
    pub(crate) value: String,
}

/// A line.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    /// Name of the compared item.
    pub(crate) name: String,
    /// One value for each place, where there is one.
    pub(crate) values: Vec<Option<Point>>,
}

/// A value of a line.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Point {
    /// The value.
    pub(crate) value: f64,
    /// Start and end of its whisker.
    pub(crate) whisker: Option<(f64, f64)>,
}

impl From<f64> for Point {
    fn from(value: f64) -> Self {
        Self { value, whisker: None }
    }
}

impl Bar {
    /// The length of the bar and its whisker.
    fn end(&self) -> f64 {
        let whisker = self.whisker.map_or(0.0, |(_, to)| to);
        self.parts.iter().map(|(_, length)| length).sum::<f64>().max(whisker)
    }
}

impl Panel {
    fn height(&self, frame: &Frame) -> f64 {
        let marks = match &self.marks {
            Marks::Bars(bars) => frame.step * bars.len() as f64,
            Marks::Lines(_) => LINES,
        };
        PANEL_TOP + marks + PANEL_BOTTOM
    }
}

/// The place of a panel, and the sizes in it.
#[derive(Clone, Copy, Debug)]
struct Frame {
    x: f64,
    y: f64,
    width: f64,
    /// Space for the names of bars, beside lines, and to the right of both.
    names: f64,
    scale: f64,
    right: f64,
    /// Height of a bar, and distance of two.
    bar: f64,
    step: f64,
}

impl Frame {
    fn of(columns: usize) -> Self {
        let (x, y, width) = (24.0, 0.0, (WIDTH - 48.0) / columns.max(1) as f64);
        if columns > 1 {
            let (names, scale, right) = (112.0, 46.0, 124.0);
            return Self { x, y, width, names, scale, right, bar: 15.0, step: 22.0 };
        }
        let (names, scale, right) = (246.0, 66.0, 206.0);
        Self { x, y, width, names, scale, right, bar: 22.0, step: 36.0 }
    }
}

impl Chart {
    /// The chart as an SVG document.
    pub(crate) fn svg(&self) -> String {
        let frame = Frame::of(self.columns);
        let rows = || self.panels.chunks(self.columns.max(1));
        let row_height =
            |row: &[Panel]| row.iter().map(|panel| panel.height(&frame)).fold(0.0, f64::max);
        let head = TITLE + REMARK * self.remarks.len().max(1) as f64 + 16.0;
        let height = head + rows().map(row_height).sum::<f64>() + FOOT;
        let mut picture = Picture::new(WIDTH, height);
        picture.text((24.0, 34.0), ink(20.0), Anchor::Start, &self.title);
        let mut at = 24.0;
        for (part, name) in self.legend.iter().enumerate() {
            picture.rectangle((at, TITLE), (14.0, 14.0), colour(part), None);
            picture.text((at + 20.0, TITLE + 12.0), ink(13.0), Anchor::Start, name);
            at += 40.0 + 7.0 * name.len() as f64;
        }
        let mut line = TITLE + 12.0;
        for remark in &self.remarks {
            picture.text((at, line), grey(12.0), Anchor::Start, remark);
            (at, line) = (24.0, line + REMARK);
        }
        let mut y = head;
        for row in rows() {
            for (column, panel) in row.iter().enumerate() {
                let frame = Frame { x: frame.x + frame.width * column as f64, y, ..frame };
                picture.text((frame.x, y + 18.0), ink(15.0), Anchor::Start, &panel.title);
                let below = Frame { y: y + PANEL_TOP, ..frame };
                match &panel.marks {
                    Marks::Bars(bars) => draw_bars(&mut picture, &below, bars, &panel.unit),
                    Marks::Lines(lines) => draw_lines(&mut picture, &below, lines, &panel.unit),
                }
            }
            y += row_height(row);
        }
        picture.text((24.0, height - 16.0), grey(11.0), Anchor::Start, &self.foot);
        picture.into_svg()
    }
}

fn colour(part: usize) -> &'static str {
    COLOURS[part % COLOURS.len()]
}

fn ink(size: f64) -> Style {
    Style { size, colour: INK }
}

fn grey(size: f64) -> Style {
    Style { size, colour: GREY }
}

fn draw_bars(picture: &mut Picture, frame: &Frame, bars: &[Bar], unit: &str) {
    let longest = bars.iter().map(Bar::end).fold(0.0, f64::max);
    let (left, width) = (frame.x + frame.names, frame.width - frame.names - frame.right);
    let scale = width / longest.max(f64::EPSILON);
    let lower = frame.y + frame.step * bars.len() as f64;
    for tick in ticks(longest) {
        let x = left + tick * scale;
        picture.line((x, frame.y), (x, lower), GRID, 1.0);
        picture.text((x, lower + 16.0), grey(11.0), Anchor::Middle, &number(tick));
    }
    let centre = left + width / 2.0;
    picture.text((centre, lower + 32.0), grey(12.0), Anchor::Middle, unit);
    let mut y = frame.y + (frame.step - frame.bar) / 2.0;
    for bar in bars {
        let (base, middle) = (y + frame.bar / 2.0 + 4.5, y + frame.bar / 2.0);
        picture.text((left - 8.0, base), ink(12.0), Anchor::End, &bar.name);
        let mut x = left;
        for &(part, length) in &bar.parts {
            picture.rectangle((x, y), (length * scale, frame.bar), colour(part), None);
            x += length * scale;
        }
        if let Some((from, to)) = bar.whisker {
            let (from, to) = (left + from * scale, left + to * scale);
            picture.line((from, middle), (to, middle), INK, 1.5);
            for end in [from, to] {
                picture.line((end, middle - 4.0), (end, middle + 4.0), INK, 1.5);
            }
        }
        let value_at = left + bar.end() * scale + 10.0;
        picture.text((value_at, base), ink(12.0), Anchor::Start, &bar.value);
        y += frame.step;
    }
}

fn draw_lines(picture: &mut Picture, frame: &Frame, marks: &Lines, unit: &str) {
    let Lines { places, lines, log, joined } = marks;
    let points = lines.iter().flat_map(|line| line.values.iter().flatten());
    let values = points.flat_map(|point| {
        let (from, to) = point.whisker.unwrap_or((point.value, point.value));
        [from, point.value, to]
    });
    let axis = Axis::of(values, *log);
    let (left, lower) = (frame.x + frame.scale, frame.y + LINES);
    let width = frame.width - frame.scale - frame.right;
    for tick in axis.ticks() {
        let y = lower - axis.part(tick) * LINES;
        picture.line((left, y), (left + width, y), GRID, 1.0);
        picture.text((left - 8.0, y + 4.0), grey(11.0), Anchor::End, &number(tick));
    }
    // Points of several lines at one place stand beside each other.
    let beside = APART * (lines.len().max(1) - 1) as f64;
    let apart = (width - beside) / (places.len().max(2) - 1) as f64;
    let at = |place: usize| left + apart * place as f64;
    let longest = places.iter().map(String::len).max().unwrap_or_default() as f64 * LETTER;
    for (place, name) in places.iter().enumerate() {
        // Long names take two rows.
        let lowered = if longest > apart && place % 2 == 1 { 13.0 } else { 0.0 };
        let at = (at(place) + beside / 2.0, lower + 16.0 + lowered);
        picture.text(at, grey(11.0), Anchor::Middle, name);
    }
    let centre = left + width / 2.0;
    picture.text((centre, lower + 44.0), grey(12.0), Anchor::Middle, unit);
    // Each line's name stands at its end. Names that would overlap are moved apart.
    let mut ends: Vec<(f64, usize)> = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        let height = |value: f64| lower - axis.part(value) * LINES;
        let mut before: Option<(f64, f64)> = None;
        for (place, point) in line.values.iter().enumerate() {
            let Some(point) = point else { continue };
            let here = (at(place) + APART * index as f64, height(point.value));
            if let Some(before) = before.filter(|_| *joined) {
                picture.line(before, here, colour(index), 2.0);
            }
            if let Some((from, to)) = point.whisker {
                let (x, from, to) = (here.0, height(from), height(to));
                picture.line((x, from), (x, to), colour(index), 1.5);
                for end in [from, to] {
                    picture.line((x - 2.5, end), (x + 2.5, end), colour(index), 1.5);
                }
            }
            picture.rectangle((here.0 - 3.0, here.1 - 3.0), (6.0, 6.0), colour(index), None);
            before = Some(here);
        }
        if let Some((_, y)) = before {
            ends.push((y, index));
        }
    }
    ends.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut free = f64::MIN;
    for (y, index) in ends {
        let y = y.max(free);
        free = y + 15.0;
        let x = left + width + 10.0;
        picture.rectangle((x, y - 5.0), (10.0, 10.0), colour(index), None);
        picture.text((x + 15.0, y + 4.0), ink(12.0), Anchor::Start, &lines[index].name);
    }
}

/// The scale of a panel of lines.
#[derive(Clone, Copy, Debug)]
struct Axis {
    log: bool,
    from: f64,
    to: f64,
}

impl Axis {
    /// A scale for these values. A logarithmic one has no values from 0 down.
    fn of(values: impl Iterator<Item = f64>, log: bool) -> Self {
        let (low, high) = values
            .filter(|value| !log || *value > 0.0)
            .fold((f64::MAX, 0.0), |(low, high), value| (value.min(low), value.max(high)));
        if !log || high <= 0.0 {
            return Self { log: false, from: 0.0, to: high };
        }
        let from = round_steps(low / 10.0).take_while(|step| *step <= low).last().unwrap_or(low);
        Self { log, from, to: high.max(from * 10.0) }
    }

    /// Where a value is on the scale, from 0 to 1.
    fn part(&self, value: f64) -> f64 {
        if self.log {
            let value = value.max(self.from);
            return (value / self.from).log10() / (self.to / self.from).log10();
        }
        value / self.to.max(f64::EPSILON)
    }

    fn ticks(&self) -> Vec<f64> {
        if !self.log {
            return ticks(self.to).collect();
        }
        let all = round_steps(self.from).skip_while(|tick| *tick < self.from * 0.999);
        let all: Vec<f64> = all.take_while(|tick| *tick <= self.to * 1.0001).collect();
        if all.len() <= 12 {
            return all;
        }
        all.into_iter().filter(|tick| (tick.log10() - tick.log10().round()).abs() < 1e-9).collect()
    }
}

/// 1, 2 and 5 times each power of ten, from the power at or below a value.
fn round_steps(from: f64) -> impl Iterator<Item = f64> {
    let power = from.log10().floor();
    (0..).flat_map(move |more| {
        let power = 10f64.powf(power + f64::from(more));
        [1.0, 2.0, 5.0].map(|step| step * power)
    })
}

/// The ticks of a scale that ends at `longest`.
fn ticks(longest: f64) -> impl Iterator<Item = f64> {
    let step = tick(longest);
    std::iter::successors(Some(0.0), move |tick| Some(tick + step))
        .take_while(move |tick| *tick <= longest * 1.0001)
}

/// The distance between ticks: 1, 2 or 5 times a power of ten, so that there are four to ten of
/// them.
fn tick(longest: f64) -> f64 {
    if longest <= 0.0 {
        return 1.0;
    }
    let power = 10f64.powf((longest / 4.0).log10().floor());
    let steps = [5.0, 2.0].into_iter().map(|step| step * power);
    steps.into_iter().find(|step| longest / step >= 4.0).unwrap_or(power)
}

#[cfg(test)]
#[path = "chart_tests.rs"]
mod tests;
