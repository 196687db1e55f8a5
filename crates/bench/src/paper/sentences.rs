//! The numbers in the sentences of documents about results, compared with the tables beside them.
//!
//! A section with tables of committed results has a comment that derives each number that its
//! sentences give:
//!
//! ```text
//! <!-- numbers
//! 6.3 = total, ms: compression-a: faasnap / pass
//! 38 MiB = DRAM of a run: ffmpeg-a: pass
//! 1.4, 4 = paper
//! -->
//! ```
//!
//! - A cell is `TABLE: ROW: COLUMN`. TABLE is the part of its comment after the experiment's name
//!   for a table of the section, or the whole comment for another one of the page. The cell after
//!   `/` leaves out what it has in common with the one before. What is divided may also be a size.
//! - `5 % = A / B` is a ratio in percent, and `5 % more = A / B` what it exceeds 100 % by.
//! - `paper` are numbers of the paper, and `given` those of the set-up and of other commands, which
//!   the sentence names.
//!
//! A number needs a line if it has decimals or a unit. Numbers in words are not compared.

use std::collections::BTreeMap;

use super::page::{END, table_name};

const BEGIN: &str = "<!-- numbers";
const UNITS: [&str; 11] = ["ms", "s", "µs", "ns", "%", "KiB", "MiB", "GiB", "MB", "GB", "times"];
/// What stands between numbers that share a unit.
const BETWEEN: [&str; 4] = ["to", "and", "or", "by"];

/// A table of a page.
struct Table<'a> {
    /// The text of the comment before it.
    name: &'a str,
    head: Vec<&'a str>,
    rows: Vec<Vec<&'a str>>,
}

/// A part of a page, from a heading to the next.
#[derive(Default)]
struct Section<'a> {
    prose: String,
    tables: Vec<Table<'a>>,
    /// Lines of the comment that derives its numbers.
    numbers: Vec<&'a str>,
}

/// Compares the numbers in the sentences of a page. The error is one line for each number that is
/// wrong, in no sentence or not derived.
pub(super) fn check(page: &str) -> Result<(), String> {
    let sections = parse(page);
    let with_results = sections.iter().filter(|section| !section.tables.is_empty());
    let errors: Vec<String> = with_results.flat_map(|section| section.errors(&sections)).collect();
    if errors.is_empty() { Ok(()) } else { Err(errors.join("\n")) }
}

fn parse(page: &str) -> Vec<Section<'_>> {
    let mut sections = Vec::new();
    let mut section = Section::default();
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        if line.starts_with("```") {
            lines.find(|line| line.starts_with("```"));
        } else if line.starts_with('#') {
            sections.push(std::mem::take(&mut section));
        } else if line == BEGIN {
            section.numbers.extend(lines.by_ref().take_while(|line| *line != "-->"));
        } else if let Some(name) = table_name(line) {
            let made = lines.by_ref().take_while(|line| *line != END);
            let made = made.filter(|line| line.starts_with('|'));
            let made = made.map(|line| line.trim_matches('|').split('|').map(str::trim).collect());
            let mut rows: Vec<Vec<&str>> = made.collect();
            if rows.len() > 2 {
                let head = rows.drain(..2).next().unwrap_or_default();
                section.tables.push(Table { name, head, rows });
            }
        } else if !line.starts_with(['|', '!', '<']) {
            section.prose.push_str(line);
            section.prose.push('\n');
        }
    }
    sections.push(section);
    sections
}

impl Section<'_> {
    /// What is wrong with its numbers. `all` are the sections of its page.
    fn errors(&self, all: &[Section<'_>]) -> Vec<String> {
        let find = |name: &str| {
            self.table(name).or_else(|| {
                all.iter()
                    .find_map(|section| section.tables.iter().find(|table| table.name == name))
            })
        };
        let (given, measured) = numbers(&self.prose);
        let mut derived = BTreeMap::new();
        let mut errors = Vec::new();
        for line in &self.numbers {
            match derive(line, find) {
                Ok(texts) => derived.extend(texts.map(|text| (text, *line))),
                Err(error) => errors.push(format!("{line}: {error}")),
            }
        }
        let stale = derived.iter().filter(|(text, _)| !given.contains(text));
        errors.extend(stale.map(|(text, line)| format!("{line}: no sentence has {text}")));
        let missing = measured.iter().filter(|number| !derived.contains_key(**number));
        errors.extend(missing.map(|number| format!("{number} is not derived")));
        errors
    }

    /// The table of the section whose comment ends with a name.
    fn table(&self, name: &str) -> Option<&Table<'_>> {
        let is_named =
            |table: &&Table<'_>| table.name.split_once(" | ").is_some_and(|(_, rest)| rest == name);
        self.tables.iter().find(is_named)
    }
}

