//! Guests with Linux: booted or thawed, identified, asked, served.

use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use firn_agent::protocol::RoleCredentials;
use firn_base::{ErrorChain, error_chain, now_ns};
use firn_memory::compare::{CompareReport, Original};
use firn_net::PendingResets;
use firn_snapshot::{PageSet, Snapshot};
use firn_vmm::{
    BootConfig, Console, CpuChoice, DEFAULT_CMDLINE, Devices, Drive, Handle, HostConfig, Microvm,
    NETWORK, OverlayBase, Scratch, Virtualization, VsockConnector, VsockListener,
};
use uuid::Uuid;

use crate::agent::{AgentClient, Invocation, InvokeError, LoadError, LoadOptions, Route};
use crate::background::Background;
use crate::console_tail::ConsoleTail;
use crate::descriptors::Descriptors;
use crate::error::StartError;
use crate::function::Function;
use crate::guest::{Ended, GuestKind, Listener};
use crate::identity::Identity;
use crate::jail;
use crate::life::{Clock, KvmDevice, Run, Running, counters};
use crate::outcome::Outcome;
use crate::report::StartReport;
use crate::session::{self, After, Interruption};
use crate::spec::{BootSpec, HostSpec, OpenedFile, RecordSpec, Sockets, StartSpec, ThawSpec};

/// How long a guest may take to reset the connections of before its freeze.
const RESETS_LIMIT: Duration = Duration::from_secs(5);

/// A guest with Linux, and what its monitor serves it with.
pub(crate) struct Linux {
    /// Without its drives.
    host: Option<HostConfig>,
    /// Where its disk writes go.
    scratch: Option<Scratch>,
    served: Served,
    limit: Duration,
    interruption: Interruption,
    request: Request,
}

/// What the guest is asked once it runs.
enum Request {
    /// A boot: load a function, if there is one.
    Load { function: Option<Box<Function>>, memory_mib: u64 },
    /// A thaw: answer an event, if there is one.
    Invoke {
        invocation: Option<Invocation>,
        /// Whether it is asked once more after its answer.
        twice: bool,
        /// Whether it describes what holds its pages after its last answer.
        holders: bool,
        keep: bool,
        compare: bool,
        root: Option<OpenedFile>,
    },
}

impl Linux {
    pub(crate) fn of_thaw(
        spec: &StartSpec,
        thaw: &ThawSpec,
        kvm: &KvmDevice,
        descriptors: &mut Descriptors,
        caught: Option<Interruption>,
    ) -> Result<Self, StartError> {
        let invoke = thaw.invoke.as_ref();
        let invocation =
            invoke.map(|invoke| Invocation::new(&invoke.event, spec.time_limit)).transpose()?;
        let request = Request::Invoke {
            invocation,
            twice: thaw.record.as_ref().is_some_and(RecordSpec::has_second),
            holders: thaw.record.as_ref().is_some_and(RecordSpec::has_holders),
            keep: invoke.is_none_or(|invoke| invoke.keep),
            compare: invoke.is_some_and(|invoke| invoke.compare),
            root: thaw.root.clone(),
        };
        Self::new(spec, request, kvm, descriptors, caught)
    }

    fn new(
        spec: &StartSpec,
        request: Request,
        kvm: &KvmDevice,
        descriptors: &mut Descriptors,
        caught: Option<Interruption>,
    ) -> Result<Self, StartError> {
        if kvm.0.is_ok() {
            require_hardware(spec.host.software_kvm)?;
        }
        let interruption = caught.map_or_else(Interruption::catch, Ok)?;
        let (host, scratch, served) = serve(&spec.host, descriptors)?;
        let served = Served { credentials: spec.credentials.clone(), ..served };
        let (host, limit) = (Some(host), spec.time_limit);
        Ok(Self { host, scratch, served, limit, interruption, request })
    }

    /// What the guest uses of its host. Its drives are the root disk and, over this base, what it
    /// writes, of at least `disk_size` bytes.
    fn take_host(
        &mut self,
        disks: Option<(OpenedFile, OverlayBase)>,
        disk_size: u64,
        descriptors: &mut Descriptors,
    ) -> Result<HostConfig, StartError> {
        let host = self.host.take();
        let host =
            host.ok_or_else(|| StartError::Spec("a guest's host is used once".to_owned()))?;
        let drives = match disks {
            Some((root, base)) => {
                Drive::of_firn(root.take(descriptors)?, base, disk_size, self.scratch.take())
            }
            None => Vec::new(),
        };
        Ok(HostConfig { drives, ..host })
    }
}

