//! Results as a picture: a bar for each planner, divided at the resume, and one for its warm
//! invocation if there was one, with whiskers to the 95th percentile.

use super::invocation::Invocation;
use super::results::{Results, Row};
use crate::cache::Cache;
use crate::picture::chart::{Bar, Chart, Marks, Panel};
use crate::text::number;

impl Results {
    /// A picture as SVG. If there are more microVMs than processors, the bars are processor time
    /// for each page, because wall times then include waiting for a processor.
    #[must_use]
    pub fn draw(&self) -> String {
        draw(self)
    }
}

fn draw(results: &Results) -> String {
    let mut legend = Vec::new();
    let mut wall = results.results.iter().filter(|row| !row.oversubscribed).peekable();
    if wall.peek().is_some() {
        legend.extend(["start to resume", "resume to last page"]);
    }
    if wall.any(|row| row.warm_ms.is_some()) {
        legend.push("second invocation, warm");
    }
    Chart {
        title: "Thaw of the player, by planner".to_owned(),
        legend: legend.into_iter().map(str::to_owned).collect(),
        remarks: vec!["bars: medians; whisker: median to p95".to_owned()],
        columns: 1,
        panels: panels(&results.results).iter().map(|rows| panel(rows)).collect(),
        foot: results.host.line(),
    }
    .svg()
}

/// Comparable rows: one trace, one state of the page cache, one number of microVMs. A row without a
/// page cache is in the panel of each state.
fn panels(rows: &[Row]) -> Vec<Vec<&Row>> {
    let mut panels: Vec<Vec<&Row>> = Vec::new();
    let (used, unused): (Vec<&Row>, Vec<&Row>) =
        rows.iter().partition(|row| row.cache != Cache::Unused);
    let of = |row: &Row| (row.trace.clone(), row.concurrency);
    for row in used {
        let fits = |panel: &&mut Vec<&Row>| {
            panel.first().is_some_and(|first| of(first) == of(row) && first.cache == row.cache)
        };
        match panels.iter_mut().find(fits) {
            Some(panel) => panel.push(row),
            None => panels.push(vec![row]),
        }
    }
    for row in unused {
        let fits = |panel: &&mut Vec<&Row>| panel.first().is_some_and(|first| of(first) == of(row));
        let mut fitting = panels.iter_mut().filter(fits).peekable();
        if fitting.peek().is_some() {
            fitting.for_each(|panel| panel.push(row));
        } else {
            panels.push(vec![row]);
        }
    }
    panels
}

fn panel(rows: &[&Row]) -> Panel {
    let title = rows.first().map_or(String::new(), |first| {
        let vms = if first.concurrency == 1 { "microVM" } else { "microVMs together" };
        let mark = if first.oversubscribed { ", oversubscribed" } else { "" };
        let runs = if first.runs == 1 { "run" } else { "runs" };
        let used = rows.iter().find(|row| row.cache != Cache::Unused);
        let cache = used.unwrap_or(first).cache;
        format!(
            "{}: {} pages, page cache {}, {} {vms}{mark}, {} {runs}",
            first.trace, first.pages, cache, first.concurrency, first.runs
        )
    });
    let cpu = rows.first().is_some_and(|row| row.oversubscribed);
    let unit = if cpu { "CPU ns per page" } else { "ms" }.to_owned();
    // The processor time of a warm invocation is not known.
    let invocations = rows.iter().flat_map(|row| row.invocations());
    let bars = invocations.filter(|invocation| !(cpu && invocation.warm)).map(bar).collect();
    Panel { title, unit, marks: Marks::Bars(bars) }
}

fn bar(invocation: Invocation<'_>) -> Bar {
    let Invocation { row, ms, warm } = invocation;
    let (parts, shown) = if row.oversubscribed {
        (vec![(0, row.cpu_ns_per_page.median)], row.cpu_ns_per_page)
    } else if warm {
        (vec![(2, ms.median)], ms)
    } else {
        let (before, after) = (row.start_to_resume_ms.median, row.resume_to_last_page_ms.median);
        (vec![(0, before), (1, after)], ms)
    };
    let preload = row.preload_ms.filter(|_| !row.oversubscribed && !warm);
    let preload = preload
        .map_or(String::new(), |preload| format!(" (preload before: {})", number(preload.median)));
    Bar {
        name: invocation.name(),
        parts,
        whisker: Some((shown.median, shown.p95)),
        value: format!("{}, p95 {}{preload}", number(shown.median), number(shown.p95)),
    }
}

#[cfg(test)]
#[path = "picture_tests.rs"]
mod tests;
