//! The processes: `firn boot`, `firn thaw` and `firn freeze`, as anybody would start them.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use firn_base::{PAGE_SIZE, now_ns};
use firn_memory::prefer_as_victim;

use firn_run::{FunctionError, Instance, Instances};

use super::standby::Standbys;
use crate::functions::{
    ImageError, Images, PLANNER_VARIABLE, SnapshotPlace, Version, VersionSnapshot,
};

/// How long a microVM may take to end before it is killed.
const END_LIMIT: Duration = Duration::from_secs(5);

/// The longest report of a command, in bytes.
const MAX_REPORT: u64 = 1 << 20;

/// How much of what a command complains of is kept, in bytes.
const MAX_COMPLAINT: u64 = 64 << 10;

/// What a guest has besides the function's memory, for its kernel and the agent, MiB.
const GUEST_MIB: u32 = 64;

/// Names the moment at which a request came in, for `firn thaw`.
const REQUEST_VARIABLE: &str = "FIRN_REQUEST_NS";

/// Starts microVMs.
#[derive(Debug)]
pub(crate) struct Launcher {
    /// The `firn` program.
    pub(crate) program: PathBuf,
    /// Where running microVMs have their sockets.
    pub(crate) instances: Instances,
    /// The socket of the pool that snapshots are kept in, where there is one.
    pub(crate) pool: Option<PathBuf>,
    /// The directory of the snapshots, where there is no pool.
    pub(crate) snapshots: PathBuf,
    /// The planners of functions that name none, the best first.
    pub(crate) planners: Vec<String>,
    /// Options for `firn boot`.
    pub(crate) boot_options: Vec<String>,
    /// What functions may run on.
    pub(crate) images: Images,
    /// Options for `firn thaw`.
    pub(crate) thaw_options: Vec<String>,
    /// Options for `firn standby`.
    pub(crate) standby_options: Vec<String>,
    /// The region that functions are told.
    pub(crate) region: String,
    /// How long a microVM may take to boot or to thaw.
    pub(crate) start_limit: Duration,
    pub(crate) started: AtomicU64,
    /// Monitors that wait for something to thaw.
    pub(crate) standbys: Standbys,
}

/// A `firn` that was started. Dropped, it is killed.
#[derive(Debug)]
pub(super) struct Started {
    pub(super) child: Child,
    pub(super) input: Option<ChildStdin>,
    stdout: Option<ChildStdout>,
    complaints: JoinHandle<Vec<u8>>,
}

/// A microVM's process. Dropped, it is killed.
#[derive(Debug)]
pub(crate) struct Monitor {
    child: Child,
    instance: Instance,
    instances: Instances,
    /// The microVM ends when this does.
    input: Option<ChildStdin>,
    complaints: JoinHandle<Vec<u8>>,
}

/// A microVM that was thawed.
#[derive(Debug)]
pub(crate) struct Thawed {
    pub(crate) monitor: Monitor,
    /// What `firn thaw` says about it.
    pub(crate) report: Box<RawValue>,
    /// Whether its process stood by.
    pub(crate) standby: bool,
}

