//! What commands print: tables and times for people, JSON for machines, errors with their causes.

use std::borrow::Cow;
use std::error::Error;
use std::io::Write;

use firn_base::error_chain;
use serde::Serialize;

pub(crate) use firn_bench::table;

/// Prints a line. A reader that went away is no error of the command's.
pub(crate) fn line(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// Prints a line that is no result: progress, notes, errors.
pub(crate) fn note(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Prints a value as one line of JSON.
pub(crate) fn json(value: &impl Serialize) {
    match serde_json::to_string(value) {
        Ok(text) => json_text(&text),
        Err(error) => note(&format!("firn: error: the result has no JSON form: {error}")),
    }
}

/// Prints JSON text, which may be a guest's.
pub(crate) fn json_text(text: &str) {
    line(&escaped(text));
}

/// Prints an error with its causes, whose texts may be a guest's.
pub(crate) fn print_error(error: &dyn Error) {
    note(&format!("firn: error: {}", plain(&error_chain(error))));
}

/// A text without control characters other than line feeds and tabs: what a guest wrote must not
/// reach the terminal as control sequences.
pub(crate) fn plain(text: &str) -> String {
    text.chars().filter(|c| !c.is_control() || matches!(c, '\n' | '\t')).collect()
}

/// The same JSON without what a terminal takes as a command: the control characters from U+007F on,
/// which JSON lets stand in strings, and the carriage return, which it lets stand between values.
fn escaped(json: &str) -> Cow<'_, str> {
    let is_command = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    if !json.contains(is_command) {
        return Cow::Borrowed(json);
    }
    let mut text = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            '\r' => text.push(' '),
            c if is_command(c) => text.push_str(&format!("\\u{:04x}", u32::from(c))),
            c => text.push(c),
        }
    }
    Cow::Owned(text)
}

#[cfg(test)]
#[path = "output_tests.rs"]
mod tests;
