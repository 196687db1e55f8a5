//! `--detach`: the same command in the background, returned from once it is ready.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use thiserror::Error;

/// Exit code of a manager that was started on demand where another process has the medium (`EX_TEMPFAIL`).
pub(crate) const IN_USE: u8 = 75;

/// Why a command did not go to the background.
#[derive(Debug, Error)]
pub(crate) enum DetachError {
    /// Signals cannot be caught.
    #[error("preparing to catch signals")]
    Signals(#[source] io::Error),
    /// It cannot be started again.
    #[error("starting firn again in the background")]
    Spawn(#[source] io::Error),
    /// Its output cannot be read.
    #[error("reading what firn says in the background")]
    Read(#[source] io::Error),
}

/// Starts this command again without `--detach`, in a session of its own, and passes on what it
/// says until it is ready or fails.
///
/// Ready is: its first line. What it says later goes nowhere. A signal that comes before ends it, too:
/// it is in no session that a terminal could reach.
pub(crate) fn detach() -> Result<ExitCode, DetachError> {
    let executable = std::env::current_exe().map_err(DetachError::Spawn)?;
    let arguments = std::env::args_os().skip(1).filter(|argument| argument != "--detach");
    let mut command = Command::new(executable);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // SAFETY: setsid(2) is async-signal-safe and is all that the child does before exec.
    unsafe {
        command.pre_exec(|| {
            rustix::process::setsid()?;
            Ok(())
        })
    };
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).map_err(DetachError::Signals)?;
    let caught = signals.handle();
    let mut child = command.spawn().map_err(DetachError::Spawn)?;
    let process = Pid::from_child(&child);
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            for _ in signals.forever() {
                // It may have ended by itself just now.
                let _ = kill_process(process, Signal::TERM);
            }
        })
        .map_err(DetachError::Spawn)?;
    let mut line = String::new();
    if let Some(stdout) = child.stdout.take() {
        BufReader::new(stdout).read_line(&mut line).map_err(DetachError::Read)?;
    }
    if !line.is_empty() {
        let _ = io::stdout().write_all(line.as_bytes());
        return Ok(ExitCode::SUCCESS);
    }
    // It ended without a word on its output: pass on its error and its exit code.
    if let Some(mut stderr) = child.stderr.take() {
        let mut text = Vec::new();
        stderr.read_to_end(&mut text).map_err(DetachError::Read)?;
        let _ = io::stderr().write_all(&text);
    }
    // Once waited for, its number may be another's.
    caught.close();
    let status = child.wait().map_err(DetachError::Spawn)?;
    let code = status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
    Ok(ExitCode::from(code))
}
