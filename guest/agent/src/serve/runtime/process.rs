//! A process of the function and its output.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, PipeReader, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open};

use super::thrashing::{PERIOD, Thrashing};
use super::{ExchangeError, RuntimeConfig, StartError};
use crate::serve::freezer::Freezer;
use crate::serve::log_tail::LogTail;

/// Grace period for a runtime to exit after its channel closed, before it is killed. A process
/// closes its files shortly before it can be reaped.
const EXIT_GRACE: Duration = Duration::from_secs(5);

/// A running process. Dropping it kills it and its process group.
#[derive(Debug)]
pub(super) struct Process {
    child: Child,
    end: OwnedFd,
    status: Option<File>,
    output: PipeReader,
    tail: LogTail,
    freezer: Option<Freezer>,
    thrashing: Thrashing,
    reaped: bool,
}

/// The descriptors that are ready.
#[derive(Debug)]
pub(super) struct Ready {
    /// Which of the caller's descriptors are readable.
    pub(super) channels: Vec<bool>,
    /// The process has ended.
    pub(super) ended: bool,
}

impl Process {
    /// Starts `command` with only `environment` as its environment, in the function's directory and
    /// in its own process group.
    pub(super) fn start(
        mut command: Command,
        config: &RuntimeConfig,
        environment: &BTreeMap<String, String>,
    ) -> Result<Self, StartError> {
        let (output, printed) = io::pipe()?;
        command.env_clear().envs(environment).current_dir(&config.task_dir);
        command.stdout(printed.try_clone()?).stderr(printed).process_group(0);
        if let Some(user) = config.user {
            command.uid(user).gid(user);
        }
        if let Some(freezer) = &config.freezer {
            // The kernel checks the rights of the process that opened the file.
            let entrance = freezer.entrance()?;
            let enter =
                move || rustix::io::write(&entrance, b"0").map(drop).map_err(io::Error::from);
            // SAFETY: `enter` makes one system call, which a forked child may make.
            unsafe { command.pre_exec(enter) };
        }
        let mut child = command.spawn().map_err(StartError::Spawn)?;
        match pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) {
            Ok(end) => {
                let (freezer, status) = (config.freezer.clone(), status(child.id()).ok());
                let tail = LogTail::default();
                let thrashing = Thrashing::new(config.counters.clone(), config.min_ttl_ms.clone());
                Ok(Self { child, end, status, output, tail, freezer, thrashing, reaped: false })
            }
            Err(error) => {
                child.kill()?;
                child.wait()?;
                Err(io::Error::from(error).into())
            }
        }
    }

    /// Waits until one of `channels` is readable, the process has ended, or it writes output, which
    /// goes to the log tail, but not for longer than [`PERIOD`]. Returns immediately without a
    /// deadline.
    pub(super) fn wait(
        &mut self,
        channels: &[BorrowedFd<'_>],
        deadline: Option<Instant>,
    ) -> Result<Ready, ExchangeError> {
        let left =
            deadline.map_or(Duration::ZERO, |at| at.saturating_duration_since(Instant::now()));
        if left.is_zero() && deadline.is_some() {
            return Err(ExchangeError::TimedOut);
        }
        let timeout = Timespec::try_from(left.min(PERIOD)).map_err(|_| ExchangeError::TimedOut)?;
        // The pipe of a closed output is always ready, so it is not polled any more.
        let output = (!self.tail.ended()).then(|| self.output.as_fd());
        let watched = [self.end.as_fd()].into_iter().chain(channels.iter().copied()).chain(output);
        let mut files: Vec<_> =
            watched.map(|file| PollFd::from_borrowed_fd(file, PollFlags::IN)).collect();
        match poll(&mut files, Some(&timeout)) {
            Ok(0) if left >= PERIOD => self.thrashing.look(),
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => self.thrashing.calm(),
            Err(error) => return Err(ExchangeError::Io(error.into())),
        }
        let ready = |file: &PollFd<'_>| !file.revents().is_empty();
        let ended = ready(&files[0]);
        let channels: Vec<bool> = files[1..=channels.len()].iter().map(ready).collect();
        let output = files[1 + channels.len()..].iter().any(ready);
        if output {
            let mut bytes = [0; 16 << 10];
            let count = self.output.read(&mut bytes).map_err(ExchangeError::Io)?;
            self.tail.push(&bytes[..count]);
        }
        Ok(Ready { channels, ended })
    }

    /// Returns an error if the process has ended.
    pub(super) fn check_running(&mut self) -> Result<(), ExchangeError> {
        if self.wait(&[], None)?.ended { Err(ExchangeError::EndedBefore) } else { Ok(()) }
    }

    /// Takes the last part of the function's output since the previous call, as text.
    pub(super) fn take_logs(&mut self) -> String {
        // Output written before the reply is already in the pipe. A pipe holds 64 KiB, so this loop
        // ends even if a thread continues to write.
        for _ in 0..8 {
            let before = self.tail.received();
            if self.wait(&[], None).is_err() || self.tail.received() == before {
                break;
            }
        }
        self.tail.take()
    }

    /// The sum of the largest resident sets of the function's processes that run, in bytes.
    pub(super) fn peak_memory(&self) -> u64 {
        let own = || Ok(vec![self.child.id()]);
        let processes = self.freezer.as_ref().map_or_else(own, Freezer::processes);
        let largest = |process| match &self.status {
            Some(status) if process == self.child.id() => largest_resident_set(status),
            _ => largest_resident_set(&status(process).ok()?),
        };
        processes.unwrap_or_default().into_iter().filter_map(largest).sum()
    }

    /// Waits for a process that closed its channel, and kills it after a grace period. Returns its
    /// status, or `None` if it was killed.
    pub(super) fn end(&mut self) -> io::Result<Option<ExitStatus>> {
        let deadline = Instant::now() + EXIT_GRACE;
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        // Not reaped (NOWAIT), so that its pid still identifies its process group.
        let ended_alone = loop {
            if rustix::process::waitid(WaitId::Pid(Pid::from_child(&self.child)), options)?
                .is_some()
            {
                break true;
            }
            if Instant::now() >= deadline {
                break false;
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        let status = self.kill()?;
        Ok(ended_alone.then_some(status))
    }

    /// Stops all threads of the function's processes but the main thread of this one, if that was
    /// excepted.
    pub(super) fn stop_others(&self, deadline: Instant) -> Result<(), ExchangeError> {
        let Some(freezer) = &self.freezer else { return Ok(()) };
        match freezer.stop(Some(self.child.id()), deadline) {
            Ok(true) => Ok(()),
            Ok(false) => Err(ExchangeError::TimedOut),
            Err(error) => Err(ExchangeError::Io(error)),
        }
    }

    /// Excepts the main thread from stopping.
    pub(super) fn hold_main_thread(&self) -> Result<(), ExchangeError> {
        let Some(freezer) = &self.freezer else { return Ok(()) };
        freezer.except(self.child.id()).map_err(ExchangeError::Io)
    }

    /// Lets everything that was stopped run again.
    pub(super) fn resume_others(&self) -> Result<(), ExchangeError> {
        let Some(freezer) = &self.freezer else { return Ok(()) };
        freezer.resume().map_err(ExchangeError::Io)
    }

    fn kill(&mut self) -> io::Result<ExitStatus> {
        // Fails only if the group does not exist any more.
        let _ = rustix::process::kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        let killed = self.freezer.as_ref().map_or(Ok(()), Freezer::kill);
        self.reaped = true;
        let status = self.child.wait()?;
        killed.map(|()| status)
    }
}

/// The status of a process (`proc_pid_status(5)`).
fn status(process: u32) -> io::Result<File> {
    File::open(format!("/proc/{process}/status"))
}

/// The largest resident set of a process so far, in bytes; none if it has ended.
fn largest_resident_set(status: &File) -> Option<u64> {
    // The line is among the first thirty.
    let mut bytes = [0; 4096];
    let count = status.read_at(&mut bytes, 0).ok()?;
    let status = str::from_utf8(&bytes[..count]).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib << 10)
}

impl Drop for Process {
    fn drop(&mut self) {
        // After reaping, the pid may be reused.
        if !self.reaped {
            let _ = self.kill();
        }
    }
}
