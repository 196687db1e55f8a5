//! One run of a frozen function under a recorder: thaw, identify, invoke.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use thiserror::Error;

use firn_memory::GuestMemory;
use firn_run::{
    AgentClient, ConnectError, IdentifyError, Identity, IdentityError, Invocation, InvokeError,
};
use firn_snapshot::Snapshot;
use firn_vmm::{
    FrozenMachine, Handle, IncompatibleError, Microvm, RestoreError, VcpuThreadError,
    open_root_disk,
};

use crate::commands::invoke::Outcome;
use crate::host_args::HostArgs;
use crate::session::{self, After, Interruption, SessionError};

/// Why a function did not run up to its answer.
#[derive(Debug, Error)]
pub(crate) enum RecordedRunError {
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error(transparent)]
    Incompatible(#[from] IncompatibleError),
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
pub(crate) struct RecordedRun<'a> {
    pub(crate) snapshot: &'a Snapshot,
    pub(crate) host: &'a HostArgs,
    /// The root file system, where it has moved.
    pub(crate) root: Option<&'a Path>,
    /// Where the guest's console goes, too.
    pub(crate) console: Option<&'a Path>,
    pub(crate) invocation: &'a Invocation,
    /// What the guest has to wake, and the function to answer.
    pub(crate) limit: Duration,
    pub(crate) interruption: &'a Interruption,
    /// Whether every fault is met in the vCPU's own thread.
    pub(crate) faults_in_vcpu_threads: bool,
}

impl RecordedRun<'_> {
    /// Restores the machine over `memory`, calls `begin` right before its vCPUs run, invokes, and calls `answered`; then the
    /// microVM ends.
    pub(crate) fn run<T, E>(
        &self,
        memory: GuestMemory,
        begin: impl FnOnce(&mut Microvm) -> Result<(), E>,
        answered: impl FnOnce(&Outcome, &Handle, AgentClient) -> Result<T, E> + Send,
    ) -> Result<(Outcome, T), E>
    where
        T: Send,
        E: From<RecordedRunError> + From<SessionError> + Send,
    {
        let (mut microvm, instance, identity) = self.restore(memory)?;
        begin(&mut microvm)?;
        microvm.resume().map_err(RecordedRunError::Resume)?;
        session::run(microvm, &instance, self.interruption, |handle, alive| {
            let alive = || alive.load(Ordering::SeqCst);
            let (outcome, agent) = self.ask(&instance.vsock_socket(), &identity, alive)?;
            let answered = answered(&outcome, handle, agent)?;
            Ok(((outcome, answered), After::Stop))
        })
    }

    fn restore(
        &self,
        memory: GuestMemory,
    ) -> Result<(Microvm, firn_run::OwnedInstance, Identity), RecordedRunError> {
        let mut frozen = FrozenMachine::open(self.snapshot, &self.host.kvm)?;
        if self.faults_in_vcpu_threads {
            frozen.fault_in_vcpu_threads();
        }
        let instance = session::claim(None)?;
        let identity = Identity::fresh()?;
        let host = session::host(&instance, session::console(self.console)?, identity.generation)?;
        let root = open_root_disk(self.snapshot, self.root).map_err(RestoreError::from)?;
        let (microvm, _) = Microvm::restore(frozen, memory, host, root)?;
        Ok((microvm, instance, identity))
    }

    fn ask(
        &self,
        vsock: &Path,
        identity: &Identity,
        alive: impl Fn() -> bool,
    ) -> Result<(Outcome, AgentClient), RecordedRunError> {
        let mut agent = AgentClient::wait_for(vsock, self.limit, alive)?;
        agent.identify(identity, self.limit)?;
        let outcome = Outcome::of(agent.invoke(self.invocation))?;
        Ok((outcome, agent))
    }
}
