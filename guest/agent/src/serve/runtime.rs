//! The Python process that runs the function.

use std::collections::BTreeMap;
use std::io::{self, PipeReader, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::log_tail::LogTail;
use crate::protocol::{
    FrameError, FunctionError, MAX_EVENT_BYTES, MAX_REPLY_LENGTH, ReceiveError, SendError, Timed,
    receive, send, write_frame,
};

/// The Python side of the channel.
const SOURCE: &str = include_str!("../runtime.py");

/// How long a runtime may take to die after its channel closed, before it is killed. A process
/// closes its files shortly before it can be waited for.
const EXIT_GRACE: Duration = Duration::from_secs(5);

/// The longest message to the runtime that is not an event, in bytes.
const MAX_MESSAGE: usize = 64 << 10;

/// How the runtime is started.
#[derive(Debug, Clone)]
pub struct RuntimeConfig {
    /// The Python interpreter, version 3.9 or newer: a path, or a name to look up in `PATH`.
    pub python: PathBuf,
    /// The folder that the function's files are written to. Everything in it is removed before.
    pub task_dir: PathBuf,
    /// The user and group that the function runs as; the agent's own where there is none.
    pub user: Option<u32>,
}

/// What the agent says to the runtime.
#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Message<'a> {
    Load { handler: &'a str, task_dir: &'a str, answer_limit: usize },
    Invoke { request_id: &'a str, time_limit_ms: u64 },
    Reseed { instance_id: &'a str, log_stream_name: &'a str },
    Collect {},
}

/// What the runtime answers. The function shares its process, so nothing here is to be trusted.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outcome {
    Done(()),
    Answer(Box<RawValue>),
    Error(FunctionError),
}

/// Why the runtime gave no [`Outcome`]. It has to be ended then.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExchangeError {
    #[error("the runtime did not answer in time")]
    TimedOut,
    #[error("the runtime ended")]
    Ended,
    #[error("the function broke the runtime's channel")]
    Broken,
    #[error("the runtime's channel failed")]
    Io(#[source] io::Error),
}

/// A running Python process. It and its process group are killed when this is dropped.
#[derive(Debug)]
pub(crate) struct Runtime {
    child: Child,
    channel: UnixStream,
    output: PipeReader,
    tail: LogTail,
    reaped: bool,
}

impl Runtime {
    /// Starts Python with `environment` and nothing else from the agent's own.
    pub(crate) fn start(
        config: &RuntimeConfig,
        environment: &BTreeMap<String, String>,
    ) -> io::Result<Self> {
        let (channel, theirs) = UnixStream::pair()?;
        let (output, printed) = io::pipe()?;
        let mut command = Command::new(&config.python);
        // -I: nothing from the environment or the current folder changes how Python itself starts.
        // -u: what the function prints is there when it ends, however it ends.
        command.args(["-I", "-u", "-c", SOURCE]);
        command.env_clear().envs(environment).current_dir(&config.task_dir);
        command.stdin(Stdio::from(OwnedFd::from(theirs)));
        command.stdout(printed.try_clone()?).stderr(printed).process_group(0);
        if let Some(user) = config.user {
            command.uid(user).gid(user);
        }
        let child = command.spawn()?;
        Ok(Self { child, channel, output, tail: LogTail::default(), reaped: false })
    }

    /// Sends `message`, with `event` after it where there is one, and waits for the outcome.
    /// Meanwhile, what the function prints goes to the log tail.
    pub(crate) fn exchange(
        &mut self,
        message: &Message<'_>,
        event: Option<&str>,
        deadline: Instant,
    ) -> Result<Outcome, ExchangeError> {
        send(&mut Timed::new(&self.channel, deadline), message, MAX_MESSAGE)?;
        if let Some(event) = event {
            let mut channel = Timed::new(&self.channel, deadline);
            write_frame(&mut channel, event.as_bytes(), MAX_EVENT_BYTES)?;
        }
        while !self.wait(Some(deadline))? {}
        let outcome = receive(&mut Timed::new(&self.channel, deadline), MAX_REPLY_LENGTH)?;
        Ok(outcome)
    }

    /// Waits until the channel or the output has something to read, reads the output, and says
    /// whether the channel has something. Without a deadline it does not wait.
    fn wait(&mut self, deadline: Option<Instant>) -> Result<bool, ExchangeError> {
        let left =
            deadline.map_or(Duration::ZERO, |at| at.saturating_duration_since(Instant::now()));
        if left.is_zero() && deadline.is_some() {
            return Err(ExchangeError::TimedOut);
        }
        let timeout = Timespec::try_from(left).map_err(|_| ExchangeError::TimedOut)?;
        let mut files = [
            PollFd::from_borrowed_fd(self.channel.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.output.as_fd(), PollFlags::IN),
        ];
        // A function that closed its output leaves a pipe that is always ready: look at it no more.
        let watched = if self.tail.ended() { &mut files[..1] } else { &mut files[..] };
        match poll(watched, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(ExchangeError::Io(error.into())),
        }
        let [channel, output] = files.map(|file| !file.revents().is_empty());
        if output {
            let mut bytes = [0; 16 << 10];
            let count = self.output.read(&mut bytes).map_err(ExchangeError::Io)?;
            self.tail.push(&bytes[..count]);
        }
        Ok(channel)
    }

    /// Takes what the function printed since the last call: its last bytes, as text.
    pub(crate) fn take_logs(&mut self) -> String {
        // What a runtime printed before its reply is in the pipe by then; a pipe holds 64 KiB, so
        // this ends even where a thread goes on printing.
        for _ in 0..8 {
            let before = self.tail.received();
            if self.wait(None).is_err() || self.tail.received() == before {
                break;
            }
        }
        self.tail.take()
    }

    /// Waits for a runtime whose channel closed, kills it where it goes on, and says how it ended:
    /// `None` where it had to be killed.
    pub(crate) fn end(&mut self) -> io::Result<Option<ExitStatus>> {
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

impl Drop for Runtime {
    fn drop(&mut self) {
        // Once reaped, its number may be another process's.
        if !self.reaped {
            let _ = self.kill();
        }
    }
}

impl From<FrameError> for ExchangeError {
    fn from(error: FrameError) -> Self {
        match error {
            FrameError::Closed | FrameError::Truncated => Self::Ended,
            FrameError::TimedOut => Self::TimedOut,
            FrameError::TooLong { .. } => Self::Broken,
            FrameError::Io(error) => Self::Io(error),
        }
    }
}

impl From<SendError> for ExchangeError {
    fn from(error: SendError) -> Self {
        match error {
            SendError::Frame(error) => error.into(),
            SendError::Unwritable(error) => Self::Io(error.into()),
        }
    }
}

impl From<ReceiveError> for ExchangeError {
    fn from(error: ReceiveError) -> Self {
        match error {
            ReceiveError::Frame(error) => error.into(),
            ReceiveError::Malformed(_) => Self::Broken,
        }
    }
}
