//! Players as processes: a batch of them starts together, and all of them must succeed.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use thiserror::Error;

use firn_base::now_ns;
use firn_memory::prefer_as_victim;

use firn_run::StartReport;

/// Passes the time of the request to a process, in ns of CLOCK_MONOTONIC.
const REQUEST_VARIABLE: &str = "FIRN_REQUEST_NS";
/// A player prints this when it has touched its last page.
pub(crate) const HELD: &str = "held\n";

/// Why a batch is not a measurement.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BatchError {
    /// A process cannot be started, or cannot be waited for.
    #[error("cannot start microVM {member} of the batch")]
    Start {
        /// Its number in the batch, from 1.
        member: u32,
        /// The error of the operating system.
        source: io::Error,
    },
    /// A microVM failed.
    #[error("microVM {member} of the batch failed ({status}): {reason}")]
    Failed {
        /// Its number in the batch, from 1.
        member: u32,
        /// The exit status of its process.
        status: String,
        /// Its standard error.
        reason: String,
    },
    /// A microVM's report is not valid.
    #[error("microVM {member} of the batch printed no valid report")]
    Report {
        /// Its number in the batch, from 1.
        member: u32,
        /// The error in its output.
        source: serde_json::Error,
    },
    /// A signal ended the measurement.
    #[error("ended by signal {0}")]
    Interrupted(i32),
}

/// Stops a measurement on a signal: the running players are killed, and the next step fails.
///
/// The measurement then returns, and temporary directories are removed.
#[derive(Debug)]
pub struct Interrupt {
    state: Arc<Mutex<State>>,
    signals: signal_hook::iterator::Handle,
}

#[derive(Debug, Default)]
struct State {
    signal: Option<i32>,
    running: Vec<OwnedFd>,
}

impl Interrupt {
    /// From here on SIGINT, SIGTERM and SIGHUP stop the measurement instead of the process.
    ///
    /// # Errors
    ///
    /// The error of the operating system, if signals cannot be caught or a thread cannot be
    /// started.
    pub fn catch() -> io::Result<Self> {
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
        let state = Arc::<Mutex<State>>::default();
        let interrupt = Self { state: state.clone(), signals: signals.handle() };
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            for signal in signals.forever() {
                let mut state = state.lock();
                state.signal = Some(signal);
                for process in &state.running {
                    // It may have ended just now.
                    let _ = pidfd_send_signal(process, Signal::KILL);
                }
            }
        })?;
        Ok(interrupt)
    }

    /// The signal that arrived, if one did.
    #[must_use]
    pub fn signal(&self) -> Option<i32> {
        self.state.lock().signal
    }

    pub(crate) fn check(&self) -> Result<(), BatchError> {
        self.signal().map_or(Ok(()), |signal| Err(BatchError::Interrupted(signal)))
    }
}

impl Drop for Interrupt {
    fn drop(&mut self) {
        self.signals.close();
    }
}

/// The processes of a batch. They are killed and waited for on drop.
pub(crate) struct Processes<'a> {
    pub(crate) members: VecDeque<Member>,
    interrupt: &'a Interrupt,
}

/// A process, and its output.
pub(crate) struct Member {
    pub(crate) number: u32,
    pub(crate) child: Child,
    pub(crate) stdout: BufReader<ChildStdout>,
    /// The output that was read so far.
    pub(crate) printed: String,
}

impl Drop for Processes<'_> {
    fn drop(&mut self) {
        for Member { child, .. } in &mut self.members {
            // A process that has ended is only waited for.
            let _ = child.kill();
            let _ = child.wait();
        }
        self.interrupt.state.lock().running.clear();
    }
}

/// A player to start.
#[derive(Clone, Copy)]
pub(crate) struct Player<'a> {
    /// The `firn` program that it is a process of.
    pub(crate) program: &'a Path,
    /// The arguments that name the snapshot.
    pub(crate) snapshot: &'a [OsString],
    pub(crate) planner: &'a str,
    /// Whether the image is in the page cache already, so that the plan's own preload is skipped.
    pub(crate) preloaded: bool,
    /// Whether it also measures its time in page faults.
    pub(crate) faults: bool,
}

