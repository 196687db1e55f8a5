//! The server that implements the protocol.
//!
//! One thread per connection reads requests. Operations on the function run one at a time in the
//! order of their arrival. A request's time limit counts from its own start, not from its arrival.

mod freezer;
mod function;
mod instance;
mod log_tail;
mod machine;
mod maps;
mod openssl;
mod pages;
mod runtime;
#[cfg(test)]
mod tests;
mod vmstat;

use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::{self, Scope};
use std::time::Duration;

use parking_lot::{FairMutex, Mutex};

pub use freezer::Freezer;
use instance::{Failure, Instance, not_identified, refusal, system};
pub use machine::{Guest, Machine};
pub use runtime::RuntimeConfig;

use crate::protocol::{
    FrameError, Identify, Invoke, MAX_REPLY_LENGTH, MAX_REQUEST_LENGTH, NEWEST_VERSION,
    OLDEST_VERSION, ReceiveError, RefusalKind, Reply, Request, SendError, Status, receive, send,
};

/// Threads that wait for connections: one serves a clone's first, and another waits for the next.
const WAITING: usize = 2;

/// Pause after a connection could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The server: one function, its runtime, and the machine.
pub struct Server {
    /// A fair mutex serves callers in the order of their arrival.
    instance: FairMutex<Instance>,
    machine: Box<dyn Machine>,
    /// Whether requests are accepted. The instance's gate is authoritative; this flag refuses
    /// requests early and releases requests that wait behind a freeze.
    admits: AtomicBool,
    invocations: AtomicU64,
    /// The data of [`Request::Status`], so that it does not wait for the instance.
    shown: Mutex<Shown>,
}

#[derive(Debug, Default)]
struct Shown {
    function: Option<String>,
    handler: Option<String>,
    instance_id: Option<String>,
}

/// The threads that serve connections.
struct Servants<'a, I> {
    server: &'a Server,
    incoming: Mutex<I>,
    /// How many of them have no connection.
    waiting: AtomicUsize,
}

impl<I, S> Servants<'_, I>
where
    I: Iterator<Item = io::Result<S>> + Send,
    S: Read + Write,
{
    /// Starts another one, if there is memory for it.
    fn add<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let thread = thread::Builder::new().name("connection".into());
        if thread.spawn_scoped(scope, || self.serve(scope)).is_err() {
            self.waiting.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn serve<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) {
        loop {
            let Some(stream) = self.incoming.lock().next() else { return };
            let Ok(mut stream) = stream else {
                // Temporarily no descriptors or memory. The peer's connection is closed.
                thread::sleep(ACCEPT_PAUSE);
                continue;
            };
            if self.waiting.fetch_sub(1, Ordering::SeqCst) == 1 {
                self.add(scope);
            }
            self.server.serve_one(&mut stream);
            let wait = |waiting| (waiting < WAITING).then_some(waiting + 1);
            if self.waiting.fetch_update(Ordering::SeqCst, Ordering::SeqCst, wait).is_err() {
                return;
            }
        }
    }
}

/// What happens to a connection after a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    Continue,
    Close,
    PowerOff,
}

impl Server {
    /// A server without a function, with a closed gate.
    #[must_use]
    pub fn new(config: RuntimeConfig, machine: Box<dyn Machine>) -> Self {
        Self {
            instance: FairMutex::new(Instance::new(config)),
            machine,
            admits: AtomicBool::new(false),
            invocations: AtomicU64::new(0),
            shown: Mutex::default(),
        }
    }

    /// Serves the connections of `incoming`, each in its own thread, until `incoming` and the
    /// connections have ended.
    ///
    /// The threads wait in advance: a clone's first connection makes none.
    pub fn serve<I, S>(&self, incoming: I)
    where
        I: IntoIterator<Item = io::Result<S>>,
        I::IntoIter: Send,
        S: Read + Write,
    {
        let incoming = Mutex::new(incoming.into_iter());
        let servants = Servants { server: self, incoming, waiting: AtomicUsize::new(0) };
        thread::scope(|scope| (0..WAITING).for_each(|_| servants.add(scope)));
    }

    /// Serves one connection until either side closes it.
    fn serve_one(&self, stream: &mut (impl Read + Write)) {
        let mut greeted = false;
        loop {
            let (reply, next) = match receive::<Request>(stream, MAX_REQUEST_LENGTH) {
                Ok(request @ Request::Hello { .. }) => {
                    greeted = true;
                    self.answer(request, stream)
                }
                Ok(request) if greeted => self.answer(request, stream),
                Ok(_) => {
                    let reason = "the first request of a connection must be hello";
                    (refusal(RefusalKind::Version, reason).into(), Next::Close)
                }
                Err(ReceiveError::Malformed(error)) => {
                    let reason = format!("the request is not valid: {error}");
                    (refusal(RefusalKind::BadRequest, reason).into(), Next::Close)
                }
                Err(ReceiveError::Frame(_)) => return,
            };
            let mut sent = send(stream, &reply, MAX_REPLY_LENGTH);
            // Nothing of it was sent.
            if let Err(error @ SendError::Frame(FrameError::TooLong { .. })) = &sent {
                let refused = refusal(RefusalKind::System, error.to_string());
                sent = send(stream, &Reply::from(refused), MAX_REPLY_LENGTH);
            }
            if next == Next::PowerOff {
                self.power_off();
            }
            if sent.is_err() || next != Next::Continue {
                return;
            }
        }
    }

