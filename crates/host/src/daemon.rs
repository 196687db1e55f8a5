//! The daemon: what it has, and what it does behind the API.

use std::collections::HashSet;
use std::future::IntoFuture;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Semaphore, oneshot};
use tokio::time::timeout;

use crate::api::{self, ApiError, Credentials};
use crate::functions::{
    CodeStore, LATEST, Place, Snapshot, SnapshotPlace, State, Target, Version, now, revision,
};
use crate::instances::{Fleet, Images, Launcher, Limits, Standbys, publish};
use crate::store::{Change, Store, StoreError};
use crate::telemetry::{Telemetry, TelemetryError};
use firn_run::Instances;

/// How long requests in flight may take to end when the daemon is asked to.
const CLOSE_LIMIT: Duration = Duration::from_secs(30);

/// How long an answer that is there may take to be sent then.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// How the daemon serves.
#[derive(Debug, Clone)]
pub struct ServeOptions {
    /// Where to listen; the kernel chooses a port in place of port 0.
    pub listen: SocketAddr,
    /// The daemon's directory: database, code, snapshots. It is made.
    pub data: PathBuf,
    /// The `firn` program that runs microVMs.
    pub program: PathBuf,
    /// Options for `firn boot`.
    pub boot_options: Vec<String>,
    /// The folder of the images that functions may name with `FIRN_IMAGE`, each a file `NAME.erofs`; none where all run on one root.
    pub images: Option<PathBuf>,
    /// Options for `firn thaw`.
    pub thaw_options: Vec<String>,
    /// Options for `firn standby`.
    pub standby_options: Vec<String>,
    /// How many monitors stand by, started and empty.
    pub standby: usize,
    /// The socket of the pool to keep snapshots in; the daemon's directory where there is none.
    pub pool: Option<PathBuf>,
    /// Planners of functions whose environment names none with `FIRN_PLANNER`: a version is thawed by the first that this host
    /// can restore its snapshot with.
    pub planners: Vec<String>,
    /// DRAM that microVMs may take together, in bytes.
    pub memory: u64,
    /// MicroVMs at once.
    pub monitors: usize,
    /// Whether a version is booked by what its microVMs were measured to take, once they were; else by all of guest memory.
    pub measured: bool,
    /// Requests that may wait for a microVM; and events in hand.
    pub queue: usize,
    /// How long an event waits whose function failed, before it is tried again; twice as long the second time.
    pub event_pause: Duration,
    /// How long a request may wait for a microVM.
    pub queue_wait: Duration,
    /// How long a microVM is kept after its last request.
    pub keep_alive: Duration,
    /// How long a microVM may take to boot or to thaw, and a function to initialise.
    pub start_limit: Duration,
    /// The region in ARNs.
    pub region: String,
    /// The account in ARNs: 12 digits.
    pub account: String,
    /// The OpenTelemetry collector that is sent a span for each invocation: a URL.
    pub otlp: Option<String>,
    /// Whose requests are taken. Everybody's who can connect, where there are none.
    pub credentials: Option<Credentials>,
}

/// Why the daemon does not serve.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// It would be open to the network.
    #[error(
        "{0} can be reached from other machines: name credentials, so that requests have to be signed, or listen on {loopback}",
        loopback = Ipv4Addr::LOCALHOST
    )]
    Unprotected(IpAddr),
    /// Its directory cannot be used.
    #[error("the daemon's directory {} cannot be used", path.display())]
    Data {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Spans cannot be exported.
    #[error(transparent)]
    Telemetry(#[from] TelemetryError),
    /// Its database cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The address cannot be listened on.
    #[error("cannot listen on {address}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// The system refuses what a server needs.
    #[error("the server cannot run")]
    System(#[source] std::io::Error),
}

/// The daemon's parts.
#[derive(Debug)]
pub(crate) struct Daemon {
    pub(crate) store: Store,
    pub(crate) code: CodeStore,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) place: Place,
    pub(crate) credentials: Option<Credentials>,
    pub(crate) telemetry: Option<Arc<Telemetry>>,
    /// Events that may be in hand.
    pub(crate) events: Arc<Semaphore>,
    /// How long an event waits whose function failed; twice as long the second time.
    pub(crate) event_pause: Duration,
    /// Held while a zip file is stored that no function names yet.
    code_in_hand: Mutex<()>,
}

/// A version that a request names.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) version: Version,
    /// How many of the function's requests may be in flight.
    pub(crate) concurrency: Option<u32>,
}

