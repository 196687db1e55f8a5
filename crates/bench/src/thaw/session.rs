//! One session: planners thaw players in turn, and every microVM is a process.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use fastrand::Rng;
use firn_base::PAGE_SIZE;
use firn_memory::planners::{pack, parse};
use firn_run::StartError;
use firn_snapshot::PackedFile;
use firn_vmm::Shape;

use super::error::SessionError;
use super::open_loop::{self, OpenLoop};
use super::results::{Noise, Results, Row, RowHead, Run};
use super::stock::StockPlayer;
use crate::batch::{self, Interrupt, Jails, Player, Prepared, Reports, in_one_group};
use crate::cache::{Cache, CacheError, SnapshotFiles};
use crate::cgroup::MemoryLimit;
use crate::free_reads::{self, FreeReads};
use crate::host::{self, Host};
use crate::players::{FrozenPlayer, Subject};
use crate::progress::{Progress, Steps};

/// A session of measurements.
#[derive(Clone, Debug)]
pub struct Session {
    /// The `firn-monitor` program: each microVM is a process of it.
    pub program: PathBuf,
    /// The jails of the monitors.
    pub jails: Jails,
    /// Players, measured one after the other.
    pub players: Vec<FrozenPlayer>,
    /// Planners, measured in turn. A planner that is listed twice is compared with itself.
    pub subjects: Vec<Subject>,
    /// Runs of each planner on each player.
    pub runs: u32,
    /// Runs before the first measured one, for planners that map from a pool. The manager then has
    /// prepared what such a run takes.
    pub warm_up: u32,
    /// MicroVMs that start together in a run.
    pub concurrency: u32,
    /// At most this number of a run's microVMs are in replicas at once, and the others wait; `None`
    /// has no limit.
    pub replicas: Option<u32>,
    /// States of the page cache before each run, measured one after the other. Planners that map
    /// from a pool use no page cache, and are measured with the first state only.
    pub caches: Vec<Cache>,
    /// Whether the guests also measure their time in page faults, which takes some time itself.
    pub faults: bool,
    /// Whether each microVM starts in a standby monitor of its own: the VM is made before the
    /// request.
    pub standby: bool,
    /// Starts at random intervals after the runs.
    pub open_loop: u32,
    /// The seed by which each run replays one of the player's inputs, the same for every planner;
    /// without it, the first one.
    pub mix: Option<u64>,
    /// Whether each microVM serves a second invocation after the first.
    pub warm: bool,
    /// Whether a long session is shortened: only the first run of each planner on each player
    /// checks all memory, while the others check what they touch, and a planner whose runs take
    /// 10 s has at most five.
    pub shortened: bool,
}

/// The name of a program that is measured beside planners.
const OTHER: &str = "the other program";

/// One run of a session.
#[derive(Clone, Copy)]
pub(crate) struct Turn<'a> {
    pub(crate) player: &'a FrozenPlayer,
    pub(crate) subject: &'a Subject,
    pub(crate) cache: Cache,
    /// The run, from 1, the warm-up included.
    pub(crate) run: u32,
    /// Whether the players end without checking all their memory.
    pub(crate) unchecked: bool,
}

impl Session {
    /// The number of batches that [`run_beside`](Self::run_beside) starts.
    fn batches(&self, stock: &[StockPlayer]) -> u64 {
        let beside = stock.len() as u64 * self.caches.len() as u64 * u64::from(self.runs);
        let turns = (0..self.caches.len()).map(|state| self.subjects_of(state).len() as u64);
        let in_pool = self.subjects.iter().filter(|subject| subject.in_pool).count() as u64;
        let warming = in_pool * u64::from(self.warm_up);
        let each = u64::from(self.runs) + u64::from(self.open_loop);
        self.players.len() as u64 * (turns.sum::<u64>() * each + warming) + beside
    }

    /// The subjects that are measured with a state of the page cache.
    fn subjects_of(&self, state: usize) -> Vec<&Subject> {
        self.subjects.iter().filter(|subject| state == 0 || !subject.in_pool).collect()
    }

    /// Runs all measurements. In each run every planner has its turn, in a random order that `seed`
    /// determines: a change of the host's load then affects all planners, and no planner always
    /// follows the same other one. All runs with one state of the page cache come before those with
    /// the next.
    ///
    /// # Errors
    ///
    /// [`SessionError`] at the first microVM that fails, and if the page cache cannot be brought
    /// into the required state.
    pub fn run(
        &self,
        host: Host,
        seed: u64,
        interrupt: &Interrupt,
        progress: &dyn Progress,
    ) -> Result<Results, SessionError> {
        self.run_beside(&[], host, seed, interrupt, progress)
    }

