//! Results as a picture: a bar for each planner, split where the guest resumes, with a whisker to the 95th percentile.

use std::fmt::Write;

use crate::cache::Cache;
use crate::results::{Results, Row};

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

const INK: &str = "#1f2933";
const QUIET: &str = "#66727f";
const GRID: &str = "#e3e8ee";
const BEFORE: &str = "#2f6f9f";
const AFTER: &str = "#8fc1e0";
const WHISKER: &str = "#b4441f";

/// Draws results. Where there are more microVMs than processors, the bars are processor time for each page, because
/// wall times say little.
#[must_use]
pub fn draw(results: &Results) -> String {
    let panels = panels(&results.results);
    let bars = |panel: &&[&Row]| STEP * panel.len() as f64;
    let height = HEAD
        + panels.iter().map(|p| PANEL_TOP + bars(&p.as_slice()) + PANEL_BOTTOM).sum::<f64>()
        + FOOT;
    let mut svg = Svg(String::new());
    svg.line(&format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
         height=\"{height}\" font-family=\"Helvetica, Arial, sans-serif\">"
    ));
    svg.line(&format!("<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>"));
    svg.text(24.0, 34.0, 20.0, INK, "start", "Thaw of the player, by planner");
    let wall = results.results.iter().any(|row| !row.oversubscribed);
    let mut at = 24.0;
    let parts = [(BEFORE, "start to resume"), (AFTER, "resume to last page")];
    for (colour, name) in parts.into_iter().filter(|_| wall) {
        svg.rect(at, 50.0, 14.0, 14.0, colour);
        svg.text(at + 20.0, 62.0, 13.0, INK, "start", name);
        at += 40.0 + 7.0 * name.len() as f64;
    }
    svg.text(at, 62.0, 13.0, QUIET, "start", "bars: medians; whisker: median to p95");
    let mut top = HEAD;
    for panel in &panels {
        svg.panel(top, panel);
        top += PANEL_TOP + STEP * panel.len() as f64 + PANEL_BOTTOM;
    }
    svg.text(24.0, height - 16.0, 11.0, QUIET, "start", &results.host.line());
    svg.line("</svg>");
    svg.0
}

/// Rows that are comparable: one trace, one state of the page cache where it plays a part, one number of microVMs.
fn panels(rows: &[Row]) -> Vec<Vec<&Row>> {
    let mut panels: Vec<Vec<&Row>> = Vec::new();
    for row in rows {
        let fits = |panel: &&mut Vec<&Row>| {
            let same_cache = |other: &&Row| {
                row.cache == Cache::Unused
                    || other.cache == Cache::Unused
                    || row.cache == other.cache
            };
            panel.first().is_some_and(|first| {
                (&first.trace, first.concurrency) == (&row.trace, row.concurrency)
            }) && panel.iter().all(same_cache)
        };
        match panels.iter_mut().find(fits) {
            Some(panel) => panel.push(row),
            None => panels.push(vec![row]),
        }
    }
    panels
}

/// What a row's bar shows.
struct Bar {
    /// Lengths of its parts, with their colours.
    parts: Vec<(f64, &'static str)>,
    median: f64,
    p95: f64,
}

impl Bar {
    fn of(row: &Row) -> Self {
        if row.oversubscribed {
            let cpu = row.cpu_ns_per_page;
            return Self { parts: vec![(cpu.median, BEFORE)], median: cpu.median, p95: cpu.p95 };
        }
        let (before, after) = (row.start_to_resume_ms.median, row.resume_to_last_page_ms.median);
        Self {
            parts: vec![(before, BEFORE), (after, AFTER)],
            median: row.total_ms.median,
            p95: row.total_ms.p95,
        }
    }

    /// How far it reaches.
    fn end(&self) -> f64 {
        self.parts.iter().map(|(length, _)| length).sum::<f64>().max(self.p95)
    }
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

    fn panel(&mut self, top: f64, rows: &[&Row]) {
        let Some(first) = rows.first() else { return };
        let vms = if first.concurrency == 1 { "microVM" } else { "microVMs together" };
        let mark = if first.oversubscribed { ", oversubscribed" } else { "" };
        let runs = if first.runs == 1 { "run" } else { "runs" };
        let used = rows.iter().find(|row| row.cache != Cache::Unused);
        let cache = used.unwrap_or(first).cache;
        let title = format!(
            "{}: {} pages, page cache {}, {} {vms}{mark}, {} {runs}",
            first.trace, first.pages, cache, first.concurrency, first.runs
        );
        self.text(24.0, top + 18.0, 15.0, INK, "start", &title);
        let bars: Vec<Bar> = rows.iter().map(|row| Bar::of(row)).collect();
        let longest = bars.iter().map(Bar::end).fold(0.0, f64::max);
        let step = tick(longest);
        let scale = (WIDTH - LEFT - RIGHT) / longest.max(f64::MIN_POSITIVE);
        let (upper, lower) = (top + PANEL_TOP, top + PANEL_TOP + STEP * rows.len() as f64);
        let ticks = std::iter::successors(Some(0.0), |tick| Some(tick + step));
        for tick in ticks.take_while(|tick| *tick <= longest * 1.0001) {
            let x = LEFT + tick * scale;
            self.stroke((x, upper), (x, lower), GRID, 1.0);
            self.text(x, lower + 16.0, 11.0, QUIET, "middle", &number(tick));
        }
        let unit = if first.oversubscribed { "CPU ns per page" } else { "ms" };
        self.text(LEFT + (WIDTH - LEFT - RIGHT) / 2.0, lower + 32.0, 12.0, QUIET, "middle", unit);
        let mut y = upper + (STEP - BAR) / 2.0;
        for (row, bar) in rows.iter().zip(&bars) {
            let label = row.label.as_ref().map_or(String::new(), |label| format!(" ({label})"));
            let name = format!("{}{label}", row.planner);
            self.text(LEFT - 12.0, y + BAR - 6.0, 13.0, INK, "end", &name);
            let mut x = LEFT;
            for &(length, colour) in &bar.parts {
                self.rect(x, y, length * scale, BAR, colour);
                x += length * scale;
            }
            let (from, to) = (LEFT + bar.median * scale, LEFT + bar.p95 * scale);
            let middle = y + BAR / 2.0;
            self.stroke((from, middle), (to, middle), WHISKER, 1.5);
            self.stroke((to, middle - 5.0), (to, middle + 5.0), WHISKER, 1.5);
            let preload = row.preload_ms.filter(|_| !row.oversubscribed);
            let preload = preload.map_or(String::new(), |preload| {
                format!(" (preload before: {})", number(preload.median))
            });
            let value = format!("{}, p95 {}{preload}", number(bar.median), number(bar.p95));
            self.text(LEFT + bar.end() * scale + 10.0, y + BAR - 6.0, 12.0, INK, "start", &value);
            y += STEP;
        }
    }
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
#[path = "svg_tests.rs"]
mod tests;
