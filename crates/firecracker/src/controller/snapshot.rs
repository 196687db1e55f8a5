//! Snapshots: creating them, and loading them in a new process.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Instant;

use firn_memory::planners::{Planner, Store, parse};
use firn_run::{Descriptors, PageFaultHandler, Source, SourceSpec};
use firn_snapshot::{Begin, Freeze, OpenTwice, Seal, Snapshot, Target, Verify};
use firn_vmm::{FreezeError, HostConfig, Microvm, note_of};
use rustix::fs::{MemfdFlags, memfd_create};

use super::devices::{overridden, unbind};
use super::{
    Answer, Controller, MemorySource, NOT_AFTER, Running, call, cannot_open, log_kick, timed,
};
use crate::config::{
    BackendType, CreateSnapshot, LoadSnapshot, PlannerChoice, SnapshotType, ValueError, VmConfig,
};
use crate::fault::Fault;
use crate::metrics::Latency;
use crate::vmm::{Load, LoadMemory, Origin};

/// The planner of a load for which none was selected.
const DEFAULT_PLANNER: &str = "firecracker";

impl Controller {
    /// Creates a snapshot of the paused microVM.
    pub(super) fn create_snapshot(&mut self, create: &CreateSnapshot) -> Result<Answer, Fault> {
        let begin = Instant::now();
        let tracks = self.config.machine_config.track_dirty_pages;
        let note = serde_json::to_vec(&self.saved_config())?;
        let running = self.running()?;
        if !running.paused {
            return Err(Fault::new("the microVM runs: pause it before a snapshot is created"));
        }
        let is_diff = create.snapshot_type == SnapshotType::Diff;
        let memory = open_output("mem_file_path", &create.mem_file_path)?;
        let metadata = memory.metadata()?;
        if running.memory == MemorySource::File(metadata.dev(), metadata.ino()) {
            let reason =
                "it is the file that this microVM's memory is mapped from; use another one";
            return Err(ValueError::invalid("mem_file_path", reason).into());
        }
        let state = open_output("snapshot_path", &create.snapshot_path)?;
        state.set_len(0)?;
        if !is_diff {
            memory.set_len(0)?;
        }
        let target = match (is_diff, tracks) {
            (true, true) => Target::Written,
            // What was written is not known: everything may have been.
            (true, false) => Target::Files { dense: true },
            (false, _) => Target::Files { dense: false },
        };
        let (handle, served) = (running.handle.clone(), running.memory == MemorySource::Handler);
        let files = (memory.try_clone()?, state.try_clone()?);
        let save = move |microvm: &mut Microvm| {
            microvm.set_note(note);
            save(microvm, target, files, served)
        };
        let (saved, own) = call(&handle, timed(save))?;
        saved?;
        memory.sync_all()?;
        state.sync_all()?;
        let latency = match create.snapshot_type {
            SnapshotType::Full => Latency::FullCreateSnapshot,
            SnapshotType::Diff => Latency::DiffCreateSnapshot,
        };
        self.metrics.took(latency, begin.elapsed(), own);
        Ok(Answer::Done)
    }

    /// What a state file has of the configuration: the resources of the guest.
    fn saved_config(&self) -> VmConfig {
        VmConfig {
            boot_source: None,
            logger: None,
            metrics: None,
            firn_planner: None,
            ..self.config.clone()
        }
    }

