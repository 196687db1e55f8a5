//! The monitor's side.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

use firn_base::{ErrorChain, error_chain, now_ns, touch_stack};
use firn_memory::planners::parse;
use firn_memory::{map_program, prefer_as_victim};
use firn_vmm::{Microvm, Shape, Standby, TracepointFormat, Virtualization};
use parking_lot::Mutex;
use signal_hook::consts::SIGTERM;

use super::connection::{Connection, ReceiveError};
use super::setup::Setup;
use super::{Event, Order, ThreadTracepoints};
use crate::descriptors::Descriptors;
use crate::error::StartError;
use crate::guest::Listener;
use crate::jail::{self, JailReport};
use crate::life::{Clock, KvmDevice};
use crate::outcome::Outcome;
use crate::report::{Making, StartReport};
use crate::session::Interruption;
use crate::source::Source;
use crate::spec::{Origin, StartSpec};
use crate::start::{Hold, Resumption, start_caught};

/// How long a monitor may take to end after its owner has ordered that, or has ended itself.
const END_LIMIT: Duration = Duration::from_secs(10);
/// What a start uses of this thread's stack and of the heap, bytes.
const STACK: usize = 80 << 10;
const HEAP: usize = 64 << 10;

/// Sends what happens to the process that started this one.
struct Reporter {
    connection: Arc<Connection>,
    jail: Option<JailReport>,
    /// Gets a message, or is closed, when a player may check its memory.
    released: Mutex<Receiver<()>>,
    /// Gets the answer to [`Event::Observe`], or is closed.
    observed: Mutex<Receiver<Observed>>,
}

/// The answer to [`Event::Observe`].
type Observed = (Result<ThreadTracepoints, StartError>, Descriptors);

impl Reporter {
    /// A process that has ended gets no message.
    fn send(&self, event: &Event) {
        let _ = self.connection.send(event, &Descriptors::default());
    }
}

impl Listener for Reporter {
    fn answered(&self, outcome: &Outcome) {
        self.send(&Event::Answered(Box::new(outcome.clone())));
    }

    fn started(&self, report: &StartReport) {
        let report = StartReport { jail: self.jail.clone(), ..report.clone() };
        self.send(&Event::Started(Box::new(report)));
    }

    fn held(&self) {
        self.send(&Event::Held);
        let _ = self.released.lock().recv();
    }

    fn tracepoints(&self, thread: u32) -> Result<(TracepointFormat, [OwnedFd; 2]), StartError> {
        self.send(&Event::Observe { thread });
        let ended = |_| StartError::Spec("the owner has ended".to_owned());
        let (observed, mut descriptors) = self.observed.lock().recv().map_err(ended)?;
        let ThreadTracepoints { format, events: [first, second] } = observed?;
        Ok((format, [descriptors.take(first)?, descriptors.take(second)?]))
    }

    fn sized(&self, memory: u64, disk: u64) {
        self.send(&Event::Size { memory, disk });
    }

    fn note(&self, text: &str) {
        self.send(&Event::Note(text.to_owned()));
    }
}

