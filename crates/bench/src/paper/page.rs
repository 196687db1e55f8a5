//! The tables of documents that are made of committed results.
//!
//! Such a table stands between two lines, of which the last is `<!-- end -->`, and the first one of
//!
//! - `<!-- NAME | COLUMN -->`: the name of an experiment's file and a column of its table;
//! - `<!-- NAME | COLUMN | PLANNER -->`: the same, divided by the numbers of a planner;
//! - `<!-- NAME | host -->`: how it was measured;
//! - `<!-- NAME | allocated -->`: which pages of its functions were free at the freeze;
//! - `<!-- NAME | marked -->`: which pages of them the guest's kernel allocated after the thaw;
//! - `<!-- NAME -->`: the table of an experiment without rows for planners;
//! - `<!-- NAME | TIME -->`, `<!-- NAME | TIME | FUNCTION FUNCTION -->`: a time of an experiment of
//!   SYSTOR '22 by tier, of all functions or of some; for TIME also `classes` or `working sets`.
//!
//! A file of `SESSIONS` has results of `firn bench thaw`, and `NAME/SESSION` is one of its
//! sessions; `NAME/SESSION*` are those whose names begin so.
//!
//! `<!-- holders | FUNCTION FUNCTION -->` is [what holds the pages](holders) of functions.
//!
//! A comment of several lines makes a table of any other file ([`records`]), which can have
//! `<!-- NAME | host -->`, too.
//!
//! Documents are written by hand, so this is used by tests alone, and by `make result-pages`.

use std::collections::HashSet;
use std::io;

use firn_base::{PAGE_SIZE, format_bytes};
use firn_memory::trace::Access;
use serde_json::{Value, json};

use super::holders;
use super::outcome::Outcome;
use super::picture::names;
use super::records;
use super::replays::Quantity;
use super::systor::SystorOutcome;
use super::text::{Cell, Column, PARTS, at_once};
use crate::host::Host;
use crate::players::replicates;
use crate::stats::Summary;
use crate::text::{markdown, number};
use crate::thaw::{OpenLoop, Row};
use crate::traces::load;

const BEGIN: &str = "<!-- ";
const CLOSE: &str = " -->";
/// The last line of a comment of several lines.
const CLOSE_LINES: &str = "-->";
/// The end of a comment about how something was measured.
const HOST: &str = " | host";
/// The name of tables of `traces/holders`.
const HOLDERS: &str = "holders";
pub(super) const END: &str = "<!-- end -->";
/// Files with sessions of `firn bench thaw` that are not of a paper.
const SESSIONS: [&str; 11] = [
    "bursts",
    "bursts-unforecast",
    "granules",
    "mixes",
    "pages-hello",
    "pages-json",
    "pages-pyaes",
    "restores",
    "standby-with",
    "standby-without",
    "tails",
];
/// Columns for sessions that are not of a paper's experiment. Only documents have them. Copies and
/// pool are a copy or a replica for each microVM, and the extent of the snapshot.
const OF_SESSIONS: [Column; 7] = [
    PARTS[0],
    PARTS[1],
    ("copies and pool", |place, row| {
        let of_trace = place.rows.iter().filter(|other| other.trace == row.trace);
        let extent = of_trace.map(|other| other.pool_bytes).max().unwrap_or_default();
        let replica = if replicates(&row.planner) { row.pool_bytes } else { 0 };
        let all = extent + (row.copy_bytes + replica) * u64::from(at_once(row));
        if row.pool_bytes == 0 { Cell::Empty } else { Cell::Bytes(all) }
    }),
    ("read of free pages", |_, row| Cell::bytes(row.batch_free_read_bytes)),
    ("a copy", |_, row| Cell::bytes(Some(row.copy_bytes).filter(|bytes| *bytes > 0))),
    ("a ready clone", |_, row| Cell::bytes(row.ready_bytes)),
    ("a standby", |_, row| Cell::bytes(row.standby_bytes)),
];
/// The columns of a table that has a row for each budget.
const CARRIED: &str = "microVMs";
const TO_CHEAPEST: &str = "to the cheapest";

/// The results of an experiment's file.
#[derive(Clone)]
enum Results {
    Replays(Box<Outcome>),
    Tiers(Box<SystorOutcome>),
}

