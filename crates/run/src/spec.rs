//! What is to be started.

use std::convert::Infallible;
use std::fs::File;
use std::num::NonZero;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use firn_agent::protocol::RoleCredentials;
use firn_memory::recorders::Part;
use firn_net::Policy;
use firn_pool::Client;
use firn_snapshot::{
    Checks, Manifest, SnapshotDirectory, SnapshotFiles, Verifier, Verify, open_pooled,
};
use firn_vmm::{NetworkConfig, VsockBroker, open_root_disk, scratch_file};
use serde::{Deserialize, Serialize};

use crate::descriptors::{Descriptors, Slot};
use crate::error::StartError;
use crate::function::Function;
use crate::instance::{Instance, Instances, OwnedInstance};
use crate::network::NetworkSpec;

/// Version of [`StartSpec`] and of everything else that crosses between a monitor and the process
/// that starts it.
pub const SPEC_VERSION: u32 = 10;

/// A request to start one microVM.
///
/// It names no file that the monitor opens for itself: what the monitor uses of the host comes as
/// descriptors, which the spec refers to by [`Slot`]. Paths are for messages and manifests.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StartSpec {
    /// [`SPEC_VERSION`] of the sender.
    pub version: u32,
    /// When the request came in, ns of CLOCK_MONOTONIC, if known.
    pub request_ns: Option<u64>,
    /// Keys of the function's role, for its hooks after the restore.
    pub credentials: Option<RoleCredentials>,
    /// What the microVM uses of its host.
    pub host: HostSpec,
    /// Limit for each of: the guest's agent answers, the function loads, the function answers.
    pub time_limit: Duration,
    /// Where the microVM comes from.
    pub origin: Origin,
}

/// What a microVM uses of its host. A player uses nothing of it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct HostSpec {
    /// Whether Linux is tried where the processor has no hardware virtualisation (a PVM guest
    /// kernel runs there).
    pub software_kvm: bool,
    /// Its sockets, which a guest with Linux has, and the file for its disk writes.
    pub sockets: Option<Sockets>,
    /// The file that gets a copy of the guest's serial console.
    pub console: Option<Slot>,
    /// What its network device is connected to. Without it the device of a guest that has one has
    /// no link.
    pub network: Option<NetworkSpec>,
}

/// Where a microVM comes from.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// A kernel.
    Boot(Box<BootSpec>),
    /// A snapshot.
    Thaw(ThawSpec),
}

/// The sockets of one microVM, bound by the process that owns its name.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Sockets {
    /// The microVM's name.
    pub name: String,
    /// The control socket, listening.
    pub control: Slot,
    /// The socket for connections to the guest, listening.
    pub vsock: Slot,
    /// The path of the latter, for messages.
    pub vsock_path: PathBuf,
    /// The end of a [`VsockBroker`] that makes the guest's connections to the host; without one
    /// they are refused.
    pub broker: Option<Slot>,
    /// Where the guest's disk writes go; `None` to keep them in memory.
    pub scratch: Option<ScratchSpec>,
}

/// The place of a guest's disk writes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ScratchSpec {
    /// An empty file without a name.
    pub file: Slot,
    /// Limit of the space that they take, bytes.
    pub limit: u64,
}

/// A microVM that boots Linux.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BootSpec {
    /// The kernel: an uncompressed ELF file or a bzImage.
    pub kernel: OpenedFile,
    /// The initramfs.
    pub initramfs: OpenedFile,
    /// The root file system, read-only.
    pub root: OpenedFile,
    /// The initial contents of the writable disk.
    pub overlay: OpenedFile,
    /// Size of the writable disk, bytes: zeros follow the file, and the guest's file system grows.
    /// A disk is as large as its file at least.
    pub disk_size: u64,
    /// Words added to the kernel's command line.
    pub cmdline: Option<String>,
    /// Number of vCPUs.
    pub vcpus: u8,
    /// The guest's processor model; `None` for the best that the host offers.
    pub cpu: Option<String>,
    /// Guest memory, bytes.
    pub memory: u64,
    /// The guest's network device; `None` for a guest without one.
    pub network: Option<NetworkConfig>,
    /// The function to load once the guest runs. Without one the guest waits for it.
    pub function: Option<Function>,
}