    /// Does the same with another program, which has its turns among those of the planners on the
    /// players that it has a snapshot of.
    pub(crate) fn run_beside(
        &self,
        stock: &[StockPlayer],
        host: Host,
        seed: u64,
        interrupt: &Interrupt,
        progress: &dyn Progress,
    ) -> Result<Results, SessionError> {
        let mut random = Rng::with_seed(seed);
        let mut steps = Steps::begin(progress, self.batches(stock));
        let mut done = |player: &FrozenPlayer, name: &str| {
            steps.advance(&format!("{name} on {}", player.trace));
        };
        let mut results = Results::at(host);
        results.warm_up = self.warm_up;
        results.mix = self.mix;
        results.order = Some(seed);
        let states = self.caches.iter().copied().enumerate();
        let turns = self.players.iter().flat_map(|player| states.clone().map(move |s| (player, s)));
        for (player, (state, cache)) in turns {
            player.settle()?;
            player
                .evict()
                .map_err(|source| SessionError::Player { trace: player.trace.clone(), source })?;
            let subjects = self.subjects_of(state);
            let mut runs: Vec<Vec<Run>> = subjects.iter().map(|_| Vec::new()).collect();
            let mut made: Vec<Option<Made>> = subjects.iter().map(|_| None).collect();
            let in_pool = subjects.iter().zip(&mut made).filter(|(subject, _)| subject.in_pool);
            for (subject, made) in in_pool {
                for run in 1..=self.warm_up {
                    let player = player.of(subject);
                    let turn = Turn { player, subject, cache, run, unchecked: false };
                    self.batch(&turn, made, interrupt)?;
                    done(player, &subject.planner);
                }
            }
            let stock = stock.iter().find(|stock| stock.trace() == player.trace);
            let mut stock_runs = Vec::new();
            for round in 0..self.runs {
                for index in shuffled(subjects.len() + stock.iter().len(), &mut random) {
                    let Some(subject) = subjects.get(index).copied() else {
                        let run = stock.map(|stock| stock.turn(cache, round + 1));
                        // A signal of the terminal reaches the program, too.
                        interrupt.check().map_err(|source| SessionError::Batch {
                            planner: OTHER.to_owned(),
                            trace: player.trace.clone(),
                            run: round + 1,
                            source,
                        })?;
                        stock_runs.extend(run.transpose()?);
                        done(player, OTHER);
                        continue;
                    };
                    let player = player.of(subject);
                    let made = &mut made[index];
                    let run = self.warm_up + round + 1;
                    if self.shortened && round >= LONG_RUNS && are_long(&runs[index]) {
                        done(player, &subject.planner);
                        continue;
                    }
                    let unchecked = self.shortened && round > 0;
                    let turn = Turn { player, subject, cache, run, unchecked };
                    runs[index].push(self.batch(&turn, made, interrupt)?);
                    done(player, &subject.planner);
                }
            }
            let mut rows = Vec::new();
            for (index, subject) in subjects.iter().enumerate() {
                let player = player.of(subject);
                let twins = twins(&subjects, subject);
                let place = twins.iter().position(|&twin| twin == index).unwrap_or_default();
                let head = RowHead {
                    label: (twins.len() > 1).then(|| label(place)),
                    standby_bytes: made[index].as_ref().and_then(|made| made.bytes),
                    ready_bytes: self.ready_bytes(player, subject)?,
                    ..self.head(player, subject, cache, &results.host)
                };
                // Each later one is compared with the first one.
                if place > 0 {
                    results.noise.extend(Noise::of(&head, &runs[twins[0]], &runs[index]));
                }
                rows.push(Row::of(head, &runs[index]).ok_or(SessionError::Nothing)?);
            }
            for ((subject, row), made) in subjects.iter().zip(&mut rows).zip(&mut made) {
                let player = player.of(subject);
                let started = || done(player, &subject.planner);
                row.open_loop =
                    self.open_loop(player, subject, row.total_ms.median, made, interrupt, started)?;
            }
            results.results.extend(rows);
            results.stock.extend(stock.and_then(|stock| stock.row(cache, &stock_runs)));
        }
        if results.results.is_empty() { Err(SessionError::Nothing) } else { Ok(results) }
    }

