//! Runs steps, or lists them.

use std::cell::RefCell;
use std::fmt::Display;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};

use crate::step::Step;
use crate::{Result, cargo};

/// How often a step is run until it succeeds, if it may be run again.
const TRIES: u32 = 3;

/// Runs the steps of a task in order.
#[derive(Debug)]
pub(crate) struct Runner {
    /// In a dry run: the lines of the steps so far.
    listed: Option<RefCell<Vec<String>>>,
    /// The value of `FIRN_REQUIRE` for all steps.
    required: String,
}

impl Runner {
    pub(crate) fn new(dry_run: bool, required: String) -> Self {
        Self { listed: dry_run.then(RefCell::default), required }
    }

    fn prepare(&self, command: &mut Command) {
        command.env("FIRN_REQUIRE", &self.required);
    }

    /// The steps of a dry run.
    pub(crate) fn listed(&self) -> Vec<String> {
        self.listed.as_ref().map(|listed| listed.borrow().clone()).unwrap_or_default()
    }

    /// Whether this is a dry run. Then it lists `text`.
    fn lists(&self, text: impl Display) -> bool {
        if let Some(listed) = &self.listed {
            listed.borrow_mut().push(text.to_string());
        }
        self.listed.is_some()
    }

    /// Runs a step. An exit code other than 0 is an error.
    pub(crate) fn run(&self, step: &Step) -> Result<()> {
        self.run_to(step, || Ok((Stdio::inherit(), Stdio::inherit())))
    }

    /// Runs a step with its standard output and standard error as `streams` makes them.
    fn run_to(&self, step: &Step, streams: impl Fn() -> io::Result<(Stdio, Stdio)>) -> Result<()> {
        if self.lists(step) {
            return Ok(());
        }
        let mut tries = 0;
        loop {
            let (stdout, stderr) = streams()?;
            let mut child = step.spawn(|command| {
                self.prepare(command);
                command.stdout(stdout).stderr(stderr);
            })?;
            let status = child.wait()?;
            tries += 1;
            if status.success() {
                return Ok(());
            }
            if tries == TRIES || !step.is_run_again(status) {
                return failed(step, status);
            }
            self.note(&format!("It failed ({status}) and is run again: {step}"));
        }
    }

    /// Runs a step without its standard output.
    pub(crate) fn run_quietly(&self, step: &Step) -> Result<()> {
        self.run_to(step, || Ok((Stdio::null(), Stdio::inherit())))
    }

    /// Runs a step with its standard output in `file`.
    pub(crate) fn run_into(&self, step: &Step, file: &File) -> Result<()> {
        self.run_to(step, || Ok((file.try_clone()?.into(), Stdio::inherit())))
    }

    /// Runs a step, and at the same time others in order, up to the first that fails. Their output
    /// is printed when all have exited.
    pub(crate) fn run_beside(&self, foreground: &Step, background: &[Step]) -> Result<()> {
        if self.is_dry() {
            for step in background {
                self.lists(format_args!("{step} &"));
            }
            return self.run(foreground);
        }
        let mut output = temporary_file()?;
        let file = output.try_clone()?;
        let required = self.required.clone();
        let other = move || {
            let runner = Self::new(false, required);
            let run = |step| {
                runner.run_to(step, || Ok((file.try_clone()?.into(), file.try_clone()?.into())))
            };
            background.iter().try_for_each(run).map_err(|error| error.to_string())
        };
        let (result, other) = std::thread::scope(|scope| {
            let other = scope.spawn(other);
            (self.run(foreground), other.join())
        });
        let mut text = Vec::new();
        output.rewind()?;
        output.read_to_end(&mut text)?;
        io::stdout().write_all(&text)?;
        result?;
        Ok(other.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?)
    }

    /// Builds a program with a cargo command such as `test -p firn --test lab`, and returns its
    /// path.
    pub(crate) fn build(&self, cargo_command: &str, name: &str) -> Result<PathBuf> {
        let step = cargo::build_step(cargo_command);
        if self.lists(&step) {
            return Ok(PathBuf::from(name));
        }
        cargo::executable(&step.output()?, name)
            .ok_or_else(|| format!("cargo names no program {name} for: {step}").into())
    }

    /// Prints a line for people.
    pub(crate) fn note(&self, text: &str) {
        if !self.is_dry() {
            line(text);
        }
    }

    /// Whether this is a dry run.
    pub(crate) fn is_dry(&self) -> bool {
        self.listed.is_some()
    }
}

/// Prints a line. A closed standard output is not an error.
pub(crate) fn line(text: &str) {
    let _ = writeln!(io::stdout(), "{text}");
}

/// A file without a name.
fn temporary_file() -> Result<File> {
    let path = std::env::temp_dir().join(format!("xtask-{}", std::process::id()));
    let file = File::options().read(true).write(true).create_new(true).open(&path)?;
    std::fs::remove_file(&path)?;
    Ok(file)
}

fn failed<T>(step: &Step, status: ExitStatus) -> Result<T> {
    Err(format!("failed ({status}): {step}").into())
}

#[cfg(test)]
#[path = "runner_tests.rs"]
mod tests;
