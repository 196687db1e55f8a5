//! The lines of Markdown files.

use super::{Line, MARKDOWN_COLUMNS};

/// All lines outside code blocks.
pub(super) fn lines(content: &str) -> Vec<Line<'_>> {
    let mut lines = Vec::new();
    let mut fence: Option<&str> = None;
    for (index, line) in content.lines().enumerate() {
        let text = line.trim_start();
        let mark = ["```", "~~~"].into_iter().find(|mark| text.starts_with(mark));
        match (fence, mark) {
            (None, Some(_)) => fence = mark,
            (Some(open), Some(mark)) if open == mark => fence = None,
            (Some(_), _) => {}
            (None, None) => {
                let free = text.starts_with('|') || is_link(text);
                let columns = (!free).then(|| (line.chars().count(), MARKDOWN_COLUMNS));
                lines.extend(prose(text).enumerate().map(|(part, text)| Line {
                    number: index + 1,
                    columns: columns.filter(|_| part == 0),
                    text: text.into(),
                }));
            }
        }
    }
    lines
}

/// The parts of a line outside code spans. At least one.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').step_by(2)
}

/// Whether a line is one link: in an item of a list, as a definition, or alone.
fn is_link(text: &str) -> bool {
    let text = text.trim_start_matches(['-', '*', ' ', '<']).trim_end_matches(['.', ' ', '>']);
    let url = |text: &str| text.starts_with("http") && !text.contains(' ');
    if url(text) {
        return true;
    }
    if !text.starts_with('[') {
        return false;
    }
    match text.split_once("](") {
        Some((_, target)) => target.strip_suffix(')').is_some_and(|target| !target.contains(' ')),
        None => text.split_once("]: ").is_some_and(|(_, target)| !target.contains(' ')),
    }
}
