//! The monitor's side.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

use firn_base::{ErrorChain, error_chain, now_ns};
use firn_memory::planners::parse;
use firn_memory::{HostFacts, map_program};
use firn_vmm::{Handle, Microvm, OpenKvm, Shape, Standby, VcpuThreadError};
use parking_lot::Mutex;

use super::connection::{Connection, ReceiveError};
use super::{Event, Order};
use crate::descriptors::Descriptors;
use crate::error::StartError;
use crate::guest::Listener;
use crate::instance::SweepAfterOwner;
use crate::jail::{self, JailMode, JailReport};
use crate::life::{Clock, KvmDevice};
use crate::report::{Making, StartReport};
use crate::session::{Interruption, end_with};
use crate::source::{Source, nested_paging};
use crate::spec::{Origin, Serving, StartSpec};
use crate::start::{Hold, Resumption, start_caught};

/// How often a ready clone looks for a signal that was caught.
const SIGNAL_PERIOD: Duration = Duration::from_secs(1);

/// The microVM of this process, once it runs.
#[derive(Clone)]
struct Running(Arc<Mutex<Option<Handle>>>);

impl Running {
    /// Changes the microVM, and ends one that cannot be changed. Does not wait for that, so that
    /// the end of the owner is noticed meanwhile.
    fn post(&self, change: fn(&mut Microvm) -> Result<(), VcpuThreadError>) {
        let Some(handle) = self.0.lock().clone() else { return };
        // The microVM may have ended just now.
        let _ = handle.post(move |microvm| {
            if change(microvm).is_err() {
                microvm.stop();
            }
        });
    }
}

/// Sends what happens to the process that started this one.
struct Reporter {
    connection: Arc<Connection>,
    jail: Option<JailReport>,
    /// Gets a message, or is closed, when a player may check its memory.
    released: Mutex<Receiver<()>>,
}

impl Reporter {
    /// A process that has ended gets no message.
    fn send(&self, event: &Event) {
        let _ = self.connection.send(event, &Descriptors::default());
    }
}

impl Listener for Reporter {
    fn started(&self, report: &StartReport) {
        let report = StartReport { jail: self.jail.clone(), ..report.clone() };
        self.send(&Event::Started(Box::new(report)));
    }

    fn held(&self) {
        self.send(&Event::Held);
        let _ = self.released.lock().recv();
    }

    fn note(&self, text: &str) {
        self.send(&Event::Note(text.to_owned()));
    }
}

