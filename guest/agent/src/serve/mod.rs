//! The server behind the protocol.
//!
//! One thread per connection reads requests; what touches the function goes through one queue, in
//! the order in which it came, one at a time. A request's time limit counts from its own start, not
//! from when it joined the queue.

mod function;
mod instance;
mod line;
mod log_tail;
mod machine;
mod runtime;
#[cfg(test)]
mod tests;

use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use instance::{Failure, Instance, not_identified, refusal};
use line::{Line, Turn};
pub use machine::{Guest, Machine};
pub use runtime::RuntimeConfig;

use crate::protocol::{
    Identify, Invoke, MAX_REPLY_LENGTH, MAX_REQUEST_LENGTH, NEWEST_VERSION, OLDEST_VERSION,
    ReceiveError, RefusalKind, Reply, Request, Status, receive, send,
};

/// How long to wait before the next connection is accepted after one could not be.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The server: one function, its runtime, and the machine that they run on.
pub struct Server {
    instance: Line<Instance>,
    machine: Box<dyn Machine>,
    /// Whether requests may join the queue. The queue's own state decides; this only spares
    /// requests the wait, and lets those that wait in front of a freeze go.
    admits: AtomicBool,
    invocations: AtomicU64,
    /// What [`Request::Status`] shows, so that it need not wait in the queue.
    shown: Mutex<Shown>,
}

#[derive(Debug, Default)]
struct Shown {
    function: Option<String>,
    handler: Option<String>,
    instance_id: Option<String>,
}

/// What becomes of a connection after a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    GoOn,
    Close,
    PowerOff,
}

impl Server {
    /// A server without a function, whose gate is closed.
    #[must_use]
    pub fn new(config: RuntimeConfig, machine: Box<dyn Machine>) -> Self {
        Self {
            instance: Line::new(Instance::new(config)),
            machine,
            admits: AtomicBool::new(false),
            invocations: AtomicU64::new(0),
            shown: Mutex::default(),
        }
    }

    /// Serves the connections that `incoming` yields, each on a thread of its own, until it ends.
    pub fn serve<S>(self: &Arc<Self>, incoming: impl IntoIterator<Item = io::Result<S>>)
    where
        S: Read + Write + Send + 'static,
    {
        for stream in incoming {
            let server = Arc::clone(self);
            let started = stream.and_then(|mut stream| {
                thread::Builder::new().name("connection".into()).spawn(move || {
                    server.serve_one(&mut stream);
                })
            });
            if started.is_err() {
                // No descriptors or no memory for now. The peer sees its connection closed.
                thread::sleep(ACCEPT_PAUSE);
            }
        }
    }

    /// Serves one connection until either side ends it.
    fn serve_one(&self, stream: &mut (impl Read + Write)) {
        let mut greeted = false;
        loop {
            let (reply, next) = match receive::<Request>(stream, MAX_REQUEST_LENGTH) {
                Ok(request @ Request::Hello { .. }) => {
                    greeted = true;
                    self.answer(request)
                }
                Ok(request) if greeted => self.answer(request),
                Ok(_) => {
                    let reason = "the first request of a connection has to be hello";
                    (refusal(RefusalKind::Version, reason).into(), Next::Close)
                }
                Err(ReceiveError::Malformed(error)) => {
                    let reason = format!("the request cannot be read: {error}");
                    (refusal(RefusalKind::BadRequest, reason).into(), Next::Close)
                }
                Err(ReceiveError::Frame(_)) => return,
            };
            let sent = send(stream, &reply, MAX_REPLY_LENGTH);
            if next == Next::PowerOff {
                self.power_off();
            }
            if sent.is_err() || next != Next::GoOn {
                return;
            }
        }
    }

    fn answer(&self, request: Request) -> (Reply, Next) {
        match request {
            Request::Hello { oldest, newest } => hello(oldest, newest),
            Request::Put(put) => {
                let mut turn = self.instance.wait();
                let stored = turn.put(&put);
                self.show(&turn);
                drop(turn);
                (stored.map_or_else(Reply::from, |()| Reply::Stored), Next::GoOn)
            }
            Request::Load(load) => {
                let mut turn = self.instance.wait();
                let loaded = turn.load(load);
                self.show(&turn);
                drop(turn);
                (loaded.map_or_else(Reply::from, Reply::Loaded), Next::GoOn)
            }
            Request::Invoke(invoke) => (self.invoke(&invoke), Next::GoOn),
            Request::PrepareFreeze => {
                self.admits.store(false, Ordering::SeqCst);
                let mut turn = self.instance.wait();
                let prepared = turn.prepare_freeze(self.machine.as_ref());
                // An identity that was queued in front of this has let requests in again.
                self.admits.store(false, Ordering::SeqCst);
                drop(turn);
                match prepared {
                    Ok(()) => (Reply::ReadyToFreeze, Next::Close),
                    Err(failure) => (failure.into(), Next::GoOn),
                }
            }
            Request::Identify(identify) => (self.identify(&identify), Next::GoOn),
            Request::Status => (Reply::Status(self.status()), Next::GoOn),
            Request::Shutdown => (Reply::ShuttingDown, Next::PowerOff),
        }
    }

    fn invoke(&self, invoke: &Invoke) -> Reply {
        if !self.admits.load(Ordering::SeqCst) {
            return not_identified().into();
        }
        let answered = self.instance.wait().invoke(invoke);
        if !matches!(answered, Err(Failure::Refused(_))) {
            self.invocations.fetch_add(1, Ordering::Relaxed);
        }
        answered.map_or_else(Reply::from, Reply::Answered)
    }

    fn identify(&self, identify: &Identify) -> Reply {
        let mut turn = self.instance.wait();
        let identified = turn.identify(identify, self.machine.as_ref());
        self.admits.store(turn.is_open(), Ordering::SeqCst);
        self.show(&turn);
        drop(turn);
        identified.map_or_else(Reply::from, |()| Reply::Identified)
    }

    fn show(&self, turn: &Turn<'_, Instance>) {
        let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        shown.function = turn.function().map(ToOwned::to_owned);
        shown.handler = turn.handler().map(ToOwned::to_owned);
        shown.instance_id = turn.instance_id().map(ToOwned::to_owned);
    }

    fn status(&self) -> Status {
        let shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        Status {
            agent: env!("CARGO_PKG_VERSION").to_owned(),
            function: shown.function.clone(),
            handler: shown.handler.clone(),
            open: self.admits.load(Ordering::SeqCst),
            instance_id: shown.instance_id.clone(),
            invocations: self.invocations.load(Ordering::Relaxed),
        }
    }

    /// Does not wait for the function: it may never return.
    fn power_off(&self) {
        self.admits.store(false, Ordering::SeqCst);
        self.machine.sync();
        if let Err(error) = self.machine.power_off() {
            // The console is all that is left to say it on.
            let _ = writeln!(io::stderr(), "firn-agent: cannot power off: {error}");
        }
    }
}

/// Picks the newest version that both sides speak.
fn hello(oldest: u32, newest: u32) -> (Reply, Next) {
    let version = newest.min(NEWEST_VERSION);
    if version >= oldest.max(OLDEST_VERSION) {
        return (Reply::Hello { version }, Next::GoOn);
    }
    let reason = format!(
        "this agent speaks versions {OLDEST_VERSION} to {NEWEST_VERSION} of the protocol, \
         the host {oldest} to {newest}"
    );
    (refusal(RefusalKind::Version, reason).into(), Next::Close)
}