/// A microVM did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The process was not created.
    #[error("cannot run firn")]
    Spawn(#[source] std::io::Error),
    /// The function's image cannot be used.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The function's after-restore hooks failed.
    #[error("the function failed: {0}")]
    Function(FunctionError),
    /// The process ended with an error.
    #[error("the microVM did not start ({status}): {complaint}")]
    Failed {
        /// The exit status.
        status: ExitStatus,
        /// The text on its standard error.
        complaint: String,
    },
    /// The process exceeded the time limit.
    #[error("the microVM did not start within {0:?}")]
    TimedOut(Duration),
    /// The output of the process cannot be read.
    #[error("cannot read the output of the microVM's process")]
    Follow(#[source] std::io::Error),
}

/// Why a microVM was not frozen.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FreezeError {
    #[error("firn cannot be run")]
    Run(#[source] std::io::Error),
    #[error("the freeze failed ({status}): {complaint}")]
    Failed { status: ExitStatus, complaint: String },
    #[error("the freeze took longer than {0:?}")]
    TimedOut(Duration),
    #[error("the freeze gave a report that cannot be read")]
    Report(#[source] serde_json::Error),
}

/// What is read of a freeze's report.
#[derive(Deserialize)]
struct Frozen {
    stored_pages: u64,
}

/// What a command prints in place of a report where the function failed.
fn function_error(line: &str) -> Option<FunctionError> {
    let error: FunctionError = serde_json::from_str(line).ok()?;
    Some(error).filter(|error| !error.error_type.is_empty())
}

/// Memory of a microVM of `version`, in MiB.
pub(crate) fn guest_mib(version: &Version) -> u32 {
    version.memory + GUEST_MIB
}

impl Launcher {
    /// Boots a microVM without a function; with what `firn boot` says about it.
    pub(crate) async fn boot(
        &self,
        version: &Version,
    ) -> Result<(Monitor, Box<RawValue>), StartError> {
        let name = self.new_name();
        let mut command = Command::new(&self.program);
        command.arg("boot").args(self.common(&name));
        command.arg("--memory").arg(format!("{}M", guest_mib(version))).args(&self.boot_options);
        if let Some(image) = self.images.of(version)? {
            command.arg("--image").arg(image.as_str());
        }
        self.follow(Started::new(command)?, &name).await
    }

    /// Thaws a microVM, in a process that stood by where there is one.
    pub(crate) async fn thaw(
        &self,
        version: &Version,
        snapshot: &VersionSnapshot,
    ) -> Result<Thawed, StartError> {
        let begin = now_ns();
        let name = self.new_name();
        let mut arguments = self.common(&name);
        let planner = version.environment.get(PLANNER_VARIABLE).unwrap_or(&snapshot.planner);
        arguments.extend(["--planner", planner].map(OsString::from));
        arguments.extend(self.thaw_options.iter().map(OsString::from));
        arguments.extend(self.place_arguments(&snapshot.place));
        let ordered = self.standbys.order(begin, &arguments).await;
        let standby = ordered.is_some();
        let started = match ordered {
            Some(started) => started,
            None => {
                let mut command = Command::new(&self.program);
                command.arg("thaw").args(arguments).env(REQUEST_VARIABLE, begin.to_string());
                Started::new(command)?
            }
        };
        let (monitor, report) = self.follow(started, &name).await?;
        Ok(Thawed { monitor, report, standby })
    }

    /// Starts monitors until as many stand by as shall.
    pub(crate) fn stand_by(&self) {
        self.standbys.fill(|| {
            let mut command = Command::new(&self.program);
            command.arg("standby").args(&self.standby_options);
            Started::new(command)
        });
    }

    /// Freezes a microVM, which ends with that, and returns the size of its image in bytes.
    pub(crate) async fn freeze(
        &self,
        monitor: &Monitor,
        place: SnapshotPlace,
    ) -> Result<VersionSnapshot, FreezeError> {
        let mut command = Command::new(&self.program);
        command.args(["freeze", "--json", monitor.instance.name()]);
        command.args(self.place_arguments(&place));
        let output = self.run(command).await?;
        let frozen: Frozen = serde_json::from_slice(&output).map_err(FreezeError::Report)?;
        let planner = self.planner(&place).await?;
        Ok(VersionSnapshot { place, bytes: frozen.stored_pages.saturating_mul(PAGE_SIZE), planner })
    }

    /// The first of the planners that makes a plan for a snapshot on this host.
    async fn planner(&self, place: &SnapshotPlace) -> Result<String, FreezeError> {
        let mut refused = Ok(String::new());
        for planner in &self.planners {
            let mut command = Command::new(&self.program);
            command.args(["plan", "--planner", planner]).args(self.place_arguments(place));
            match self.run(command).await {
                Ok(_) => return Ok(planner.clone()),
                Err(error) => refused = Err(error),
            }
        }
        refused
    }

    /// Removes a snapshot.
    pub(crate) async fn remove(&self, place: &SnapshotPlace) -> Result<(), FreezeError> {
        match place {
            SnapshotPlace::Directory(name) => {
                match tokio::fs::remove_dir_all(self.snapshots.join(name)).await {
                    Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                        Err(FreezeError::Run(error))
                    }
                    _ => Ok(()),
                }
            }
            SnapshotPlace::Pool(name) => {
                let mut command = Command::new(&self.program);
                command.args(["pool", "rm"]);
                if let Some(pool) = &self.pool {
                    command.arg("--pool").arg(pool);
                }
                self.run(command.arg(name)).await.map(drop)
            }
        }
    }

    /// The place of a new snapshot.
    pub(crate) fn place(&self, version: &Version) -> SnapshotPlace {
        let name =
            format!("{}-{}-{}", version.function, version.version, version.revision.simple());
        match self.pool {
            Some(_) => SnapshotPlace::Pool(name),
            None => SnapshotPlace::Directory(name),
        }
    }

    fn place_arguments(&self, place: &SnapshotPlace) -> Vec<OsString> {
        match place {
            SnapshotPlace::Directory(name) => vec![self.snapshots.join(name).into()],
            SnapshotPlace::Pool(name) => {
                let pool = self.pool.iter().flat_map(|pool| ["--pool".into(), pool.into()]);
                pool.chain([name.into()]).collect()
            }
        }
    }

    fn new_name(&self) -> String {
        let number = self.started.fetch_add(1, Ordering::Relaxed);
        format!("serve-{}-{number}", std::process::id())
    }

    /// Arguments that `firn boot` and `firn thaw` have in common.
    fn common(&self, name: &str) -> Vec<OsString> {
        let limit = self.start_limit.as_secs().max(1).to_string();
        ["--json", "--end-with-input", "--time-limit", &limit, "--name", name]
            .map(OsString::from)
            .to_vec()
    }

    /// Waits for the report of a process that starts a microVM.
    async fn follow(
        &self,
        started: Started,
        name: &str,
    ) -> Result<(Monitor, Box<RawValue>), StartError> {
        let Started { child, input, stdout, complaints } = started;
        let instances = self.instances.clone();
        let instance = instances.named(name);
        let mut monitor = Monitor { child, instance, instances, input, complaints };
        let mut line = String::new();
        let read = async {
            match stdout {
                Some(stdout) => BufReader::new(stdout.take(MAX_REPORT)).read_line(&mut line).await,
                None => Ok(0),
            }
        };
        // The command has the same limit for its guest: this one is for a command that hangs.
        let limit = self.start_limit + END_LIMIT;
        match timeout(limit, read).await {
            Ok(Ok(0)) => Err(monitor.failure().await),
            Ok(Ok(_)) => match function_error(&line) {
                Some(error) => {
                    monitor.end().await;
                    Err(StartError::Function(error))
                }
                // A firn of another version might say nothing that is JSON: the microVM is good all
                // the same.
                None => Ok((
                    monitor,
                    RawValue::from_string(line).unwrap_or_else(|_| RawValue::NULL.to_owned()),
                )),
            },
            Ok(Err(error)) => Err(StartError::Follow(error)),
            Err(_) => {
                monitor.kill().await;
                Err(StartError::TimedOut(limit))
            }
        }
    }

    /// Runs a command to its end, and returns what it said.
    async fn run(
        &self,
        mut command: impl std::borrow::BorrowMut<Command>,
    ) -> Result<Vec<u8>, FreezeError> {
        let command: &mut Command = command.borrow_mut();
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        let output = timeout(self.start_limit, command.output());
        let output = output.await.map_err(|_| FreezeError::TimedOut(self.start_limit))?;
        let output = output.map_err(FreezeError::Run)?;
        if output.status.success() {
            return Ok(output.stdout);
        }
        Err(FreezeError::Failed { status: output.status, complaint: text(&output.stderr) })
    }
}

impl Started {
    pub(super) fn new(mut command: Command) -> Result<Self, StartError> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.kill_on_drop(true).spawn().map_err(StartError::Spawn)?;
        if let Some(process) = child.id() {
            prefer_as_victim(process).map_err(StartError::Spawn)?;
        }
        let complaints = tokio::spawn(read_to_end(child.stderr.take(), MAX_COMPLAINT));
        Ok(Self { input: child.stdin.take(), stdout: child.stdout.take(), child, complaints })
    }
}

