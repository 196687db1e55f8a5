//! From a spec to the end of a microVM.

use std::sync::Arc;

use firn_memory::planners::{Planner, Preloaded, parse};

use crate::descriptors::Descriptors;
use crate::error::StartError;
use crate::guest::{Ended, GuestKind, Listener};
use crate::life::{Clock, KvmDevice};
use crate::linux::{self, Linux};
use crate::player::{Player, traces_of};
use crate::session::Interruption;
use crate::source::Source;
use crate::spec::{Origin, SPEC_VERSION, StartSpec, ThawSpec};

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
    start_caught(spec, descriptors, kvm, clock, listener, None)
}

/// The same in a process that catches signals already.
pub(crate) fn start_caught(
    spec: &StartSpec,
    descriptors: Descriptors,
    kvm: KvmDevice,
    clock: Clock,
    listener: &Arc<dyn Listener>,
    caught: Option<Interruption>,
) -> Result<(), StartError> {
    if spec.version != SPEC_VERSION {
        let (found, known) = (spec.version, SPEC_VERSION);
        let text = format!("it has version {found}, this firn knows version {known}");
        return Err(StartError::Spec(text));
    }
    let clock = Clock { request_ns: clock.request_ns.or(spec.request_ns), ..clock };
    match &spec.origin {
        Origin::Boot(boot) => linux::boot(spec, boot, descriptors, kvm, &clock, listener, caught),
        Origin::Thaw(thaw) => thaw_snapshot(spec, thaw, descriptors, kvm, &clock, listener, caught),
    }
}

fn thaw_snapshot(
    spec: &StartSpec,
    thaw: &ThawSpec,
    mut descriptors: Descriptors,
    kvm: KvmDevice,
    clock: &Clock,
    listener: &Arc<dyn Listener>,
    caught: Option<Interruption>,
) -> Result<(), StartError> {
    let mut planner = parse(&thaw.planner)?;
    if thaw.preloaded {
        planner = Box::new(Preloaded(planner));
    }
    let mut source = Source::open(&thaw.source, &*planner, &mut descriptors)?;
    let ended = if traces_of(source.snapshot().manifest()).is_some() {
        let player = Player::new(&source, &thaw.replay)?;
        live(player, &source, &*planner, kvm, clock, descriptors, listener)
    } else if thaw.replay.input.is_some() {
        Err(StartError::NotPlayer)
    } else {
        let guest = Linux::of_thaw(spec, thaw, &kvm, &mut descriptors, caught)?;
        live(guest, &source, &*planner, kvm, clock, descriptors, listener)
    }?;
    for note in source.give_back(ended.writes.as_ref(), ended.written.as_ref()) {
        listener.note(&note);
    }
    if let Some(report) = ended.report {
        listener.started(&report);
    }
    Ok(())
}

/// The states of a thaw, one after the other.
pub(crate) fn live(
    mut guest: impl GuestKind,
    source: &Source,
    planner: &dyn Planner,
    kvm: KvmDevice,
    clock: &Clock,
    mut descriptors: Descriptors,
    listener: &Arc<dyn Listener>,
) -> Result<Ended, StartError> {
    let mut mapped = source.plan(planner, clock)?.map(kvm)?;
    let (host, root) = guest.prepare(source, &mut mapped, &mut descriptors)?;
    let restored = mapped.restore(host, root)?;
    guest.restored(&restored.microvm, listener);
    guest.follow(restored.resume()?, listener)
}
