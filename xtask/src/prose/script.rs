//! The comments of shell scripts, Python files, TOML files and makefiles.

use super::{COMMENT_COLUMNS, Line};

/// Comments that begin with `#`; in Python files docstrings too.
pub(super) fn lines(content: &str, python: bool) -> Vec<Line<'_>> {
    let mut lines = Vec::new();
    // Within a string literal of several lines: whether it is a docstring.
    let mut literal: Option<bool> = None;
    for (index, line) in content.lines().enumerate() {
        let mark = "\"\"\"";
        let odd = python && line.matches(mark).count() % 2 == 1;
        let starts = python && literal.is_none() && line.trim_start().starts_with(mark);
        let text = if starts || literal == Some(true) {
            Some(line.trim().trim_matches('"'))
        } else if literal == Some(false) || (index == 0 && line.starts_with("#!")) {
            None
        } else {
            comment(line)
        };
        if odd {
            literal = if literal.is_none() { Some(starts) } else { None };
        }
        lines.extend(text.map(|text| Line {
            number: index + 1,
            columns: Some((line.chars().count(), COMMENT_COLUMNS)),
            text: text.into(),
        }));
    }
    lines
}

/// The comment at the end of a line. A `#` within quotes begins none.
fn comment(line: &str) -> Option<&str> {
    line.match_indices('#').map(|(start, _)| line.split_at(start)).find_map(|(before, comment)| {
        let separate = before.chars().next_back().is_none_or(char::is_whitespace);
        let open = |quote: char| before.matches(quote).count() % 2 == 1;
        (separate && !open('"') && !open('\'')).then_some(comment)
    })
}