impl Monitor {
    /// Its process, while it runs.
    pub(crate) fn process(&self) -> Option<u32> {
        self.child.id()
    }

    /// The microVM's way in.
    pub(crate) fn vsock_socket(&self) -> PathBuf {
        self.instance.vsock_socket()
    }

    /// Whether the process runs.
    pub(crate) fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Lets the microVM end, and waits for that.
    pub(crate) async fn end(mut self) {
        self.input = None;
        if timeout(END_LIMIT, self.child.wait()).await.is_err() {
            self.kill().await;
        }
        self.sweep().await;
    }

    async fn kill(&mut self) {
        // Fails where it has ended.
        let _ = self.child.kill().await;
        self.sweep().await;
    }

    /// Removes the sockets that a killed process leaves.
    async fn sweep(&self) {
        let instances = self.instances.clone();
        // To look at the directory of names is to sweep it.
        let _ = tokio::task::spawn_blocking(move || instances.running()).await;
    }

    /// Why it ended without a word.
    async fn failure(mut self) -> StartError {
        let status = match timeout(END_LIMIT, self.child.wait()).await {
            Ok(Ok(status)) => status,
            Ok(Err(error)) => return StartError::Follow(error),
            Err(_) => {
                self.kill().await;
                return StartError::TimedOut(END_LIMIT);
            }
        };
        self.sweep().await;
        let complaint = text(&(&mut self.complaints).await.unwrap_or_default());
        StartError::Failed { status, complaint }
    }
}

/// Reads a pipe to its end, and keeps its first `limit` bytes.
async fn read_to_end(pipe: Option<impl tokio::io::AsyncRead + Unpin>, limit: u64) -> Vec<u8> {
    let mut text = Vec::new();
    if let Some(mut pipe) = pipe {
        // What cannot be read was not said.
        let _ = (&mut pipe).take(limit).read_to_end(&mut text).await;
        let _ = tokio::io::copy(&mut pipe, &mut tokio::io::sink()).await;
    }
    text
}

fn text(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.trim().trim_start_matches("firn: error: ").to_owned()
}
