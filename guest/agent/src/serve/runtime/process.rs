//! A process of the function, and what it prints.

use std::collections::BTreeMap;
use std::io::{self, PipeReader, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open};

use super::{ExchangeError, RuntimeConfig};
use crate::serve::log_tail::LogTail;

/// How long a runtime may take to die after its channel closed, before it is killed. A process
/// closes its files shortly before it can be waited for.
const EXIT_GRACE: Duration = Duration::from_secs(5);

/// A running process. It and its process group are killed when this is dropped.
#[derive(Debug)]
pub(super) struct Process {
    child: Child,
    end: OwnedFd,
    output: PipeReader,
    tail: LogTail,
    reaped: bool,
}

/// What has something to say.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ready {
    /// The descriptor that the caller waits for.
    pub(super) channel: bool,
    /// The process, which has ended.
    pub(super) ended: bool,
}

impl Process {
    /// Starts `command` with `environment` and nothing else from the agent's own, in the function's
    /// folder, in a process group of its own.
    pub(super) fn start(
        mut command: Command,
        config: &RuntimeConfig,
        environment: &BTreeMap<String, String>,
    ) -> io::Result<Self> {
        let (output, printed) = io::pipe()?;
        command.env_clear().envs(environment).current_dir(&config.task_dir);
        command.stdout(printed.try_clone()?).stderr(printed).process_group(0);
        if let Some(user) = config.user {
            command.uid(user).gid(user);
        }
        let mut child = command.spawn()?;
        match pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) {
            Ok(end) => Ok(Self { child, end, output, tail: LogTail::default(), reaped: false }),
            Err(error) => {
                child.kill()?;
                child.wait()?;
                Err(error.into())
            }
        }
    }

    /// Waits until `channel` can be read, the process has ended, or it prints something, which goes
    /// to the log tail. Without a deadline it does not wait.
    pub(super) fn wait(
        &mut self,
        channel: BorrowedFd<'_>,
        deadline: Option<Instant>,
    ) -> Result<Ready, ExchangeError> {
        let left =
            deadline.map_or(Duration::ZERO, |at| at.saturating_duration_since(Instant::now()));
        if left.is_zero() && deadline.is_some() {
            return Err(ExchangeError::TimedOut);
        }
        let timeout = Timespec::try_from(left).map_err(|_| ExchangeError::TimedOut)?;
        let mut files = [
            PollFd::new(&channel, PollFlags::IN),
            PollFd::new(&self.end, PollFlags::IN),
            PollFd::from_borrowed_fd(self.output.as_fd(), PollFlags::IN),
        ];
        // A function that closed its output leaves a pipe that is always ready: look at it no more.
        let watched = if self.tail.ended() { &mut files[..2] } else { &mut files[..] };
        match poll(watched, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(ExchangeError::Io(error.into())),
        }
        let [channel, ended, output] = files.map(|file| !file.revents().is_empty());
        if output {
            let mut bytes = [0; 16 << 10];
            let count = self.output.read(&mut bytes).map_err(ExchangeError::Io)?;
            self.tail.push(&bytes[..count]);
        }
        Ok(Ready { channel, ended })
    }

    /// Takes what the function printed since the last call: its last bytes, as text.
    pub(super) fn take_logs(&mut self, channel: BorrowedFd<'_>) -> String {
        // What a runtime printed before its reply is in the pipe by then; a pipe holds 64 KiB, so
        // this ends even where a thread goes on printing.
        for _ in 0..8 {
            let before = self.tail.received();
            if self.wait(channel, None).is_err() || self.tail.received() == before {
                break;
            }
        }
        self.tail.take()
    }

    /// Waits for a process that closed its channel, kills it where it goes on, and says how it
    /// ended: `None` where it had to be killed.
    pub(super) fn end(&mut self) -> io::Result<Option<ExitStatus>> {
        let deadline = Instant::now() + EXIT_GRACE;
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        // Left unreaped (NOWAIT), so that its number still names its process group.
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

    fn kill(&mut self) -> io::Result<ExitStatus> {
        // Fails only where the group is gone, which is what is wanted.
        let _ = rustix::process::kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        self.reaped = true;
        self.child.wait()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Once reaped, its number may be another process's.
        if !self.reaped {
            let _ = self.kill();
        }
    }
}