/// A file that came open, and its path for messages and manifests.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct OpenedFile {
    /// The file.
    pub slot: Slot,
    /// Its absolute path, without links.
    pub path: PathBuf,
}

/// A microVM that is restored from a snapshot.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ThawSpec {
    /// The snapshot.
    pub source: SourceSpec,
    /// The planner, as `NAME[:KEY=VALUE,...]`.
    pub planner: String,
    /// Whether the image is in the page cache already, so that the plan's own preload is left out.
    pub preloaded: bool,
    /// The root disk of a guest with Linux.
    pub root: Option<OpenedFile>,
    /// What a guest with Linux is asked.
    pub invoke: Option<InvokeSpec>,
    /// How a player replays.
    pub replay: ReplaySpec,
    /// What is recorded of the run, in which guest memory does not come from the planner then.
    #[serde(default)]
    pub record: Option<RecordSpec>,
}

/// A run that is recorded by its monitor.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RecordSpec {
    /// What is recorded.
    pub what: Recorded,
    /// An empty file, which gets the recording.
    pub out: Slot,
}

impl StartSpec {
    /// Whether it has a trace recorded.
    pub(crate) fn traces(&self) -> bool {
        let Origin::Thaw(thaw) = &self.origin else { return false };
        thaw.record.as_ref().is_some_and(|record| matches!(record.what, Recorded::Trace { .. }))
    }
}

impl RecordSpec {
    /// Whether the guest is asked a second time.
    pub(crate) fn has_second(&self) -> bool {
        matches!(self.what, Recorded::Trace { again: Some(_), .. })
    }

    /// Whether the guest describes what holds its pages.
    pub(crate) fn has_holders(&self) -> bool {
        matches!(self.what, Recorded::Trace { holders: true, .. })
    }
}

/// What a monitor records of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recorded {
    /// These parts of a profile, of those that [`Touches`](firn_memory::recorders::Touches) fills.
    Profile(Vec<Part>),
    /// A trace of every page that a guest with Linux and one vCPU touches.
    Trace {
        /// Whether later accesses are recorded as well, at most one of each page in so much of the
        /// guest's work, and a second invocation.
        again: Option<NonZero<u64>>,
        /// Whether the guest describes what holds its pages once all is recorded.
        #[serde(default)]
        holders: bool,
    },
}

/// One request to the function of a thawed guest.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct InvokeSpec {
    /// The event, as JSON text.
    pub event: String,
    /// Whether the microVM runs on after the answer.
    pub keep: bool,
    /// Whether guest memory is compared with the image after the answer.
    pub compare: bool,
}

/// How a player replays. It matters to a player's snapshot only.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ReplaySpec {
    /// The trace, where the player has several; the first without.
    pub input: Option<String>,
    /// Whether the player waits for its release once the last page is touched, before it checks all
    /// its memory.
    pub hold: bool,
    /// Whether the guest measures the time in page faults, which takes some time itself.
    pub fault_time: bool,
    /// Whether the player serves a second invocation after the first: the one that its trace
    /// has recorded, or an identical one.
    #[serde(default)]
    pub warm: bool,
    /// Whether the player ends without checking all its memory. It still checks what it touches.
    #[serde(default)]
    pub unchecked: bool,
}

/// Where a snapshot is.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SourceSpec {
    /// In a directory.
    Directory {
        /// Its files, open.
        files: Box<SnapshotFiles<Slot>>,
        /// The directory's path, for messages.
        path: PathBuf,
        /// Whether what a plan maps unchecked is verified first.
        verify: bool,
        /// What has to confirm its signature, if it must be signed.
        verifier: Option<Box<Verifier>>,
    },
    /// In a pool.
    Pool {
        /// A connection to the pool's manager; `None` for the one that the standby monitor has.
        manager: Option<Slot>,
        /// The snapshot's name.
        name: String,
        /// When its bytes are verified.
        verify: Verify,
        /// What has to confirm its signature, if it must be signed.
        verifier: Option<Box<Verifier>>,
    },
}

impl SourceSpec {
    /// A snapshot in a directory.
    ///
    /// # Errors
    /// [`StartError::Open`]: its files cannot be opened.
    pub fn directory(path: &Path, descriptors: &mut Descriptors) -> Result<Self, StartError> {
        let (files, directory) = SnapshotFiles::open(path)?;
        Ok(Self::of_files(files, directory, descriptors))
    }