    /// Makes one run without the others of the session. The caller alternates it with those of
    /// other sessions, and makes a row of all of them by [`Self::row`].
    pub(crate) fn turn(&self, turn: &Turn<'_>, interrupt: &Interrupt) -> Result<Run, SessionError> {
        self.batch(turn, &mut None, interrupt)
    }

    /// A row of runs that [`Self::turn`] made.
    pub(crate) fn row(
        &self,
        turn: &Turn<'_>,
        host: &Host,
        runs: &[Run],
    ) -> Result<Row, SessionError> {
        let head = self.head(turn.player, turn.subject, turn.cache, host);
        Row::of(head, runs).ok_or(SessionError::Nothing)
    }

    /// What all rows of a subject on a player share.
    fn head(&self, player: &FrozenPlayer, subject: &Subject, cache: Cache, host: &Host) -> RowHead {
        RowHead {
            planner: row_name(subject),
            label: None,
            trace: player.trace.clone(),
            concurrency: self.concurrency,
            cache: cache_of(subject, cache),
            oversubscribed: u64::from(self.concurrency) > host.cpus,
            snapshots: self.snapshots_of(player),
            at_once: Some(self.at_once(subject)).filter(|at_once| *at_once < self.concurrency),
            recorded_on: player.recorded_on.clone().filter(|_| subject.learns()),
            standby_bytes: None,
            ready_bytes: None,
        }
    }

    /// MicroVMs of a batch that run together. The others wait.
    fn at_once(&self, subject: &Subject) -> u32 {
        let limit = self.replicas.filter(|_| subject.replicates());
        limit.map_or(self.concurrency, |limit| limit.clamp(1, self.concurrency.max(1)))
    }

    /// The number of snapshots that the microVMs of a batch are thawed from.
    fn snapshots_of(&self, player: &FrozenPlayer) -> u32 {
        let all = u32::try_from(player.others.len()).unwrap_or(u32::MAX).saturating_add(1);
        all.min(self.concurrency)
    }

    /// Packs the file that a planner maps, and returns which one it is.
    fn pack(
        &self,
        place: &FrozenPlayer,
        subject: &Subject,
    ) -> Result<Option<PackedFile>, SessionError> {
        if !subject.packs {
            return Ok(None);
        }
        let packed = pack(&place.snapshot, &*parse(&subject.planner)?);
        let (planner, trace) = (subject.planner.clone(), place.trace.clone());
        let packed = packed.map_err(Box::new).map_err(|source| SessionError::Pack {
            planner,
            trace,
            source,
        })?;
        Ok(packed.map(|report| report.file))
    }

    /// The monitors of a batch that are prepared before it, if it starts in such; none otherwise.
    /// `made` is what standby monitors make, once it is known.
    fn prepare(
        &self,
        batch: &[Player<'_>],
        ready: bool,
        made: &mut Option<Made>,
    ) -> Result<Vec<Prepared>, StartError> {
        let players = batch.iter().cycle().zip(0..self.concurrency);
        if ready {
            let make = |(player, _): (&Player<'_>, _)| Ok(Prepared::Ready(player.make_ready()?.0));
            let clones = players.map(make).collect::<Result<_, StartError>>()?;
            // What the manager prepares in the place of what they took is no part of the batch.
            if let Some(player) = batch.first() {
                player.settle()?;
            }
            return Ok(clones);
        }
        let Some(player) = batch.first().filter(|_| self.standby) else { return Ok(Vec::new()) };
        let made = match made {
            Some(made) => made,
            None => made.insert(Made::of(player)?),
        };
        players.map(|(player, _)| Ok(Prepared::Standby(player.stand_by(&made.shape)?))).collect()
    }

    /// Memory of one ready clone, if the subject starts from such.
    fn ready_bytes(
        &self,
        place: &FrozenPlayer,
        subject: &Subject,
    ) -> Result<Option<u64>, SessionError> {
        if !subject.ready {
            return Ok(None);
        }
        let bytes = ready_bytes(&self.player(place, subject, None));
        bytes.map_err(|source| SessionError::StandBy {
            planner: subject.planner.clone(),
            trace: place.trace.clone(),
            source: Box::new(source),
        })
    }

    /// The input that a run replays.
    fn input<'a>(&self, player: &'a FrozenPlayer, run: u32) -> Option<&'a str> {
        let mut random = Rng::with_seed(self.mix?.wrapping_add(u64::from(run)));
        random.choice(&player.inputs).map(String::as_str)
    }

