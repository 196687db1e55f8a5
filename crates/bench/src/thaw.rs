//! The comparison of planners: thaws of players, interleaved in one session.

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use firn_memory::planners::{PackError, ParsePlannerError, pack, parse};
use firn_pool::{Client, ClientError};
use firn_snapshot::PackedFile;
use thiserror::Error;

use crate::batch::{self, BatchError, Interrupt, Player};
use crate::cache::{Cache, CacheError, SnapshotFiles};
use crate::free_reads::{self, FreeReads};
use crate::host::{self, Host};
use crate::results::{Noise, Results, Row, RowHead, Run};

/// What a manager takes at most to notice that a client is gone.
const NOTICED: Duration = Duration::from_millis(5);

/// A planner that is to be measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject {
    /// As it is written, with all its options.
    pub planner: String,
    /// Whether its plan preloads the image before the resume.
    pub preloads: bool,
    /// Whether it maps the snapshot from a pool.
    pub in_pool: bool,
    /// Whether it maps a file that was packed from the image. It is packed before each batch in which it is not what the
    /// planner needs.
    pub packs: bool,
}

/// A player frozen for a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frozen {
    /// The trace.
    pub trace: String,
    /// The snapshot's directory.
    pub snapshot: PathBuf,
    /// The same player in a pool, for the planners that map it from there.
    pub pooled: Option<Pooled>,
    /// The input that the profile was recorded on, where there is one.
    pub recorded_on: Option<String>,
    /// The same player with other content, in snapshots of their own, for microVMs that are not to share one: those of a batch take
    /// turns.
    pub others: Vec<Self>,
}

/// A snapshot in a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pooled {
    /// The socket of the pool's manager.
    pub socket: PathBuf,
    /// Its name there.
    pub name: String,
}

impl Frozen {
    /// What names the snapshot to `firn thaw`, for a subject.
    #[must_use]
    pub fn arguments(&self, subject: &Subject) -> Vec<OsString> {
        match self.pooled.as_ref().filter(|_| subject.in_pool) {
            Some(Pooled { socket, name }) => {
                vec!["--pool".into(), socket.into(), name.into()]
            }
            None => vec![self.snapshot.clone().into()],
        }
    }

    /// Empties the page cache of the snapshots. What a run left there would have the folios of that run's planner, and they would stay where
    /// the next runs want all of it cached.
    fn evict(&self) -> Result<(), SessionError> {
        for place in std::iter::once(self).chain(&self.others) {
            let player = |source| SessionError::Player { trace: self.trace.clone(), source };
            SnapshotFiles::all(&place.snapshot).and_then(|files| files.evict()).map_err(player)?;
        }
        Ok(())
    }

    /// Waits until the pool has ready what it makes ahead: in ns. What a run left to do is part of none that follows.
    fn settle(&self) -> Result<Option<u64>, ClientError> {
        let Some(pooled) = &self.pooled else { return Ok(None) };
        let begin = Instant::now();
        // The manager sees the end of a microVM's connection a moment after the microVM's end.
        std::thread::sleep(NOTICED);
        Client::connect(&pooled.socket)?.settle()?;
        let ns = begin.elapsed().saturating_sub(NOTICED).as_nanos();
        Ok(Some(u64::try_from(ns).unwrap_or(u64::MAX)))
    }
}

/// What is measured.
#[derive(Clone, Debug)]
pub struct Session {
    /// The `firn` that each microVM is a process of.
    pub program: PathBuf,
    /// Players, measured one after the other.
    pub players: Vec<Frozen>,
    /// Planners, measured in turn. One that is named twice is measured against itself.
    pub subjects: Vec<Subject>,
    /// Runs of each planner on each player.
    pub runs: u32,
    /// Runs of planners that map from a pool, before those that count: the manager has ready then what such a batch takes.
    pub warm_up: u32,
    /// MicroVMs that are started together in a run.
    pub concurrency: u32,
    /// States of the page cache, measured one after the other: each before each run. Planners that map from a pool use no page cache, and
    /// have their turns with the first.
    pub caches: Vec<Cache>,
    /// Whether the guests measure the time in page faults too, which takes some itself.
    pub faults: bool,
}

