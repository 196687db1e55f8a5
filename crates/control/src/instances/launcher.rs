//! Starts microVMs, and freezes and removes their snapshots.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use firn_base::{ErrorChain, PAGE_SIZE, now_ns};
use firn_run::jail::Jail;
use firn_run::monitor::Monitor;
use firn_run::{
    BootSpec, Descriptors, HostSpec, Instances, Making, NetworkSpec, OpenedFile, Origin,
    OwnedInstance, ReadyUse, ReplaySpec, RoleCredentials, ScratchSpec, Sockets, SourceSpec,
    StartReport, StartSpec, ThawSpec,
};
use firn_snapshot::{Destination, Verify};
use firn_vmm::{NetworkConfig, Shape};
use tokio::time::timeout;

use super::cpu::Cpus;
use super::launch_errors::{FreezeError, LaunchError, PlanError, RemoveSnapshotError};
use super::microvm::{END_LIMIT, Microvm};
use super::network::FunctionNetwork;
use super::pool::SnapshotPool;
use super::processes::Processes;
use super::ready::{Make, ReadyClones, Waiting};
use super::scratch::Scratch;
use super::snapshot_keys::SnapshotKeys;
use super::standby::{Prepare, Standbys, ThawKey};
use crate::blocking::blocking;
use crate::functions::{
    ImageError, Images, NETWORK_VARIABLE, Roles, SnapshotPlace, Version, VersionSnapshot,
    snapshot_name,
};

/// Memory of a guest besides the function's memory, for its kernel and the agent, MiB.
const GUEST_MIB: u32 = 64;

/// The files that microVMs boot from.
#[derive(Debug, Clone)]
pub struct BootFiles {
    /// The uncompressed ELF kernel.
    pub kernel: PathBuf,
    /// The initramfs.
    pub initramfs: PathBuf,
    /// The root file system of functions that choose no image.
    pub root: PathBuf,
    /// The initial contents of the writable disk.
    pub overlay: PathBuf,
}

/// Starts microVMs.
#[derive(Debug)]
pub(crate) struct Launcher {
    /// The `firn-monitor` program.
    pub(crate) program: PathBuf,
    /// The KVM device.
    pub(crate) kvm: PathBuf,
    /// Whether to start Linux guests without hardware virtualisation.
    pub(crate) software_kvm: bool,
    pub(crate) boot_files: BootFiles,
    pub(crate) images: Images,
    /// The names of running microVMs.
    pub(crate) instances: Instances,
    /// The pool for snapshots.
    pub(crate) pool: Option<SnapshotPool>,
    /// The directory for snapshots, if there is no pool.
    pub(crate) snapshots: PathBuf,
    /// The keys that snapshots in this directory are signed with, if they are signed.
    pub(crate) keys: Option<SnapshotKeys>,
    /// Planners for functions that choose none, best first.
    pub(crate) planners: Vec<String>,
    /// The region that functions find in their environment.
    pub(crate) region: String,
    /// The keys of functions' roles, if there are any.
    pub(crate) roles: Option<Roles>,
    /// Time limit for a boot or a thaw.
    pub(crate) start_limit: Duration,
    /// The number of microVMs started so far.
    pub(crate) started: AtomicU64,
    pub(crate) standbys: Standbys,
    pub(crate) processes: Arc<Processes>,
    pub(crate) scratch: Scratch,
    /// What guests reach by their network; `None` for guests without one.
    pub(crate) network: Option<FunctionNetwork>,
    /// How monitors are jailed.
    pub(crate) jail: Jail,
    /// The limits of CPU time, if there are any.
    pub(crate) cpus: Option<Cpus>,
    pub(crate) ready: ReadyClones<ThawKey, Microvm>,
}

/// What a microVM gets of its host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Resources {
    /// The most bytes that its guest writes to its disk.
    pub(crate) disk: u64,
    /// Whether its guest has a network device.
    pub(crate) network: bool,
}

/// A thawed microVM.
#[derive(Debug)]
pub(crate) struct Thawed {
    pub(crate) microvm: Microvm,
    pub(crate) report: Box<StartReport>,
    /// Whether it runs in a standby monitor.
    pub(crate) standby: bool,
}