/// Runs a monitor: waits on standard input for an order, carries it out, and reports. Returns once
/// the microVM has ended; the error was reported already. Without an order it returns when standard
/// input is closed. It enters the jail first, and the network namespace at the path `network`.
///
/// # Errors
/// What failed.
pub fn serve(kvm: &Path, jail: JailMode, network: Option<&Path>) -> Result<(), StartError> {
    let connection = Connection::of_stdin();
    let connection =
        Arc::new(connection.map_err(|error| StartError::session("use standard input", error))?);
    // Before there is a second thread.
    let jail = jail::enter(jail, network).inspect_err(|error| {
        // An owner that has ended gets no message.
        let _ = connection.send(&Event::Failed(error.clone()), &Descriptors::default());
    })?;
    // Where that fails, the start tries again and reports why.
    let mut opened = OpenKvm::open(kvm).ok().map(Standby::from);
    // The thread that ends this process with its owner starts before there is an order, and reads
    // after it.
    let (release, released) = sync_channel(1);
    let (begin, begun) = sync_channel::<Running>(1);
    let reader = connection.clone();
    end_with(move || {
        let running = loop {
            match begun.recv() {
                Ok(running) => break running,
                // No order came: this process ends by itself.
                Err(_) => std::thread::park(),
            }
        };
        while let Ok((order, _)) = reader.receive::<Order>(None) {
            match order {
                // A player that does not wait is not released.
                Order::Release => drop(release.try_send(())),
                Order::Pause => running.post(Microvm::pause),
                Order::Unpause => running.post(Microvm::resume),
                _ => break,
            }
        }
    })?;
    let mut waiting_ns = now_ns();
    let mut manager = None;
    let (order, descriptors) = loop {
        match connection.receive(None) {
            Ok((Order::StandBy { shape, manager: slot }, mut descriptors)) => {
                manager = slot.map(|slot| descriptors.take(slot)).transpose()?;
                let ready = Event::Ready(stand_by(opened.as_mut(), &shape));
                waiting_ns = now_ns();
                let sent = connection.send(&ready, &Descriptors::default());
                sent.map_err(|error| StartError::session("answer", error))?;
            }
            Ok((order, descriptors)) => break (order, descriptors.with_manager(manager)),
            Err(ReceiveError::Closed) => return Ok(()),
            Err(error) => return Err(StartError::Monitor(ErrorChain::of(&error))),
        }
    };
    let begun_ns = now_ns();
    // Dropped last: the end of a start may wait for the pool's manager, and the owner may be killed
    // meanwhile.
    let sweep = sweep_after(&order);
    // From here on the end of the owner ends this process: where sockets are left then, by a
    // signal that is caught.
    let caught = sweep.as_ref().map(|_| Interruption::catch()).transpose()?;
    let signal = caught.as_ref().map(Interruption::signal_flag);
    let running = Running(caught.as_ref().map(Interruption::handle).unwrap_or_default());
    let ready = matches!(order, Order::MakeReady(_));
    if !ready {
        let _ = begin.send(running.clone());
    }
    let reporter =
        Arc::new(Reporter { connection: connection.clone(), jail, released: Mutex::new(released) });
    let hold = |making: &Making| {
        reporter.send(&Event::MadeReady(Box::new(making.clone())));
        let clock = wait_for_resume(&connection, signal.as_deref())?;
        let _ = begin.send(running.clone());
        Ok(clock)
    };
    let done = match order {
        Order::Start(spec) | Order::MakeReady(spec) => {
            let kvm = opened.map_or_else(|| KvmDevice::from(kvm), KvmDevice::Open);
            let request_ns = spec.request_ns;
            let stood_by = request_ns.is_some_and(|request| waiting_ns < request);
            let clock = Clock { begun_ns, request_ns, stood_by };
            let listener: Arc<dyn Listener> = reporter.clone();
            let hold: Option<Hold<'_>> = if ready { Some(&hold) } else { None };
            start_caught(&spec, descriptors, kvm, clock, &listener, (caught, hold))
        }
        Order::Plan(spec) => {
            let kvm = opened.map_or_else(|| KvmDevice::from(kvm), KvmDevice::Open);
            plan(&spec, descriptors, kvm)
                .map(|shape| reporter.send(&Event::Planned(Box::new(shape))))
        }
        Order::Release
        | Order::Resume { .. }
        | Order::StandBy { .. }
        | Order::Pause
        | Order::Unpause => Err(StartError::Spec("the first order starts nothing".to_owned())),
    };
    let done = done.inspect_err(|error| reporter.send(&Event::Failed(error.clone())));
    drop(sweep);
    done
}

fn sweep_after(order: &Order) -> Option<SweepAfterOwner> {
    let (Order::Start(spec) | Order::MakeReady(spec)) = order else { return None };
    let Serving::Owned(sockets) = &spec.host.serving else { return None };
    SweepAfterOwner::new(&sockets.vsock_path)
}

/// Waits for the order to resume; `None` where the owner has ended. A signal that ends the microVM
/// is noticed within [`SIGNAL_PERIOD`].
fn wait_for_resume(
    connection: &Connection,
    signal: Option<&AtomicI32>,
) -> Result<Option<Resumption>, StartError> {
    let limit = signal.map(|_| SIGNAL_PERIOD);
    loop {
        match connection.receive(limit) {
            Ok((Order::Resume { request_ns, credentials }, _)) => {
                let (begun_ns, request_ns) = (now_ns(), Some(request_ns));
                let clock = Clock { begun_ns, request_ns, stood_by: true };
                return Ok(Some(Resumption { clock, credentials }));
            }
            Ok(_) => return Err(StartError::Spec("a ready clone is only resumed".to_owned())),
            Err(ReceiveError::Closed) => return Ok(None),
            Err(ReceiveError::TimedOut) => {
                let signal = signal.map_or(0, |signal| signal.load(Ordering::SeqCst));
                if signal != 0 {
                    return Err(StartError::Signal(signal));
                }
            }
            Err(error) => return Err(StartError::Monitor(ErrorChain::of(&error))),
        }
    }
}

/// Makes what can be made in advance; returns why it cannot.
fn stand_by(kvm: Option<&mut Standby>, shape: &Shape) -> Option<String> {
    // What the host is like is read once in a process.
    let _ = HostFacts::of_process();
    nested_paging();
    let _ = map_program();
    match kvm?.make(shape) {
        Ok(()) => None,
        Err(error) => Some(format!("nothing was made in advance: {}", error_chain(&error))),
    }
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
