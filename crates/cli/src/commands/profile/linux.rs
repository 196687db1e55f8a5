//! Recorded runs of a guest with Linux.

use std::path::Path;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;

use firn_memory::recorders::{Part, ProfileRecordError, ProfileRecorder};
use firn_run::{Interruption, Invocation, Outcome, RecordedRun, Source};
use firn_snapshot::{Destination, FreezeRequest, ImageKind, Profile};

use super::{left_out, watched};
use crate::commands::invoke;
use crate::event;
use crate::host_args::HostArgs;
use crate::output;

/// What is thawed, and what it is asked.
pub(super) struct Guest<'a> {
    pub(super) host: &'a HostArgs,
    /// The root file system, where it has moved.
    pub(super) root: Option<&'a Path>,
    pub(super) event: Option<&'a str>,
    /// The event's name.
    pub(super) input: Option<&'a str>,
    /// Seconds to wake, and to answer.
    pub(super) time_limit: u64,
    /// Where it is frozen after its answer.
    pub(super) freeze: Option<&'a Path>,
    /// Whether a recorder that this host refuses is left out.
    pub(super) lenient: bool,
}

/// What came of the runs.
pub(super) enum Runs {
    /// So many were recorded.
    Recorded(usize),
    /// The function failed, with this exit code: the profile is of no use.
    Failed(ExitCode),
}

/// Thaws once for each recorder, and puts what they find into `profile`.
pub(super) fn record(
    source: &Source,
    guest: &Guest<'_>,
    recorders: Vec<Box<dyn ProfileRecorder>>,
    profile: &mut Profile,
) -> anyhow::Result<Runs> {
    let limit = Duration::from_secs(guest.time_limit);
    let event = event::read(guest.event.context(
        "the snapshot holds a function, which is recorded while it answers: give --invoke",
    )?)?;
    let invocation = Invocation::new(&event, limit)?;
    let interruption = Interruption::catch()?;
    let mut recorded = 0;
    for recorder in recorders {
        let parts = recorder.parts();
        let names: Vec<&str> = parts.iter().copied().map(Part::name).collect();
        output::note(&format!("firn: a run is recorded for {}", names.join(", ")));
        let recorder = Mutex::new(recorder);
        let outcome = run(source, guest, &recorder, &invocation, limit, &interruption);
        let outcome = match outcome {
            Err(error) if guest.lenient && is_host_limitation(&error) => {
                left_out(&parts, &*error);
                continue;
            }
            outcome => outcome,
        };
        let recorder = recorder.into_inner().unwrap_or_else(PoisonError::into_inner);
        recorder.finish(profile)?;
        let outcome = outcome?;
        if outcome.error.is_some() {
            invoke::print(&outcome);
            return Ok(Runs::Failed(ExitCode::from(invoke::exit_code(&outcome))));
        }
        recorded += 1;
    }
    let input = guest.input.or(guest.event).unwrap_or_default();
    if profile.inputs.iter().all(|known| known != input) {
        profile.inputs.push(input.to_owned());
    }
    Ok(Runs::Recorded(recorded))
}

/// Whether the recorder failed because of what this host lacks.
fn is_host_limitation(error: &anyhow::Error) -> bool {
    error.downcast_ref().is_some_and(ProfileRecordError::is_host_limitation)
}

/// One recorded run, up to a microVM that has ended.
fn run(
    source: &Source,
    guest: &Guest<'_>,
    recorder: &Mutex<Box<dyn ProfileRecorder>>,
    invocation: &Invocation,
    limit: Duration,
    interruption: &Interruption,
) -> anyhow::Result<Outcome> {
    let snapshot = source.snapshot();
    let with = || recorder.lock().unwrap_or_else(PoisonError::into_inner);
    let run = RecordedRun {
        source,
        kvm: &guest.host.kvm,
        software_kvm: guest.host.software_kvm,
        root: guest.root,
        console: None,
        invocation,
        limit,
        interruption,
        faults_in_vcpu_threads: with().faults_in_vcpu_threads(),
    };
    let memory = with().memory(snapshot)?;
    watched(with().watches_at().as_deref());
    let (outcome, ()) = run.run(
        memory,
        |microvm| Ok(with().begin(snapshot, &microvm.shared_memory())?),
        || (),
        |outcome, handle, agent| {
            with().end();
            let Some(path) = guest.freeze.filter(|_| outcome.error.is_none()) else {
                return Ok(());
            };
            agent.prepare_freeze(limit)?;
            let request = FreezeRequest {
                destination: Destination::Directory(path.to_owned()),
                dense: snapshot.manifest().image.kind == ImageKind::Dense,
                function: snapshot.manifest().description.function.clone(),
            };
            handle.call(move |microvm| firn_snapshot::freeze(microvm, request))??;
            Ok::<_, anyhow::Error>(())
        },
        |text| output::note(&format!("firn: {text}")),
    )?;
    Ok(outcome)
}