/// Serves until a signal asks it to end. `ready` is told the address.
///
/// # Errors
/// See [`ServeError`].
pub fn serve(options: &ServeOptions, ready: impl FnOnce(SocketAddr)) -> Result<(), ServeError> {
    if !options.listen.ip().is_loopback() && options.credentials.is_none() {
        return Err(ServeError::Unprotected(options.listen.ip()));
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(ServeError::System)?;
    runtime.block_on(async {
        let daemon = Daemon::open(options)?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(ServeError::System)?;
        let mut terminate = signal(SignalKind::terminate()).map_err(ServeError::System)?;
        let address = options.listen;
        let listener = TcpListener::bind(address).await;
        let listener = listener.map_err(|source| ServeError::Listen { address, source })?;
        daemon.recover().await?;
        let address = listener.local_addr().map_err(ServeError::System)?;
        ready(address);
        tracing::info!(%address, "listening");
        let (ask, asked) = oneshot::channel::<()>();
        let served = axum::serve(listener, api::router(Arc::clone(&daemon)))
            .with_graceful_shutdown(async move { drop(asked.await) });
        let mut serving = tokio::spawn(served.into_future());
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            ended = &mut serving => {
                return ended.unwrap_or_else(|lost| Err(lost.into())).map_err(ServeError::System);
            }
        }
        tracing::info!("ending");
        // Nobody listens where it has ended meanwhile.
        let _ = ask.send(());
        daemon.fleet.close(CLOSE_LIMIT).await;
        // The last answers.
        let _ = timeout(ANSWER_LIMIT, serving).await;
        if let Some(telemetry) = daemon.telemetry.clone() {
            // A task that was lost has logged why.
            let _ = tokio::task::spawn_blocking(move || telemetry.end()).await;
        }
        Ok(())
    })
}

impl Daemon {
    /// Opens the daemon's directory.
    pub(crate) fn open(options: &ServeOptions) -> Result<Arc<Self>, ServeError> {
        let failed = |source| ServeError::Data { path: options.data.clone(), source };
        let snapshots = options.data.join("snapshots");
        std::fs::create_dir_all(&snapshots).map_err(failed)?;
        let launcher = Launcher {
            program: options.program.clone(),
            instances: Instances::of_user(),
            pool: options.pool.clone(),
            snapshots,
            planners: options.planners.clone(),
            boot_options: options.boot_options.clone(),
            images: Images { folder: options.images.clone() },
            thaw_options: options.thaw_options.clone(),
            standby_options: options.standby_options.clone(),
            region: options.region.clone(),
            start_limit: options.start_limit,
            started: AtomicU64::new(0),
            standbys: Standbys::new(options.standby),
        };
        let limits = Limits {
            memory: options.memory,
            monitors: options.monitors,
            measured: options.measured,
            queue: options.queue,
            queue_wait: options.queue_wait,
            keep_alive: options.keep_alive,
        };
        Ok(Arc::new(Self {
            store: Store::open(&options.data.join("state.redb"))?,
            code: CodeStore::open(options.data.join("code")).map_err(failed)?,
            fleet: Fleet::new(launcher, limits),
            place: Place { region: options.region.clone(), account: options.account.clone() },
            credentials: options.credentials.clone(),
            telemetry: match &options.otlp {
                Some(endpoint) => Some(Arc::new(Telemetry::new(endpoint)?)),
                None => None,
            },
            events: Arc::new(Semaphore::new(options.queue)),
            event_pause: options.event_pause,
            code_in_hand: Mutex::new(()),
        }))
    }

    /// Finds the version that a request names.
    pub(crate) fn find(&self, target: &Target) -> Result<Found, ApiError> {
        let missing = |qualifier: Option<&str>| {
            let arn = crate::functions::Arn(&self.place, &target.name, qualifier);
            ApiError::not_found("Function", arn)
        };
        let named = target.qualifier.as_deref();
        let function = self.store.function(&target.name)?.ok_or_else(|| missing(named))?;
        let concurrency = function.concurrency;
        let number = match named {
            None | Some(LATEST) => {
                return Ok(Found { version: function.latest, concurrency });
            }
            Some(number) if number.bytes().all(|byte| byte.is_ascii_digit()) => number.to_owned(),
            Some(alias) => {
                let alias = self.store.alias(&target.name, alias)?;
                alias.ok_or_else(|| missing(named))?.version
            }
        };
        let version = self.store.version(&target.name, &number)?;
        Ok(Found { version: version.ok_or_else(|| missing(named))?, concurrency })
    }