    /// Carries out a request. An answer that the function streams goes to `stream`.
    fn answer(&self, request: Request, stream: &mut impl Write) -> (Reply, Next) {
        match request {
            Request::Hello { oldest, newest } => hello(oldest, newest),
            Request::Put(put) => {
                let mut instance = self.instance.lock();
                let stored = instance.put(&put);
                self.show(&instance);
                drop(instance);
                (stored.map_or_else(Reply::from, |()| Reply::Stored), Next::Continue)
            }
            Request::Load(load) => {
                let mut instance = self.instance.lock();
                let loaded = instance.load(load);
                self.show(&instance);
                drop(instance);
                (loaded.map_or_else(Reply::from, Reply::Loaded), Next::Continue)
            }
            Request::Invoke(invoke) => (self.invoke(&invoke, stream), Next::Continue),
            Request::PrepareFreeze => {
                self.admits.store(false, Ordering::SeqCst);
                let mut instance = self.instance.lock();
                let prepared = instance.prepare_freeze(self.machine.as_ref());
                // A queued identify request may have opened the gate before.
                self.admits.store(false, Ordering::SeqCst);
                drop(instance);
                match prepared {
                    Ok(()) => (Reply::ReadyToFreeze, Next::Close),
                    Err(failure) => (failure.into(), Next::Continue),
                }
            }
            Request::Identify(identify) => (self.identify(&identify), Next::Continue),
            Request::Status => (Reply::Status(self.status()), Next::Continue),
            Request::Pages => (self.pages(), Next::Continue),
            Request::Shutdown => (Reply::ShuttingDown, Next::PowerOff),
        }
    }

    fn invoke(&self, invoke: &Invoke, stream: &mut impl Write) -> Reply {
        if !self.admits.load(Ordering::SeqCst) {
            return not_identified().into();
        }
        // If the host has closed the connection, so does this side after the reply. The function
        // runs until then.
        let mut host = |part: &Reply| drop(send(stream, part, MAX_REPLY_LENGTH));
        let answered = self.instance.lock().invoke(invoke, &mut host);
        if !matches!(answered, Err(Failure::Refused(_))) {
            self.invocations.fetch_add(1, Ordering::Relaxed);
        }
        answered.map_or_else(Reply::from, Reply::Answered)
    }

    fn identify(&self, identify: &Identify) -> Reply {
        let mut instance = self.instance.lock();
        let identified = instance.identify(identify, self.machine.as_ref());
        self.admits.store(instance.is_open(), Ordering::SeqCst);
        self.show(&instance);
        drop(instance);
        identified.map_or_else(Reply::from, |()| Reply::Identified)
    }

    fn show(&self, instance: &Instance) {
        let mut shown = self.shown.lock();
        shown.function = instance.function().map(ToOwned::to_owned);
        shown.handler = instance.handler().map(ToOwned::to_owned);
        shown.instance_id = instance.instance_id().map(ToOwned::to_owned);
    }

    fn status(&self) -> Status {
        let shown = self.shown.lock();
        Status {
            agent: env!("CARGO_PKG_VERSION").to_owned(),
            function: shown.function.clone(),
            handler: shown.handler.clone(),
            open: self.admits.load(Ordering::SeqCst),
            instance_id: shown.instance_id.clone(),
            invocations: self.invocations.load(Ordering::Relaxed),
        }
    }

    fn pages(&self) -> Reply {
        let refused = |error| system("cannot find what holds the pages of memory", &error).into();
        self.machine.pages().map_or_else(refused, Reply::Pages)
    }

    /// Does not wait for the function, which may never return.
    fn power_off(&self) {
        self.admits.store(false, Ordering::SeqCst);
        self.machine.sync();
        if let Err(error) = self.machine.power_off() {
            // The error can only be printed on the console.
            let _ = writeln!(io::stderr(), "firn-agent: cannot power off: {error}");
        }
    }
}

/// Selects the newest version that both sides support.
fn hello(oldest: u32, newest: u32) -> (Reply, Next) {
    let version = newest.min(NEWEST_VERSION);
    if version >= oldest.max(OLDEST_VERSION) {
        return (Reply::Hello { version }, Next::Continue);
    }
    let reason = format!(
        "this agent supports protocol versions {OLDEST_VERSION} to {NEWEST_VERSION}, \
         the host {oldest} to {newest}"
    );
    (refusal(RefusalKind::Version, reason).into(), Next::Close)
}
