//! One command: it can be printed, compared and run.

use std::ffi::OsStr;
use std::fmt::{self, Display, Formatter};
use std::process::{Child, Command, ExitStatus, Stdio};

use crate::Result;

/// Variables that `cargo run` sets for xtask. They describe xtask, so its children do not get them.
const OF_CARGO_RUN: [&str; 3] = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_"];

/// A command with its arguments and the variables that it gets in addition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Step {
    program: String,
    arguments: Vec<String>,
    variables: Vec<(String, String)>,
    again_after: Option<i32>,
}

impl Step {
    pub(crate) fn new(program: impl AsRef<OsStr>) -> Self {
        let (arguments, variables) = (Vec::new(), Vec::new());
        Self { program: text(program), arguments, variables, again_after: None }
    }

    /// A command whose words are separated by single spaces.
    pub(crate) fn words(line: &str) -> Self {
        let mut words = line.split(' ');
        Self::new(words.next().unwrap_or_default()).args(words)
    }

    pub(crate) fn arg(mut self, argument: impl AsRef<OsStr>) -> Self {
        self.arguments.push(text(argument));
        self
    }

    pub(crate) fn args<S: AsRef<OsStr>>(mut self, arguments: impl IntoIterator<Item = S>) -> Self {
        self.arguments.extend(arguments.into_iter().map(text));
        self
    }

    pub(crate) fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.variables.push((name.to_owned(), text(value)));
        self
    }

    /// An exit code after which the command is run again.
    pub(crate) fn again_after(self, code: i32) -> Self {
        Self { again_after: Some(code), ..self }
    }

    /// Whether the command is run again after `status`.
    pub(crate) fn is_run_again(&self, status: ExitStatus) -> bool {
        self.again_after.is_some() && status.code() == self.again_after
    }

    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        for (name, _) in std::env::vars_os() {
            if OF_CARGO_RUN.iter().any(|prefix| name.to_string_lossy().starts_with(prefix)) {
                command.env_remove(name);
            }
        }
        command
            .args(&self.arguments)
            .envs(self.variables.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Starts the command with its streams as `configure` sets them.
    pub(crate) fn spawn(&self, configure: impl FnOnce(&mut Command)) -> Result<Child> {
        let mut command = self.command();
        configure(&mut command);
        command.spawn().map_err(|error| format!("cannot run {}: {error}", self.program).into())
    }

    /// Runs the command without output. Whether it exits with code 0.
    pub(crate) fn succeeds(&self) -> Result<bool> {
        let quiet = |command: &mut Command| {
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        };
        Ok(self.spawn(quiet)?.wait()?.success())
    }

    /// Runs the command and returns its standard output. Its standard error is xtask's own.
    pub(crate) fn output(&self) -> Result<String> {
        let child = self.spawn(|command| {
            command.stdout(Stdio::piped());
        })?;
        let output = child.wait_with_output()?;
        if !output.status.success() {
            return Err(format!("failed ({}): {self}", output.status).into());
        }
        Ok(String::from_utf8(output.stdout)?)
    }
}

/// The command as a line for a shell.
impl Display for Step {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        for (name, value) in &self.variables {
            write!(formatter, "{name}={} ", quoted(value))?;
        }
        write!(formatter, "{}", quoted(&self.program))?;
        self.arguments.iter().try_for_each(|argument| write!(formatter, " {}", quoted(argument)))
    }
}

/// Paths are UTF-8 text here: they are printed and written into scripts for the lab.
fn text(argument: impl AsRef<OsStr>) -> String {
    argument.as_ref().to_string_lossy().into_owned()
}

fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=+:,./@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}
