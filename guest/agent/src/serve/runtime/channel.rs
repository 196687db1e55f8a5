//! The socket of a Python process that the agent starts, and what its clones do
//! (`guest/agent/src/clone.py`).

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::process::Process;
use super::{ExchangeError, Outcome};
use crate::protocol::{
    FunctionError, MAX_ANSWER_BYTES, MAX_EVENT_BYTES, MAX_REPLY_LENGTH, Timed, receive, send,
    write_frame,
};

/// Maximum length of a message to the runtime other than an event, in bytes.
const MAX_MESSAGE: usize = 64 << 10;

/// How often a process that does not answer its rehearsal gets another.
const REHEARSALS: u32 = 5;

/// Time limit of a rehearsal. It is generous because the machine may be emulated.
const REHEARSAL_LIMIT: Duration = Duration::from_secs(5);

/// A message to the runtime.
#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Message<'a> {
    Load { handler: &'a str, task_dir: &'a str, answer_limit: usize },
    Invoke { request_id: &'a str, time_limit_ms: u64 },
    Collect {},
    Hold {},
    Identify { instance_id: &'a str, log_stream_name: &'a str, reseeded: bool },
}

/// What distinguishes a clone, for its own process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Identity<'a> {
    pub(crate) instance_id: &'a str,
    pub(crate) log_stream_name: &'a str,
}

/// A reply of the runtime. The function shares its process, so the content is not trusted.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Reply {
    Done(()),
    Answer(Box<RawValue>),
    Error(FunctionError),
}

/// The agent's end.
#[derive(Debug)]
pub(super) struct Channel {
    socket: UnixStream,
    /// Whether the process keeps the interpreter's lock and waits for one of the
    /// [orders](Self::order).
    held: bool,
}

impl Channel {
    /// A channel to the process that `command` will start.
    pub(super) fn to(command: &mut Command) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        command.stdin(Stdio::from(OwnedFd::from(theirs)));
        Ok(Self { socket: ours, held: false })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Sends `message`, followed by `event` if present, and waits for the outcome. Meanwhile the
    /// function's output goes to the log tail.
    pub(super) fn exchange(
        &self,
        process: &mut Process,
        message: &Message<'_>,
        event: Option<&str>,
        deadline: Instant,
    ) -> Result<Outcome, ExchangeError> {
        send(&mut Timed::new(&self.socket, deadline), message, MAX_MESSAGE)?;
        if let Some(event) = event {
            write_frame(
                &mut Timed::new(&self.socket, deadline),
                event.as_bytes(),
                MAX_EVENT_BYTES,
            )?;
        }
        self.outcome(process, deadline)
    }

    /// Waits until the process has written to the channel.
    fn readable(&self, process: &mut Process, deadline: Instant) -> Result<(), ExchangeError> {
        // A process that has ended may have left a reply, and its children may keep the channel
        // open.
        let mut ended = false;
        loop {
            let ready = process.wait(&[self.fd()], Some(deadline))?;
            if ready.channels == [true] {
                return Ok(());
            }
            if ended {
                return Err(ExchangeError::Ended);
            }
            ended = ready.ended;
        }
    }

    /// Waits for an outcome.
    pub(super) fn outcome(
        &self,
        process: &mut Process,
        deadline: Instant,
    ) -> Result<Outcome, ExchangeError> {
        self.readable(process, deadline)?;
        let reply = receive(&mut Timed::new(&self.socket, deadline), MAX_REPLY_LENGTH)?;
        match reply {
            Reply::Done(()) => Ok(Outcome::Done),
            Reply::Answer(answer) if answer.get().len() <= MAX_ANSWER_BYTES => {
                Ok(Outcome::Answer(answer))
            }
            Reply::Answer(_) => Err(ExchangeError::Broken),
            Reply::Error(error) => Ok(Outcome::Error(error)),
        }
    }

    /// Collects garbage, then stops everything but the main thread, which keeps the interpreter's
    /// lock and has reseeded once. A stopped thread may own another lock that reseeding needs, such
    /// as an allocator's: the process runs on, and is stopped again at another point.
    pub(super) fn stop(
        &mut self,
        process: &mut Process,
        deadline: Instant,
    ) -> Result<Outcome, ExchangeError> {
        match self.exchange(process, &Message::Collect {}, None, deadline)? {
            Outcome::Done => {}
            other => return Ok(other),
        }
        for _ in 0..REHEARSALS {
            process.hold_main_thread()?;
            match self.exchange(process, &Message::Hold {}, None, deadline)? {
                Outcome::Done => self.held = true,
                other => return Ok(other),
            }
            process.stop_others(deadline)?;
            self.order()?;
            match self.obeyed(process, Instant::now() + REHEARSAL_LIMIT) {
                Err(ExchangeError::TimedOut) => {}
                result => return result.map(|()| Outcome::Done),
            }
            process.resume_others()?;
            self.obeyed(process, deadline)?;
            self.order()?;
            self.obeyed(process, deadline)?;
            self.release()?;
        }
        Err(ExchangeError::TimedOut)
    }

    /// Reseeds, lets everything run again, and gives the process its identity.
    pub(super) fn resume(
        &mut self,
        process: &mut Process,
        Identity { instance_id, log_stream_name }: Identity<'_>,
        deadline: Instant,
    ) -> Result<Outcome, ExchangeError> {
        let reseeded = self.held;
        if reseeded {
            self.order()?;
            self.obeyed(process, deadline)?;
            process.resume_others()?;
            self.release()?;
        }
        let message = Message::Identify { instance_id, log_stream_name, reseeded };
        self.exchange(process, &message, None, deadline)
    }

    /// Lets a process that holds the lock reseed: the first time as a rehearsal, then in a clone.
    fn order(&mut self) -> Result<(), ExchangeError> {
        self.socket.write_all(b"\n").map_err(ExchangeError::Io)
    }

    /// Waits until an order was carried out.
    fn obeyed(&mut self, process: &mut Process, deadline: Instant) -> Result<(), ExchangeError> {
        self.readable(process, deadline)?;
        self.socket.read_exact(&mut [0]).map_err(ExchangeError::Io)
    }

    /// Lets the process release the lock, after both orders.
    fn release(&mut self) -> Result<(), ExchangeError> {
        self.held = false;
        self.order()
    }
}