impl Results {
    fn of_json(name: &str, json: &str) -> serde_json::Result<Self> {
        Ok(if name.starts_with("systor-") {
            Self::Tiers(serde_json::from_str(json)?)
        } else if is_of_paper(name) {
            Self::Replays(serde_json::from_str(json)?)
        } else {
            Self::Replays(serde_json::from_value(as_experiment(serde_json::from_str(json)?))?)
        })
    }

    /// Leaves out all sessions but those of a name, or of a beginning of names before `*`.
    fn retain(&mut self, session: &str) {
        let begins =
            |name: &str| session.strip_suffix('*').is_some_and(|all| name.starts_with(all));
        if let Self::Replays(results) = self {
            results.sessions.retain(|place| place.name == session || begins(&place.name));
        }
    }

    /// The text of a comment's parts after the name.
    fn text(&self, column: Option<&str>, more: Option<&str>) -> Option<String> {
        match (self, column) {
            (Self::Replays(results), Some("host")) => Some(results.conditions()),
            (Self::Replays(results), Some("allocated")) => results.allocated(),
            (Self::Replays(results), Some("marked")) => results.marked(),
            (Self::Replays(results), Some(column)) => results.by_planner(column, more),
            (Self::Replays(results), None) => results.without_rows(),
            (Self::Tiers(results), column) => results.by_tier(column?, more),
        }
    }
}

/// A page of Markdown with all its tables made anew. `read` returns the JSON of an experiment's
/// file. Other comments are left as they are. An error is the first table that cannot be made.
fn fill(page: &str, mut read: impl FnMut(&str) -> io::Result<String>) -> Result<String, String> {
    let mut filled = String::new();
    let mut lines = page.split_inclusive('\n');
    while let Some(line) = lines.next() {
        filled.push_str(line);
        let Some(comment) = table_name(line) else { continue };
        let mut columns = None;
        if !line.contains(CLOSE) {
            let lines: Vec<_> =
                lines.by_ref().take_while(|line| line.trim_end() != CLOSE_LINES).collect();
            filled.extend(lines.iter().copied().chain([CLOSE_LINES, "\n"]));
            columns = Some(lines.into_iter().map(str::trim_end).collect::<Vec<_>>());
        }
        let (name, _) = comment.split_once([' ', '/']).unwrap_or((comment, ""));
        let text = if name == HOLDERS {
            comment.split_once(" | ").and_then(|(_, functions)| holders::table(functions))
        } else {
            let text =
                read(name).and_then(|json| Ok(table_of(comment, columns.as_deref(), &json)?));
            text.map_err(|error| format!("cannot read the results of {name}: {error}"))?
        };
        let text = text.ok_or_else(|| format!("the results have no table {comment:?}"))?;
        filled.push_str(&format!("\n{text}\n{END}\n"));
        if !lines.any(|line| line.trim_end() == END) {
            return Err(format!("{comment:?} has no {END:?}"));
        }
    }
    Ok(filled)
}

/// The text of a comment's table of the JSON that it names. `columns` are the lines of a comment of
/// several lines. `None` if the results have no such table.
fn table_of(
    comment: &str,
    columns: Option<&[&str]>,
    json: &str,
) -> serde_json::Result<Option<String>> {
    let mut parts = comment.split(" | ");
    let (place, column, more) = (parts.next().unwrap_or_default(), parts.next(), parts.next());
    let (name, session) =
        place.split_once('/').map_or((place, None), |(name, session)| (name, Some(session)));
    match (columns, column) {
        (Some(columns), Some(list)) => {
            Ok(records::table(&serde_json::from_str(json)?, list, columns))
        }
        (None, Some("host")) if !is_of_paper(name) => {
            let mut file: Value = serde_json::from_str(json)?;
            Ok(Some(host_lines(&serde_json::from_value(file["host"].take())?) + "\n"))
        }
        _ => {
            let mut results = Results::of_json(name, json)?;
            if let Some(session) = session {
                results.retain(session);
            }
            Ok(results.text(column, more))
        }
    }
}

/// The text of a comment that names a file of results; of a comment of several lines, the first
/// one.
pub(super) fn table_name(line: &str) -> Option<&str> {
    let comment = line.trim_end().strip_prefix(BEGIN)?;
    let Some(comment) = comment.strip_suffix(CLOSE) else {
        return comment.contains(" | ").then_some(comment);
    };
    let name = comment.split([' ', '/']).next()?;
    let is_result = is_of_paper(name) || SESSIONS.contains(&name) || comment.ends_with(HOST);
    (is_result || name == HOLDERS).then_some(comment)
}