    /// The same, and the root disk that the snapshot's manifest names, if it names one. The
    /// manifest is not parsed before the verifier has confirmed it, if there is one.
    ///
    /// # Errors
    /// [`StartError::Open`]: its files cannot be opened, or the manifest is damaged or not signed;
    /// [`StartError::Host`]: the disk cannot be opened, or is not the one of the freeze.
    pub fn directory_with_root(
        path: &Path,
        verifier: Option<&Verifier>,
        descriptors: &mut Descriptors,
    ) -> Result<(Self, Option<OpenedFile>), StartError> {
        let (files, directory) = SnapshotFiles::open(path)?;
        let root = OpenedFile::root_of(&files.manifest(path, verifier)?, descriptors)?;
        Ok((Self::of_files(files, directory, descriptors), root))
    }

    fn of_files(
        files: SnapshotFiles,
        directory: SnapshotDirectory,
        descriptors: &mut Descriptors,
    ) -> Self {
        let path = directory.path().to_owned();
        descriptors.keep_directory(directory);
        let slots: Result<_, Infallible> = files.try_map(|file| Ok(descriptors.add(file)));
        let Ok(files) = slots;
        Self::Directory { files: Box::new(files), path, verify: false, verifier: None }
    }

    /// The same, with what a plan maps unchecked from its files verified before the guest runs.
    #[must_use]
    pub fn verified(self) -> Self {
        match self {
            Self::Directory { files, path, verifier, .. } => {
                Self::Directory { files, path, verify: true, verifier }
            }
            pool @ Self::Pool { .. } => pool,
        }
    }

    /// The same, refused before anything of it is parsed unless the verifier confirms it.
    #[must_use]
    pub fn signed(mut self, by: Verifier) -> Self {
        let (Self::Directory { verifier, .. } | Self::Pool { verifier, .. }) = &mut self;
        *verifier = Some(Box::new(by));
        self
    }

    /// A snapshot in the pool whose manager listens on `socket`.
    ///
    /// # Errors
    /// [`StartError::Open`]: the manager does not answer.
    pub fn pool(
        socket: &Path,
        name: &str,
        verify: Verify,
        descriptors: &mut Descriptors,
    ) -> Result<Self, StartError> {
        let manager = Some(descriptors.add(Client::connect(socket)?.into_stream()));
        Ok(Self::Pool { manager, name: name.to_owned(), verify, verifier: None })
    }

    /// The same, and the root disk that the snapshot's manifest names, if it names one. The
    /// manifest is not parsed before the verifier has confirmed it, if there is one.
    ///
    /// # Errors
    /// [`StartError::Open`]: the manager does not answer, has no such snapshot, or it is damaged;
    /// [`StartError::Host`]: the disk cannot be opened, or is not the one of the freeze.
    pub fn pool_with_root(
        socket: &Path,
        name: &str,
        verify: Verify,
        verifier: Option<&Verifier>,
        descriptors: &mut Descriptors,
    ) -> Result<(Self, Option<OpenedFile>), StartError> {
        // By a connection of its own: the monitor's has no grant but its own.
        let checks = Checks { bytes: Verify::Never, signature: verifier };
        let (snapshot, _grant) = open_pooled(socket, name, checks)?;
        let root = OpenedFile::root_of(snapshot.manifest(), descriptors)?;
        Ok((Self::pool(socket, name, verify, descriptors)?, root))
    }

    /// A snapshot in the pool that a [standby monitor](crate::monitor::Monitor::stand_by) is
    /// connected to.
    #[must_use]
    pub fn pool_of_standby(name: &str, verify: Verify) -> Self {
        Self::Pool { manager: None, name: name.to_owned(), verify, verifier: None }
    }
}

impl OpenedFile {
    /// Opens a file for reading.
    ///
    /// # Errors
    /// [`StartError::Host`]: it cannot be opened.
    pub fn open(path: &Path, descriptors: &mut Descriptors) -> Result<Self, StartError> {
        let opened = firn_vmm::OpenFile::open(path)?;
        Ok(Self { slot: descriptors.add(opened.file), path: opened.path })
    }

