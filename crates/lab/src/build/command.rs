//! Runs the programs of a build, and stops them when this process is asked to stop.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};

use rustix::process::{Pid, Signal, kill_process_group};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::BuildError;

/// Fails if one of the programs is not in a folder of `PATH`.
pub(super) fn require(programs: &[&str]) -> Result<(), BuildError> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = |name: &str| std::env::split_paths(&path).any(|folder| folder.join(name).is_file());
    let missing: Vec<&str> = programs.iter().copied().filter(|name| !found(name)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(BuildError::MissingPrograms { programs: missing.join(", ") })
}

/// Runs one program after the other. Their standard output goes to standard error unless a caller
/// redirects it.
pub(super) struct Runner {
    signals: Signals,
}

impl Runner {
    pub(super) fn new() -> Result<Self, BuildError> {
        let signals = Signals::new([SIGCHLD, SIGHUP, SIGINT, SIGTERM]).map_err(|source| {
            BuildError::Start { program: "signal handlers".to_owned(), source }
        })?;
        Ok(Self { signals })
    }

    /// Runs a program. An exit code other than 0 is an error, with `hint` in its text.
    pub(super) fn run(
        &mut self,
        command: &mut Command,
        hint: &'static str,
    ) -> Result<(), BuildError> {
        let output = io::stderr().as_fd().try_clone_to_owned();
        let output = output.map_err(|source| start_error(command, source))?;
        self.run_as_is(command.stdout(output), hint)
    }

    /// Runs a program with its standard output in `file`.
    pub(super) fn run_into(&mut self, command: &mut Command, file: File) -> Result<(), BuildError> {
        self.run_as_is(command.stdout(file), "")
    }

    /// Runs a program and returns its standard output.
    pub(super) fn output(&mut self, command: &mut Command) -> Result<String, BuildError> {
        let failed = |source| start_error(command, source);
        let mut file = tempfile::tempfile().map_err(failed)?;
        let copy = file.try_clone().map_err(failed)?;
        self.run_into(command, copy)?;
        let failed = |source| start_error(command, source);
        let mut text = String::new();
        file.rewind().and_then(|()| file.read_to_string(&mut text)).map_err(failed)?;
        Ok(text)
    }

    /// Runs `first` and `second` with the output of the first as the input of the second.
    pub(super) fn pipe(
        &mut self,
        first: &mut Command,
        second: &mut Command,
    ) -> Result<(), BuildError> {
        let mut source = first
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| start_error(first, error))?;
        if let Some(pipe) = source.stdout.take() {
            second.stdin(pipe);
        }
        let result = self.run(second, "");
        if result.is_err() {
            // An error means that it has exited.
            let _ = source.kill();
        }
        let status = source.wait().map_err(|error| start_error(first, error))?;
        result?;
        check(first, status, "")
    }

    fn run_as_is(&mut self, command: &mut Command, hint: &'static str) -> Result<(), BuildError> {
        let mut child =
            command.process_group(0).spawn().map_err(|source| start_error(command, source))?;
        let status = self.wait(&mut child, command)?;
        check(command, status, hint)
    }

    /// Waits for a child. A signal to this process terminates the child's process group first.
    fn wait(&mut self, child: &mut Child, command: &Command) -> Result<ExitStatus, BuildError> {
        loop {
            // SIGCHLD of a child that exits after this call ends the wait below.
            let status = child.try_wait().map_err(|source| start_error(command, source))?;
            if let Some(status) = status {
                return Ok(status);
            }
            if let Some(signal) = self.signals.wait().find(|signal| *signal != SIGCHLD) {
                // An error means that the group has exited.
                let _ = kill_process_group(Pid::from_child(child), Signal::TERM);
                child.wait().map_err(|source| start_error(command, source))?;
                return Err(BuildError::Interrupted { signal });
            }
        }
    }
}

fn check(command: &Command, status: ExitStatus, hint: &'static str) -> Result<(), BuildError> {
    if status.success() {
        return Ok(());
    }
    Err(BuildError::Program { program: name(command), status, hint })
}

fn start_error(command: &Command, source: io::Error) -> BuildError {
    BuildError::Start { program: name(command), source }
}

/// The name for messages: the program's, or the one that a loader runs.
fn name(command: &Command) -> String {
    let program = command.get_program().to_string_lossy();
    if !program.contains("ld-linux") {
        return program.into_owned();
    }
    command.get_args().nth(2).unwrap_or_default().to_string_lossy().into_owned()
}

#[cfg(test)]
#[path = "command_tests.rs"]
mod tests;