/// A frozen microVM.
#[derive(Debug)]
pub(crate) struct Frozen {
    pub(crate) place: SnapshotPlace,
    /// Size of its stored image, bytes.
    pub(crate) bytes: u64,
}

/// What a start gets of the request that it is for.
#[derive(Debug, Clone)]
struct StartRequest {
    /// When the request came in, ns of CLOCK_MONOTONIC.
    received_ns: u64,
    /// Keys of the function's role for its hooks after a restore.
    credentials: Option<RoleCredentials>,
}

/// Guest memory of a microVM of `version`, MiB.
pub(crate) fn guest_mib(version: &Version) -> u32 {
    version.memory + GUEST_MIB
}

impl Launcher {
    /// The present keys of a version's role.
    pub(crate) fn credentials(&self, version: &Version) -> Option<RoleCredentials> {
        let roles = self.roles.as_ref()?;
        roles.of(&version.role).unwrap_or_else(|error| {
            let error: &dyn std::error::Error = &error;
            tracing::error!(error, function = version.function, "the function gets no AWS keys");
            None
        })
    }

    /// The root image that a version runs on.
    fn root(&self, version: &Version) -> Result<PathBuf, ImageError> {
        Ok(self.images.of(version)?.unwrap_or_else(|| self.boot_files.root.clone()))
    }

    /// Boots a microVM without a function.
    pub(crate) async fn boot(
        self: &Arc<Self>,
        version: &Version,
    ) -> Result<(Microvm, Box<StartReport>), LaunchError> {
        // The function gets its keys when it is loaded.
        let request = StartRequest { received_ns: now_ns(), credentials: None };
        let root = self.root(version)?;
        let memory = u64::from(guest_mib(version)) << 20;
        let (disk_size, limit) = (version.disk(), self.scratch.disk(version));
        let network = self.has_network(version);
        let launcher = Arc::clone(self);
        blocking(move || {
            let monitor = launcher.spawn()?;
            let files = &launcher.boot_files;
            let mut descriptors = Descriptors::default();
            let mut open = |path| OpenedFile::open(path, &mut descriptors);
            let boot = BootSpec {
                network: network.then(NetworkConfig::default),
                kernel: open(&files.kernel)?,
                initramfs: open(&files.initramfs)?,
                root: open(&root)?,
                overlay: open(&files.overlay)?,
                disk_size,
                cmdline: None,
                vcpus: 1,
                cpu: None,
                memory,
                function: None,
            };
            let microvm = launcher.send(
                monitor,
                Origin::Boot(Box::new(boot)),
                Resources { disk: limit, network },
                descriptors,
                request,
            )?;
            Ok(launcher.wait(microvm)?)
        })
        .await
    }

    /// Thaws a microVM: resumes a ready clone if there is one, or starts one, in a standby monitor
    /// if there is one.
    pub(crate) async fn thaw(
        self: &Arc<Self>,
        version: &Version,
        snapshot: &VersionSnapshot,
    ) -> Result<Thawed, LaunchError> {
        let received_ns = now_ns();
        let VersionSnapshot { place, planner, root, network, .. } = snapshot.clone();
        let root = root.map_or_else(|| self.root(version), Ok)?;
        let (owner, disk) = (version.owner.clone(), self.scratch.disk(version));
        let key = ThawKey { place, owner, planner, root, disk, network };
        let (launcher, version) = (Arc::clone(self), version.clone());
        blocking(move || {
            let credentials = launcher.credentials(&version);
            let request = StartRequest { received_ns, credentials };
            if let Some(clone) = launcher.ready.take(&key) {
                match launcher.resume(clone, request.clone()) {
                    Ok((microvm, report)) => {
                        return Ok(Thawed { microvm, report, standby: true });
                    }
                    Err(error @ LaunchError::Function(_)) => return Err(error),
                    // It has not got the request, which another microVM can serve.
                    Err(error) => {
                        let error: &dyn std::error::Error = &error;
                        tracing::warn!(error, "a ready clone failed; starting another microVM");
                    }
                }
            }
            let standby = launcher.standbys.take(&key);
            let is_standby = standby.is_some();
            let started = match standby {
                Some(monitor) => launcher.thaw_in(monitor, &key, request.clone()),
                None => launcher.thaw_in(launcher.spawn()?, &key, request.clone()),
            };
            let (microvm, mut report) = match started {
                // The standby monitor, or the pool's manager that it was connected to, has ended.
                Err(LaunchError::Start(
                    firn_run::StartError::Monitor(_) | firn_run::StartError::Open(_),
                )) if is_standby => launcher.thaw_in(launcher.spawn()?, &key, request)?,
                started => started?,
            };
            report.ready = launcher.ready.is_on().then_some(ReadyUse::Miss);
            Ok(Thawed { microvm, report, standby: is_standby })
        })
        .await
    }

