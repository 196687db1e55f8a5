//! Players as processes: a batch of them is started together, and all of them have to succeed.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use rustix::time::{ClockId, clock_gettime};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use thiserror::Error;

use crate::player::PlayerReport;

/// Tells a process when its request came in, in ns of CLOCK_MONOTONIC.
const REQUEST_VARIABLE: &str = "FIRN_REQUEST_NS";

/// Why a batch is no measurement.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BatchError {
    /// A process could not be started, or waited for.
    #[error("starting microVM {member} of the batch")]
    Start {
        /// Its number in the batch, from 1.
        member: u32,
        /// What the kernel said.
        source: io::Error,
    },
    /// A microVM failed.
    #[error("microVM {member} of the batch failed ({status}): {reason}")]
    Failed {
        /// Its number in the batch, from 1.
        member: u32,
        /// How its process ended.
        status: String,
        /// What it said on standard error.
        reason: String,
    },
    /// A microVM's report is none.
    #[error("microVM {member} of the batch printed no report")]
    Report {
        /// Its number in the batch, from 1.
        member: u32,
        /// What is wrong with what it printed.
        source: serde_json::Error,
    },
    /// A signal ended the measurement.
    #[error("ended by signal {0}")]
    Interrupted(i32),
}

/// Stops a measurement when a signal comes: the players that run are killed, and the next step fails.
///
/// Whoever holds directories to be removed then returns, and removes them.
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

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Interrupt {
    /// From here on SIGINT, SIGTERM and SIGHUP stop the measurement, not the process.
    ///
    /// # Errors
    ///
    /// What the kernel said to catching signals, or to a new thread.
    pub fn catch() -> io::Result<Self> {
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
        let state = Arc::<Mutex<State>>::default();
        let interrupt = Self { state: state.clone(), signals: signals.handle() };
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            for signal in signals.forever() {
                let mut state = lock(&state);
                state.signal = Some(signal);
                for process in &state.running {
                    // It may have ended by itself just now.
                    let _ = pidfd_send_signal(process, Signal::KILL);
                }
            }
        })?;
        Ok(interrupt)
    }

    /// The signal that came, if one did.
    #[must_use]
    pub fn signal(&self) -> Option<i32> {
        lock(&self.state).signal
    }

    fn check(&self) -> Result<(), BatchError> {
        self.signal().map_or(Ok(()), |signal| Err(BatchError::Interrupted(signal)))
    }
}

impl Drop for Interrupt {
    fn drop(&mut self) {
        self.signals.close();
    }
}

/// The processes of a batch, killed and waited for when it is given up.
struct Processes<'a> {
    children: VecDeque<Child>,
    interrupt: &'a Interrupt,
}

impl Drop for Processes<'_> {
    fn drop(&mut self) {
        for child in &mut self.children {
            // One that has ended is only waited for.
            let _ = child.kill();
            let _ = child.wait();
        }
        lock(&self.interrupt.state).running.clear();
    }
}

/// Starts `count` players of one snapshot, which these arguments name, together, waits for all of them, and returns their reports.
///
/// `preloaded` says that the image is in the page cache already: a plan's own preload is left out.
pub(crate) fn run(
    program: &Path,
    snapshot: &[OsString],
    planner: &str,
    preloaded: bool,
    count: u32,
    interrupt: &Interrupt,
) -> Result<Vec<PlayerReport>, BatchError> {
    let mut processes = Processes { children: VecDeque::new(), interrupt };
    interrupt.check()?;
    for member in 1..=count {
        let mut command = Command::new(program);
        command.args(["thaw", "--json", "--planner", planner]);
        if preloaded {
            command.arg("--preloaded");
        }
        // A group of its own: a signal from the terminal reaches this process, which then ends them all.
        command.args(snapshot).process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let start = |source| BatchError::Start { member, source };
        let child = command.env(REQUEST_VARIABLE, now().to_string()).spawn().map_err(start)?;
        let process = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        processes.children.push_back(child);
        if let Some(process) = process {
            let process = pidfd_open(process, PidfdFlags::empty());
            lock(&interrupt.state).running.push(process.map_err(|e| start(e.into()))?);
        }
        // A signal that came before the process was listed has not ended it.
        interrupt.check()?;
    }
    let mut outputs = Vec::new();
    // A report is smaller than a pipe, so none waits for another to be read.
    while let Some(child) = processes.children.pop_front() {
        let member = count - u32::try_from(processes.children.len()).unwrap_or_default();
        let output = child.wait_with_output();
        outputs.push((member, output.map_err(|source| BatchError::Start { member, source })?));
    }
    interrupt.check()?;
    outputs
        .into_iter()
        .map(|(member, output)| {
            if !output.status.success() {
                return Err(BatchError::Failed {
                    member,
                    status: output.status.to_string(),
                    reason: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
                });
            }
            serde_json::from_slice(&output.stdout)
                .map_err(|source| BatchError::Report { member, source })
        })
        .collect()
}

/// ns of CLOCK_MONOTONIC, which all processes share.
fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
    seconds * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or_default()
}

#[cfg(test)]
#[path = "batch_tests.rs"]
mod tests;