    fn root_of(
        manifest: &Manifest,
        descriptors: &mut Descriptors,
    ) -> Result<Option<Self>, StartError> {
        let root = open_root_disk(manifest, None)?;
        Ok(root.map(|root| Self { slot: descriptors.add(root.file), path: root.path }))
    }

    pub(crate) fn take(
        self,
        descriptors: &mut Descriptors,
    ) -> Result<firn_vmm::OpenFile, StartError> {
        Ok(firn_vmm::OpenFile { file: descriptors.take(self.slot)?.into(), path: self.path })
    }
}

impl StartSpec {
    /// A request for a start of `origin`.
    #[must_use]
    pub fn new(origin: Origin, host: HostSpec, time_limit: Duration) -> Self {
        let (request_ns, credentials) = Default::default();
        Self { version: SPEC_VERSION, request_ns, credentials, host, time_limit, origin }
    }

    /// The rules of the guest's network, with its counters; `None` in a monitor.
    pub(crate) fn policy(&self) -> Option<Policy> {
        self.host.network.as_ref()?.policy.clone()
    }
}

impl Sockets {
    /// Binds the sockets of a microVM whose name the caller has claimed. Its guest connects to
    /// nothing on the host.
    ///
    /// # Errors
    /// [`StartError::Host`] names what cannot be bound.
    pub fn bind(instance: &Instance, descriptors: &mut Descriptors) -> Result<Self, StartError> {
        let bind = |path: &Path| {
            UnixListener::bind(path).map_err(|error| StartError::path("bind", path, error))
        };
        let (control, vsock_path) = (instance.control_socket(), instance.vsock_socket());
        Ok(Self {
            name: instance.name().to_owned(),
            control: descriptors.add(bind(&control)?),
            vsock: descriptors.add(bind(&vsock_path)?),
            vsock_path,
            broker: None,
            scratch: None,
        })
    }
}

impl ScratchSpec {
    /// Makes a file in `directory`, or in memory where its file system has no files without a name,
    /// for at most `limit` bytes that a guest writes to its disk.
    ///
    /// # Errors
    /// [`StartError::Host`]: it cannot be made.
    pub fn create(
        directory: &Path,
        limit: u64,
        descriptors: &mut Descriptors,
    ) -> Result<Self, StartError> {
        let file = scratch_file(directory);
        let file = file.map_err(|error| StartError::path("create a file in", directory, error))?;
        Ok(Self { file: descriptors.add(file), limit })
    }
}

impl HostSpec {
    /// Claims the name of a microVM, or one made of the id of this process, and binds its sockets.
    /// A thread of this process connects the guest to programs on the host. The file that gets a
    /// copy of its console is created or emptied. If it has disks, its disk writes go to a file in
    /// the directory for temporary files.
    ///
    /// # Errors
    /// [`StartError::Session`]: the name is in use or is not valid; [`StartError::Host`]: a file or
    /// a socket cannot be made.
    pub fn claim(
        name: Option<&str>,
        console: Option<&Path>,
        has_disks: bool,
        descriptors: &mut Descriptors,
    ) -> Result<(OwnedInstance, Self), StartError> {
        let unnamed = format!("vm-{}", std::process::id());
        let instances = Instances::of_user();
        // Removes what killed commands have left in the run folder.
        let _ = instances.running();
        let instance = instances.claim(name.unwrap_or(&unnamed))?;
        let create = |path: &Path| {
            File::create(path).map_err(|error| StartError::path("create", path, error))
        };
        let console = console.map(create).transpose()?.map(|file| descriptors.add(file));
        let mut sockets = Sockets::bind(&instance, descriptors)?;
        if has_disks {
            let directory = std::env::temp_dir();
            sockets.scratch = Some(ScratchSpec::create(&directory, u64::MAX, descriptors)?);
        }
        let broker = VsockBroker::prepare(instance.vsock_socket());
        let (broker, begin) =
            broker.map_err(|error| StartError::session("make a pair of sockets", error))?;
        descriptors.after_sending(begin);
        sockets.broker = Some(descriptors.add(broker));
        Ok((instance, Self { sockets: Some(sockets), console, ..Self::default() }))
    }
}