/// Sessions of `firn bench thaw`, one or several, as the places of an experiment.
fn as_experiment(mut file: Value) -> Value {
    let sessions = match file["sessions"].take() {
        Value::Array(sessions) => sessions,
        _ => vec![file.clone()],
    };
    let place = |mut session: Value| {
        let name = session["name"].as_str().unwrap_or_default().to_owned();
        json!({ "name": name, "rows": session["results"].take() })
    };
    let places: Vec<Value> = sessions.into_iter().map(place).collect();
    json!({
        "name": "", "source": "", "title": "", "quantity": Quantity::Total, "host": file["host"],
        "sessions": places, "left_out": {},
    })
}

/// Whether a name is that of an experiment, or begins with it.
fn is_of_paper(name: &str) -> bool {
    ["pass-", "faasnap-", "snapbpf-", "systor-"].iter().any(|paper| name.starts_with(paper))
}

impl Cell {
    /// Its number, if it is one.
    fn value(&self) -> Option<f64> {
        match self {
            Self::Text(_) | Self::Empty => None,
            Self::Time(summary, _) => Some(summary.median),
            Self::Bytes(bytes) => Some(*bytes as f64),
            Self::Count(count) | Self::Ratio(count, _) => Some(*count),
        }
    }
}

/// A cell of a table with a column for each planner.
struct Entry<'a> {
    /// What its row begins with.
    key: Vec<String>,
    planner: &'a str,
    cell: Cell,
}

impl Outcome {
    /// A table of one column of the results, with a column for each planner. `base` is the planner
    /// that each number is divided by.
    fn by_planner(&self, column: &str, base: Option<&str>) -> Option<String> {
        let (head, entries) = self.entries(column)?;
        let has = |entry: &&Entry<'_>| !matches!(entry.cell, Cell::Empty);
        let planners = names(entries.iter().filter(has).map(|entry| entry.planner));
        let base = match base {
            Some(base) => Some(*planners.iter().find(|planner| short(planner, &planners) == base)?),
            None => None,
        };
        let mut keys: Vec<&Vec<String>> = Vec::new();
        for entry in &entries {
            if !keys.contains(&&entry.key) {
                keys.push(&entry.key);
            }
        }
        keys.sort_by(|a, b| a[0].cmp(&b[0]));
        let find = |key: &Vec<String>, planner: &str| {
            entries.iter().find(|entry| entry.key == *key && entry.planner == planner)
        };
        let ratio = |key: &Vec<String>, planner: &str, base: &str| {
            let value = |planner| find(key, planner)?.cell.value();
            Some(value(planner)? / value(base)?)
        };
        let mut rows: Vec<Vec<String>> = Vec::new();
        for key in &keys {
            let cell = |planner: &&str| match base {
                Some(base) => ratio(key, planner, base).map_or(String::new(), number),
                None => find(key, planner).map_or(String::new(), |entry| entry.cell.to_string()),
            };
            rows.push(key.iter().cloned().chain(planners.iter().map(cell)).collect());
        }
        for place in names(keys.iter().map(|key| key.get(1).map_or("", String::as_str))) {
            let of_place = |key: &&&Vec<String>| key.get(1).is_none_or(|name| name == place);
            let keys: Vec<_> = keys.iter().filter(of_place).collect();
            let Some(base) = base.filter(|_| keys.len() > 2) else { continue };
            let mean = |planner: &&str| {
                let ratios: Option<Vec<f64>> =
                    keys.iter().map(|key| ratio(key, planner, base)).collect();
                ratios.map_or(String::new(), |ratios| number(geometric_mean(&ratios)))
            };
            let mut row = vec!["geometric mean".to_owned(), place.to_owned()];
            row.resize(head.len(), String::new());
            rows.push(row.into_iter().chain(planners.iter().map(mean)).collect());
        }
        let short: Vec<String> = planners.iter().map(|planner| short(planner, &planners)).collect();
        let head: Vec<&str> = head.into_iter().chain(short.iter().map(String::as_str)).collect();
        Some(markdown(&head, &rows))
    }

