//! One run of a frozen function under a recorder: thaw, identify, invoke.

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use firn_memory::GuestMemory;
use firn_vmm::{Handle, Microvm, OpenFile, open_root_disk};

use crate::agent::{AgentClient, Invocation};
use crate::descriptors::Descriptors;
use crate::error::StartError;
use crate::life::Clock;
use crate::linux::{invoke_failed, require_linux, serve};
use crate::outcome::Outcome;
use crate::session::{self, After, Interruption};
use crate::source::Source;
use crate::spec::HostSpec;

/// What is thawed under a recorder, and what it is asked.
pub struct RecordedRun<'a> {
    /// The snapshot.
    pub source: &'a Source,
    /// The KVM device.
    pub kvm: &'a Path,
    /// Whether Linux is tried where the processor has no hardware virtualisation.
    pub software_kvm: bool,
    /// The root disk, where it has moved since the freeze.
    pub root: Option<&'a Path>,
    /// The file that gets a copy of the guest's console.
    pub console: Option<&'a Path>,
    /// The request.
    pub invocation: &'a Invocation,
    /// Limit for the guest to wake, and for the function to answer.
    pub limit: Duration,
    /// Signals that end the run.
    pub interruption: &'a Interruption,
    /// Whether every page fault is handled in the vCPU's own thread.
    pub faults_in_vcpu_threads: bool,
}

impl RecordedRun<'_> {
    /// Restores the machine over `memory`, calls `begin` right before its vCPUs run, `connected`
    /// right before it invokes, and `answered` after that; then the microVM ends. `note` gets the
    /// errors of devices that stopped serving the guest.
    ///
    /// # Errors
    /// [`StartError`], or what `begin` or `answered` returned.
    pub fn run<T, E>(
        &self,
        memory: GuestMemory,
        begin: impl FnOnce(&mut Microvm) -> Result<(), E>,
        connected: impl FnOnce() + Send,
        answered: impl FnOnce(&Outcome, &Handle, AgentClient) -> Result<T, E> + Send,
        note: impl Fn(&str),
    ) -> Result<(Outcome, T), E>
    where
        T: Send,
        E: From<StartError> + Send,
    {
        require_linux(self.software_kvm, self.kvm)?;
        let mut descriptors = Descriptors::default();
        let (_claimed, host) = HostSpec::claim(None, self.console, true, &mut descriptors)?;
        let (host, served) = serve(&host, &mut descriptors)?;
        let mut mapped = self.source.recorded(memory, self.kvm.into(), &Clock::now())?;
        if self.faults_in_vcpu_threads {
            mapped.machine_mut().fault_in_vcpu_threads();
        }
        let mut restored = mapped.restore(host, self.root()?)?;
        begin(&mut restored.microvm)?;
        let running = restored.resume()?;
        let lead = |handle: &Handle, alive: &AtomicBool| {
            // This clone has no network, and so no connections to report.
            let (mut agent, _) = served.identify(self.limit, alive, |_| ())?;
            connected();
            let outcome = self.invoke(&mut agent)?;
            let answered = answered(&outcome, handle, agent)?;
            Ok(((outcome, answered), After::Stop))
        };
        session::run(running.microvm, &served.control, self.interruption, lead, note)
    }

    /// Invokes the function.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn invoke(&self, agent: &mut AgentClient) -> Result<Outcome, StartError> {
        Outcome::of(agent.invoke(self.invocation)).map_err(|error| invoke_failed(&error))
    }

    fn root(&self) -> Result<Option<OpenFile>, StartError> {
        Ok(open_root_disk(self.source.snapshot().manifest(), self.root)?)
    }
}