/// Why there are no results: nothing is averaged over failures.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SessionError {
    /// A microVM failed.
    #[error("{planner} failed on {trace} in run {run}")]
    Batch {
        /// The planner.
        planner: String,
        /// The trace.
        trace: String,
        /// The run, from 1.
        run: u32,
        /// How.
        source: BatchError,
    },
    /// The page cache is not as it should be.
    #[error("{planner} cannot be measured on {trace} in run {run}")]
    Cache {
        /// The planner.
        planner: String,
        /// The trace.
        trace: String,
        /// The run, from 1.
        run: u32,
        /// Why.
        source: CacheError,
    },
    /// A planner's name is none.
    #[error(transparent)]
    Planner(#[from] ParsePlannerError),
    /// The file that a planner maps cannot be packed.
    #[error("packing what {planner} needs of the player of {trace}")]
    Pack {
        /// The planner.
        planner: String,
        /// The trace.
        trace: String,
        /// Why.
        source: Box<PackError>,
    },
    /// The pool's manager does not answer.
    #[error("waiting for the pool to be ready")]
    Pool(#[from] ClientError),
    /// The files of a snapshot cannot be opened.
    #[error("opening the player of {trace}")]
    Player {
        /// The trace.
        trace: String,
        /// Why.
        source: CacheError,
    },
    /// Nothing was asked for.
    #[error("nothing to measure: give at least one planner, one trace and one run")]
    Nothing,
}

impl Session {
    /// Batches that [`run`](Self::run) starts, for a progress bar.
    #[must_use]
    pub fn batches(&self) -> u64 {
        let turns = (0..self.caches.len()).map(|state| self.subjects_of(state).len() as u64);
        let in_pool = self.subjects.iter().filter(|subject| subject.in_pool).count() as u64;
        let warming = in_pool * u64::from(self.warm_up);
        self.players.len() as u64 * (turns.sum::<u64>() * u64::from(self.runs) + warming)
    }

    /// Who has a turn with a state of the page cache.
    fn subjects_of(&self, state: usize) -> Vec<&Subject> {
        self.subjects.iter().filter(|subject| state == 0 || !subject.in_pool).collect()
    }

    /// Measures. In each run every planner has its turn, in an order that is rotated from run to run, so that what
    /// changes on the host meets all of them, and none always follows the same other. With several states of the page cache all
    /// runs with one come before those with the next.
    ///
    /// `done` is called after each batch with the planner that it was of.
    ///
    /// # Errors
    ///
    /// [`SessionError`] at the first microVM that fails, and where the page cache cannot be brought into the
    /// state that was asked for.
    pub fn run(
        &self,
        host: Host,
        interrupt: &Interrupt,
        mut done: impl FnMut(&Frozen, &Subject),
    ) -> Result<Results, SessionError> {
        let mut results = Results::at(host);
        results.warm_up = self.warm_up;
        let oversubscribed = u64::from(self.concurrency) > results.host.cpus;
        let states = self.caches.iter().copied().enumerate();
        let turns = self.players.iter().flat_map(|player| states.clone().map(move |s| (player, s)));
        for (player, (state, cache)) in turns {
            player.settle()?;
            player.evict()?;
            let subjects = self.subjects_of(state);
            let mut runs: Vec<Vec<Run>> = subjects.iter().map(|_| Vec::new()).collect();
            for subject in subjects.iter().filter(|subject| subject.in_pool) {
                for run in 1..=self.warm_up {
                    self.batch(player, subject, cache, run, interrupt)?;
                    done(player, subject);
                }
            }
            for round in 0..self.runs {
                for index in rotation(subjects.len(), round) {
                    let subject = subjects[index];
                    runs[index].push(self.batch(player, subject, cache, round + 1, interrupt)?);
                    done(player, subject);
                }
            }
            for (index, subject) in subjects.iter().enumerate() {
                let twins = twins(&subjects, subject);
                let place = twins.iter().position(|&twin| twin == index).unwrap_or_default();
                let head = RowHead {
                    planner: subject.planner.clone(),
                    label: (twins.len() > 1).then(|| label(place)),
                    trace: player.trace.clone(),
                    concurrency: self.concurrency,
                    cache: cache_of(subject, cache),
                    oversubscribed,
                    snapshots: self.snapshots_of(player),
                    recorded_on: player.recorded_on.clone().filter(|_| subject.learns()),
                };
                // Each later one is compared with the first.
                if place > 0 {
                    results.noise.extend(Noise::of(&head, &runs[twins[0]], &runs[index]));
                }
                results.results.push(Row::of(head, &runs[index]).ok_or(SessionError::Nothing)?);
            }
        }
        if results.results.is_empty() { Err(SessionError::Nothing) } else { Ok(results) }
    }

    /// How many snapshots the microVMs of a batch are of.
    fn snapshots_of(&self, player: &Frozen) -> u32 {
        let all = u32::try_from(player.others.len()).unwrap_or(u32::MAX).saturating_add(1);
        all.min(self.concurrency)
    }

    /// Has the file there that a planner maps, and says which it is.
    fn pack(&self, place: &Frozen, subject: &Subject) -> Result<Option<PackedFile>, SessionError> {
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

    fn batch(
        &self,
        player: &Frozen,
        subject: &Subject,
        state: Cache,
        run: u32,
        interrupt: &Interrupt,
    ) -> Result<Run, SessionError> {
        let (planner, trace) = (subject.planner.clone(), player.trace.clone());
        let cache = |source| SessionError::Cache {
            planner: planner.clone(),
            trace: trace.clone(),
            run,
            source,
        };
        let places: Vec<&Frozen> = std::iter::once(player).chain(&player.others).collect();
        let (mut files, mut free) = (Vec::new(), Vec::new());
        // What is cached before a run is not read in it.
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
        // What the page cache holds of the directory is no cost of a planner that does not use it.
        let tables = host::kvm_table_bytes();
        let held = || {
            let grown = host::kvm_table_bytes().saturating_sub(tables);
            let cached = match subject.in_pool {
                true => Ok(0),
                false => files.iter().try_fold(0, |sum, files| Ok(sum + files.cached_bytes()?)),
            };
            let free: io::Result<Vec<_>> = free.iter().map(FreeReads::count).collect();
            if !subject.in_pool {
                files.iter().for_each(SnapshotFiles::warm);
            }
            (grown, cached, free)
        };
        let arguments: Vec<_> = places.iter().map(|place| place.arguments(subject)).collect();
        let batch: Vec<Player<'_>> = arguments
            .iter()
            .map(|snapshot| Player {
                program: &self.program,
                snapshot,
                planner: &subject.planner,
                preloaded: subject.preloads,
                faults: self.faults,
            })
            .collect();
        let (reports, (kvm_table_bytes, cached_bytes, free)) =
            batch::run(&batch, self.concurrency, interrupt, held).map_err(|source| {
                SessionError::Batch { planner: planner.clone(), trace: trace.clone(), run, source }
            })?;
        let cached_bytes = cached_bytes.map_err(cache)?;
        let settle_ns = player.settle()?.filter(|_| subject.in_pool);
        let unread = |source| cache(CacheError::Io { path: player.snapshot.clone(), source });
        let free = free.map_err(unread)?;
        let free_bytes = (!free.is_empty()).then(|| free_reads::bytes(&free, &reports));
        Ok(Run { reports, preload_ns, settle_ns, cached_bytes, free_bytes, kvm_table_bytes })
    }
}

impl Subject {
    /// Whether its plans depend on the profile.
    fn learns(&self) -> bool {
        parse(&self.planner).is_ok_and(|planner| planner.learns())
    }
}

/// The page cache before a run of a subject, of the states that are measured.
fn cache_of(subject: &Subject, state: Cache) -> Cache {
    if subject.in_pool { Cache::Unused } else { state }
}

/// The places of a planner among subjects.
fn twins(subjects: &[&Subject], subject: &Subject) -> Vec<usize> {
    (0..subjects.len()).filter(|&i| subjects[i].planner == subject.planner).collect()
}

/// The order of `n` subjects in a round: each round starts one later.
fn rotation(n: usize, round: u32) -> impl Iterator<Item = usize> {
    let first = usize::try_from(round).unwrap_or_default().checked_rem(n).unwrap_or_default();
    (first..n).chain(0..first)
}

/// `a`, `b`, and so on.
fn label(place: usize) -> String {
    let letter = u8::try_from(place).ok().and_then(|place| b'a'.checked_add(place));
    letter
        .filter(u8::is_ascii_lowercase)
        .map_or_else(|| place.to_string(), |l| char::from(l).to_string())
}

#[cfg(test)]
#[path = "thaw_tests.rs"]
mod tests;
