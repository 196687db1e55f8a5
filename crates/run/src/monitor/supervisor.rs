//! A process that starts one microVM in a monitor, follows it, and ends with it.

use std::path::Path;
use std::sync::Arc;

use firn_base::now_ns;

use super::process::{Monitor, MonitorError};
use super::{Event, Order};
use crate::descriptors::Descriptors;
use crate::error::StartError;
use crate::guest::Listener;
use crate::jail::Jail;
use crate::session::Interruption;
use crate::spec::StartSpec;

/// The monitor of a microVM that ends with this process, and on the signals that end it.
pub struct Supervisor {
    monitor: Monitor,
    interruption: Option<Interruption>,
}

impl Supervisor {
    /// Starts a monitor in a jail: `program` is `firn-monitor`, `kvm` the KVM device. From here on
    /// SIGINT, SIGTERM and SIGHUP end the microVM, or the monitor that has none yet, instead of
    /// this process.
    ///
    /// # Errors
    /// [`StartError::Monitor`]; [`StartError::Session`]: signals cannot be caught.
    pub fn spawn(jail: &Jail, program: &Path, kvm: &Path) -> Result<Self, StartError> {
        let monitor = Monitor::spawn(jail, program, kvm)?;
        let connection = monitor.connection()?;
        let interruption = Interruption::catch_or(move |signal| {
            // The monitor may have ended just now.
            let _ = connection.send_now(&Order::End { signal });
        })?;
        Ok(Self { monitor, interruption: Some(interruption) })
    }

    /// The same for a process that handles signals by itself.
    ///
    /// # Errors
    /// [`StartError::Monitor`].
    pub fn spawn_in(jail: &Jail, program: &Path, kvm: &Path) -> Result<Self, StartError> {
        Ok(Self { monitor: Monitor::spawn(jail, program, kvm)?, interruption: None })
    }

    /// Starts the microVM of a spec in the monitor, tells `listener` what the monitor reports, and
    /// returns when the monitor has ended.
    ///
    /// # Errors
    /// The monitor's own [`StartError`]; [`StartError::Signal`]: a signal ended it before it ran a
    /// guest with Linux, or while it replayed a player; [`StartError::Monitor`]: it ended without
    /// an error of its own.
    pub fn run(
        mut self,
        spec: StartSpec,
        descriptors: Descriptors,
        listener: &Arc<dyn Listener>,
    ) -> Result<(), StartError> {
        let sent = self.monitor.start(spec, &descriptors);
        // What the monitor alone holds is closed when it ends.
        drop(descriptors);
        let done = sent.and_then(|()| self.monitor.follow(listener));
        or_signal(done, self.interruption.as_ref())
    }

    /// The same, and calls `ready` with the id of the monitor's process right before the guest's
    /// first instruction.
    ///
    /// # Errors
    /// That of `ready`; and as [`Supervisor::run`].
    pub fn run_from_ready<E: From<StartError>>(
        mut self,
        spec: StartSpec,
        descriptors: Descriptors,
        ready: impl FnOnce(u32) -> Result<(), E>,
        listener: &Arc<dyn Listener>,
    ) -> Result<(), E> {
        let limit = spec.time_limit;
        let sent = self.monitor.make_ready(spec, &descriptors);
        drop(descriptors);
        let made = sent.and_then(|()| self.monitor.wait_made_ready(limit).map(drop));
        or_signal(made, self.interruption.as_ref())?;
        ready(self.monitor.pid())?;
        let resumed = self.monitor.resume(now_ns(), None);
        let done = resumed.and_then(|()| self.monitor.follow(listener));
        Ok(or_signal(done, self.interruption.as_ref())?)
    }
}

/// A signal explains why a monitor ended without a report.
fn or_signal(
    done: Result<(), StartError>,
    interruption: Option<&Interruption>,
) -> Result<(), StartError> {
    match (done, interruption.and_then(Interruption::signal)) {
        (Err(StartError::Monitor(_)), Some(signal)) => Err(StartError::Signal(signal)),
        (done, _) => done,
    }
}

impl Monitor {
    /// Tells `listener` what the monitor reports, until it ends. A player that waits is released
    /// when [`Listener::held`] returns, which runs in a thread of its own.
    ///
    /// # Errors
    /// The monitor's own [`StartError`]; [`StartError::Monitor`], where it ended without one.
    pub fn follow(mut self, listener: &Arc<dyn Listener>) -> Result<(), StartError> {
        loop {
            match self.event(None)? {
                Some(Event::Answered(outcome)) => listener.answered(&outcome),
                Some(Event::Started(report)) => listener.started(&report),
                Some(Event::Note(text)) => listener.note(&text),
                Some(Event::Observe { thread }) => self.observe(thread)?,
                Some(Event::Held) => {
                    let (connection, listener) = (self.connection()?, listener.clone());
                    let hold = move || {
                        listener.held();
                        // The monitor may have ended meanwhile.
                        let _ = connection.send_now(&Order::Release);
                    };
                    let thread = std::thread::Builder::new().name("held".into()).spawn(hold);
                    thread.map_err(|error| StartError::session("start a thread", error))?;
                }
                Some(_) => return Err(MonitorError::Order.into()),
                None => return self.wait(),
            }
        }
    }
}