    fn player<'a>(
        &'a self,
        place: &'a FrozenPlayer,
        subject: &'a Subject,
        input: Option<&'a str>,
    ) -> Player<'a> {
        Player {
            input,
            program: &self.program,
            snapshot: place.place(subject),
            planner: &subject.planner,
            preloaded: subject.preloads,
            faults: self.faults,
            warm: self.warm,
            unchecked: false,
            jail: self.jails.of(subject.jailed),
        }
    }

    /// Starts at random intervals, after the runs, whose median is `idle_ms`.
    fn open_loop(
        &self,
        place: &FrozenPlayer,
        subject: &Subject,
        idle_ms: f64,
        made: &mut Option<Made>,
        interrupt: &Interrupt,
        started: impl FnMut(),
    ) -> Result<Option<OpenLoop>, SessionError> {
        if self.open_loop == 0 {
            return Ok(None);
        }
        let (planner, trace) = (&subject.planner, &place.trace);
        let player = self.player(place, subject, None);
        let made = made.as_ref().map(|made| &made.shape).filter(|_| self.standby);
        let reports = open_loop::starts(player, self.open_loop, made, interrupt, started);
        let reports = reports.map_err(|source| SessionError::Batch {
            planner: planner.clone(),
            trace: trace.clone(),
            run: self.warm_up + self.runs + 1,
            source,
        })?;
        place.settle()?;
        Ok(OpenLoop::of(&reports, idle_ms))
    }

    fn batch(
        &self,
        turn: &Turn<'_>,
        made: &mut Option<Made>,
        interrupt: &Interrupt,
    ) -> Result<Run, SessionError> {
        let Turn { player, subject, cache: state, run, unchecked } = *turn;
        let (planner, trace) = (subject.planner.clone(), player.trace.clone());
        let cache = |source| SessionError::Cache {
            planner: planner.clone(),
            trace: trace.clone(),
            run,
            source,
        };
        // Those that no microVM of the batch thaws are left as they are.
        let places: Vec<&FrozenPlayer> = std::iter::once(player)
            .chain(&player.others)
            .zip(0..self.concurrency)
            .map(|(place, _)| place)
            .collect();
        let (mut files, mut free) = (Vec::new(), Vec::new());
        // A run reads no pages that were cached before it.
        let counts_free = !subject.in_pool && !subject.preloads && state == Cache::Cold;
        for place in &places {
            let packed = self.pack(place, subject)?;
            if counts_free {
                free.extend(FreeReads::of(&place.snapshot, packed));
            }
            let opened = SnapshotFiles::open(&place.snapshot, packed);
            files.push(
                opened.map_err(|source| SessionError::Player { trace: trace.clone(), source })?,
            );
        }
        let mut preload_ns = None;
        for files in &files {
            let took = files.prepare(cache_of(subject, state), subject.preloads).map_err(cache)?;
            preload_ns = took.map(|ns| ns + preload_ns.unwrap_or_default()).or(preload_ns);
        }
        // A planner of a pool does not use the directory, so cached pages of it are none of its
        // cost.
        let tables = host::kvm_table_bytes();
        let held = || {
            let grown = host::kvm_table_bytes().saturating_sub(tables);
            let cached = match subject.in_pool {
                true => Ok(0),
                false => files.iter().try_fold(0, |sum, files| Ok(sum + files.cached_bytes()?)),
            };
            let free: io::Result<Vec<_>> = free.iter().map(FreeReads::count).collect();
            if !subject.in_pool && !unchecked {
                files.iter().for_each(SnapshotFiles::warm);
            }
            (grown, cached, free)
        };
        let batch: Vec<_> = places
            .iter()
            .map(|place| Player {
                unchecked,
                ..self.player(place, subject, self.input(place, run))
            })
            .collect();
        let prepared =
            self.prepare(&batch, subject.ready, made).map_err(|source| SessionError::StandBy {
                planner: planner.clone(),
                trace: trace.clone(),
                source: Box::new(source),
            })?;
        let Reports { reports, burst_ns, held: (kvm_table_bytes, cached_bytes, free) } =
            batch::run(&batch, self.concurrency, self.at_once(subject), prepared, interrupt, held)
                .map_err(|source| SessionError::Batch {
                    planner: planner.clone(),
                    trace: trace.clone(),
                    run,
                    source,
                })?;
        let cached_bytes = cached_bytes.map_err(cache)?;
        let settle_ns = player.settle()?.filter(|_| subject.in_pool);
        let unread = |source| cache(CacheError::Io { path: player.snapshot.clone(), source });
        let free = free.map_err(unread)?;
        let free_bytes = (!free.is_empty()).then(|| free_reads::bytes(&free, &reports));
        Ok(Run {
            reports,
            burst_ns,
            preload_ns,
            settle_ns,
            cached_bytes,
            free_bytes,
            kvm_table_bytes,
        })
    }
}

