//! `--detach`: runs the same command in the background, and returns once it is ready.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};

use anyhow::Context;
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Starts this command again without `--detach`, in a session of its own, and forwards its output
/// until it is ready or fails.
///
/// It is ready when it prints its first line; later output is discarded. Until then a signal to
/// this process ends it too: no terminal reaches its session.
pub(crate) fn detach() -> anyhow::Result<ExitCode> {
    let executable = std::env::current_exe().context("cannot find the path of this program")?;
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
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("cannot catch signals")?;
    let caught = signals.handle();
    let mut child = command.spawn().context("cannot start firn in the background")?;
    let process = Pid::from_child(&child);
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            for _ in signals.forever() {
                // It may have ended just now.
                let _ = kill_process(process, Signal::TERM);
            }
        })
        .context("cannot start firn in the background")?;
    let mut line = String::new();
    if let Some(stdout) = child.stdout.take() {
        BufReader::new(stdout)
            .read_line(&mut line)
            .context("cannot read the output of firn in the background")?;
    }
    if !line.is_empty() {
        let _ = io::stdout().write_all(line.as_bytes());
        return Ok(ExitCode::SUCCESS);
    }
    // It ended without output: forward its error and its exit code.
    if let Some(mut stderr) = child.stderr.take() {
        let mut text = Vec::new();
        stderr
            .read_to_end(&mut text)
            .context("cannot read the output of firn in the background")?;
        let _ = io::stderr().write_all(&text);
    }
    // After the wait, another process may have its id.
    caught.close();
    let status = child.wait().context("cannot start firn in the background")?;
    let code = status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
    Ok(ExitCode::from(code))
}
