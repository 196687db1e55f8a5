//! Carries out requests: the resources before the start, the microVM after it.

mod balloon;
mod boot;
mod devices;
mod snapshot;

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use firn_memory::planners::parse;
use firn_net::MetadataStore;
use firn_run::StartError;
use firn_run::jail::{self, ThreadRole};
use firn_vmm::{GoneError, Handle, Microvm, OpenFile, VcpuThreadError};
use serde_json::{Value, json};

use crate::api::{Action, Request, VmState};
use crate::config::{BootSource, MachineConfig, PlannerChoice, VmConfig};
use crate::exit::Exit;
use crate::fault::Fault;
use crate::log;
use crate::logger::{self, Level, LoggerConfig};
use crate::metrics::{Latency, Metrics, MetricsConfig};
use crate::vmm::Vmm;
use crate::{APP_NAME, VERSION};

/// A request that only makes sense for a microVM that was not started yet.
const NOT_AFTER: &str = "The requested operation is not supported after starting the microVM.";
/// A request that only makes sense for a microVM that was started.
const NOT_BEFORE: &str = "The requested operation is not supported before starting the microVM.";

/// What a request is answered with, if it succeeds.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Answer {
    /// Nothing.
    Done,
    /// JSON.
    Json(Value),
}

/// A microVM, before and after its start.
pub(crate) struct Controller {
    id: String,
    vmm: Vmm,
    metrics: Metrics,
    config: VmConfig,
    /// Whether this thread has still to be confined.
    confine: bool,
    /// Whether there was a resource that a load does not allow before it.
    configured: bool,
    running: Option<Running>,
    mmds: MetadataStore,
}

/// A microVM that was started.
struct Running {
    handle: Handle,
    paused: bool,
    memory: MemorySource,
}

/// Where the memory of a microVM comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MemorySource {
    /// It was empty.
    Boot,
    /// A file, with its device and inode.
    File(u64, u64),
    /// A page fault handler.
    Handler,
}

impl Controller {
    /// A microVM without resources. Its metadata has at most `mmds_limit` bytes. `confine` is
    /// whether the thread that carries out requests is to be confined.
    pub(crate) fn new(
        id: String,
        vmm: Vmm,
        metrics: Metrics,
        mmds_limit: usize,
        confine: bool,
    ) -> Self {
        Self {
            id,
            vmm,
            metrics,
            config: VmConfig::default(),
            confine,
            configured: false,
            running: None,
            mmds: MetadataStore::with_limit(mmds_limit),
        }
    }

    /// Takes from this thread what it does not need to serve clients, unless that was done. Before
    /// a guest runs it has to be, and the thread's first answer does not wait for it.
    pub(crate) fn confine(&mut self) -> Result<(), StartError> {
        if self.confine {
            jail::confine_thread(ThreadRole::Open, Exit::SystemCall.code().into())?;
            self.confine = false;
        }
        Ok(())
    }

    /// Whether [`Controller::confine`] has something to do.
    pub(crate) const fn is_to_be_confined(&self) -> bool {
        self.confine
    }

    /// Sets up all resources of a configuration file, and starts the microVM if it has a kernel.
    pub(crate) fn set_up(&mut self, config: &VmConfig) -> Result<(), Fault> {
        let VmConfig { logger, metrics, firn_planner, boot_source, machine_config, .. } = config;
        let starts = boot_source.is_some();
        if !starts && firn_planner.is_none() {
            return Err(Fault::new("the configuration file has no boot-source"));
        }
        let mut requests = Vec::new();
        requests.extend(logger.clone().map(Request::PutLogger));
        requests.extend(metrics.clone().map(Request::PutMetrics));
        requests.extend(firn_planner.clone().map(Request::PutPlanner));
        if *machine_config != MachineConfig::default() {
            requests.push(Request::PutMachineConfig(machine_config.clone()));
        }
        requests.extend(boot_source.clone().map(Request::PutBootSource));
        requests.extend(devices::requests(config));
        if starts {
            requests.push(Request::Act(Action::InstanceStart));
        }
        requests.into_iter().try_for_each(|request| self.handle(request).map(drop))
    }