/// Runs a monitor: waits on standard input for an order, carries it out, and reports. Returns once
/// the microVM has ended; the error was reported already. Without an order it returns when standard
/// input is closed. It enters its jail first, for which a process has closed the [descriptors that
/// it inherited](jail::close_inherited).
///
/// # Errors
/// What failed.
pub fn serve() -> Result<(), StartError> {
    let connection = Connection::of_stdin();
    let connection =
        Arc::new(connection.map_err(|error| StartError::session("use standard input", error))?);
    // Before there is a second thread.
    let prepared = prefer_as_victim()
        .map_err(|error| StartError::session("be the first to end where memory is short", error))
        .and_then(|()| jail::share_heap())
        .and_then(|()| Setup::receive(&connection))
        .and_then(|setup| {
            let enter = |(kvm, mode, shared): (KvmDevice, _, _)| {
                let create = || kvm.0.iter().for_each(Standby::create_in_advance);
                let jail = jail::enter(mode, shared, create)?;
                Ok((kvm, jail))
            };
            setup.map(enter).transpose()
        });
    let prepared = prepared.inspect_err(|error| {
        // An owner that has ended gets no message.
        let _ = connection.send(&Event::Failed(error.clone()), &Descriptors::default());
    })?;
    let Some((mut kvm, jail)) = prepared else { return Ok(()) };
    // Nothing here relies on what a signal does by default: the first process of a pid namespace
    // ignores it.
    let interruption = Interruption::catch_or(|_| std::process::exit(1))?;
    // The thread that ends this process with its owner starts before there is an order, and reads
    // after it.
    let (release, released) = sync_channel(1);
    let (observe, observed) = sync_channel(1);
    let (begin, begun) = sync_channel(1);
    let (reader, ending) = (connection.clone(), interruption.ending());
    let follow_owner = move || {
        // Without an order, this process ends by itself.
        let Ok(()) = begun.recv() else { return };
        let signal = loop {
            match reader.receive::<Order>(None) {
                // A player that does not wait is not released.
                Ok((Order::Release, _)) => drop(release.try_send(())),
                Ok((Order::Observed(observed), descriptors)) => {
                    drop(observe.try_send((observed, descriptors)));
                }
                Ok((Order::Pause, _)) => ending.post(Microvm::pause),
                Ok((Order::Unpause, _)) => ending.post(Microvm::resume),
                Ok((Order::End { signal }, _)) => break signal,
                _ => break SIGTERM,
            }
        };
        ending.end(signal);
        std::thread::sleep(END_LIMIT);
        std::process::exit(1);
    };
    let thread = std::thread::Builder::new().name("owner".into()).spawn(follow_owner);
    thread.map_err(|error| StartError::session("start a thread", error))?;
    let mut waiting_ns = now_ns();
    let mut manager = None;
    let (order, descriptors) = loop {
        match connection.receive(None) {
            Ok((Order::StandBy { shape, manager: slot }, mut descriptors)) => {
                manager = slot.map(|slot| descriptors.take(slot)).transpose()?;
                jail::wait_to_narrow()?;
                let ready = Event::Ready(stand_by(&mut kvm, &shape));
                waiting_ns = now_ns();
                let sent = connection.send(&ready, &Descriptors::default());
                sent.map_err(|error| StartError::session("answer", error))?;
            }
            Ok((Order::End { .. }, _)) => return Ok(()),
            Ok((order, descriptors)) => break (order, descriptors.with_manager(manager)),
            Err(ReceiveError::Closed) => return Ok(()),
            Err(error) => return Err(StartError::Monitor(ErrorChain::of(&error))),
        }
    };
    let begun_ns = now_ns();
    let ready = matches!(order, Order::MakeReady(_));
    if !ready {
        let _ = begin.send(());
    }
    let reporter = Arc::new(Reporter {
        connection: connection.clone(),
        jail,
        released: Mutex::new(released),
        observed: Mutex::new(observed),
    });
    let hold = |making: &Making| {
        reporter.send(&Event::MadeReady(Box::new(making.clone())));
        let clock = wait_for_resume(&connection)?;
        let _ = begin.send(());
        Ok(clock)
    };
    match order {
        Order::Start(spec) | Order::MakeReady(spec) => {
            let request_ns = spec.request_ns;
            let stood_by = request_ns.is_some_and(|request| waiting_ns < request);
            let clock = Clock { begun_ns, request_ns, stood_by };
            let listener: Arc<dyn Listener> = reporter.clone();
            let hold: Option<Hold<'_>> = if ready { Some(&hold) } else { None };
            start_caught(&spec, descriptors, kvm, clock, &listener, (Some(interruption), hold))
        }
        Order::Plan(spec) => plan(&spec, descriptors, kvm)
            .map(|shape| reporter.send(&Event::Planned(Box::new(shape)))),
        Order::Release
        | Order::End { .. }
        | Order::Resume { .. }
        | Order::StandBy { .. }
        | Order::Observed(_)
        | Order::Pause
        | Order::Unpause => Err(StartError::Spec("the first order starts nothing".to_owned())),
    }
    .inspect_err(|error| reporter.send(&Event::Failed(error.clone())))
}

/// Waits for the order to resume; `None` where the owner has ended.
fn wait_for_resume(connection: &Connection) -> Result<Option<Resumption>, StartError> {
    match connection.receive(None) {
        Ok((Order::Resume { request_ns, credentials }, _)) => {
            let (begun_ns, request_ns) = (now_ns(), Some(request_ns));
            let clock = Clock { begun_ns, request_ns, stood_by: true };
            Ok(Some(Resumption { clock, credentials }))
        }
        Ok((Order::End { .. }, _)) | Err(ReceiveError::Closed) => Ok(None),
        Ok(_) => Err(StartError::Spec("a ready clone is only resumed".to_owned())),
        Err(error) => Err(StartError::Monitor(ErrorChain::of(&error))),
    }
}

/// Makes what can be made in advance; returns why it cannot.
fn stand_by(kvm: &mut KvmDevice, shape: &Shape) -> Option<String> {
    // What the processor is like is read once in a process. The standard library has all its
    // features once it is asked for one.
    let _ = Virtualization::of_host();
    let _ = std::arch::is_x86_feature_detected!("avx2");
    map_program();
    let made = kvm.0.as_mut().ok()?.make(shape);
    touch_stack::<STACK>();
    std::hint::black_box(vec![1_u8; HEAP]);
    made.err().map(|error| format!("nothing was made in advance: {}", error_chain(&error)))
}

fn plan(
    spec: &StartSpec,
    mut descriptors: Descriptors,
    kvm: KvmDevice,
) -> Result<Shape, StartError> {
    let Origin::Thaw(thaw) = &spec.origin else {
        return Err(StartError::Spec("a boot has no plan".to_owned()));
    };
    let planner = parse(&thaw.planner)?;
    let source = Source::open(&thaw.source, &*planner, &mut descriptors)?;
    source.shape(&*planner, kvm)
}
