//! [`Control`]: the operations of the daemon, without any protocol.

mod account;
mod aliases;
mod attachments;
mod backoff;
mod destinations;
mod errors;
mod events;
mod functions;
mod invocations;
mod layers;
mod once;
mod provisioned;
mod snapshots;
mod tags;
mod tenants;
#[cfg(test)]
mod testing;
mod urls;
mod versions;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;

use firn_base::format_bytes;
use firn_run::StartError;
use firn_run::cgroup::CgroupError;
use firn_run::jail::{Jail, JailMode};
use firn_run::{Instances, PoolManagerError};

pub use account::Account;
pub use aliases::AliasChange;
pub use attachments::MAX_PERMISSIONS;
pub use errors::{
    AliasError, AttachmentError, ChangeError, DeleteError, EventRefused, FindError, InvalidTag,
    NotFound, PrepareError, ProvisionedError, PublishError, RevisionMismatch,
};
pub use functions::{CodeChange, Found, Hold, NewFunction};
pub use invocations::{InvocationRequest, Prepared};
pub use layers::{LayerTarget, NewLayer};
pub use once::Claim;
pub use provisioned::ProvisionedStatus;
pub use tenants::{QuotaError, Quotas, Tenants};
pub use urls::UrlRequest;
pub use versions::PublishRequest;

use events::Events;
use provisioned::Keepers;

use crate::functions::{CodeStore, ImageFiles, Images, Roles, RolesError};
use crate::instances::{
    BootFiles, Cpus, DaemonStatus, Fleet, FunctionNetwork, Launcher, Limits, ReadyClones, Scratch,
    SnapshotKeys, SnapshotPool, Standbys,
};
use crate::store::{Store, StoreError};
use crate::telemetry::Telemetry;

/// The configuration of [`Control`].
#[derive(Debug, Clone)]
pub struct ControlOptions {
    /// The directory for the database, code and snapshots, created where needed.
    pub data: PathBuf,
    /// The directory for what guests write to their disks. `None` for one in `data`.
    pub scratch: Option<PathBuf>,
    /// Limit of what all guests together write to their disks, bytes. `None` for seven eighths of
    /// the free space in the directory.
    pub scratch_size: Option<u64>,
    /// Limit of what one guest writes to its disk, bytes. `None` for all of its disk.
    pub disk: Option<u64>,
    /// Whether to rebuild a lost or damaged database.
    pub recover: bool,
    /// The `firn` program, which manages the pool.
    pub program: PathBuf,
    /// The `firn-monitor` program, which runs a microVM.
    pub monitor_program: PathBuf,
    /// The KVM device.
    pub kvm: PathBuf,
    /// Whether to start Linux guests without hardware virtualisation.
    pub software_kvm: bool,
    /// The files that microVMs boot from.
    pub boot_files: BootFiles,
    /// The images that functions can choose with `FIRN_IMAGE`. `None` if all functions run on the
    /// same root.
    pub images: Option<ImageFiles>,
    /// Number of standby monitors.
    pub standby: usize,
    /// DRAM for ready clones, bytes; 0 makes none.
    pub ready: u64,
    /// The pool for snapshots: its medium, or its manager's socket. `None` to store snapshots in
    /// the daemon's directory.
    pub pool: Option<PathBuf>,
    /// The directory for the keys that sign the snapshots of each tenant, created where needed.
    /// `None` to sign none. Snapshots in a pool are not signed.
    pub snapshot_keys: Option<PathBuf>,
    /// Planners for functions that do not choose one with `FIRN_PLANNER`, best first. A version
    /// uses the first planner that can thaw its snapshot on this host.
    pub planners: Vec<String>,
    /// Memory (DRAM) limit of all microVMs together, bytes.
    pub memory: u64,
    /// Limit of running microVMs. With tap devices, their number is another one.
    pub monitors: usize,
    /// Whether monitors are jailed.
    pub jail: JailMode,
    /// What functions reach by their network, those with `FIRN_NETWORK=none` excepted; `None` for
    /// functions without one.
    pub network: Option<FunctionNetwork>,
    /// Memory of a function that gets one CPU, MiB; others get CPU time in proportion. `None` does
    /// not limit CPU time.
    pub one_cpu: Option<u32>,
    /// Whether the memory reserved for a microVM follows the measured use of its version, once
    /// there is a measurement. Otherwise the daemon reserves all of guest memory.
    pub measured: bool,
    /// Limit of requests that wait for a microVM, and limit of accepted events.
    pub queue: usize,
    /// Limit of the bytes of accepted events together.
    pub event_bytes: u64,
    /// How long the daemon waits before it retries an event after the function's first error. The
    /// wait before the second retry is twice as long.
    pub event_pause: Duration,
    /// How long a request waits for a microVM.
    pub queue_wait: Duration,
    /// How long an idle microVM is kept.
    pub keep_alive: Duration,
    /// Whether idle microVMs are paused.
    pub pause_idle: bool,
    /// Time limit for a boot, a thaw, and the initialisation of a function.
    pub start_limit: Duration,
    /// The region that functions find in their environment.
    pub region: String,
    /// A file with the AWS keys of functions' roles.
    pub roles: Option<PathBuf>,
    /// The quotas of tenants.
    pub tenants: Tenants,
}