    /// Carries out a request.
    pub(crate) fn handle(&mut self, request: Request) -> Result<Answer, Fault> {
        match request {
            Request::GetInstance => Ok(Answer::Json(self.describe())),
            Request::GetVersion => Ok(Answer::Json(json!({ "firecracker_version": VERSION }))),
            Request::GetVmConfig => answer(&self.config),
            Request::GetMachineConfig => answer(&self.config.machine_config),
            Request::PutMachineConfig(config) => {
                self.before_start()?;
                config.check()?;
                self.configured = true;
                self.config.machine_config = config;
                Ok(Answer::Done)
            }
            Request::PatchMachineConfig(update) => {
                self.before_start()?;
                self.config.machine_config = update.of(&self.config.machine_config)?;
                self.configured = true;
                Ok(Answer::Done)
            }
            Request::PutBootSource(source) => self.put_boot_source(source),
            Request::PutPlanner(choice) => self.put_planner(choice),
            Request::PutLogger(config) => self.put_logger(config),
            Request::PutMetrics(config) => self.put_metrics(config),
            Request::Act(Action::InstanceStart) => self.boot(),
            Request::Act(Action::FlushMetrics) => {
                self.metrics.flush()?;
                Ok(Answer::Done)
            }
            Request::PatchVm(state) => self.patch_vm(state),
            Request::CreateSnapshot(create) => self.create_snapshot(&create),
            Request::LoadSnapshot(load) => self.load_snapshot(&load),
            request => self.carry_out_of_device(request),
        }
    }

    fn describe(&self) -> Value {
        let state = match &self.running {
            None => "Not started",
            Some(Running { paused: true, .. }) => "Paused",
            Some(_) => "Running",
        };
        json!({ "id": self.id, "state": state, "vmm_version": VERSION, "app_name": APP_NAME })
    }

    fn before_start(&self) -> Result<(), Fault> {
        if self.running.is_some() { Err(Fault::new(NOT_AFTER)) } else { Ok(()) }
    }

    fn running(&self) -> Result<&Running, Fault> {
        self.running.as_ref().ok_or_else(|| Fault::new(NOT_BEFORE))
    }

    fn put_boot_source(&mut self, source: BootSource) -> Result<Answer, Fault> {
        self.before_start()?;
        open("kernel_image_path", &source.kernel_image_path)?;
        if let Some(path) = &source.initrd_path {
            open("initrd_path", path)?;
        }
        self.configured = true;
        self.config.boot_source = Some(source);
        Ok(Answer::Done)
    }

    fn put_planner(&mut self, choice: PlannerChoice) -> Result<Answer, Fault> {
        self.before_start()?;
        parse(&choice.planner).map_err(|error| Fault::of("planner is not valid", &error))?;
        self.config.firn_planner = Some(choice);
        Ok(Answer::Done)
    }

    fn put_logger(&mut self, config: LoggerConfig) -> Result<Answer, Fault> {
        self.before_start()?;
        logger::configure(&config).map_err(|error| Fault::of("cannot open log_path", &error))?;
        self.config.logger = Some(config);
        Ok(Answer::Done)
    }

    fn put_metrics(&mut self, config: MetricsConfig) -> Result<Answer, Fault> {
        self.before_start()?;
        self.metrics.configure(&config)?;
        self.config.metrics = Some(config);
        Ok(Answer::Done)
    }

    fn patch_vm(&mut self, state: VmState) -> Result<Answer, Fault> {
        let begin = Instant::now();
        let running = self.running.as_mut().ok_or_else(|| Fault::new(NOT_BEFORE))?;
        let (latency, paused) = match state {
            VmState::Paused => (Latency::PauseVm, true),
            VmState::Resumed => (Latency::ResumeVm, false),
        };
        let change = if paused { Microvm::pause } else { resume };
        let (changed, own) = call(&running.handle, timed(change))?;
        changed?;
        if !paused {
            log_kick();
        }
        running.paused = paused;
        self.metrics.took(latency, begin.elapsed(), own);
        Ok(Answer::Done)
    }
}

fn answer(value: &impl serde::Serialize) -> Result<Answer, Fault> {
    Ok(Answer::Json(serde_json::to_value(value)?))
}

/// Calls the microVM's own thread.
fn call<T: Send + 'static>(
    handle: &Handle,
    request: impl FnOnce(&mut Microvm) -> T + Send + 'static,
) -> Result<T, GoneError> {
    handle.call(request)
}

/// The same request, which also returns the time that it took there.
fn timed<T>(
    request: impl FnOnce(&mut Microvm) -> T + Send + 'static,
) -> impl FnOnce(&mut Microvm) -> (T, Duration) + Send + 'static {
    move |microvm| {
        let begin = Instant::now();
        let result = request(microvm);
        (result, begin.elapsed())
    }
}

/// Clients find out by this line of the log that a guest runs. Its devices looked at their queues
/// before, if it was restored or resumed; that of a boot has none yet.
fn log_kick() {
    log!(Level::Info, "Artificially kick devices.");
}

fn resume(microvm: &mut Microvm) -> Result<(), VcpuThreadError> {
    microvm.kick_devices();
    microvm.resume()
}

/// Opens a file that a field names, for reading.
fn open(field: &str, path: &str) -> Result<OpenFile, Fault> {
    OpenFile::open(path.as_ref())
        .map_err(|error| Fault::of(&format!("{field} is not valid"), &error))
}

/// The file that a field names cannot be opened.
fn cannot_open(field: &str, path: &Path, error: &io::Error) -> Fault {
    Fault::of(&format!("{field} is not valid: cannot open {}", path.display()), error)
}
