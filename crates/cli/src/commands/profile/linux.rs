//! Recorded runs of a guest with Linux: thaw, identify, invoke, stop.

use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use thiserror::Error;

use firn_host::{
    AgentClient, ConnectError, EventError, IdentifyError, Identity, IdentityError, Invocation,
    InvokeError,
};
use firn_memory::recorders::{Part, ProfileRecordError, ProfileRecorder};
use firn_snapshot::{Profile, Snapshot};
use firn_vmm::{
    FrozenMachine, HostConfig, IncompatibleError, Microvm, RestoreError, VcpuThreadError,
    Virtualization,
};

use crate::commands::invoke::Outcome;
use crate::event::{self, ReadEventError};
use crate::host_args::{HostArgs, HostError};
use crate::output;
use crate::session::{self, After, Interruption, SessionError};

/// Why a run was not recorded.
#[derive(Debug, Error)]
pub(crate) enum RunLinuxError {
    #[error("the snapshot holds a function, which is recorded while it answers: give --invoke")]
    NoEvent,
    #[error(transparent)]
    Host(#[from] HostError),
    #[error(transparent)]
    Read(#[from] ReadEventError),
    #[error(transparent)]
    Event(#[from] EventError),
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error(transparent)]
    Incompatible(#[from] IncompatibleError),
    #[error(transparent)]
    Recorder(#[from] ProfileRecordError),
    #[error(transparent)]
    Restore(#[from] RestoreError),
    #[error("starting the guest's processors")]
    Resume(#[source] VcpuThreadError),
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Identify(#[from] IdentifyError),
    #[error(transparent)]
    Invoke(#[from] InvokeError),
}

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
}

/// Thaws once for each recorder, and puts what they find into `profile`. Where the function fails that is its exit code,
/// and the profile is of no use.
pub(super) fn record(
    snapshot: &Snapshot,
    guest: &Guest<'_>,
    recorders: Vec<Box<dyn ProfileRecorder>>,
    profile: &mut Profile,
) -> Result<Option<ExitCode>, RunLinuxError> {
    guest.host.require_linux(Virtualization::detect())?;
    let limit = Duration::from_secs(guest.time_limit);
    let event = event::read(guest.event.ok_or(RunLinuxError::NoEvent)?)?;
    let invocation = Invocation::new(&event, limit)?;
    let interruption = Interruption::catch()?;
    for recorder in recorders {
        let parts: Vec<&str> = recorder.parts().into_iter().map(Part::name).collect();
        output::note(&format!("firn: a run is recorded for {}", parts.join(", ")));
        let recorder = Mutex::new(recorder);
        let outcome = run(snapshot, guest, &recorder, &invocation, limit, &interruption);
        let recorder = recorder.into_inner().unwrap_or_else(PoisonError::into_inner);
        // What ended the recorder is the cause where the guest ended, too.
        recorder.finish(profile)?;
        let outcome = outcome?;
        if outcome.error.is_some() {
            outcome.print();
            return Ok(Some(outcome.exit_code()));
        }
    }
    let input = guest.input.or(guest.event).unwrap_or_default();
    if profile.inputs.iter().all(|known| known != input) {
        profile.inputs.push(input.to_owned());
    }
    Ok(None)
}

/// One recorded run, up to a microVM that has ended.
fn run(
    snapshot: &Snapshot,
    guest: &Guest<'_>,
    recorder: &Mutex<Box<dyn ProfileRecorder>>,
    invocation: &Invocation,
    limit: Duration,
    interruption: &Interruption,
) -> Result<Outcome, RunLinuxError> {
    let with = || recorder.lock().unwrap_or_else(PoisonError::into_inner);
    let mut frozen = FrozenMachine::open(snapshot, &guest.host.kvm)?;
    if with().faults_in_vcpu_threads() {
        frozen.fault_in_vcpu_threads();
    }
    let instance = session::claim(None)?;
    let identity = Identity::fresh()?;
    let host = HostConfig {
        kvm: guest.host.kvm.clone(),
        vsock: instance.vsock_socket(),
        scratch: std::env::temp_dir(),
        console: session::console(None)?,
        generation: Some(identity.generation),
        windows: Vec::new(),
    };
    let memory = with().memory(snapshot)?;
    let root = guest.root.map(Path::to_owned);
    let (mut microvm, _) = Microvm::restore(frozen, memory, &host, root)?;
    with().begin(snapshot, &microvm.shared_memory())?;
    microvm.resume().map_err(RunLinuxError::Resume)?;
    session::run(microvm, &instance, interruption, |_, alive| {
        let alive = || alive.load(Ordering::SeqCst);
        let mut agent = AgentClient::wait_for(&instance.vsock_socket(), limit, alive)?;
        agent.identify(&identity, limit)?;
        let outcome = Outcome::of(agent.invoke(invocation))?;
        with().end();
        Ok((outcome, After::Stop))
    })
}
