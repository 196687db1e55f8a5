//! The freeze: how long a guest takes to become a sealed snapshot, next to a plain durable write.
//!
//! A guest with a given number of used pages is frozen again and again, into a directory and into a
//! pool. Each freeze is of a new guest, whose used pages were all written since it began, so a
//! freeze finds nothing that an earlier one has read. In the same run `fio` writes as many bytes to
//! the same medium and syncs them. Every frozen snapshot is thawed by the player, which checks all
//! its bytes.

mod fio;
mod guest;
mod results;

use std::path::{Path, PathBuf};
use std::time::Instant;

use firn_base::nanoseconds;
use firn_memory::planners::{ParsePlannerError, parse};
use firn_pool::{ClientError, MediumKind};
use firn_run::player::replay;
use firn_run::{Clock, ReplaySpec, Source, StartError};
use firn_snapshot::{Destination, FreezeReport, FreezeRequest, NotFrozenError, Verify};
use firn_vmm::{FreezeError, KVM_DEVICE};
use thiserror::Error;

pub use fio::FioError;
pub use guest::GuestError;
pub use results::{FreezeResults, FreezeRow, Reference};

use crate::batch::BatchError;
use crate::harness::Harness;
use crate::host::{Host, HostError};
use crate::medium::{self, MediumError};
use crate::player::{FreezePlayerError, PlayerInputs, PlayerOptions, prepare};
use crate::players::PoolPlayers;
use crate::progress::Steps;

/// A measurement of freezes.
#[derive(Clone, Debug)]
pub struct FreezeConfig {
    /// Freezes into each destination.
    pub runs: u32,
    /// Bytes of guest memory.
    pub memory: u64,
    /// Bytes of it that are in use: the other pages were never touched.
    pub used: u64,
    /// The directory in which snapshots are made, on the medium to measure. By default it is the
    /// directory for temporary files.
    pub directory: Option<PathBuf>,
    /// The socket of a pool's manager, to freeze into that pool, too.
    pub pool: Option<PathBuf>,
    /// Whether `fio` writes as many bytes to the same medium after each freeze.
    pub reference: bool,
}

impl Default for FreezeConfig {
    fn default() -> Self {
        Self {
            runs: 20,
            memory: 1 << 30,
            used: 80 << 20,
            directory: None,
            pool: None,
            reference: true,
        }
    }
}

