//! The monitor's side.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

use firn_base::{ErrorChain, now_ns};
use firn_memory::planners::parse;
use firn_vmm::OpenKvm;
use parking_lot::Mutex;

use super::connection::{Connection, ReceiveError};
use super::{Event, Order};
use crate::descriptors::Descriptors;
use crate::error::StartError;
use crate::guest::Listener;
use crate::instance::SweepAfterOwner;
use crate::life::{Clock, KvmDevice};
use crate::report::StartReport;
use crate::session::end_with;
use crate::source::Source;
use crate::spec::{Origin, Serving, StartSpec};
use crate::start::start;

/// Sends what happens to the process that started this one.
struct Reporter {
    connection: Arc<Connection>,
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
        self.send(&Event::Started(Box::new(report.clone())));
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
/// input is closed.
///
/// # Errors
/// What failed.
pub fn serve(kvm: &Path) -> Result<(), StartError> {
    let connection = Connection::of_stdin();
    let connection =
        Arc::new(connection.map_err(|error| StartError::session("use standard input", error))?);
    // Where that fails, the start tries again and reports why.
    let opened = OpenKvm::open(kvm).ok();
    let (order, descriptors) = match connection.receive(None) {
        Ok(received) => received,
        Err(ReceiveError::Closed) => return Ok(()),
        Err(error) => return Err(StartError::Monitor(ErrorChain::of(&error))),
    };
    let begun_ns = now_ns();
    // Dropped last: the end of a start may wait for the pool's manager, and the owner may be killed
    // meanwhile.
    let _sweep = sweep_after(&order);
    let (release, released) = sync_channel(1);
    let reader = connection.clone();
    end_with(move || {
        while let Ok((Order::Release, _)) = reader.receive::<Order>(None) {
            // A player that does not wait is not released.
            let _ = release.try_send(());
        }
    })?;
    let reporter =
        Arc::new(Reporter { connection: connection.clone(), released: Mutex::new(released) });
    let done = match order {
        Order::Start(spec) => {
            let kvm = opened.map_or_else(|| KvmDevice::from(kvm), KvmDevice::Open);
            let clock = Clock { begun_ns, request_ns: spec.request_ns };
            let listener: Arc<dyn Listener> = reporter.clone();
            start(&spec, descriptors, kvm, clock, &listener)
        }
        Order::Plan(spec) => plan(&spec, descriptors).map(|()| reporter.send(&Event::Planned)),
        Order::Release => Err(StartError::Spec("the first order is to release".to_owned())),
    };
    done.inspect_err(|error| reporter.send(&Event::Failed(error.clone())))
}

fn sweep_after(order: &Order) -> Option<SweepAfterOwner> {
    let Order::Start(spec) = order else { return None };
    let Serving::Owned(sockets) = &spec.host.serving else { return None };
    SweepAfterOwner::new(&sockets.vsock_path)
}

fn plan(spec: &StartSpec, mut descriptors: Descriptors) -> Result<(), StartError> {
    let Origin::Thaw(thaw) = &spec.origin else {
        return Err(StartError::Spec("a boot has no plan".to_owned()));
    };
    let planner = parse(&thaw.planner)?;
    let source = Source::open(&thaw.source, &*planner, &mut descriptors)?;
    firn_memory::planners::plan(source.snapshot(), source.grant(), &*planner)?;
    Ok(())
}