    /// What the rows of a table begin with, and its other cells.
    fn entries(&self, column: &str) -> Option<(Vec<&'static str>, Vec<Entry<'_>>)> {
        match column {
            CARRIED => {
                let rows = self.budgets.iter().flat_map(|budget| {
                    budget.results.iter().map(|row| Entry {
                        key: vec![row.trace.clone(), format_bytes(budget.memory)],
                        planner: &row.planner,
                        cell: Cell::Text(row.number()),
                    })
                });
                Some((vec!["function", "budget"], rows.collect()))
            }
            TO_CHEAPEST => {
                let rows = self.costs.iter().flat_map(|priced| {
                    priced.costs.costs.iter().map(|row| Entry {
                        key: vec![
                            row.trace.clone(),
                            format_bytes(priced.memory),
                            priced.pool_as.clone(),
                        ],
                        planner: &row.planner,
                        cell: row.to_cheapest.map_or(Cell::Empty, Cell::Count),
                    })
                });
                Some((vec!["function", "budget", "pool as"], rows.collect()))
            }
            column => {
                let (_, cell) = self.column(column)?;
                let places = self.sessions.len();
                let rows = self.rows().map(|(place, row)| {
                    let place_name = Some(place.name.clone()).filter(|_| places > 1);
                    // Traces of one name, recorded of different guests.
                    let other = |other: &Row| other.trace == row.trace && other.pages != row.pages;
                    let function = if place.rows.iter().any(other) {
                        format!("{}, {} pages", row.trace, row.pages)
                    } else {
                        row.trace.clone()
                    };
                    Entry {
                        key: std::iter::once(function).chain(place_name).collect(),
                        planner: &row.planner,
                        cell: cell(place, row),
                    }
                });
                let head = if places > 1 { vec!["function", "place"] } else { vec!["function"] };
                Some((head, rows.collect()))
            }
        }
    }

    /// A column of any table of rows.
    fn column(&self, name: &str) -> Option<Column> {
        self.columns().into_iter().chain(OF_SESSIONS).find(|(head, _)| *head == name)
    }

    /// Starts at random intervals.
    fn open_loop_markdown(&self) -> Option<String> {
        let head = [
            "planner",
            "median of the runs, ms",
            "median of the starts, ms",
            "p95",
            "largest",
            "p95 / median of the runs",
            "fallbacks",
        ];
        let row = |row: &Row| {
            let OpenLoop { total_ms, p95_to_idle_median, fallbacks, .. } =
                row.open_loop.as_ref()?;
            let times = [row.total_ms.median, total_ms.median, total_ms.p95, total_ms.max];
            let numbers = times.into_iter().chain([*p95_to_idle_median]).map(number);
            let first = std::iter::once(row.planner.clone());
            Some(first.chain(numbers).chain([fallbacks.to_string()]).collect())
        };
        let rows: Vec<Vec<String>> = self.rows().filter_map(|(_, of)| row(of)).collect();
        (!rows.is_empty()).then(|| markdown(&head, &rows))
    }

    /// The table of an experiment that has no row for each planner.
    fn without_rows(&self) -> Option<String> {
        self.histogram_markdown()
            .or_else(|| self.programs_markdown())
            .or_else(|| self.kernel_faults_markdown())
            .or_else(|| self.open_loop_markdown())
    }

    /// How many of the pages that its functions touch were free at the freeze, so that the guest
    /// allocates them anew.
    fn allocated(&self) -> Option<String> {
        let rows = names(self.rows().map(|(_, row)| &*row.trace)).into_iter().map(|name| {
            let trace = load(name).ok()?.trace;
            let first = trace.touches().iter().filter(|touch| touch.access != Access::LaterWrite);
            let free = first.filter(|touch| trace.free().is_some_and(|free| free.get(touch.page)));
            let (free, touched) = (free.count(), trace.touched_pages());
            let bytes = format_bytes(free as u64 * PAGE_SIZE);
            let share = number(100.0 * free as f64 / touched as f64);
            Some(vec![name.to_owned(), touched.to_string(), free.to_string(), bytes, share])
        });
        let head = ["function", "pages touched", "free at the freeze", "bytes", "%"];
        Some(markdown(&head, &rows.collect::<Option<Vec<_>>>()?))
    }