    /// Loads a snapshot.
    pub(super) fn load_snapshot(&mut self, load: &LoadSnapshot) -> Result<Answer, Fault> {
        let begin = Instant::now();
        if self.running.is_some() {
            return Err(Fault::new(NOT_AFTER));
        }
        self.confine()?;
        if self.configured {
            let reason = "only logger, metrics and planner may be configured before";
            return Err(Fault::new(format!("a snapshot cannot be loaded: {reason}")));
        }
        let (backend, tracks) = (load.backend()?, load.tracks()?);
        let (planner, pool) = self.planner(backend.backend_type)?;
        let state_path = Path::new(&load.snapshot_path);
        let state = File::open(state_path);
        let state = state.map_err(|error| cannot_open("snapshot_path", state_path, &error))?;
        let memory_path = Path::new(&backend.backend_path);
        let file = match backend.backend_type {
            BackendType::File => {
                let file = OpenTwice::open(memory_path);
                Some(file.map_err(|error| cannot_open("backend_path", memory_path, &error))?)
            }
            BackendType::Uffd => None,
        };
        let metadata = file.as_ref().map(|file| file.file.metadata()).transpose()?;
        let image = file.map(|file| (file, memory_path));
        let snapshot = Snapshot::of_two_files(state, state_path, image)?;
        let config = saved(&snapshot)?;
        let manifest = snapshot.manifest();
        let machine_config = config.machine_config.of_snapshot(
            manifest.description.vcpus,
            manifest.layout.total_bytes(),
            tracks,
        );
        let config = overridden(VmConfig { machine_config, ..config }, load)?;
        let layout = manifest.layout.clone();
        let source = match pool {
            None => Source::new(snapshot, None),
            Some(pool) => open_pooled(&pool, &snapshot, &*planner)?,
        };
        let memory = match backend.backend_type {
            BackendType::File => LoadMemory::Planned(planner),
            BackendType::Uffd => {
                let (handler, memory) = PageFaultHandler::hand_over(layout, memory_path)?;
                LoadMemory::Served(handler, Box::new(memory))
            }
        };
        let host = HostConfig { advance_clock: load.clock_realtime, ..self.host(&config)? };
        let resumes = load.resume_vm;
        let origin = Origin::Load(Box::new(Load { source, memory, host, tracks, resumes }));
        let (handle, own) = self.vmm.start(origin).inspect_err(|_| unbind(&config))?;
        self.config = VmConfig {
            logger: self.config.logger.take(),
            metrics: self.config.metrics.take(),
            firn_planner: self.config.firn_planner.take(),
            ..config
        };
        let memory = match metadata {
            Some(metadata) => MemorySource::File(metadata.dev(), metadata.ino()),
            None => MemorySource::Handler,
        };
        if resumes {
            log_kick();
        }
        self.running = Some(Running { handle, paused: !resumes, memory });
        self.metrics.took(Latency::LoadSnapshot, begin.elapsed(), own);
        Ok(Answer::Done)
    }

    /// The planner of a load, and the socket of the manager of its pool, if it maps from one.
    fn planner(&self, backend: BackendType) -> Result<(Box<dyn Planner>, Option<String>), Fault> {
        let Some(PlannerChoice { planner, pool }) = &self.config.firn_planner else {
            return Ok((parse(DEFAULT_PLANNER)?, None));
        };
        let planner = parse(planner)?;
        let name = planner.name();
        if planner.has_program() {
            return Err(Fault::new(format!(
                "the planner {name} needs a BPF program, which this process may not attach: use snapbpf"
            )));
        }
        if backend == BackendType::Uffd {
            let text = format!("the planner {name} is for backend_type \"File\", not \"Uffd\"");
            return Err(Fault::new(text));
        }
        match (planner.store(), pool) {
            (Store::Directory, Some(_)) => Err(Fault::new(format!(
                "the planner {name} maps from no pool: PUT it without pool"
            ))),
            (Store::Extent | Store::Replica, None) => {
                let text = format!("the planner {name} needs a pool: PUT /firn/planner with one");
                Err(Fault::new(text))
            }
            (_, pool) => Ok((planner, pool.clone())),
        }
    }
}

/// The configuration of the microVM that was saved.
fn saved(snapshot: &Snapshot) -> Result<VmConfig, Fault> {
    serde_json::from_slice(&note_of(snapshot)?)
        .map_err(|error| Fault::of("the state file is not one of firn-firecracker", &error))
}

/// Opens the snapshot of a state file in a pool, where its name is its id.
fn open_pooled(pool: &str, snapshot: &Snapshot, planner: &dyn Planner) -> Result<Source, Fault> {
    let id = snapshot.manifest().description.id;
    let mut descriptors = Descriptors::default();
    let spec = SourceSpec::pool(pool.as_ref(), &id.to_string(), Verify::Once, &mut descriptors)?;
    let source = Source::open(&spec, planner, &mut descriptors)?;
    if source.snapshot().manifest().description.id == id {
        Ok(source)
    } else {
        Err(Fault::new(format!("the pool at {pool} has another snapshot of this name")))
    }
}

/// Writes the two files of a paused microVM, in its own thread.
fn save(
    microvm: &mut Microvm,
    target: Target,
    (memory, state): (File, File),
    served: bool,
) -> Result<(), FreezeError> {
    if served {
        // What the handler has not provided yet would be zeros.
        microvm.memory().touch_all().map_err(FreezeError::Pages)?;
    }
    let overlay = anonymous("overlay").map_err(FreezeError::Pages)?;
    microvm.write(Begin { target, function: None }, vec![memory.into(), overlay.into()])?;
    microvm.seal(Seal::Container { protected: Vec::new() }, vec![state.into()])?;
    Ok(())
}

fn anonymous(name: &str) -> io::Result<File> {
    Ok(memfd_create(name, MemfdFlags::CLOEXEC)?.into())
}

fn open_output(field: &str, path: &str) -> Result<File, Fault> {
    let path = Path::new(path);
    let file = File::options().read(true).write(true).create(true).truncate(false).open(path);
    file.map_err(|error| cannot_open(field, path, &error))
}