/// What a monitor serves a guest with.
pub(crate) struct Served {
    pub(crate) name: String,
    pub(crate) control: UnixListener,
    vsock_path: PathBuf,
    connector: VsockConnector,
    console: Console,
    identity: Identity,
    /// The resets of connections of before the freeze.
    resets: PendingResets,
    /// The keys of the function's role.
    credentials: Option<RoleCredentials>,
}

/// Takes what a microVM uses of its host from the descriptors, with a fresh identity for the clone.
/// Its drives come later.
fn serve(
    spec: &HostSpec,
    descriptors: &mut Descriptors,
) -> Result<(HostConfig, Option<Scratch>, Served), StartError> {
    let network = spec.network.as_ref();
    let addresses = network.and_then(|network| network.addresses.clone());
    let metadata = network.and_then(|network| Some(network.metadata.as_ref()?.config.address));
    let identity = Identity { addresses, metadata, ..Identity::fresh()? };
    let console = Console::new(descriptors.take_file(spec.console)?);
    let without = || StartError::Spec("a guest with Linux needs sockets".to_owned());
    let sockets = spec.sockets.clone().ok_or_else(without)?;
    let Sockets { name, control, vsock, vsock_path, broker, scratch } = sockets;
    let control = UnixListener::from(descriptors.take(control)?);
    let vsock = UnixListener::from(descriptors.take(vsock)?);
    let broker = broker.map(|slot| descriptors.take(slot)).transpose()?;
    let vsock = VsockListener::new(vsock)
        .map_err(|error| StartError::path("listen on", &vsock_path, error))?
        .with_broker(broker);
    let connector = vsock.connector();
    let scratch = match scratch {
        Some(scratch) => {
            let file = descriptors.take(scratch.file)?.into();
            Some(Scratch { file, limit: scratch.limit })
        }
        None => None,
    };
    let network = network.map(|network| network.take(descriptors)).transpose()?;
    let resets = network.as_ref().map(|network| network.resets.clone()).unwrap_or_default();
    let host = HostConfig {
        vsock: Some(vsock),
        networks: network.map(|network| (NETWORK.to_owned(), network)).into_iter().collect(),
        console: console.clone(),
        generation: Some(identity.generation),
        ..HostConfig::default()
    };
    let credentials = None;
    let served =
        Served { name, control, vsock_path, connector, console, identity, resets, credentials };
    Ok((host, scratch, served))
}

impl Served {
    /// Waits for the guest's agent, and gives the clone its identity. Returns when the agent
    /// answered, ns of CLOCK_MONOTONIC. Before the guest's programs run, its kernel has reset their
    /// old connections; `note` gets what else is to be known.
    pub(crate) fn identify(
        &self,
        limit: Duration,
        alive: &AtomicBool,
        note: impl Fn(&str),
    ) -> Result<(AgentClient, u64), StartError> {
        let route = Route::Inside { connector: &self.connector, socket: &self.vsock_path };
        let agent = AgentClient::wait_for(route, limit, || alive.load(Ordering::SeqCst));
        let mut agent = agent.map_err(|error| StartError::NoAgent {
            reason: error_chain(&error),
            console: ConsoleTail::of(&self.console),
        })?;
        let ready_ns = now_ns();
        if let Err(count) = self.resets.wait(RESETS_LIMIT) {
            note(&format!(
                "the guest's kernel has not reset its {count} old connections within {} s: \
                 a program that uses one of them may have to wait for a time-out",
                RESETS_LIMIT.as_secs()
            ));
        }
        agent.set_credentials(self.credentials.clone());
        agent.identify(&self.identity, limit)?;
        Ok((agent, ready_ns))
    }
}

impl GuestKind for Linux {
    fn host(
        &mut self,
        snapshot: &Snapshot,
        descriptors: &mut Descriptors,
    ) -> Result<HostConfig, StartError> {
        let Request::Invoke { root, .. } = &mut self.request else {
            return self.take_host(None, 0, descriptors);
        };
        let base = OverlayBase::of_snapshot(snapshot);
        let base = base.map_err(|error| StartError::session("duplicate a descriptor", error))?;
        let disks = root.take().zip(base);
        self.take_host(disks, 0, descriptors)
    }

