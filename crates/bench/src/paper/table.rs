//! The table of the papers' experiments: 36 figures, tables and statements, each with its name.
//! Help, documents and tests are made of it.

use std::fmt;

use thiserror::Error;

use super::experiments::EXPERIMENTS;
use super::replays::Replays;
use super::systor::SystorExperiment;

/// A figure, table or statement of a paper.
#[derive(Clone, Copy, Debug)]
pub struct Experiment {
    /// Its name on the command line and of its files, such as `pass-figure-9`.
    pub name: &'static str,
    /// The paper, section and figure.
    pub source: &'static str,
    /// The subject of the figure.
    pub title: &'static str,
    /// How it is made.
    pub way: Way,
    /// How firn's results compare with the paper's.
    pub verdict: Verdict,
    /// What was measured, in Markdown relative to `docs/results`; empty if nothing was.
    pub measured: &'static str,
}

/// How an experiment is made.
#[derive(Clone, Copy, Debug)]
pub enum Way {
    /// Players replay traces; an experiment has one part or several.
    Replays(&'static [Replays]),
    /// Players replay traces on tiers.
    Tiers(SystorExperiment),
    /// It cannot be made so far.
    Missing {
        /// The reason.
        reason: &'static str,
        /// What it needs.
        needs: &'static str,
    },
}

/// How firn's results compare with the paper's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// They agree; the text restricts that.
    Agrees(&'static str),
    /// Some agree and some differ.
    Partly(&'static str),
    /// They differ.
    Differs(&'static str),
    /// There are no committed results.
    NotMeasured,
    /// This host cannot show it.
    CannotShow,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Agrees("") => f.write_str("agrees"),
            Self::Agrees(text) => write!(f, "agrees: {text}"),
            Self::Partly(text) => write!(f, "agrees in part: {text}"),
            Self::Differs(text) => write!(f, "differs: {text}"),
            Self::NotMeasured => f.write_str("not measured"),
            Self::CannotShow => f.write_str("cannot be shown"),
        }
    }
}

/// An experiment cannot be found or run.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum FindError {
    /// There is no experiment of this name.
    #[error("no experiment has the name {0:?}; `firn bench paper` lists the names")]
    Unknown(String),
    /// It cannot be made so far.
    #[error("{name} cannot be measured: {reason}; it needs {needs}")]
    Missing {
        /// The experiment.
        name: &'static str,
        /// The reason.
        reason: &'static str,
        /// What it needs.
        needs: &'static str,
    },
}

/// Finds experiments by their names, in the order of the table. `all` selects every one that can be
/// made, and `pass`, `faasnap`, `snapbpf` and `systor` those of a paper.
///
/// # Errors
///
/// [`FindError`] at the first name that is unknown, or of an experiment that cannot be made.
pub fn find(names: &[String]) -> Result<Vec<&'static Experiment>, FindError> {
    let mut wanted = [false; EXPERIMENTS.len()];
    for name in names {
        let mut found = false;
        for (experiment, wanted) in EXPERIMENTS.iter().zip(&mut wanted) {
            let group = name == "all" || name == experiment.paper();
            if !group && name != experiment.name {
                continue;
            }
            found = true;
            match experiment.way {
                Way::Missing { .. } if group => {}
                Way::Missing { reason, needs } => {
                    return Err(FindError::Missing { name: experiment.name, reason, needs });
                }
                _ => *wanted = true,
            }
        }
        if !found {
            return Err(FindError::Unknown(name.clone()));
        }
    }
    let all = EXPERIMENTS.iter().zip(wanted);
    Ok(all.filter_map(|(experiment, wanted)| wanted.then_some(experiment)).collect())
}