    fn thaw_in(
        &self,
        monitor: Monitor,
        key: &ThawKey,
        request: StartRequest,
    ) -> Result<(Microvm, Box<StartReport>), LaunchError> {
        let client_since = key.client_since();
        let mut descriptors = Descriptors::default();
        let thaw = self.thaw_spec(key, monitor.has_manager(), &mut descriptors)?;
        let microvm =
            self.send(monitor, Origin::Thaw(thaw), key.resources(), descriptors, request)?;
        let (microvm, report) = self.wait(microvm)?;
        Ok((Microvm { client_since, ..microvm }, report))
    }

    /// Resumes a ready clone.
    fn resume(
        &self,
        mut clone: Microvm,
        request: StartRequest,
    ) -> Result<(Microvm, Box<StartReport>), LaunchError> {
        clone.monitor.resume(request.received_ns, request.credentials)?;
        Ok(self.wait(clone)?)
    }

    /// Records that a microVM serves requests from now on, and limits its CPU time, which its start
    /// and the function's initialisation use without a limit.
    pub(crate) fn serves(&self, microvm: &Microvm, version: &Version) {
        microvm.serves();
        let Some(cpus) = self.cpus else { return };
        if let Err(error) = cpus.limit(&microvm.monitor, version.memory) {
            let error: &dyn std::error::Error = &error;
            tracing::error!(error, function = version.function, "cannot limit CPU time");
        }
    }

    /// Starts and prepares standby monitors, and makes ready clones. Blocks for the time of a few
    /// starts.
    pub(crate) fn stand_by(&self) {
        self.standbys.fill(self);
        self.ready.fill(self);
    }

    /// Freezes a microVM, which ends.
    pub(crate) async fn freeze(
        self: &Arc<Self>,
        microvm: &Microvm,
        version: &Version,
    ) -> Result<Frozen, FreezeError> {
        let (launcher, instance) = (Arc::clone(self), (*microvm.instance).clone());
        let (place, owner) = (self.place(version), version.owner.clone());
        let frozen_place = place.clone();
        let freezing = blocking(move || {
            let keys = launcher.keys.as_ref();
            let signer = keys.map(|keys| keys.signer(owner.as_deref())).transpose()?;
            let destination = match frozen_place {
                SnapshotPlace::Directory(name) => {
                    Destination::Directory(launcher.snapshots.join(name))
                }
                SnapshotPlace::Pool(name) => {
                    let socket = launcher.pool_socket(&name).map_err(FreezeError::Place)?;
                    Destination::Pool { socket, name }
                }
            };
            Ok::<_, FreezeError>(firn_run::freeze(
                &instance,
                destination,
                false,
                false,
                signer.as_ref(),
            )?)
        });
        let frozen = timeout(self.start_limit, freezing).await;
        let frozen = frozen.map_err(|_| FreezeError::TimedOut(self.start_limit))??;
        let bytes = frozen.report.stored_pages.saturating_mul(PAGE_SIZE);
        Ok(Frozen { place, bytes })
    }

