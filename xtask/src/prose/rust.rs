//! The comments and string literals of Rust files.

use super::{COMMENT_COLUMNS, Line};

/// A lexical state that lasts over the ends of lines.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Code,
    /// In a string literal.
    Text,
    /// In a raw string literal with this many `#`.
    Raw(usize),
    /// In a block comment of this depth.
    Block(usize),
}

/// The parts of all lines that are comments, names of functions or, with `literals`, in string
/// literals. Only lines with comments have a limit of columns.
pub(super) fn lines(content: &str, literals: bool) -> Vec<Line<'_>> {
    let mut state = State::Code;
    let mut lines = Vec::new();
    for (index, line) in content.lines().enumerate() {
        let mut scanned = scan(line, state);
        if !literals && !scanned.comment {
            scanned.parts.clear();
        }
        state = scanned.state;
        let columns = scanned.comment.then(|| (line.chars().count(), COMMENT_COLUMNS));
        lines.extend(scanned.parts.into_iter().enumerate().map(|(part, text)| Line {
            number: index + 1,
            columns: columns.filter(|_| part == 0),
            text: text.into(),
        }));
        if let Some((_, name)) = line.split_once("fn ").filter(|_| state == State::Code) {
            let name = name.split(['(', '<']).next().unwrap_or_default().replace('_', " ");
            lines.push(Line { number: index + 1, columns: None, text: name.into() });
        }
    }
    lines
}

struct Scanned<'a> {
    /// The state at the end of the line.
    state: State,
    /// Whether a part is a comment.
    comment: bool,
    parts: Vec<&'a str>,
}

fn scan(line: &str, mut state: State) -> Scanned<'_> {
    let mut scanned = Scanned { state, comment: false, parts: Vec::new() };
    let mut rest = line;
    while !rest.is_empty() {
        let (part, after, next) = match state {
            State::Code => match code(rest) {
                Token::Comment(comment) => {
                    scanned.comment = true;
                    scanned.parts.extend(comment.split('`').step_by(2));
                    break;
                }
                Token::Opens(after, next) => (None, after, next),
                Token::None => break,
            },
            State::Text => {
                let end = end_of_text(rest);
                let after = rest.get(end + 1..).unwrap_or_default();
                let next = if end < rest.len() { State::Code } else { State::Text };
                (Some(&rest[..end]), after, next)
            }
            State::Raw(marks) => match rest.find(&format!("\"{}", "#".repeat(marks))) {
                Some(end) => (Some(&rest[..end]), &rest[end + 1 + marks..], State::Code),
                None => (Some(rest), "", state),
            },
            State::Block(depth) => {
                scanned.comment = true;
                match (rest.find("*/"), rest.find("/*")) {
                    (Some(end), open) if open.is_none_or(|open| end < open) => {
                        let next = if depth == 1 { State::Code } else { State::Block(depth - 1) };
                        (Some(&rest[..end]), &rest[end + 2..], next)
                    }
                    (_, Some(open)) => {
                        (Some(&rest[..open]), &rest[open + 2..], State::Block(depth + 1))
                    }
                    _ => (Some(rest), "", state),
                }
            }
        };
        scanned.parts.extend(part.into_iter().flat_map(|part| part.split('`').step_by(2)));
        (rest, state) = (after, next);
    }
    scanned.state = state;
    scanned
}

enum Token<'a> {
    /// A comment up to the end of the line.
    Comment(&'a str),
    /// What follows the opening of a literal or block comment, and the state in it.
    Opens(&'a str, State),
    None,
}

/// The first comment or literal in code.
fn code(rest: &str) -> Token<'_> {
    let mut at = 0;
    while let Some(next) = rest.get(at..).and_then(|rest| rest.chars().next()) {
        let here = &rest[at..];
        if here.starts_with("//") {
            return Token::Comment(here);
        }
        if let Some(after) = here.strip_prefix("/*") {
            return Token::Opens(after, State::Block(1));
        }
        if let Some(after) = here.strip_prefix('"') {
            return Token::Opens(after, State::Text);
        }
        let in_word =
            rest[..at].chars().next_back().is_some_and(|c| c.is_alphanumeric() || c == '_');
        let raw = here.strip_prefix("br").or(here.strip_prefix('r')).filter(|_| !in_word);
        if let Some(after) = raw {
            let marks = after.len() - after.trim_start_matches('#').len();
            if let Some(after) = after[marks..].strip_prefix('"') {
                return Token::Opens(after, State::Raw(marks));
            }
        }
        at += if next == '\'' { character(here) } else { next.len_utf8() };
    }
    Token::None
}

/// The length in bytes of the character literal, or of the mark of a lifetime, at the start of
/// `text`.
fn character(text: &str) -> usize {
    let mut chars = text.char_indices().skip(1);
    let (first, second) = (chars.next(), chars.next());
    match (first, second) {
        // An escape: its end is the first mark after the escaped character.
        (Some((_, '\\')), Some((at, escaped))) => {
            let after = at + escaped.len_utf8();
            text[after..].find('\'').map_or(after, |end| after + end + 1)
        }
        (_, Some((at, '\''))) => at + 1,
        _ => 1,
    }
}

/// Where a string literal ends, or the line.
fn end_of_text(text: &str) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return at,
            _ => {}
        }
    }
    text.len()
}