impl Experiment {
    /// The paper's name in names of experiments: `pass`, `faasnap`, `snapbpf` or `systor`.
    #[must_use]
    pub fn paper(&self) -> &'static str {
        self.name.split_once('-').map_or(self.name, |(paper, _)| paper)
    }

    /// The names of its files, without their endings: one for each part.
    #[must_use]
    pub fn files(&self) -> Vec<String> {
        match self.way {
            Way::Replays(parts) => parts.iter().map(|part| self.file(part)).collect(),
            Way::Tiers(_) => vec![self.name.to_owned()],
            Way::Missing { .. } => Vec::new(),
        }
    }

    /// The name of the files of a part.
    #[must_use]
    pub fn file(&self, part: &Replays) -> String {
        match part.part {
            "" => self.name.to_owned(),
            part => format!("{}-{part}", self.name),
        }
    }

    /// The names of the files with results that a part can be made of: its own first, then those of
    /// parts that measure the same.
    #[must_use]
    pub fn sources(&self, part: &Replays) -> Vec<String> {
        let own = self.file(part);
        let mut files = Vec::new();
        for other in &EXPERIMENTS {
            let Way::Replays(parts) = other.way else { continue };
            let same = parts.iter().filter(|other| other.measures_as(part));
            files.extend(same.map(|part| other.file(part)).filter(|file| *file != own));
        }
        files.insert(0, own);
        files
    }

    /// The last column of the document's table: what was measured, or why nothing was.
    fn remark(&self) -> String {
        match self.way {
            Way::Missing { reason, needs } => format!("{reason}; needs {needs}"),
            _ => self.measured.to_owned(),
        }
    }
}

/// The rows of a listing for a terminal: name, source, title, and why an experiment cannot be made.
#[must_use]
pub fn listing() -> Vec<Vec<String>> {
    let row = |experiment: &Experiment| {
        let Experiment { name, source, title, way, .. } = experiment;
        let reason = match way {
            Way::Missing { reason, .. } => format!("not so far: {reason}"),
            _ => String::new(),
        };
        vec![(*name).to_owned(), (*source).to_owned(), (*title).to_owned(), reason]
    };
    EXPERIMENTS.iter().map(row).collect()
}

/// The names for a help text: one line for each paper.
#[must_use]
pub fn help() -> String {
    let mut lines: Vec<(&str, Vec<&str>)> = Vec::new();
    for experiment in &EXPERIMENTS {
        let name = experiment.name;
        match lines.last_mut() {
            Some((paper, names)) if *paper == experiment.paper() => names.push(name),
            _ => lines.push((experiment.paper(), vec![name])),
        }
    }
    let line = |(_, names): (&str, Vec<&str>)| format!("  {}", names.join(" "));
    lines.into_iter().map(line).collect::<Vec<_>>().join("\n")
}

/// The part of `docs/results/README.md` that is made of the table: how many experiments have
/// results, and the table.
#[must_use]
pub fn document() -> String {
    let count = |is: fn(&Verdict) -> bool| EXPERIMENTS.iter().filter(|e| is(&e.verdict)).count();
    let agree = count(|verdict| matches!(verdict, Verdict::Agrees(_)));
    let partly = count(|verdict| matches!(verdict, Verdict::Partly(_)));
    let differ = count(|verdict| matches!(verdict, Verdict::Differs(_)));
    let unmeasured = count(|verdict| *verdict == Verdict::NotMeasured);
    let cannot = count(|verdict| *verdict == Verdict::CannotShow);
    let all = EXPERIMENTS.len();
    let rows = EXPERIMENTS.iter().map(|experiment| {
        let Experiment { name, source, title, verdict, .. } = experiment;
        vec![
            (*source).to_owned(),
            (*title).to_owned(),
            format!("`{name}`"),
            verdict.to_string(),
            experiment.remark(),
        ]
    });
    let head = ["source", "title", "name", "verdict", "measured"];
    let table: Vec<String> = markdown_rows(&head, rows);
    format!(
        "Of {all} experiments {agree} agree, {partly} agree in part, {differ} differ, {unmeasured} can be run and have no \
         committed results,\nand {cannot} cannot be shown here.\n\n{}\n",
        table.join("\n")
    )
}

/// A table of Markdown without padding, so that a changed row changes no other.
fn markdown_rows(head: &[&str], rows: impl Iterator<Item = Vec<String>>) -> Vec<String> {
    let line = |cells: &[String]| {
        let cells: Vec<String> = cells
            .iter()
            .map(|cell| if cell.is_empty() { " ".to_owned() } else { format!(" {cell} ") })
            .collect();
        format!("|{}|", cells.join("|"))
    };
    let head: Vec<String> = head.iter().map(|cell| (*cell).to_owned()).collect();
    let rule = format!("|{}", "---|".repeat(head.len()));
    [line(&head), rule].into_iter().chain(rows.map(|row| line(&row))).collect()
}