    /// Makes a version of `$LATEST`, and freezes it in the background where the function is for SnapStart.
    pub(crate) async fn publish(
        self: &Arc<Self>,
        name: &str,
        request: Option<api::PublishVersion>,
    ) -> Result<Version, ApiError> {
        let (daemon, name) = (Arc::clone(self), name.to_owned());
        let request = request.unwrap_or_default();
        let (version, new) = api::blocking(move || daemon.make_version(&name, &request)).await?;
        if new && version.state == State::Pending {
            let daemon = Arc::clone(self);
            tokio::spawn(daemon.freeze(version.clone()));
        }
        Ok(version)
    }

    fn make_version(
        &self,
        name: &str,
        request: &api::PublishVersion,
    ) -> Result<(Version, bool), ApiError> {
        let missing =
            || ApiError::not_found("Function", crate::functions::Arn(&self.place, name, None));
        self.store.change(|change| {
            let mut function = change.function(name)?.ok_or_else(missing)?;
            let latest = &function.latest;
            let expected = request.revision_id.as_deref();
            if expected.is_some_and(|expected| expected != latest.revision.to_string()) {
                return Err(ApiError::precondition());
            }
            let digest = api::base64_of_hex(&latest.code.sha256);
            if request.code_sha256.as_ref().is_some_and(|expected| *expected != digest) {
                return Err(ApiError::invalid(format!(
                    "CodeSHA256 ({}) is different from current CodeSHA256 in $LATEST ({digest}). Please try again with the CodeSHA256 in $LATEST.",
                    request.code_sha256.as_deref().unwrap_or_default(),
                )));
            }
            // As AWS Lambda: nothing new, no new version.
            let last = match function.next_version {
                0 | 1 => None,
                next => change.version(name, next - 1)?,
            };
            if let Some(last) = last.filter(|last| same(last, latest)) {
                return Ok((last, false));
            }
            let number = function.next_version;
            let version = Version {
                version: number.to_string(),
                revision: revision(),
                last_modified: now(),
                description: request.description.clone().unwrap_or(latest.description.clone()),
                state: if latest.snap_start { State::Pending } else { State::Active },
                ..latest.clone()
            };
            function.next_version += 1;
            change.put_function(name, &function)?;
            change.put_version(name, number, &version)?;
            Ok((version, true))
        })
    }

