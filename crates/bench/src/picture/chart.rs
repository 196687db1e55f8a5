//! Charts: panels of horizontal bars, and of lines over a scale.

use super::{Anchor, Picture, Style};
use crate::text::number;

const WIDTH: f64 = 1000.0;
const LEFT: f64 = 270.0;
const RIGHT: f64 = 230.0;
const BAR: f64 = 22.0;
const STEP: f64 = 36.0;
const HEAD: f64 = 84.0;
/// Space above and below the bars of a panel.
const PANEL_TOP: f64 = 34.0;
const PANEL_BOTTOM: f64 = 56.0;
const FOOT: f64 = 34.0;
/// Height of a panel of lines.
const LINES: f64 = 260.0;

const INK: &str = "#1f2933";
const GREY: &str = "#66727f";
const GRID: &str = "#e3e8ee";
const WHISKER: &str = "#b4441f";
/// Colours of parts and lines, in order.
const COLOURS: [&str; 10] = [
    "#2f6f9f", "#8fc1e0", "#b4441f", "#d9a441", "#4c8c4a", "#7b5ea7", "#a65e7a", "#5b6770",
    "#c58f5c", "#3aa6a0",
];

/// A chart.
#[derive(Clone, Debug)]
pub(crate) struct Chart {
    /// Title of the chart.
    pub(crate) title: String,
    /// Names of the parts of the bars, in the order of their colours.
    pub(crate) legend: Vec<String>,
    /// Text after the legend.
    pub(crate) remark: String,
    /// Panels, from top to bottom.
    pub(crate) panels: Vec<Panel>,
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
    /// Names of the places on the scale, and one line over them for each compared item.
    Lines(Vec<String>, Vec<Line>),
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
    pub(crate) values: Vec<Option<f64>>,
}

impl Bar {
    /// The length of the bar and its whisker.
    fn end(&self) -> f64 {
        let whisker = self.whisker.map_or(0.0, |(_, to)| to);
        self.parts.iter().map(|(_, length)| length).sum::<f64>().max(whisker)
    }
}

impl Panel {
    fn height(&self) -> f64 {
        let marks = match &self.marks {
            Marks::Bars(bars) => STEP * bars.len() as f64,
            Marks::Lines(..) => LINES,
        };
        PANEL_TOP + marks + PANEL_BOTTOM
    }
}

impl Chart {
    /// The chart as an SVG document.
    pub(crate) fn svg(&self) -> String {
        let height = HEAD + self.panels.iter().map(Panel::height).sum::<f64>() + FOOT;
        let mut picture = Picture::new(WIDTH, height);
        picture.text((24.0, 34.0), ink(20.0), Anchor::Start, &self.title);
        let mut at = 24.0;
        for (part, name) in self.legend.iter().enumerate() {
            picture.rectangle((at, 50.0), (14.0, 14.0), colour(part), None);
            picture.text((at + 20.0, 62.0), ink(13.0), Anchor::Start, name);
            at += 40.0 + 7.0 * name.len() as f64;
        }
        picture.text((at, 62.0), grey(13.0), Anchor::Start, &self.remark);
        let mut top = HEAD;
        for panel in &self.panels {
            picture.text((24.0, top + 18.0), ink(15.0), Anchor::Start, &panel.title);
            match &panel.marks {
                Marks::Bars(bars) => draw_bars(&mut picture, top + PANEL_TOP, bars, &panel.unit),
                Marks::Lines(places, lines) => {
                    draw_lines(&mut picture, top + PANEL_TOP, places, lines, &panel.unit);
                }
            }
            top += panel.height();
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

fn draw_bars(picture: &mut Picture, upper: f64, bars: &[Bar], unit: &str) {
    let longest = bars.iter().map(Bar::end).fold(0.0, f64::max);
    let scale = (WIDTH - LEFT - RIGHT) / longest.max(f64::EPSILON);
    let lower = upper + STEP * bars.len() as f64;
    for tick in ticks(longest) {
        let x = LEFT + tick * scale;
        picture.line((x, upper), (x, lower), GRID, 1.0);
        picture.text((x, lower + 16.0), grey(11.0), Anchor::Middle, &number(tick));
    }
    let centre = LEFT + (WIDTH - LEFT - RIGHT) / 2.0;
    picture.text((centre, lower + 32.0), grey(12.0), Anchor::Middle, unit);
    let mut y = upper + (STEP - BAR) / 2.0;
    for bar in bars {
        picture.text((LEFT - 12.0, y + BAR - 6.0), ink(13.0), Anchor::End, &bar.name);
        let mut x = LEFT;
        for &(part, length) in &bar.parts {
            picture.rectangle((x, y), (length * scale, BAR), colour(part), None);
            x += length * scale;
        }
        if let Some((from, to)) = bar.whisker {
            let (from, to, middle) = (LEFT + from * scale, LEFT + to * scale, y + BAR / 2.0);
            picture.line((from, middle), (to, middle), WHISKER, 1.5);
            picture.line((to, middle - 5.0), (to, middle + 5.0), WHISKER, 1.5);
        }
        let value_at = LEFT + bar.end() * scale + 10.0;
        picture.text((value_at, y + BAR - 6.0), ink(12.0), Anchor::Start, &bar.value);
        y += STEP;
    }
}

fn draw_lines(picture: &mut Picture, upper: f64, places: &[String], lines: &[Line], unit: &str) {
    let values = || lines.iter().flat_map(|line| line.values.iter().flatten().copied());
    let highest = values().fold(0.0, f64::max);
    let scale = LINES / highest.max(f64::EPSILON);
    let (left, lower) = (90.0, upper + LINES);
    let width = WIDTH - left - RIGHT;
    for tick in ticks(highest) {
        let y = lower - tick * scale;
        picture.line((left, y), (left + width, y), GRID, 1.0);
        picture.text((left - 8.0, y + 4.0), grey(11.0), Anchor::End, &number(tick));
    }
    let apart = width / (places.len().max(2) - 1) as f64;
    let at = |place: usize| left + apart * place as f64;
    for (place, name) in places.iter().enumerate() {
        picture.text((at(place), lower + 16.0), grey(11.0), Anchor::Middle, name);
    }
    picture.text((left + width / 2.0, lower + 32.0), grey(12.0), Anchor::Middle, unit);
    // Each line's name stands at its end. Names that would overlap are moved apart.
    let mut ends: Vec<(f64, usize)> = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        let points = line.values.iter().enumerate();
        let points: Vec<(f64, f64)> = points
            .filter_map(|(place, value)| value.map(|value| (at(place), lower - value * scale)))
            .collect();
        for pair in points.windows(2) {
            picture.line(pair[0], pair[1], colour(index), 2.0);
        }
        for &(x, y) in &points {
            picture.rectangle((x - 3.0, y - 3.0), (6.0, 6.0), colour(index), None);
        }
        if let Some(&(_, y)) = points.last() {
            ends.push((y, index));
        }
    }
    ends.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut free = f64::MIN;
    for (y, index) in ends {
        let y = y.max(free);
        free = y + 15.0;
        let (at, style) =
            ((left + width + 12.0, y + 4.0), Style { size: 12.0, colour: colour(index) });
        picture.text(at, style, Anchor::Start, &lines[index].name);
    }
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
