//! From a spec to the end of a microVM.

use std::sync::Arc;
use std::time::Instant;

use firn_agent::protocol::RoleCredentials;
use firn_base::now_ns;
use firn_memory::planners::{Planner, Preloaded, parse};

use crate::descriptors::Descriptors;
use crate::error::StartError;
use crate::guest::{Ended, GuestKind, Listener};
use crate::life::{Clock, KvmDevice};
use crate::linux::{self, Linux};
#[cfg(feature = "player-agent")]
use crate::player::agent;
use crate::player::{Player, traces_of};
use crate::recording::Recording;
use crate::report::Making;
use crate::session::Interruption;
use crate::source::Source;
use crate::spec::{Origin, RecordSpec, SPEC_VERSION, StartSpec, ThawSpec};

/// Starts the microVM of a spec in this process, and serves it to its end. `listener` gets the
/// report once it is ready.
///
/// # Errors
/// See [`StartError`]. Nothing of the microVM is left over.
pub fn start(
    spec: &StartSpec,
    descriptors: Descriptors,
    kvm: KvmDevice,
    clock: Clock,
    listener: &Arc<dyn Listener>,
) -> Result<(), StartError> {
    descriptors.begin_threads()?;
    start_caught(spec, descriptors, kvm, clock, listener, (None, None))
}

/// The request of a microVM that is restored already.
pub(crate) struct Resumption {
    pub(crate) clock: Clock,
    /// Keys of the function's role.
    pub(crate) credentials: Option<RoleCredentials>,
}

/// Waits for the request of a microVM that is restored; `None` where none will come.
pub(crate) type Hold<'a> = &'a dyn Fn(&Making) -> Result<Option<Resumption>, StartError>;

/// The same in a process that catches signals already.
pub(crate) fn start_caught(
    spec: &StartSpec,
    descriptors: Descriptors,
    kvm: KvmDevice,
    clock: Clock,
    listener: &Arc<dyn Listener>,
    (caught, hold): (Option<Interruption>, Option<Hold<'_>>),
) -> Result<(), StartError> {
    if spec.version != SPEC_VERSION {
        let (found, known) = (spec.version, SPEC_VERSION);
        let text = format!("it has version {found}, this firn knows version {known}");
        return Err(StartError::Spec(text));
    }
    let clock = Clock { request_ns: clock.request_ns.or(spec.request_ns), ..clock };
    match &spec.origin {
        Origin::Boot(_) if hold.is_some() => {
            Err(StartError::Spec("a boot cannot be made ready".to_owned()))
        }
        #[cfg(feature = "player-agent")]
        Origin::Boot(boot) if agent::is_player(boot) => {
            agent::boot(&spec.host, boot, (descriptors, kvm), &clock, listener, caught)
        }
        Origin::Boot(boot) => linux::boot(spec, boot, descriptors, kvm, &clock, listener, caught),
        Origin::Thaw(thaw) => {
            let record = thaw.record.as_ref();
            let order = Order { kvm, clock: &clock, descriptors, hold, record };
            thaw_snapshot(spec, thaw, order, listener, caught)
        }
    }
}

fn thaw_snapshot(
    spec: &StartSpec,
    thaw: &ThawSpec,
    mut order: Order<'_>,
    listener: &Arc<dyn Listener>,
    caught: Option<Interruption>,
) -> Result<(), StartError> {
    let mut planner = parse(&thaw.planner)?;
    if thaw.preloaded {
        planner = Box::new(Preloaded(planner));
    }
    let mut source = Source::open(&thaw.source, &*planner, &mut order.descriptors)?;
    let ended = if traces_of(source.snapshot().manifest()).is_some() {
        let player = Player::new(&source, &thaw.replay)?;
        #[cfg(feature = "player-agent")]
        let player = agent::PlayerAgent::new(player, &spec.host, &mut order.descriptors, caught)?;
        live(player, &source, &*planner, order, listener)
    } else if thaw.replay.input.is_some() {
        Err(StartError::NotPlayer)
    } else {
        let guest = Linux::of_thaw(spec, thaw, &order.kvm, &mut order.descriptors, caught)?;
        live(guest, &source, &*planner, order, listener)
    }?;
    let Some(ended) = ended else { return Ok(()) };
    if let Some(note) = source.learn(ended.writes.as_ref()) {
        listener.note(&note);
    }
    if let Some(report) = ended.report {
        listener.started(&report);
    }
    Ok(())
}

/// How a thaw is to be done.
pub(crate) struct Order<'a> {
    pub(crate) kvm: KvmDevice,
    pub(crate) clock: &'a Clock,
    pub(crate) descriptors: Descriptors,
    /// Where it waits before the resume.
    pub(crate) hold: Option<Hold<'a>>,
    /// What is recorded of it.
    pub(crate) record: Option<&'a RecordSpec>,
}

/// The states of a thaw, one after the other; `None` where it waited for a request that did not
/// come.
pub(crate) fn live(
    mut guest: impl GuestKind,
    source: &Source,
    planner: &dyn Planner,
    order: Order<'_>,
    listener: &Arc<dyn Listener>,
) -> Result<Option<Ended>, StartError> {
    let Order { kvm, clock, mut descriptors, hold, record } = order;
    let begin = Instant::now();
    let host = guest.host(source.snapshot(), &mut descriptors)?;
    // What the owner does with that is done when the guest begins to run.
    listener.sized(source.snapshot().manifest().layout.total_bytes(), host.written_disk_memory());
    let (mut mapped, recording) = match record {
        None => (source.plan(planner, clock)?.map(kvm, guest.tracks_writes())?, None),
        Some(spec) => {
            let (memory, recording) = Recording::start(spec, source.snapshot(), &mut descriptors)?;
            (source.recorded(memory, kvm, clock)?, Some(recording))
        }
    };
    // A player uses no sockets: a client is refused, and does not wait.
    drop(descriptors);
    let heard = recording.as_ref().map(|recording| recording.listener(listener.clone()));
    let listener = heard.as_ref().unwrap_or(listener);
    guest.prepare(&mut mapped);
    if hold.is_some() {
        mapped.machine_mut().hold();
    }
    let mut restored = mapped.restore(host)?;
    guest.restored(&restored.microvm, listener);
    if let Some(hold) = hold {
        // Nothing that is left needs more, and the request does not wait for the filter.
        restored.narrow()?;
        let making = restored.making(begin)?;
        let Some(Resumption { clock, credentials }) = hold(&making)? else { return Ok(None) };
        let begin_ns = now_ns();
        restored.begin_release()?;
        source.check_current()?;
        restored.release(guest.identify(credentials)?, making, &clock, begin_ns)?;
    }
    if let Some(recording) = &recording {
        recording.begin(&mut restored.microvm, listener)?;
    }
    let ended = guest.follow(restored.resume()?, listener)?;
    recording.map_or(Ok(()), |recording| recording.finish(source.snapshot()))?;
    Ok(Some(ended))
}