    fn tracks_writes(&self) -> bool {
        matches!(&self.request, Request::Invoke { compare: true, .. })
    }

    fn identify(
        &mut self,
        credentials: Option<RoleCredentials>,
    ) -> Result<Option<Uuid>, StartError> {
        let earlier = &mut self.served.identity;
        let (addresses, metadata) = (earlier.addresses.take(), earlier.metadata);
        *earlier = Identity { addresses, metadata, ..Identity::fresh()? };
        self.served.credentials = credentials;
        Ok(Some(self.served.identity.generation))
    }

    fn follow(
        self,
        running: Running<'_>,
        listener: &Arc<dyn Listener>,
    ) -> Result<Ended, StartError> {
        let Self { served, limit, interruption, request, .. } = self;
        let Running { microvm, mut run } = running;
        run.report.name = Some(served.name.clone());
        let (run, served) = (&mut run, &served);
        let lead = |handle: &Handle, alive: &AtomicBool| {
            let note = |text: &str| listener.note(text);
            let (mut agent, ready_ns) = served.identify(limit, alive, note)?;
            let (identified_ns, resumed_ns) = (now_ns(), run.resumed_ns());
            let since = |begin_ns| Some(now_ns().saturating_sub(begin_ns));
            let times = &mut run.report.times;
            let serves = match request {
                Request::Load { function, memory_mib } => {
                    times.boot_ns = Some(ready_ns.saturating_sub(resumed_ns));
                    times.identify_ns = Some(identified_ns.saturating_sub(ready_ns));
                    if let Some(function) = function {
                        load(&mut agent, &function, limit, memory_mib)?;
                        times.function_ns = since(identified_ns);
                        run.report.function = Some(function.name().to_owned());
                    }
                    run.ends_now();
                    run.report.counters = measured(handle)?;
                    true
                }
                Request::Invoke { invocation, twice, holders, keep, compare, .. } => {
                    times.identify_ns = Some(identified_ns.saturating_sub(resumed_ns));
                    if let Some(invocation) = &invocation {
                        let mut invoke = || {
                            let outcome = Outcome::of(agent.invoke(invocation));
                            outcome.map_err(|error| invoke_failed(&error))
                        };
                        listener.asked();
                        let outcome = invoke()?;
                        run.report.times.invoke_ns = since(identified_ns);
                        run.ends_now();
                        listener.answered(&outcome);
                        if twice && outcome.error.is_none() {
                            listener.answered(&invoke()?);
                        }
                        if holders && outcome.error.is_none() {
                            match agent.pages(limit) {
                                Ok(pages) => listener.described(pages),
                                Err(error) => listener.note(&error_chain(&error)),
                            }
                        }
                        run.report.outcome = Some(outcome);
                    }
                    if run.report.outcome.is_none() {
                        run.ends_now();
                    }
                    run.report.counters = measured(handle)?;
                    run.report.writes = run.writes()?;
                    if let Some(source) = run.source.filter(|_| compare) {
                        run.report.compared = Some(compared(handle, source.snapshot())?);
                    }
                    keep
                }
            };
            // A microVM that does not serve can wait for the rest of its report.
            if !serves {
                run.background.finish()?;
            }
            run.report.loader = run.background.loaded();
            listener.started(&run.report);
            finish(&mut run.background, listener)?;
            let after = if serves { After::Serve } else { After::Stop };
            Ok::<_, StartError>((run.report.writes.take(), after))
        };
        let note = |text: &str| listener.note(text);
        let writes = session::run(microvm, &served.control, &interruption, lead, note)?;
        Ok(Ended { report: None, writes })
    }
}

/// Waits for the steps and the loader: other processes may rely on this one's loading, so it does
/// not end before.
fn finish(background: &mut Background, listener: &Arc<dyn Listener>) -> Result<(), StartError> {
    background.finish()?;
    if let Some(failure) = background.loader_failure() {
        listener.note(&failure);
    }
    Ok(())
}

