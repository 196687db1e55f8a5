//! Pictures of measurements: panels of horizontal bars, and lines over a scale, as SVG.

use std::fmt::Write;

const WIDTH: f64 = 1000.0;
const LEFT: f64 = 270.0;
const RIGHT: f64 = 230.0;
const BAR: f64 = 22.0;
const STEP: f64 = 36.0;
const HEAD: f64 = 84.0;
/// Of a panel, above its bars and below them.
const PANEL_TOP: f64 = 34.0;
const PANEL_BOTTOM: f64 = 56.0;
const FOOT: f64 = 34.0;
/// Height of a panel of lines.
const LINES: f64 = 260.0;

const INK: &str = "#1f2933";
const QUIET: &str = "#66727f";
const GRID: &str = "#e3e8ee";
const WHISKER: &str = "#b4441f";
/// Colours of parts and lines, in order.
const COLOURS: [&str; 10] = [
    "#2f6f9f", "#8fc1e0", "#b4441f", "#d9a441", "#4c8c4a", "#7b5ea7", "#a65e7a", "#5b6770",
    "#c58f5c", "#3aa6a0",
];

/// A picture.
#[derive(Clone, Debug)]
pub struct Chart {
    /// What it is.
    pub title: String,
    /// Names of the parts of bars, in the order of their colours.
    pub legend: Vec<String>,
    /// Said behind the legend.
    pub remark: String,
    /// Its panels, from top to bottom.
    pub panels: Vec<Panel>,
    /// Where it was measured.
    pub foot: String,
}

/// What shares one scale.
#[derive(Clone, Debug)]
pub struct Panel {
    /// What it shows.
    pub title: String,
    /// What is on the scale.
    pub unit: String,
    /// What is in it.
    pub marks: Marks,
}

/// How values are shown.
#[derive(Clone, Debug)]
pub enum Marks {
    /// One bar for each thing that is compared.
    Bars(Vec<Bar>),
    /// One line for each thing that is compared, over the same places, each with a name.
    Lines(Vec<String>, Vec<Line>),
}

/// A bar.
#[derive(Clone, Debug)]
pub struct Bar {
    /// What it is of.
    pub name: String,
    /// Lengths of its parts, each with its place in the legend.
    pub parts: Vec<(usize, f64)>,
    /// A whisker, from and to.
    pub whisker: Option<(f64, f64)>,
    /// Said behind it.
    pub value: String,
}

/// A line.
#[derive(Clone, Debug)]
pub struct Line {
    /// What it is of.
    pub name: String,
    /// Its values, one for each place; `None` where there is none.
    pub values: Vec<Option<f64>>,
}

impl Bar {
    /// How far it reaches.
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
    /// The picture as SVG.
    #[must_use]
    pub fn svg(&self) -> String {
        let height = HEAD + self.panels.iter().map(Panel::height).sum::<f64>() + FOOT;
        let mut svg = Svg(String::new());
        svg.line(&format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
             height=\"{height}\" font-family=\"Helvetica, Arial, sans-serif\">"
        ));
        svg.line(&format!("<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>"));
        svg.text(24.0, 34.0, 20.0, INK, "start", &self.title);
        let mut at = 24.0;
        for (part, name) in self.legend.iter().enumerate() {
            svg.rect(at, 50.0, 14.0, 14.0, colour(part));
            svg.text(at + 20.0, 62.0, 13.0, INK, "start", name);
            at += 40.0 + 7.0 * name.len() as f64;
        }
        svg.text(at, 62.0, 13.0, QUIET, "start", &self.remark);
        let mut top = HEAD;
        for panel in &self.panels {
            svg.text(24.0, top + 18.0, 15.0, INK, "start", &panel.title);
            match &panel.marks {
                Marks::Bars(bars) => svg.bars(top + PANEL_TOP, bars, &panel.unit),
                Marks::Lines(places, lines) => {
                    svg.lines(top + PANEL_TOP, places, lines, &panel.unit);
                }
            }
            top += panel.height();
        }
        svg.text(24.0, height - 16.0, 11.0, QUIET, "start", &self.foot);
        svg.line("</svg>");
        svg.0
    }
}

fn colour(part: usize) -> &'static str {
    COLOURS[part % COLOURS.len()]
}

struct Svg(String);

impl Svg {
    fn line(&mut self, text: &str) {
        self.0.push_str(text);
        self.0.push('\n');
    }

    fn element(&mut self, arguments: std::fmt::Arguments<'_>) {
        // A String takes everything that is written to it.
        let _ = self.0.write_fmt(arguments);
        self.0.push('\n');
    }