/// The daemon's state cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Its directory cannot be used.
    #[error("cannot use the daemon's directory {}", path.display())]
    Data {
        /// The directory.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// Its database cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Not one guest's disk fits into the directory for them.
    #[error(
        "{} has {} for guests' disks (--scratch-size, or 7/8 of the free space), and each takes {}: free space, \
         name another directory with --scratch, or limit each disk with --disk",
        path.display(), format_bytes(*size), format_bytes(*disk)
    )]
    Scratch {
        /// The directory.
        path: PathBuf,
        /// Space for all disks, bytes.
        size: u64,
        /// Size of the smallest disk, bytes.
        disk: u64,
    },
    /// The directory for keys cannot be used.
    #[error("cannot use the directory {} for snapshot keys", path.display())]
    Keys {
        /// The directory.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The pool's manager cannot be reached.
    #[error(transparent)]
    Pool(#[from] PoolManagerError),
    /// The roles' keys cannot be used.
    #[error(transparent)]
    Roles(#[from] RolesError),
    /// CPU time cannot be limited.
    #[error("cannot limit the CPU time of microVMs; without --cpu-limit it is not limited")]
    Cpus(#[from] CgroupError),
    /// No monitor can be jailed as it has to be.
    #[error(transparent)]
    Jail(#[from] StartError),
}

/// Functions, their versions, and the microVMs that serve their requests.
#[derive(Debug)]
pub struct Control {
    store: Store,
    code: CodeStore,
    tenants: Tenants,
    fleet: Arc<Fleet>,
    telemetry: Option<Arc<Telemetry>>,
    events: Events,
    /// How long the daemon waits after a function's first error.
    event_pause: Duration,
    /// Limit of running microVMs.
    monitors: usize,
    /// Held while stored code is not yet part of a version, so that the sweep does not remove it.
    code_lock: Mutex<()>,
    /// Told of every deletion of versions, after it.
    deletions: Notify,
    keepers: Mutex<Keepers>,
}

impl Control {
    /// Opens the daemon's directory. Must run inside a Tokio runtime.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(
        options: &ControlOptions,
        telemetry: Option<Telemetry>,
    ) -> Result<Arc<Self>, OpenError> {
        let failed = |source| OpenError::Data { path: options.data.clone(), source };
        // Monitors have another working directory.
        let data = std::path::absolute(&options.data).map_err(failed)?;
        let store = Store::open(&data, options.recover)?;
        let path = options.scratch.clone().unwrap_or_else(|| data.join("scratch"));
        let (disk, size) = (options.disk.unwrap_or(u64::MAX), options.scratch_size);
        let scratch = Scratch::open(path.clone(), &options.boot_files.overlay, disk, size)
            .map_err(|source| OpenError::Data { path, source })?;
        let (size, disk) = (scratch.size(), scratch.smallest());
        if disk > size {
            let path = scratch.path().to_owned();
            return Err(OpenError::Scratch { path, size, disk });
        }
        let snapshots = data.join("snapshots");
        std::fs::create_dir_all(&snapshots).map_err(failed)?;
        let pool = match &options.pool {
            Some(path) => {
                let path = std::path::absolute(path).map_err(failed)?;
                Some(SnapshotPool::open(&options.program, &path)?)
            }
            None => None,
        };
        let open_keys = |path: &PathBuf| {
            SnapshotKeys::open(path)
                .map_err(|source| OpenError::Keys { path: path.clone(), source })
        };
        let jail = match options.one_cpu {
            Some(_) => Jail::with_cpu_limits(options.jail)?,
            None => Jail::new(options.jail),
        };
        jail.check()?;
        let launcher = Launcher {
            program: options.monitor_program.clone(),
            instances: Instances::of_user(),
            pool,
            snapshots,
            keys: options.snapshot_keys.as_ref().map(open_keys).transpose()?,
            planners: options.planners.clone(),
            kvm: options.kvm.clone(),
            software_kvm: options.software_kvm,
            boot_files: options.boot_files.clone(),
            images: Images(options.images.clone()),
            region: options.region.clone(),
            roles: options.roles.as_deref().map(Roles::open).transpose()?,
            start_limit: options.start_limit,
            started: AtomicU64::new(0),
            standbys: Standbys::new(options.standby),
            processes: Arc::default(),
            scratch,
            network: options.network.clone(),
            jail,
            cpus: options.one_cpu.map(|one| Cpus { one }),
            ready: ReadyClones::new(options.ready),
        };
        // Removes what killed daemons and managers have left in the run folder.
        let _ = launcher.instances.running();
        let taps = options.network.as_ref().and_then(FunctionNetwork::limit);
        let limits = Limits {
            memory: options.memory,
            monitors: taps.map_or(options.monitors, |taps| taps.min(options.monitors)),
            measured: options.measured,
            queue: options.queue,
            queue_wait: options.queue_wait,
            keep_alive: options.keep_alive,
            pause_idle: options.pause_idle,
        };
        Ok(Arc::new(Self {
            store,
            code: CodeStore::open(data.join("code")).map_err(failed)?,
            tenants: options.tenants.clone(),
            fleet: Fleet::new(launcher, limits),
            telemetry: telemetry.map(Arc::new),
            events: Events::open(&data, options.queue, options.event_bytes).map_err(failed)?,
            event_pause: options.event_pause,
            monitors: options.monitors,
            code_lock: Mutex::new(()),
            deletions: Notify::new(),
            keepers: Mutex::default(),
        }))
    }

    /// Stops: refuses new requests, ends all microVMs and waits for that, at most `limit`.
    pub async fn close(&self, limit: Duration) {
        self.fleet.close(limit).await;
    }

    /// Exports the remaining spans. Call this last.
    pub async fn flush_telemetry(&self) {
        if let Some(telemetry) = self.telemetry.clone() {
            // Telemetry logs its own errors.
            let _ = tokio::task::spawn_blocking(move || telemetry.shut_down()).await;
        }
    }

    /// The current status.
    #[must_use]
    pub fn status(&self) -> DaemonStatus {
        self.fleet.status()
    }

    /// The counters, in the OpenMetrics text format.
    #[must_use]
    pub fn metrics(&self) -> String {
        self.fleet.metrics.text()
    }
}

#[cfg(test)]
mod tests;