    /// Freezes a version, and writes down what came of it.
    async fn freeze(self: Arc<Self>, version: Version) {
        let (name, number) = (version.function.clone(), version.version.clone());
        tracing::info!(function = name, version = number, "freezing");
        let frozen =
            publish(Arc::clone(&self.fleet), self.code.clone(), Arc::new(version.clone())).await;
        let (state, snapshot) = match frozen {
            Ok(snapshot) => {
                let Snapshot { planner, bytes, .. } = &snapshot;
                tracing::info!(function = name, version = number, bytes, planner, "frozen");
                (State::Active, Some(snapshot))
            }
            Err(error) => {
                let error: &(dyn std::error::Error + 'static) = &error;
                tracing::warn!(function = name, version = number, error, "not frozen");
                (State::Failed { reason: firn_base::error_chain(error) }, None)
            }
        };
        let daemon = Arc::clone(&self);
        let kept = snapshot.clone();
        let stored = api::blocking(move || {
            daemon.store.change(|change| {
                let number = version.version.parse().unwrap_or_default();
                let found = change.version(&version.function, number)?;
                let Some(found) = found.filter(|found| found.revision == version.revision) else {
                    return Ok(false);
                };
                let changed = Version { state, snapshot: kept, ..found };
                change.put_version(&version.function, number, &changed)?;
                Ok::<_, ApiError>(true)
            })
        })
        .await;
        // Where it was deleted meanwhile, or cannot be written down, nobody will ask for it.
        if !matches!(stored, Ok(true))
            && let Some(snapshot) = snapshot
        {
            self.remove(&snapshot.place).await;
        }
    }

    /// Ends the microVMs of a version that was deleted, and removes its snapshot.
    pub(crate) async fn forget(self: &Arc<Self>, version: Version) {
        self.fleet.retire(version.revision);
        if let Some(snapshot) = version.snapshot {
            self.remove(&snapshot.place).await;
        }
    }

    async fn remove(self: &Arc<Self>, place: &SnapshotPlace) {
        if let Err(error) = self.fleet.launcher.remove(place).await {
            let error: &(dyn std::error::Error + 'static) = &error;
            tracing::warn!(?place, error, "a snapshot was not removed");
        } else if let SnapshotPlace::Pool(name) = place {
            self.removed(name.clone()).await;
        }
    }

    /// Notes that a snapshot was removed from the pool.
    async fn removed(self: &Arc<Self>, name: String) {
        let daemon = Arc::clone(self);
        let noted =
            move || daemon.store.change(|change| Ok::<_, ApiError>(change.forget_doomed(&name)?));
        // The log has the error. The next start then tries again, in vain.
        let _ = api::blocking(noted).await;
    }

    /// Notes in the database, with the change that deletes a version, that its snapshot is to be removed from the pool: the
    /// daemon may end before that is done.
    pub(crate) fn doom(&self, change: &Change, version: &Version) -> Result<(), StoreError> {
        let frozen = version.snapshot.as_ref().map(|snapshot| snapshot.place.clone());
        let place = match version.state {
            // It may be there in a moment.
            State::Pending => Some(self.fleet.launcher.place(version)),
            _ => frozen,
        };
        match place {
            Some(SnapshotPlace::Pool(name)) => change.doom(&name),
            _ => Ok(()),
        }
    }

    /// Keeps [`Daemon::sweep_code`] waiting while code is stored that no function names yet.
    pub(crate) fn hold_code(&self) -> MutexGuard<'_, ()> {
        self.code_in_hand.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes code that no version names.
    pub(crate) async fn sweep_code(self: &Arc<Self>) {
        let daemon = Arc::clone(self);
        let swept = api::blocking(move || {
            let _hold = daemon.hold_code();
            let versions = daemon.all_versions()?;
            let used: HashSet<PathBuf> =
                versions.iter().map(|version| daemon.code.path(&version.code)).collect();
            let swept = daemon.code.keep(|path| used.contains(path));
            swept.map_err(|error| ApiError::service(&error, "the code's folder cannot be swept"))
        });
        // The log has the error; nobody who waits for an answer is concerned.
        let _ = swept.await;
    }

    fn all_versions(&self) -> Result<Vec<Version>, StoreError> {
        let mut versions = Vec::new();
        for function in self.store.functions()? {
            versions.extend(self.store.versions(&function.latest.function)?);
            versions.push(function.latest);
        }
        Ok(versions)
    }

    /// Goes on where an earlier daemon was stopped: freezes what it was freezing, removes what nobody names.
    pub(crate) async fn recover(self: &Arc<Self>) -> Result<(), ServeError> {
        let versions = self.all_versions()?;
        let mut used = HashSet::new();
        for version in versions {
            if let Some(SnapshotPlace::Directory(name)) =
                version.snapshot.as_ref().map(|s| &s.place)
            {
                used.insert(name.clone());
            }
            if version.state == State::Pending {
                tokio::spawn(Arc::clone(self).freeze(version));
            }
        }
        let snapshots = &self.fleet.launcher.snapshots;
        sweep(snapshots, &used)
            .map_err(|source| ServeError::Data { path: snapshots.clone(), source })?;
        for name in self.store.doomed()? {
            // One that was removed just before the daemon ended is not there.
            let _ = self.fleet.launcher.remove(&SnapshotPlace::Pool(name.clone())).await;
            self.removed(name).await;
        }
        self.sweep_code().await;
        Ok(())
    }
}

/// Removes the directories in `folder` that are not `used`.
fn sweep(folder: &Path, used: &HashSet<String>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_name().to_str().is_none_or(|name| !used.contains(name)) {
            std::fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}

/// Whether a published version is what `$LATEST` is.
fn same(published: &Version, latest: &Version) -> bool {
    published.code == latest.code
        && published.environment == latest.environment
        && published.runtime == latest.runtime
        && published.handler == latest.handler
        && published.role == latest.role
        && (published.timeout, published.memory) == (latest.timeout, latest.memory)
        && published.snap_start == latest.snap_start
}