    /// The planner that thaws a new snapshot of `version`: the one that the function names, or the
    /// first that makes a plan on this host. A monitor makes the plan, because the daemon does not
    /// parse snapshots. The root image of the snapshot is returned with it.
    pub(crate) async fn choose_planner(
        self: &Arc<Self>,
        version: &Version,
        place: &SnapshotPlace,
    ) -> Result<(String, PathBuf), PlanError> {
        let (launcher, place) = (Arc::clone(self), place.clone());
        let root = self.root(version).map_err(|error| PlanError::None(error.into()))?;
        let (owner, disk) = (version.owner.clone(), self.scratch.disk(version));
        let network = self.has_network(version);
        let named = version.named_planner().map(ToOwned::to_owned);
        let planning = move || {
            let plan = |planner: String| {
                let (place, owner, root) = (place.clone(), owner.clone(), root.clone());
                let key = ThawKey { place, owner, planner, root, disk, network };
                launcher.plan(&key).map(|_| (key.planner, key.root))
            };
            if let Some(planner) = named {
                return plan(planner).map_err(PlanError::Named);
            }
            let mut refused = Ok((String::new(), PathBuf::new()));
            for planner in &launcher.planners {
                match plan(planner.clone()) {
                    Ok(planned) => return Ok(planned),
                    Err(error) => refused = Err(PlanError::None(error)),
                }
            }
            refused
        };
        blocking(planning).await
    }

    /// Has a monitor plan a thaw. Returns the shape of its microVM.
    fn plan(&self, key: &ThawKey) -> Result<Shape, LaunchError> {
        let mut descriptors = Descriptors::default();
        let thaw = self.thaw_spec(key, false, &mut descriptors)?;
        let spec = StartSpec::new(Origin::Thaw(thaw), HostSpec::default(), self.start_limit);
        Ok(Prepare::spawn(self)?.plan(spec, &descriptors, self.start_limit)?)
    }

    /// Removes a snapshot.
    pub(crate) async fn remove(
        self: &Arc<Self>,
        place: &SnapshotPlace,
    ) -> Result<(), RemoveSnapshotError> {
        let (launcher, place) = (Arc::clone(self), place.clone());
        launcher.ready.forget(|key| key.place == place);
        let removing = blocking(move || match place {
            SnapshotPlace::Directory(name) => {
                match std::fs::remove_dir_all(launcher.snapshots.join(name)) {
                    Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                        Err(RemoveSnapshotError::Directory(error))
                    }
                    _ => Ok(()),
                }
            }
            SnapshotPlace::Pool(name) => {
                let pool = launcher.pool.as_ref().ok_or(RemoveSnapshotError::NoPool)?;
                Ok(pool.remove(&name)?)
            }
        });
        let removed = timeout(self.start_limit, removing).await;
        removed.map_err(|_| RemoveSnapshotError::TimedOut(self.start_limit))?
    }

    /// The place of a new snapshot.
    pub(crate) fn place(&self, version: &Version) -> SnapshotPlace {
        let name = snapshot_name(version);
        match self.pool {
            Some(_) => SnapshotPlace::Pool(name),
            None => SnapshotPlace::Directory(name),
        }
    }

    /// The thaw of a snapshot; `connected` is whether its monitor has a connection to the pool's
    /// manager.
    pub(crate) fn thaw_spec(
        &self,
        key: &ThawKey,
        connected: bool,
        descriptors: &mut Descriptors,
    ) -> Result<ThawSpec, LaunchError> {
        let source = match &key.place {
            SnapshotPlace::Directory(name) => {
                SourceSpec::directory(&self.snapshots.join(name), descriptors)?
            }
            SnapshotPlace::Pool(name) if connected => {
                SourceSpec::pool_of_standby(name, Verify::Once)
            }
            SnapshotPlace::Pool(name) => {
                SourceSpec::pool(&self.pool_socket(name)?, name, Verify::Once, descriptors)?
            }
        };
        let source = match &self.keys {
            Some(keys) => source.signed(keys.verifier(key.owner.as_deref())?),
            None => source,
        };
        let root = OpenedFile::open(&key.root, descriptors)?;
        Ok(ThawSpec {
            source,
            planner: key.planner.clone(),
            preloaded: false,
            root: Some(root),
            invoke: None,
            replay: ReplaySpec::default(),
            record: None,
        })
    }

    fn pool_socket(&self, snapshot: &str) -> Result<PathBuf, LaunchError> {
        let pool = self.pool.as_ref().ok_or_else(|| LaunchError::NoPool(snapshot.to_owned()))?;
        Ok(pool.socket()?)
    }

    /// Whether the guests of a version have a network device.
    pub(crate) fn has_network(&self, version: &Version) -> bool {
        self.network.is_some() && !version.environment.contains_key(NETWORK_VARIABLE)
    }

    /// Sends a start request to a monitor.
    fn send(
        &self,
        monitor: Monitor,
        origin: Origin,
        resources: Resources,
        mut descriptors: Descriptors,
        request: StartRequest,
    ) -> Result<Microvm, firn_run::StartError> {
        let network = self.connect_now(resources.network, &mut descriptors)?;
        let (instance, spec) = self.named(origin, resources.disk, network, &mut descriptors)?;
        let StartRequest { received_ns, credentials } = request;
        let spec = StartSpec { request_ns: Some(received_ns), credentials, ..spec };
        let mut microvm = self.microvm(monitor, instance)?;
        microvm.monitor.start(spec, &descriptors)?;
        Ok(microvm)
    }

    fn microvm(
        &self,
        monitor: Monitor,
        instance: OwnedInstance,
    ) -> Result<Microvm, firn_run::StartError> {
        let process = self.processes.register(monitor.pid());
        let process =
            process.map_err(|error| firn_run::StartError::Monitor(ErrorChain::of(&error)))?;
        Ok(Microvm { monitor, instance, process, client_since: None, paused: false })
    }

    /// The request for a microVM with a new name.
    fn named(
        &self,
        origin: Origin,
        disk: u64,
        network: Option<NetworkSpec>,
        descriptors: &mut Descriptors,
    ) -> Result<(OwnedInstance, StartSpec), firn_run::StartError> {
        let number = self.started.fetch_add(1, Ordering::Relaxed);
        let instance = self.instances.claim(&format!("serve-{}-{number}", std::process::id()))?;
        let scratch = Some(ScratchSpec::create(self.scratch.path(), disk, descriptors)?);
        let sockets = Some(Sockets { scratch, ..Sockets::bind(&instance, descriptors)? });
        let software_kvm = self.software_kvm;
        let host = HostSpec { software_kvm, sockets, network, ..HostSpec::default() };
        Ok((instance, StartSpec::new(origin, host, self.start_limit)))
    }

    /// Waits for the report of a start.
    fn wait(
        &self,
        mut microvm: Microvm,
    ) -> Result<(Microvm, Box<StartReport>), firn_run::StartError> {
        // The monitor has the same limit for its guest. This limit is for a monitor that hangs.
        let started = microvm.monitor.started(Some(self.start_limit + END_LIMIT));
        for note in microvm.monitor.take_notes() {
            tracing::info!(instance = microvm.instance.name(), note);
        }
        Ok((microvm, started?))
    }
}

