//! `firn profile record`: one thaw for each recorder, and what they found as the snapshot's
//! profile.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;

use firn_base::{PageRange, error_chain};
use firn_memory::planners::{FaaSnap, pack};
use firn_memory::recorders::{self, Part};
use firn_run::monitor::Supervisor;
use firn_run::player::traces_of;
use firn_run::{Descriptors, OpenedFile, RecordError, RecordedThaw, RecordingHost, SourceSpec};
use firn_snapshot::{Profile, Snapshot, set_profile, sign};
use firn_vmm::free_pages;

use super::left_out;
use super::summary::Summary;
use crate::commands::invoke;
use crate::event;
use crate::host_args::MonitorHostArgs;
use crate::output;
use crate::signature_args::SignerArgs;
use crate::snapshot_args::SnapshotArgs;
use crate::supervisor;

/// The part that needs no run.
const FREE: &str = "free";

/// Arguments of `firn profile record`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn profile record snapshots/hello --invoke @guest/functions/hello/input-a.json --input a
  firn profile record snapshots/json --input json-b
  firn profile record snapshots/json --input json-b --part groups
  firn profile record snapshots/hello --invoke '{\"name\": \"Ada\"}' --freeze snapshots/hello-2

Parts:
  faults   every page in the order of its first touch (userfaultfd)
  writes   the pages that were written (from the same run)
  groups   FaaSnap's working-set groups: pages that became cached, by samples of mincore. The image's pages are evicted
           from the page cache first, so no other microVM of the snapshot may run; not for a snapshot in a pool
  cache    SnapBPF's: which pages entered the page cache, and when, by a BPF program; for root, and as for groups
  free     the pages that the guest's allocator held free at the freeze, by its own metadata in the snapshot, without a
           run; of a player, what its traces say

Recorders that need different runs get one thaw each. Without --part, what this host cannot record is left out. A profile replaces the parts that were asked for and keeps the
others. Files that were packed by the old profile are not used any more: make them anew.")]
pub(crate) struct RecordArgs {
    #[command(flatten)]
    snapshot: SnapshotArgs,
    #[command(flatten)]
    signing: SignerArgs,
    /// What the function is asked: JSON, @FILE, or - for standard input
    #[arg(long, value_name = "EVENT")]
    invoke: Option<String>,
    /// A player: the trace that it replays, the first where none is named. A function: the event's
    /// name in the profile
    #[arg(long, value_name = "NAME")]
    input: Option<String>,
    /// What is recorded, separated by commas; default: all that can be of this snapshot
    #[arg(long, value_name = "PART", value_delimiter = ',')]
    part: Vec<String>,
    /// FaaSnap: after the answer freeze the guest into a second snapshot, which gets the groups and
    /// their loading-set file
    #[arg(long, value_name = "DIRECTORY", conflicts_with = "pool")]
    freeze: Option<PathBuf>,
    /// Seconds that the guest may take to wake, and the function to answer
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    time_limit: u64,
    /// The root file system, where it has moved since the freeze
    #[arg(long, value_name = "FILE")]
    root: Option<PathBuf>,
    /// Print one JSON object: the summary of the profile
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    monitor: MonitorHostArgs,
}

pub(crate) fn run(arguments: &RecordArgs) -> anyhow::Result<ExitCode> {
    let free = arguments.part.iter().any(|part| part == FREE);
    let others = arguments.part.iter().filter(|part| *part != FREE);
    let asked = others.map(|part| part.parse()).collect::<Result<Vec<Part>, _>>()?;
    let signer = arguments.snapshot.signer(&arguments.signing)?;
    let opened = arguments.snapshot.open()?;
    let snapshot = opened.snapshot();
    if signer.is_some() {
        // Only what was signed is signed again.
        snapshot.check_signed_files()?;
    }
    if arguments.freeze.is_some() && (free || asked.iter().any(|part| *part != Part::Groups)) {
        bail!("--freeze goes with the part groups alone, which belongs to the run that is frozen");
    }
    if let Some(second) = arguments.freeze.as_deref().filter(|path| is_same(path, snapshot.path()))
    {
        bail!(
            "--freeze names the snapshot that is recorded, {}: give the second snapshot a directory of its own",
            second.display()
        );
    }
    let lenient = asked.is_empty() && arguments.freeze.is_none();
    let parts = if arguments.freeze.is_some() {
        vec![Part::Groups]
    } else if asked.is_empty() && !free {
        let in_pool = opened.grant().is_some();
        Part::ALL.into_iter().filter(|part| part.in_pools() || !in_pool).collect()
    } else {
        asked
    };
    let mut profile = before(snapshot);
    let mut recorded = 0;
    if free {
        profile.free = Some(free_runs(snapshot)?);
    }
    let recorders = recorders::of(&parts);
    // Without one, the free pages alone: nothing runs.
    if !recorders.is_empty() {
        let is_player = traces_of(snapshot.manifest()).is_some();
        let event = event(arguments, is_player)?;
        let thaw = RecordedThaw {
            snapshot,
            event: event.as_deref(),
            input: arguments.input.as_deref().or(arguments.invoke.as_deref()),
            freeze: arguments.freeze.as_deref(),
            software_kvm: arguments.monitor.host.software_kvm,
            limit: Duration::from_secs(arguments.time_limit),
        };
        for recorder in recorders {
            let parts = recorder.parts();
            if !is_player {
                let names: Vec<&str> = parts.iter().copied().map(Part::name).collect();
                output::note(&format!("firn: a run is recorded for {}", names.join(", ")));
            }
            let outcome = match thaw.record(recorder, arguments, &mut profile) {
                Err(error) if lenient && is_host_limitation(&error) => {
                    left_out(&parts, &*error);
                    continue;
                }
                outcome => outcome?,
            };
            if let Some(outcome) = outcome.filter(|outcome| outcome.error.is_some()) {
                invoke::print(&outcome);
                output::note("firn: the function failed: no profile is written");
                return Ok(ExitCode::from(invoke::exit_code(&outcome)));
            }
            recorded += 1;
        }
    }
    if recorded == 0 && !free {
        bail!("nothing was recorded: this host refuses every part");
    }
    let summary = match &arguments.freeze {
        Some(second) => {
            let summary = give_second(second, &profile)?;
            signer.map_or(Ok(()), |signer| sign(second, &signer))?;
            summary
        }
        None => {
            arguments.snapshot.set_profile(&profile, signer.as_ref())?;
            Summary::of(&profile, snapshot)
        }
    };
    if arguments.json {
        output::json(&summary);
    } else {
        output::line(&summary.to_string());
    }
    Ok(ExitCode::SUCCESS)
}

