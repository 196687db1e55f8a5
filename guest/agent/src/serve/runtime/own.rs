//! The agent's own runtime: a Python process that exchanges frames over a socket.

use std::collections::BTreeMap;
use std::io;
use std::process::{Command, ExitStatus};
use std::time::Instant;

use super::channel::{Channel, Identity, Message};
use super::process::Process;
use super::{ExchangeError, Outcome, RuntimeConfig, StartError};
use crate::protocol::{Invoke, Load, MAX_ANSWER_BYTES};

/// The Python program.
const SOURCE: &str = concat!(include_str!("../../clone.py"), include_str!("../../runtime.py"));

/// A running Python process.
#[derive(Debug)]
pub(crate) struct OwnRuntime {
    process: Process,
    channel: Channel,
}

impl OwnRuntime {
    pub(super) fn start(
        config: &RuntimeConfig,
        environment: &BTreeMap<String, String>,
    ) -> Result<Self, StartError> {
        let mut command = Command::new(&config.python);
        // -I: the environment and the current directory do not affect the start of Python. -u:
        // output is written immediately, so that it is complete however the function ends.
        command.args(["-I", "-u", "-c", SOURCE]);
        let channel = Channel::to(&mut command)?;
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
        self.channel.exchange(&mut self.process, &message, None, deadline)
    }

    pub(super) fn invoke(
        &mut self,
        invoke: &Invoke,
        deadline: Instant,
    ) -> Result<Outcome, ExchangeError> {
        self.process.check_running()?;
        let message =
            Message::Invoke { request_id: &invoke.request_id, time_limit_ms: invoke.time_limit_ms };
        let event = invoke.event.get();
        self.channel.exchange(&mut self.process, &message, Some(event), deadline)
    }

    pub(super) fn stop(&mut self, deadline: Instant) -> Result<Outcome, ExchangeError> {
        self.channel.stop(&mut self.process, deadline)
    }

    pub(super) fn resume(
        &mut self,
        identity: Identity<'_>,
        deadline: Instant,
    ) -> Result<Outcome, ExchangeError> {
        self.channel.resume(&mut self.process, identity, deadline)
    }

    pub(super) fn take_logs(&mut self) -> String {
        self.process.take_logs()
    }

    pub(super) fn peak_memory(&self) -> u64 {
        self.process.peak_memory()
    }

    pub(super) fn end(&mut self) -> io::Result<Option<ExitStatus>> {
        self.process.end()
    }
}
