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
    /// The hosts lack what would show it; the text has what agrees or differs in spite of that.
    CannotShow(&'static str),
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Agrees("") => f.write_str("agrees"),
            Self::Agrees(text) => write!(f, "agrees: {text}"),
            Self::Partly(text) => write!(f, "agrees in part: {text}"),
            Self::Differs(text) => write!(f, "differs: {text}"),
            Self::CannotShow(text) => write!(f, "cannot show: {text}"),
        }
    }
}

/// There is no experiment of this name.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("no experiment has the name {0:?}; `firn bench paper` lists the names")]
pub struct FindError(pub String);

/// Finds experiments by their names, in the order of the table. `all` selects every one, and
/// `pass`, `faasnap`, `snapbpf` and `systor` those of a paper.
///
/// # Errors
///
/// [`FindError`] at the first name that is unknown.
pub fn find(names: &[String]) -> Result<Vec<&'static Experiment>, FindError> {
    let mut wanted = [false; EXPERIMENTS.len()];
    for name in names {
        let mut found = false;
        for (experiment, wanted) in EXPERIMENTS.iter().zip(&mut wanted) {
            if [experiment.name, experiment.paper(), "all"].contains(&name.as_str()) {
                (found, *wanted) = (true, true);
            }
        }
        if !found {
            return Err(FindError(name.clone()));
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
}

/// The rows of a listing for a terminal: name, source, title.
#[must_use]
pub fn listing() -> Vec<Vec<String>> {
    let row = |experiment: &Experiment| {
        [experiment.name, experiment.source, experiment.title].map(str::to_owned).to_vec()
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
    let unshown = count(|verdict| matches!(verdict, Verdict::CannotShow(_)));
    let all = EXPERIMENTS.len();
    let rows = EXPERIMENTS.iter().map(|experiment| {
        let Experiment { name, source, title, verdict, measured, .. } = experiment;
        vec![
            (*source).to_owned(),
            (*title).to_owned(),
            format!("`{name}`"),
            verdict.to_string(),
            (*measured).to_owned(),
        ]
    });
    let head = ["source", "title", "name", "verdict", "measured"];
    let table: Vec<String> = markdown_rows(&head, rows);
    format!(
        "Of {all} experiments {agree} agree, {partly} agree in part, {differ} differ, and {unshown} need other hosts.\n\n\
         {}\n",
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