/// The event of a guest with Linux.
fn event(arguments: &RecordArgs, is_player: bool) -> anyhow::Result<Option<String>> {
    if is_player {
        if arguments.invoke.is_some() {
            bail!("a player answers no event: leave --invoke out, and name its trace with --input");
        }
        if arguments.freeze.is_some() {
            bail!(
                "--freeze is for functions: a player's memory after a replay is not the memory that a replay starts from, so \
                 a player is its own second snapshot"
            );
        }
        return Ok(None);
    }
    let freeze = arguments.freeze.as_deref();
    let parent = freeze.and_then(Path::parent);
    if parent.is_some_and(|parent| parent != Path::new("") && !parent.is_dir()) {
        bail!(
            "the second snapshot cannot be {}: create the directory that contains it first",
            freeze.unwrap_or(Path::new("")).display()
        );
    }
    let event = arguments.invoke.as_deref().context(
        "the snapshot holds a function, which is recorded while it answers: give --invoke",
    )?;
    event::read(event).map(Some)
}

/// Whether the recorder failed because of what this host lacks.
fn is_host_limitation(error: &anyhow::Error) -> bool {
    error.downcast_ref().is_some_and(RecordError::is_host_limitation)
}

impl RecordingHost for RecordArgs {
    type Error = anyhow::Error;

    fn open(
        &self,
        descriptors: &mut Descriptors,
    ) -> anyhow::Result<(SourceSpec, Option<OpenedFile>)> {
        self.snapshot.source(self.root.as_deref(), descriptors)
    }

    fn spawn(&self) -> anyhow::Result<Supervisor> {
        supervisor::spawn(&self.monitor)
    }

    fn note(&self, text: &str) {
        output::note(&format!("firn: {text}"));
    }
}

/// Whether two paths are one directory, by whatever names and links.
fn is_same(one: &Path, other: &Path) -> bool {
    let place = |path: &Path| fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    place(one).is_some_and(|one| place(other) == Some(one))
}

/// Gives the second snapshot the groups of the run that it was frozen after, and its loading-set
/// file.
fn give_second(path: &Path, recorded: &Profile) -> anyhow::Result<Summary> {
    let second = Snapshot::open(path)?;
    let profile = Profile {
        inputs: recorded.inputs.clone(),
        groups: recorded.groups.clone(),
        ..second.profile_or_empty()?
    };
    set_profile(path, &profile)?;
    pack(path, &FaaSnap::default())?;
    Ok(Summary::of(&profile, &second))
}

/// The pages that the guest's allocator held free. A player's traces say which they were, and its
/// profile has had them since it was made.
fn free_runs(snapshot: &Snapshot) -> anyhow::Result<Vec<PageRange>> {
    if traces_of(snapshot.manifest()).is_some() {
        let profile = snapshot.profile().ok().flatten();
        return Ok(profile.and_then(|profile| profile.free).unwrap_or_default());
    }
    free_pages(snapshot).context("cannot find the guest's free pages")
}

/// The profile that the new parts go into. One that cannot be used is no reason not to record
/// another.
fn before(snapshot: &Snapshot) -> Profile {
    snapshot.profile_or_empty().unwrap_or_else(|error| {
        output::note(&format!(
            "firn: the profile that was there is given up: {}",
            output::plain(&error_chain(&error))
        ));
        Profile::of(snapshot.manifest().description.id)
    })
}