    /// Which pages that its functions touch the guest's kernel allocated after the thaw, by its
    /// tracepoint `kmem:mm_page_alloc` (`make traces FUNCTIONS=NAME-marking`).
    fn marked(&self) -> Option<String> {
        let rows = names(self.rows().map(|(_, row)| &*row.trace)).into_iter().map(|name| {
            let (trace, mut recorded) = holders::read("marking", name)?;
            let runs: Vec<[u64; 2]> = serde_json::from_value(recorded["allocated"].take()).ok()?;
            let allocated: HashSet<u64> =
                runs.iter().flat_map(|[first, pages]| *first..first + pages).collect();
            let touched: HashSet<u64> = trace.touches().iter().map(|touch| touch.page).collect();
            let free = trace.free()?;
            let is_free = |page: &&u64| free.get(**page);
            let marked: Vec<&u64> = touched.intersection(&allocated).collect();
            let both = marked.iter().copied().filter(is_free).count();
            let free = touched.iter().filter(is_free).count();
            let share = number(100.0 * marked.len() as f64 / touched.len() as f64);
            let counts = [touched.len(), marked.len()].map(|count| count.to_string());
            let rest = [share, free.to_string(), both.to_string()];
            Some(std::iter::once(name.to_owned()).chain(counts).chain(rest).collect())
        });
        let head = [
            "function",
            "pages touched",
            "allocated",
            "%",
            "free at the freeze",
            "allocated of them",
        ];
        Some(markdown(&head, &rows.collect::<Option<Vec<Vec<String>>>>()?))
    }

    /// How it was measured, and the noise.
    fn conditions(&self) -> String {
        let ratios = self.sessions.iter().flat_map(|place| &place.noise);
        let ratios = ratios.map(|noise| &noise.ratio);
        let medians: Vec<f64> = ratios.clone().map(|ratio| ratio.median).collect();
        let ends: Vec<f64> = ratios.flat_map(|ratio| [ratio.low, ratio.high]).collect();
        let range = |of: &[f64]| Summary::of(of).map(|all| [all.min, all.max].map(number));
        let noise = match (range(&medians), range(&ends)) {
            (Some([min, max]), Some([low, high])) => format!(
                "\n- the same planner twice, second / first: {min} to {max}, intervals {low} to {high}"
            ),
            _ => String::new(),
        };
        let fills = self.budgets.iter().flat_map(|budget| &budget.results);
        let fills = fills.filter_map(|row| u32::try_from(row.counts.len()).ok());
        let runs = self.rows().map(|(_, row)| row.runs);
        let runs: Vec<u32> = runs.chain(fills.filter(|counts| *counts > 0)).collect();
        let runs = match (runs.iter().min(), runs.iter().max()) {
            (Some(least), Some(most)) if least == most => format!("{least} runs; "),
            (Some(least), Some(most)) => format!("{least} to {most} runs; "),
            _ => String::new(),
        };
        format!("{}; {runs}seed {}{noise}\n", host_lines(&self.host), self.order)
    }
}

/// A host as lines of a list, of which the last can go on.
pub(super) fn host_lines(host: &Host) -> String {
    let Host { machine, kernel, kvm, medium, commit, .. } = host;
    format!("- {machine}; Linux {kernel}\n- {kvm}; {medium}\n- firn {commit}")
}

/// A planner's name with those of its options that another one of that name has not.
fn short(planner: &str, all: &[&str]) -> String {
    let (name, options) = with_options(planner);
    let is_in_all = |option: &&str| {
        let same = all.iter().map(|other| with_options(other));
        let mut same = same.filter(|(other, _)| *other == name);
        same.all(|(_, options)| options.split(',').any(|other| other == *option))
    };
    let options = options.split(',').filter(|option| !option.is_empty());
    let own: Vec<&str> = options.filter(|option| !is_in_all(option)).collect();
    if own.is_empty() { name.to_owned() } else { format!("{name}:{}", own.join(",")) }
}

fn with_options(planner: &str) -> (&str, &str) {
    planner.split_once(':').unwrap_or((planner, ""))
}

fn geometric_mean(values: &[f64]) -> f64 {
    (values.iter().map(|value| value.ln()).sum::<f64>() / values.len() as f64).exp()
}

#[path = "page_tests.rs"]
mod tests;
