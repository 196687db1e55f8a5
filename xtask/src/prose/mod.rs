//! Checks the style of texts and comments: line lengths, and phrases that plain technical English
//! avoids.

mod markdown;
mod phrases;
mod rust;
mod script;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs;

use crate::context::Context;
use crate::step::Step;
use crate::unused::is_test;
use crate::{Result, runner};

/// The longest line of a Markdown file outside tables, code blocks and lines that are only a link,
/// in characters.
const MARKDOWN_COLUMNS: usize = 120;
/// The longest line with a comment, in characters.
const COMMENT_COLUMNS: usize = 100;
/// Files with phrases as data.
const EXEMPT: &str = "xtask/src/prose/";

/// A line with something to check.
#[derive(Debug, PartialEq, Eq)]
struct Line<'a> {
    /// Its number, from 1.
    number: usize,
    /// Its length, and the limit for it, if it has one.
    columns: Option<(usize, usize)>,
    /// The part that people read.
    text: Cow<'a, str>,
}

/// A violation.
#[derive(Debug, PartialEq, Eq)]
struct Finding {
    path: String,
    line: usize,
    message: String,
}

/// Prints the violations and their number in each crate or folder. Any violation is an error.
/// `FOLDER` limits the check to paths that begin with its value.
pub(crate) fn check(context: &Context) -> Result<()> {
    let list = Step::words("git ls-files --cached --others --exclude-standard");
    if context.runner.is_dry() {
        return context.runner.run(&list);
    }
    let folder = std::env::var("FOLDER").unwrap_or_default();
    let mut findings = Vec::new();
    for path in list.output()?.lines().filter(|path| path.starts_with(&folder)) {
        // A deleted file is listed until the deletion is committed.
        if kind(path).is_some() && context.paths.root.join(path).is_file() {
            findings.extend(check_file(path, &fs::read_to_string(context.paths.root.join(path))?));
        }
    }
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for Finding { path, line, message } in &findings {
        runner::line(&format!("{path}:{line}: {message}"));
        *counts.entry(group(path)).or_default() += 1;
    }
    for (group, count) in counts {
        runner::line(&format!("{count:5} {group}"));
    }
    if findings.is_empty() {
        return Ok(());
    }
    Err(format!("{} lines differ from the writing style (CONTRIBUTING.md)", findings.len()).into())
}

/// The kinds of files that are checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FileKind {
    Markdown,
    Rust,
    /// Comments begin with `#`.
    Script,
}

fn kind(path: &str) -> Option<FileKind> {
    let name = path.rsplit('/').next().unwrap_or(path);
    if path.starts_with(EXEMPT) {
        return None;
    }
    match name.rsplit_once('.').map_or(name, |(_, extension)| extension) {
        "md" => Some(FileKind::Markdown),
        "rs" => Some(FileKind::Rust),
        "py" | "sh" | "toml" | "yml" | "Makefile" => Some(FileKind::Script),
        _ if ["lab/init", ".ci/run"].contains(&path) => Some(FileKind::Script),
        _ => None,
    }
}

fn check_file(path: &str, content: &str) -> Vec<Finding> {
    let lines = match kind(path) {
        Some(FileKind::Markdown) => markdown::lines(content),
        Some(FileKind::Rust) => rust::lines(content, !is_test(path)),
        Some(FileKind::Script) => script::lines(content, path.ends_with(".py")),
        None => Vec::new(),
    };
    let mut findings = Vec::new();
    for Line { number, columns, text } in lines {
        let mut add = |message| {
            findings.push(Finding { path: path.to_owned(), line: number, message });
        };
        if let Some((columns, limit)) = columns.filter(|(columns, limit)| columns > limit) {
            add(format!("{columns} columns, at most {limit}"));
        }
        for (phrase, instead) in phrases::of(&text) {
            add(format!("\"{phrase}\": {instead}"));
        }
    }
    findings
}

/// The crate or folder that a file is counted in.
fn group(path: &str) -> String {
    let folders: Vec<&str> = path.split('/').collect();
    match folders.as_slice() {
        [_] => "top".to_owned(),
        ["crates" | "guest", name, _, ..] => format!("{}/{name}", folders[0]),
        [first, ..] => (*first).to_owned(),
        [] => String::new(),
    }
}

#[cfg(test)]
mod tests;