/// What standby monitors make for a player.
struct Made {
    shape: Shape,
    /// Memory that one takes, the kernel's own for it included; `None` where it cannot be counted.
    bytes: Option<u64>,
}

impl Made {
    fn of(player: &Player<'_>) -> Result<Self, StartError> {
        let shape = player.shape()?;
        let jail = in_one_group();
        let player = Player { jail: &jail, ..*player };
        let bytes = counted(|| player.stand_by(&shape), |_| 0)?;
        Ok(Self { shape, bytes })
    }
}

/// Memory of one ready clone: what is charged to its group, and its copy, which the pool's manager
/// made. `None` where it cannot be counted.
fn ready_bytes(player: &Player<'_>) -> Result<Option<u64>, StartError> {
    let jail = in_one_group();
    let player = Player { jail: &jail, ..*player };
    counted(|| player.make_ready(), |(_, making)| making.copy_bytes)
}

/// Memory of one of what `make` makes: by the counters of a control group, which has the kernel's
/// own for it, and what `elsewhere` returns. `None` where it cannot be counted: it is only a
/// measurement.
fn counted<T>(
    make: impl Fn() -> Result<T, StartError>,
    elsewhere: impl Fn(&T) -> u64,
) -> Result<Option<u64>, StartError> {
    let Ok(group) = MemoryLimit::enter(NO_LIMIT) else { return Ok(None) };
    let total = || group.usage().ok().map(|usage| usage.total);
    let before = total();
    let made: Vec<T> = (0..COUNTED).map(|_| make()).collect::<Result<_, _>>()?;
    let grown = total().zip(before).map(|(after, before)| after.saturating_sub(before));
    let elsewhere: u64 = made.iter().map(elsewhere).sum();
    // The group can only be removed without them.
    drop(made);
    Ok(grown.map(|grown| (grown + elsewhere) / COUNTED))
}

/// From this time on a run is long.
const LONG: Duration = Duration::from_secs(10);
/// Long runs of a shortened session, at most.
const LONG_RUNS: u32 = 5;

/// Whether half of these runs or more are long.
fn are_long(runs: &[Run]) -> bool {
    let long = runs.iter().filter(|run| Duration::from_nanos(run.burst_ns) >= LONG).count();
    2 * long >= runs.len()
}

/// Processes whose memory is counted together: the kernel charges in batches.
const COUNTED: u64 = 8;
/// The largest limit of a control group, which limits nothing.
const NO_LIMIT: u64 = (i64::MAX as u64) & !(PAGE_SIZE - 1);

/// The state of the page cache before a run of a subject.
fn cache_of(subject: &Subject, state: Cache) -> Cache {
    if subject.in_pool { Cache::Unused } else { state }
}

/// The indices of a planner among the subjects.
fn twins(subjects: &[&Subject], subject: &Subject) -> Vec<usize> {
    let of = |subject: &Subject| (subject.planner.clone(), subject.jailed);
    (0..subjects.len()).filter(|&i| of(subjects[i]) == of(subject)).collect()
}

/// The planner's name in a row.
fn row_name(subject: &Subject) -> String {
    let planner = &subject.planner;
    if subject.jailed { planner.clone() } else { format!("{planner} without a jail") }
}

/// The order of `n` subjects in a round.
pub(crate) fn shuffled(n: usize, random: &mut Rng) -> Vec<usize> {
    let mut order: Vec<usize> = (0..n).collect();
    random.shuffle(&mut order);
    order
}

/// `a`, `b`, and so on.
fn label(place: usize) -> String {
    let letter = u8::try_from(place).ok().and_then(|place| b'a'.checked_add(place));
    letter
        .filter(u8::is_ascii_lowercase)
        .map_or_else(|| place.to_string(), |l| char::from(l).to_string())
}

#[cfg(test)]
#[path = "session_tests.rs"]
mod tests;
