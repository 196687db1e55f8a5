//! The thread of the microVM: it makes it, serves it and ends with it.
//!
//! Other threads have a [`Vmm`], through which one of them starts the microVM, and its
//! [`Handle`] afterwards. Files are opened by the thread that starts it.

use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use firn_base::{ErrorChain, error_chain};
use firn_memory::GuestMemory;
use firn_memory::planners::Planner;
use firn_run::jail::{self, ThreadRole};
use firn_run::{Clock, KvmDevice, PageFaultHandler, Running, Source, StartError};
use firn_vmm::{
    BootConfig, BootError, End, Handle, HostConfig, KVM_DEVICE, KvmError, Microvm, OpenKvm,
    OpenKvmError, RunError, VcpuThreadError, open_kvm_device,
};
use thiserror::Error;

use crate::exit::Exit;
use crate::log;
use crate::logger::Level;
use crate::metrics::Metrics;

/// Why a microVM was not started.
#[derive(Debug, Error)]
pub(crate) enum VmmError {
    /// KVM cannot be opened.
    #[error(transparent)]
    Device(ErrorChain),
    /// KVM cannot be used.
    #[error(transparent)]
    Kvm(#[from] OpenKvmError),
    /// It was not booted.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// Its vCPUs cannot run.
    #[error("cannot start the guest's processors")]
    Resume(#[from] VcpuThreadError),
    /// It was not restored.
    #[error(transparent)]
    Load(#[from] StartError),
    /// The microVM's thread has ended.
    #[error("the microVM has ended")]
    Ended,
}

/// What a microVM is made from.
pub(crate) enum Origin {
    /// A kernel; the guest runs at once.
    Boot(Box<BootConfig>),
    /// A snapshot.
    Load(Box<Load>),
}

/// A restore.
pub(crate) struct Load {
    /// The snapshot.
    pub(crate) source: Source,
    /// Where guest memory comes from.
    pub(crate) memory: LoadMemory,
    /// What the microVM uses of its host.
    pub(crate) host: HostConfig,
    /// Whether written pages are tracked.
    pub(crate) tracks: bool,
    /// Whether the guest runs at once.
    pub(crate) resumes: bool,
}

/// Where guest memory comes from.
pub(crate) enum LoadMemory {
    /// From the image, by a plan.
    Planned(Box<dyn Planner>),
    /// From another process.
    Served(PageFaultHandler, Box<GuestMemory>),
}

/// A request to start the microVM.
struct Job {
    origin: Origin,
    result: Sender<StartResult>,
}

/// A handle to the microVM, and the time that its start took; or why there is none.
type StartResult = Result<(Handle, Duration), VmmError>;

/// What is done when a microVM starts.
struct Started {
    begin: Instant,
    result: Sender<StartResult>,
    metrics: Metrics,
}

/// The thread of the microVM, for the thread that starts it.
pub(crate) struct Vmm(Sender<Job>);

/// The same, for itself.
pub(crate) struct VmmThread {
    jobs: Receiver<Job>,
    metrics: Metrics,
}

impl Vmm {
    /// Both ends. `metrics` count what the microVM does.
    pub(crate) fn new(metrics: Metrics) -> (Self, VmmThread) {
        let (sender, jobs) = channel();
        (Self(sender), VmmThread { jobs, metrics })
    }

    /// Starts the microVM, and returns when it is made, with the time that this took its thread.
    /// After an error it can be started again.
    pub(crate) fn start(&self, origin: Origin) -> StartResult {
        let (result, started) = channel();
        self.0.send(Job { origin, result }).map_err(|_| VmmError::Ended)?;
        started.recv().map_err(|_| VmmError::Ended)?
    }
}

impl VmmThread {
    /// Waits for the microVM's start, and serves it to its end. With `confine` this thread, and
    /// those of the vCPUs, lose their privileges first, and open nothing from then on.
    pub(crate) fn serve(self, confine: bool) -> Exit {
        // While the first requests come.
        let device = open_kvm_device(KVM_DEVICE.as_ref());
        let mut kvm = Some(open_kvm(&device));
        if confine {
            let code = Exit::SystemCall.code().into();
            jail::prepare();
            if let Err(error) = jail::confine_thread(ThreadRole::Serve, code) {
                log!(Level::Error, "{}", error_chain(&error));
                return Exit::Failure;
            }
        }
        kvm.iter().flatten().for_each(OpenKvm::create_in_advance);
        while let Ok(Job { origin, result }) = self.jobs.recv() {
            let metrics = self.metrics.clone();
            let started = Started { begin: Instant::now(), result, metrics };
            let kvm = kvm.take().unwrap_or_else(|| open_kvm(&device));
            let ended = kvm.and_then(|kvm| match origin {
                Origin::Boot(config) => boot(*config, kvm, &started),
                Origin::Load(load) => load.restore(kvm, &started),
            });
            match ended {
                Ok(ended) => return exit(ended),
                // The thread that started it waits for this.
                Err(error) => drop(started.result.send(Err(error))),
            }
        }
        // There is nothing that could start one.
        Exit::Failure
    }
}

fn open_kvm(device: &Result<OwnedFd, KvmError>) -> Result<OpenKvm, VmmError> {
    let device = device.as_ref().map_err(|error| VmmError::Device(ErrorChain::of(error)))?;
    let device = device.try_clone().map_err(|error| VmmError::Device(ErrorChain::of(&error)))?;
    Ok(OpenKvm::on(device, KVM_DEVICE.as_ref())?)
}

fn boot(
    config: BootConfig,
    kvm: OpenKvm,
    started: &Started,
) -> Result<Result<End, RunError>, VmmError> {
    let mut microvm = Microvm::boot(config, kvm)?;
    microvm.resume()?;
    Ok(serve(&mut microvm, started))
}

impl Load {
    fn restore(
        self: Box<Self>,
        kvm: OpenKvm,
        started: &Started,
    ) -> Result<Result<End, RunError>, VmmError> {
        let Self { mut source, memory, host, tracks, resumes } = *self;
        let (kvm, clock) = (KvmDevice::from(Ok(kvm)), Clock::now());
        // Dropped after the microVM.
        let _handler;
        let mapped = match memory {
            LoadMemory::Planned(planner) => source.plan(&*planner, &clock)?.map(kvm, tracks)?,
            LoadMemory::Served(handler, mut memory) => {
                _handler = handler;
                if tracks {
                    memory.track_writes();
                }
                source.served(*memory, kvm, &clock)?
            }
        };
        let restored = mapped.restore(host)?;
        let Running { mut microvm, mut run } =
            if resumes { restored.resume()? } else { restored.pause()? };
        let ended = serve(&mut microvm, started);
        let writes = run.writes();
        drop(microvm);
        let mut notes = Vec::from_iter(run.finish()?);
        drop(run);
        notes.extend(source.learn(writes?.as_ref()));
        for note in notes {
            log!(Level::Warn, "{note}");
        }
        Ok(ended)
    }
}

fn serve(microvm: &mut Microvm, started: &Started) -> Result<End, RunError> {
    let Started { begin, result, metrics } = started;
    metrics.watch(microvm.handle());
    // A thread that has ended wants no handle.
    let _ = result.send(Ok((microvm.handle(), begin.elapsed())));
    let end = microvm.run();
    metrics.ended(microvm.counters());
    for error in microvm.device_errors() {
        log!(Level::Error, "{error}");
    }
    end
}

fn exit(end: Result<End, RunError>) -> Exit {
    match end {
        Ok(End::Shutdown | End::Reset | End::TripleFault | End::Stopped) => {
            log!(Level::Info, "Firecracker exiting successfully. exit_code=0");
            Exit::Success
        }
        Ok(End::Failure(failure)) => {
            log!(Level::Error, "the microVM failed: {}", error_chain(&failure));
            Exit::Failure
        }
        Err(error) => {
            log!(Level::Error, "the microVM failed: {}", error_chain(&error));
            Exit::Failure
        }
    }
}
