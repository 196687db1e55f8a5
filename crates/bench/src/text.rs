//! Numbers and tables as text.

use comfy_table::{CellAlignment, ContentArrangement, Table, TableStyle, presets};

use crate::stats::Summary;

/// A number with three significant digits, such as `1.23`, `12.3` or `123`.
pub(crate) fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        size if size < 10.0 => format!("{value:.2}"),
        size if size < 100.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

/// The interval of the median, or minimum to maximum with few runs, such as `1.10 to 1.32`.
pub(crate) fn interval(summary: &Summary) -> String {
    let [low, high] = summary.interval().map(number);
    format!("{low} to {high}")
}

/// The median with its interval; the median alone if there is one measurement.
pub(crate) fn with_interval(summary: &Summary) -> String {
    if summary.min == summary.max {
        number(summary.median)
    } else {
        with_range(summary.median, summary.interval())
    }
}

/// A number with the range that it is in, such as `1.23 (1.10 to 1.32)`.
pub(crate) fn with_range(value: f64, range: [f64; 2]) -> String {
    let [low, high] = range.map(number);
    format!("{} ({low} to {high})", number(value))
}

/// A table for a terminal: the first column is aligned left, all others right.
#[must_use]
pub fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let mut table = styled(presets::UTF8_FULL_CONDENSED, head, rows);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}

/// A table in Markdown, with a line feed at its end.
pub(crate) fn markdown(head: &[&str], rows: &[Vec<String>]) -> String {
    format!("{}\n", styled(presets::ASCII_MARKDOWN, head, rows))
}

fn styled(style: TableStyle, head: &[&str], rows: &[Vec<String>]) -> Table {
    let mut table = Table::new();
    table.load_style(style);
    table.set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(head);
    table.add_rows(rows);
    table
}
