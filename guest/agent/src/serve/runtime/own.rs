//! The agent's own runtime: a Python process that exchanges frames over a socket.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Instant;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::process::Process;
use super::{ExchangeError, Outcome, RuntimeConfig};
use crate::protocol::{
    FunctionError, Invoke, Load, MAX_ANSWER_BYTES, MAX_EVENT_BYTES, MAX_REPLY_LENGTH, Timed,
    receive, send, write_frame,
};

/// The Python program.
const SOURCE: &str = concat!(include_str!("../../clone.py"), include_str!("../../runtime.py"));

/// Maximum length of a message to the runtime other than an event, in bytes.
const MAX_MESSAGE: usize = 64 << 10;

/// A message to the runtime.
#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum Message<'a> {
    Load { handler: &'a str, task_dir: &'a str, answer_limit: usize },
    Invoke { request_id: &'a str, time_limit_ms: u64 },
    Reseed { instance_id: &'a str, log_stream_name: &'a str },
    Collect {},
}

/// A reply of the runtime. The function shares its process, so the content is not trusted.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Reply {
    Done(()),
    Answer(Box<RawValue>),
    Error(FunctionError),
}

/// A running Python process.
#[derive(Debug)]
pub(crate) struct OwnRuntime {
    process: Process,
    channel: UnixStream,
}

impl OwnRuntime {
    pub(super) fn start(
        config: &RuntimeConfig,
        environment: &BTreeMap<String, String>,
    ) -> io::Result<Self> {
        let (channel, theirs) = UnixStream::pair()?;
        let mut command = Command::new(&config.python);
        // -I: the environment and the current directory do not affect the start of Python. -u:
        // output is written immediately, so that it is complete however the function ends.
        command.args(["-I", "-u", "-c", SOURCE]).stdin(Stdio::from(OwnedFd::from(theirs)));
        Ok(Self { process: Process::start(command, config, environment)?, channel })
    }

    pub(super) fn init(
        &mut self,
        config: &RuntimeConfig,
        load: &Load,
        deadline: Instant,
    ) -> Result<Outcome, ExchangeError> {
        let message = Message::Load {
            handler: &load.handler,
            task_dir: &config.task_dir.to_string_lossy(),
            answer_limit: MAX_ANSWER_BYTES,
        };
        self.exchange(&message, None, deadline)
    }

    pub(super) fn invoke(
        &mut self,
        invoke: &Invoke,
        deadline: Instant,
    ) -> Result<Outcome, ExchangeError> {
        let message =
            Message::Invoke { request_id: &invoke.request_id, time_limit_ms: invoke.time_limit_ms };
        self.exchange(&message, Some(invoke.event.get()), deadline)
    }

    pub(super) fn collect(&mut self, deadline: Instant) -> Result<Outcome, ExchangeError> {
        self.exchange(&Message::Collect {}, None, deadline)
    }

    pub(super) fn reseed(
        &mut self,
        instance_id: &str,
        log_stream_name: &str,
        deadline: Instant,
    ) -> Result<Outcome, ExchangeError> {
        self.exchange(&Message::Reseed { instance_id, log_stream_name }, None, deadline)
    }

    pub(super) fn take_logs(&mut self) -> String {
        self.process.take_logs(self.channel.as_fd())
    }

    pub(super) fn end(&mut self) -> io::Result<Option<ExitStatus>> {
        self.process.end()
    }

    /// Sends `message`, followed by `event` if present, and waits for the outcome. Meanwhile the
    /// function's output goes to the log tail.
    fn exchange(
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
        // A process that has ended may have left a reply, and its children may keep the channel
        // open.
        let mut ended = false;
        loop {
            let ready = self.process.wait(self.channel.as_fd(), Some(deadline))?;
            if ready.channel {
                break;
            }
            if ended {
                return Err(ExchangeError::Ended);
            }
            ended = ready.ended;
        }
        let reply = receive(&mut Timed::new(&self.channel, deadline), MAX_REPLY_LENGTH)?;
        match reply {
            Reply::Done(()) => Ok(Outcome::Done),
            Reply::Answer(answer) if answer.get().len() <= MAX_ANSWER_BYTES => {
                Ok(Outcome::Answer(answer))
            }
            Reply::Answer(_) => Err(ExchangeError::Broken),
            Reply::Error(error) => Ok(Outcome::Error(error)),
        }
    }
}