/// Why freezes were not measured.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RunFreezeError {
    /// There is no directory for the snapshots.
    #[error(transparent)]
    Medium(#[from] MediumError),
    /// The sizes of the guest are not valid.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// The guest cannot be made.
    #[error(transparent)]
    Player(#[from] FreezePlayerError),
    /// The host cannot be described.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The pool's manager returned an error.
    #[error(transparent)]
    Pool(#[from] ClientError),
    /// A freeze failed.
    #[error("freeze {run} into the {destination} failed")]
    Freeze {
        /// The run, from 1.
        run: u32,
        /// `directory` or `pool`.
        destination: &'static str,
        /// The reason.
        source: Box<NotFrozenError<FreezeError>>,
    },
    /// The thaw of a frozen snapshot failed, or found a wrong page.
    #[error("the thaw after freeze {run} into the {destination} failed")]
    Thaw {
        /// The run, from 1.
        run: u32,
        /// `directory` or `pool`.
        destination: &'static str,
        /// The reason.
        source: StartError,
    },
    /// The planner of that thaw is unknown: a defect.
    #[error(transparent)]
    Planner(#[from] ParsePlannerError),
    /// `fio` failed.
    #[error(transparent)]
    Fio(#[from] FioError),
    /// A snapshot cannot be removed.
    #[error("cannot remove {path}")]
    Remove {
        /// The snapshot's directory.
        path: PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// A signal ended the measurement.
    #[error(transparent)]
    Interrupted(#[from] BatchError),
    /// The number of runs is 0.
    #[error("nothing to measure: give at least one run")]
    Nothing,
}

/// One freeze.
struct Run {
    total_ns: u64,
    settle_ns: Option<u64>,
    report: FreezeReport,
    fio_ns: Option<u64>,
}

/// A destination that is measured.
struct Subject {
    name: &'static str,
    medium: String,
    destination: Destination,
    /// The folder in which `fio` writes; `None` if the medium has no file system.
    beside: Option<PathBuf>,
    planner: &'static str,
    runs: Vec<Run>,
}

impl FreezeConfig {
    /// Freezes a new guest into each destination in turn, and lets `fio` write as many bytes beside
    /// it. The order changes from run to run.
    ///
    /// # Errors
    ///
    /// [`RunFreezeError`].
    pub fn run(&self, harness: &Harness<'_>) -> Result<FreezeResults, RunFreezeError> {
        if self.runs == 0 {
            return Err(RunFreezeError::Nothing);
        }
        if self.reference {
            fio::check()?;
        }
        let inputs = guest::inputs(self.memory, self.used)?;
        let directory = medium::directory(self.directory.as_deref())?;
        let host = Host::of(directory.path())?;
        let mut subjects = vec![Subject {
            name: "directory",
            medium: host.medium.clone(),
            destination: Destination::Directory(directory.path().join("snapshot")),
            beside: Some(directory.path().to_owned()),
            planner: "firecracker",
            runs: Vec::new(),
        }];
        let pool = self.pool.as_deref();
        let mut pool = pool.map(|pool| PoolPlayers::connect(pool, harness.progress)).transpose()?;
        if let Some(pool) = &mut pool {
            let place = pool.reserve_name();
            let (medium, beside) = pool_medium(pool)?;
            subjects.push(Subject {
                name: "pool",
                medium,
                destination: Destination::Pool { socket: place.socket, name: place.name },
                beside,
                planner: "pass_shared",
                runs: Vec::new(),
            });
        }
        let mut steps = Steps::begin(harness.progress, u64::from(self.runs));
        for run in 1..=self.runs {
            let order: Vec<&mut Subject> = if run % 2 == 1 {
                subjects.iter_mut().collect()
            } else {
                subjects.iter_mut().rev().collect()
            };
            for subject in order {
                harness.interrupt.check()?;
                if run > 1 {
                    subject.remove()?;
                }
                if let Some(pool) = &mut pool {
                    pool.wait_until_freed()?;
                }
                let begin = Instant::now();
                if let Some(pool) = &mut pool {
                    pool.settle()?;
                }
                let is_pool = matches!(subject.destination, Destination::Pool { .. });
                let settle_ns = is_pool.then(|| nanoseconds(begin.elapsed()));
                self.measure(subject, &inputs, run, settle_ns)?;
            }
            steps.advance("runs");
        }
        let rows = subjects.iter().map(Subject::row).collect::<Option<_>>();
        let rows = rows.ok_or(RunFreezeError::Nothing)?;
        Ok(FreezeResults { host, memory_bytes: self.memory, used_bytes: self.used, rows })
    }

    /// One freeze, in turn with `fio`; then the snapshot is checked.
    fn measure(
        &self,
        subject: &mut Subject,
        inputs: &PlayerInputs,
        run: u32,
        settle_ns: Option<u64>,
    ) -> Result<(), RunFreezeError> {
        let destination = subject.name;
        let options = PlayerOptions::default();
        let (mut microvm, function) = prepare(inputs, &options, KVM_DEVICE.as_ref())?;
        let request = FreezeRequest {
            destination: subject.destination.clone(),
            dense: false,
            function: Some(function),
        };
        let begin = Instant::now();
        let report = firn_snapshot::freeze(&mut microvm, request);
        let total_ns = nanoseconds(begin.elapsed());
        let report = report.map_err(|source| RunFreezeError::Freeze {
            run,
            destination,
            source: source.into(),
        })?;
        drop(microvm);
        let beside = subject.beside.as_deref().filter(|_| self.reference);
        let fio_ns = beside.map(|folder| fio::write(folder, report.bytes_written)).transpose()?;
        subject.check()?.map_err(|source| RunFreezeError::Thaw { run, destination, source })?;
        subject.runs.push(Run { total_ns, settle_ns, report, fio_ns });
        Ok(())
    }
}

impl Subject {
    /// Thaws the snapshot: the player checks every byte of its memory.
    fn check(&self) -> Result<Result<(), StartError>, RunFreezeError> {
        let planner = parse(self.planner)?;
        let source = match &self.destination {
            Destination::Directory(path) => Source::open_directory(path),
            Destination::Pool { socket, name } => Source::open_sealed(socket, name, Verify::Once),
        };
        let kvm = Path::new(KVM_DEVICE).into();
        Ok(source.and_then(|source| {
            replay(&source, &ReplaySpec::default(), &*planner, kvm, &Clock::now()).map(drop)
        }))
    }

    fn remove(&self) -> Result<(), RunFreezeError> {
        match &self.destination {
            Destination::Directory(path) => std::fs::remove_dir_all(path)
                .map_err(|source| RunFreezeError::Remove { path: path.clone(), source }),
            Destination::Pool { socket, name } => {
                firn_pool::Client::connect(socket)?.reclaim(name)?;
                Ok(())
            }
        }
    }
}

/// The name of the pool's medium, and the folder of its file, if it has one.
fn pool_medium(pool: &mut PoolPlayers<'_>) -> Result<(String, Option<PathBuf>), RunFreezeError> {
    let facts = pool.describe()?;
    let is_file = matches!(facts.kind, MediumKind::DaxFile | MediumKind::File | MediumKind::Tmpfs);
    let folder = Path::new(&facts.name).parent().filter(|_| is_file).map(|folder| {
        // The path is relative to the manager's directory if it has no folder.
        if folder.as_os_str().is_empty() { PathBuf::from(".") } else { folder.to_owned() }
    });
    let under = folder.as_deref().map(Host::of).transpose()?;
    let name = under.map_or(facts.name, |under| format!("file, {}", under.medium));
    Ok((name, folder))
}

#[cfg(test)]
mod tests;