impl<'a> Processes<'a> {
    pub(crate) fn new(interrupt: &'a Interrupt) -> Self {
        Self { members: VecDeque::new(), interrupt }
    }

    /// Starts one more process, with a number from 1.
    pub(crate) fn start(&mut self, start: Player<'_>, number: u32) -> Result<(), BatchError> {
        let member = number;
        let failed = |source| BatchError::Start { member, source };
        let mut command = Command::new(start.program);
        command.args(["thaw", "--json", "--planner", start.planner]);
        if start.preloaded {
            command.arg("--preloaded");
        }
        if start.faults {
            command.arg("--fault-time");
        }
        // Each process has a group of its own. A signal from the terminal then reaches only this
        // process, which ends them all.
        command.args(start.snapshot).arg("--hold").process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child =
            command.env(REQUEST_VARIABLE, now_ns().to_string()).spawn().map_err(failed)?;
        let process = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let stdout = child.stdout.take().ok_or_else(|| failed(io::ErrorKind::BrokenPipe.into()))?;
        let stdout = BufReader::new(stdout);
        let printed = String::new();
        let id = child.id();
        self.members.push_back(Member { number, child, stdout, printed });
        prefer_as_victim(id).map_err(failed)?;
        if let Some(process) = process {
            let process = pidfd_open(process, PidfdFlags::empty());
            self.interrupt.state.lock().running.push(process.map_err(|e| failed(e.into()))?);
        }
        Ok(())
    }
}

/// Starts `count` players together, taking turns with `players`, waits for all of them, and returns
/// their reports.
///
/// `held` is called when every player has touched its last page and none checks all its memory yet:
/// that check reads pages into the page cache that other players may not have touched.
pub(crate) fn run<T>(
    players: &[Player<'_>],
    count: u32,
    interrupt: &Interrupt,
    held: impl FnOnce() -> T,
) -> Result<(Vec<StartReport>, T), BatchError> {
    let mut processes = Processes::new(interrupt);
    interrupt.check()?;
    for (number, player) in (1..=count).zip(players.iter().cycle()) {
        processes.start(*player, number)?;
        // A signal before this process was listed has not ended it.
        interrupt.check()?;
    }
    for Member { number, stdout, printed, .. } in &mut processes.members {
        let member = *number;
        // A failed process prints nothing.
        stdout.read_line(printed).map_err(|source| BatchError::Start { member, source })?;
    }
    let held = held();
    for Member { child, .. } in &mut processes.members {
        drop(child.stdin.take());
    }
    let mut reports = Vec::new();
    // Reports and errors are smaller than a pipe, so no process waits for another to be read.
    while let Some(member) = processes.members.front_mut() {
        reports.push(member.report());
        processes.members.pop_front();
    }
    interrupt.check()?;
    Ok((reports.into_iter().collect::<Result<_, _>>()?, held))
}

impl Member {
    /// Whether its process has ended, or its state is unknown.
    pub(crate) fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits for its end.
    pub(crate) fn report(&mut self) -> Result<StartReport, BatchError> {
        let member = self.number;
        let start = |source| BatchError::Start { member, source };
        self.stdout.read_to_string(&mut self.printed).map_err(start)?;
        let mut reason = Vec::new();
        if let Some(stderr) = &mut self.child.stderr {
            stderr.read_to_end(&mut reason).map_err(start)?;
        }
        let status = self.child.wait().map_err(start)?;
        if !status.success() {
            let reason = String::from_utf8_lossy(&reason).trim().to_owned();
            return Err(BatchError::Failed { member, status: status.to_string(), reason });
        }
        let report = self.printed.strip_prefix(HELD).unwrap_or(&self.printed);
        serde_json::from_str(report).map_err(|source| BatchError::Report { member, source })
    }
}

#[cfg(test)]
#[path = "batch_tests.rs"]
mod tests;
