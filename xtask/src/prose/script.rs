//! The comments of shell scripts, Python files, TOML files and makefiles.

use super::{COMMENT_COLUMNS, Line};

/// Comments that begin with `#`; in Python files docstrings too.
pub(super) fn lines(content: &str, python: bool) -> Vec<Line<'_>> {
    let mut lines = Vec::new();
    let mut docstring = false;
    for (index, line) in content.lines().enumerate() {
        let marks = line.matches("\"\"\"").count();
        let starts = python && !docstring && line.trim_start().starts_with("\"\"\"");
        let text = if docstring || starts {
            docstring = if docstring { marks == 0 } else { marks == 1 };
            Some(line.trim().trim_matches('"'))
        } else {
            comment(line).filter(|_| !(index == 0 && line.starts_with("#!")))
        };
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