/// All numbers of sentences, and those of them that have decimals or a unit.
fn numbers(prose: &str) -> (Vec<&str>, Vec<&str>) {
    let text = prose.split('`').step_by(2);
    let words: Vec<&str> = text.flat_map(str::split_whitespace).collect();
    let (mut all, mut measured) = (Vec::new(), Vec::new());
    let mut has_unit = false;
    for word in words.into_iter().rev() {
        let bare = word.trim_matches(|char: char| "()[],;:.*".contains(char));
        if is_number(bare) {
            all.push(bare);
            if has_unit || bare.contains('.') {
                measured.push(bare);
            }
        } else if !BETWEEN.contains(&bare) {
            has_unit = UNITS.contains(&bare);
        }
    }
    (all, measured)
}

fn is_number(word: &str) -> bool {
    word.starts_with(|char: char| char.is_ascii_digit())
        && word.chars().all(|char| char.is_ascii_digit() || ",.".contains(char))
}

/// The numbers that a line derives, as texts. The error is the reason why a number is wrong.
fn derive<'a, 't>(
    line: &'a str,
    find: impl Fn(&str) -> Option<&'t Table<'t>>,
) -> Result<impl Iterator<Item = &'a str>, String> {
    let (stated, source) = line.split_once(" = ").ok_or("it has no \" = \"")?;
    if !["paper", "given"].contains(&source) {
        let (first, second) = match source.split_once(" / ") {
            Some((first, second)) => (first, Some(second)),
            None => (source, None),
        };
        let mut place: Vec<&str> = first.split(": ").collect();
        let (mut value, mut rounded) = cell(&place, &find)?;
        if let Some(second) = second {
            let other: Vec<&str> = second.split(": ").collect();
            let common = place.len().saturating_sub(other.len());
            place.splice(common.., other);
            let (divisor, more) = cell(&place, &find)?;
            (value, rounded) = (value / divisor, rounded + more);
        }
        let (number, unit) = stated.split_once(' ').unwrap_or((stated, ""));
        let mut error = value * rounded;
        match unit {
            "" => {}
            "%" => (value, error) = (100.0 * value, 100.0 * error),
            "% more" => (value, error) = (100.0 * (value - 1.0), 100.0 * error),
            unit => {
                let scale = scale(unit).ok_or_else(|| format!("{unit:?} is no unit"))?;
                (value, error) = (value / scale, error / scale);
            }
        }
        let (stated, half) = parse_number(number).ok_or("it is no number")?;
        if (stated - value).abs() > half + error {
            return Err(format!("the tables have {value:.3}"));
        }
    }
    Ok(stated.split(", ").map(|part| part.split(' ').next().unwrap_or(part)))
}

/// The number in a cell of a table, in bytes if its unit is one of them, and how far it may be from
/// what it was rounded from, relative to itself.
fn cell<'t>(
    place: &[&str],
    find: impl Fn(&str) -> Option<&'t Table<'t>>,
) -> Result<(f64, f64), String> {
    if let [size] = place
        && let Some((number, bytes)) = size.split_once(' ')
        && let (Some((number, _)), Some(scale)) = (parse_number(number), scale(bytes))
    {
        return Ok((number * scale, 0.0));
    }
    let [table, row, column] = place else { return Err("a cell is TABLE: ROW: COLUMN".into()) };
    let found = find(table).ok_or_else(|| format!("there is no table {table:?}"))?;
    let at = found.head.iter().position(|head| head == column);
    let at = at.ok_or_else(|| format!("{table:?} has no column {column:?}"))?;
    let begins = |cells: &&Vec<&str>| (1..=at).any(|count| cells[..count].join(" ") == *row);
    let mut rows = found.rows.iter().filter(begins);
    let cells = rows.next().ok_or_else(|| format!("{table:?} has no row {row:?}"))?;
    if rows.next().is_some() {
        return Err(format!("several rows of {table:?} begin with {row:?}"));
    }
    let mut words = cells.get(at).copied().unwrap_or_default().split(' ');
    let number = words.next().unwrap_or_default().trim_end_matches('*');
    let number = parse_number(number).ok_or_else(|| format!("{table:?}, {row:?} is no number"))?;
    let (number, half) = number;
    Ok((number * words.next().and_then(scale).unwrap_or(1.0), half / number))
}

/// A number, and half of its last digit.
fn parse_number(text: &str) -> Option<(f64, f64)> {
    let decimals = text.split_once('.').map_or(0, |(_, decimals)| decimals.len());
    let number = text.replace(',', "").parse().ok()?;
    Some((number, 0.5 * 0.1_f64.powi(i32::try_from(decimals).ok()?)))
}

/// The bytes of a unit.
fn scale(unit: &str) -> Option<f64> {
    let power = ["B", "KiB", "MiB", "GiB"].iter().position(|name| *name == unit)?;
    Some(1024_f64.powi(i32::try_from(power).ok()?))
}

#[path = "sentences_tests.rs"]
mod tests;