/// Boots the microVM of a spec, and serves it to its end.
pub(crate) fn boot(
    spec: &StartSpec,
    boot: &BootSpec,
    mut descriptors: Descriptors,
    kvm: KvmDevice,
    clock: &Clock,
    listener: &Arc<dyn Listener>,
    caught: Option<Interruption>,
) -> Result<(), StartError> {
    let function = boot.function.clone().map(Box::new);
    let request = Request::Load { function, memory_mib: boot.memory >> 20 };
    let cpu = boot.cpu.as_deref().map(str::parse).transpose();
    let cpu = cpu.map_err(|error: firn_vmm::CpuModelError| StartError::Spec(error.to_string()))?;
    let mut guest = Linux::new(spec, request, &kvm, &mut descriptors, caught)?;
    let added = boot.cmdline.as_deref().map(|added| format!(" {added}")).unwrap_or_default();
    let base = OverlayBase::File(boot.overlay.clone().take(&mut descriptors)?);
    let disks = Some((boot.root.clone(), base));
    let config = BootConfig {
        kernel: boot.kernel.clone().take(&mut descriptors)?,
        initramfs: Some(boot.initramfs.clone().take(&mut descriptors)?),
        cmdline: format!("{DEFAULT_CMDLINE}{added}"),
        device_arguments: false,
        legacy_devices: false,
        track_writes: false,
        vcpus: boot.vcpus,
        smt: false,
        cpu: cpu.map_or(CpuChoice::Best, CpuChoice::Exactly),
        memory: boot.memory,
        devices: Devices::of_firn(boot.network),
        host: guest.take_host(disks, boot.disk_size, &mut descriptors)?,
    };
    listener.sized(config.memory, config.host.written_disk_memory());
    let mut microvm = Microvm::boot(config, kvm.0.map_err(StartError::Boot)?)?;
    jail::narrow(microvm.largest_file(), microvm.most_sockets())?;
    microvm.resume()?;
    let mut report = StartReport::empty();
    report.memory = boot.memory;
    report.cpu = microvm.cpu_model().map(|model| model.to_string());
    report.times.process_start_ns = clock.process_start_ns();
    let (memory, first_run) = (microvm.shared_memory(), microvm.first_run());
    let background = Background::start(None, memory.clone(), None);
    let (source, plan, begin_ns, since) = (None, None, clock.begun_ns, clock.since());
    let run = Run { source, plan, background, memory, report, first_run, begin_ns, since };
    guest.follow(Running { microvm, run }, listener).map(drop)
}

/// Refuses early what would fail late: a guest with Linux where the KVM behind `device` cannot run
/// one. `software_kvm` lets it try without hardware virtualisation.
///
/// # Errors
/// [`StartError::NoHardware`].
pub fn require_linux(software_kvm: bool, device: &Path) -> Result<(), StartError> {
    // A device that cannot be opened has a better error of its own.
    if device.exists() { require_hardware(software_kvm) } else { Ok(()) }
}

fn require_hardware(software_kvm: bool) -> Result<(), StartError> {
    if software_kvm {
        return Ok(());
    }
    match Virtualization::of_host() {
        Virtualization::Hardware => Ok(()),
        Virtualization::Software => Err(StartError::NoHardware),
    }
}

fn load(
    agent: &mut AgentClient,
    function: &Function,
    time_limit: Duration,
    memory_mib: u64,
) -> Result<(), StartError> {
    let options = LoadOptions { time_limit, memory_mib, environment: Default::default() };
    match agent.load(function, &options) {
        Ok(_) => Ok(()),
        Err(error) => Err(load_failed(&error)),
    }
}

fn load_failed(error: &LoadError) -> StartError {
    StartError::LoadFunction(ErrorChain::of(error))
}

pub(crate) fn invoke_failed(error: &InvokeError) -> StartError {
    StartError::Invoke(ErrorChain::of(error))
}

/// The counters, read in the microVM's own thread.
pub(crate) fn measured(handle: &Handle) -> Result<crate::report::Counters, StartError> {
    handle.call(counters)?.map_err(StartError::Measure)
}

/// Pauses the guest for good, and compares its memory with the image.
fn compared(handle: &Handle, snapshot: &Snapshot) -> Result<CompareReport, StartError> {
    let original = Original::of(snapshot);
    // In the microVM's own thread: meanwhile no device writes.
    handle.call(move |microvm| {
        let written = microvm.written().map_err(|error| failed(&error))?;
        let written = written.unwrap_or_else(|| PageSet::new(0));
        original.compare(microvm.memory(), &written).map_err(|error| failed(&error))
    })?
}

fn failed(error: &dyn std::error::Error) -> StartError {
    StartError::Compare(ErrorChain::of(error))
}