impl Waiting for Microvm {
    fn is_alive(&mut self) -> bool {
        self.monitor.is_alive()
    }
}

impl Make<ThawKey, Microvm> for Launcher {
    fn make(&self, key: &ThawKey) -> Result<(Microvm, Making), firn_run::StartError> {
        let client_since = key.client_since();
        let mut descriptors = Descriptors::default();
        let thaw = self.thaw_spec(key, false, &mut descriptors).map_err(|error| match error {
            LaunchError::Start(error) => error,
            error => firn_run::StartError::Open(ErrorChain::of(&error)),
        })?;
        let network = self.connect(key.network, &mut descriptors)?;
        let origin = Origin::Thaw(thaw);
        let (instance, spec) = self.named(origin, key.disk, network, &mut descriptors)?;
        let mut clone = self.microvm(Prepare::spawn(self)?, instance)?;
        clone.monitor.make_ready(spec, &descriptors)?;
        let making = clone.monitor.wait_made_ready(self.start_limit)?;
        Ok((Microvm { client_since, ..clone }, making))
    }
}

impl Prepare for Launcher {
    fn spawn(&self) -> Result<Monitor, firn_run::StartError> {
        Monitor::spawn(&self.jail, &self.program, &self.kvm)
    }

    fn shape(&self, key: &ThawKey) -> Option<Shape> {
        self.plan(key).ok()
    }

    fn pool(&self) -> Option<PathBuf> {
        self.pool.as_ref()?.socket().ok()
    }
}