    fn text(&mut self, x: f64, y: f64, size: f64, colour: &str, anchor: &str, text: &str) {
        let text = escaped(text);
        self.element(format_args!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{size}\" fill=\"{colour}\" \
             text-anchor=\"{anchor}\">{text}</text>"
        ));
    }

    fn rect(&mut self, x: f64, y: f64, width: f64, height: f64, colour: &str) {
        self.element(format_args!(
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{colour}\"/>"
        ));
    }

    fn stroke(&mut self, from: (f64, f64), to: (f64, f64), colour: &str, width: f64) {
        let ((x1, y1), (x2, y2)) = (from, to);
        self.element(format_args!(
            "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{colour}\" \
             stroke-width=\"{width}\"/>"
        ));
    }

    fn bars(&mut self, upper: f64, bars: &[Bar], unit: &str) {
        let longest = bars.iter().map(Bar::end).fold(0.0, f64::max);
        let scale = (WIDTH - LEFT - RIGHT) / longest.max(f64::EPSILON);
        let lower = upper + STEP * bars.len() as f64;
        for tick in ticks(longest) {
            let x = LEFT + tick * scale;
            self.stroke((x, upper), (x, lower), GRID, 1.0);
            self.text(x, lower + 16.0, 11.0, QUIET, "middle", &number(tick));
        }
        self.text(LEFT + (WIDTH - LEFT - RIGHT) / 2.0, lower + 32.0, 12.0, QUIET, "middle", unit);
        let mut y = upper + (STEP - BAR) / 2.0;
        for bar in bars {
            self.text(LEFT - 12.0, y + BAR - 6.0, 13.0, INK, "end", &bar.name);
            let mut x = LEFT;
            for &(part, length) in &bar.parts {
                self.rect(x, y, length * scale, BAR, colour(part));
                x += length * scale;
            }
            if let Some((from, to)) = bar.whisker {
                let (from, to, middle) = (LEFT + from * scale, LEFT + to * scale, y + BAR / 2.0);
                self.stroke((from, middle), (to, middle), WHISKER, 1.5);
                self.stroke((to, middle - 5.0), (to, middle + 5.0), WHISKER, 1.5);
            }
            let behind = LEFT + bar.end() * scale + 10.0;
            self.text(behind, y + BAR - 6.0, 12.0, INK, "start", &bar.value);
            y += STEP;
        }
    }

    fn lines(&mut self, upper: f64, places: &[String], lines: &[Line], unit: &str) {
        let values = || lines.iter().flat_map(|line| line.values.iter().flatten().copied());
        let highest = values().fold(0.0, f64::max);
        let scale = LINES / highest.max(f64::EPSILON);
        let (left, lower) = (90.0, upper + LINES);
        let width = WIDTH - left - RIGHT;
        for tick in ticks(highest) {
            let y = lower - tick * scale;
            self.stroke((left, y), (left + width, y), GRID, 1.0);
            self.text(left - 8.0, y + 4.0, 11.0, QUIET, "end", &number(tick));
        }
        let apart = width / (places.len().max(2) - 1) as f64;
        let at = |place: usize| left + apart * place as f64;
        for (place, name) in places.iter().enumerate() {
            self.text(at(place), lower + 16.0, 11.0, QUIET, "middle", name);
        }
        self.text(left + width / 2.0, lower + 32.0, 12.0, QUIET, "middle", unit);
        // Names stand at the ends of their lines, moved apart where they would meet.
        let mut ends: Vec<(f64, usize)> = Vec::new();
        for (index, line) in lines.iter().enumerate() {
            let points = line.values.iter().enumerate();
            let points: Vec<(f64, f64)> = points
                .filter_map(|(place, value)| value.map(|value| (at(place), lower - value * scale)))
                .collect();
            for pair in points.windows(2) {
                self.stroke(pair[0], pair[1], colour(index), 2.0);
            }
            for &(x, y) in &points {
                self.rect(x - 3.0, y - 3.0, 6.0, 6.0, colour(index));
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
            self.text(
                left + width + 12.0,
                y + 4.0,
                12.0,
                colour(index),
                "start",
                &lines[index].name,
            );
        }
    }
}

/// Places of ticks up to a value.
fn ticks(longest: f64) -> impl Iterator<Item = f64> {
    let step = tick(longest);
    std::iter::successors(Some(0.0), move |tick| Some(tick + step))
        .take_while(move |tick| *tick <= longest * 1.0001)
}

/// The distance between ticks: 1, 2 or 5 times a power of ten, so that there are four to ten.
fn tick(longest: f64) -> f64 {
    if longest <= 0.0 {
        return 1.0;
    }
    let power = 10f64.powf((longest / 4.0).log10().floor());
    let steps = [5.0, 2.0].into_iter().map(|step| step * power);
    steps.into_iter().find(|step| longest / step >= 4.0).unwrap_or(power)
}

/// A number for people: three digits.
pub fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        size if size < 10.0 => format!("{value:.2}"),
        size if size < 100.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

/// Text that is no markup.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '&' => escaped.push_str("&amp;"),
            '"' => escaped.push_str("&quot;"),
            // XML has no way to write control characters.
            c if c.is_control() => escaped.push(' '),
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
#[path = "chart_tests.rs"]
mod tests;
