//! The measurements of an experiment: all tiers of a function in one session.

use fastrand::Rng;
use firn_base::error_chain;
use firn_run::StartReport;
use thiserror::Error;

use super::cell::Times;
use super::tiers::{ActiveTier, GuestFault, Media, processors};
use super::{At, Candidate, Cell, SystorConfig, SystorError, SystorOutcome};
use crate::batch::Jails;
use crate::harness::Harness;
use crate::host::Host;
use crate::player::{GapFactor, Leaves, Repeats};
use crate::players::{PlayersConfig, PlayersError, Prepared, Subject};
use crate::progress::{Quiet, Steps};
use crate::stats::Summary;
use crate::thaw::{Run, Session, SessionError, Turn, shuffled};
use crate::tier::EmulateError;
use crate::traces::load;

/// The trace that shows what a guest's cold fault takes on a tier.
const FAULTS: &str = "sequential-read:8M";

/// Why a tier or a cell is left out.
#[derive(Debug, Error)]
enum CellError {
    /// Its snapshots cannot be made.
    #[error(transparent)]
    Players(#[from] PlayersError),
    /// A microVM failed.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// The delays of an emulated disk cannot be changed.
    #[error(transparent)]
    Emulate(#[from] EmulateError),
    /// A guest reads faster than the delays let it.
    #[error(
        "the delays do not hold for guests: {reads} reads took {ms} ms, and cannot take less than {least} ms; is another \
         blkio rule in force?"
    )]
    Unlimited { reads: u64, ms: f64, least: f64 },
}

/// What all measurements share.
pub(super) struct Study<'a> {
    pub(super) config: &'a SystorConfig,
    pub(super) harness: &'a Harness<'a>,
    /// Bytes of DRAM that may be used.
    pub(super) room: u64,
}

/// Tiers that are measured on the same snapshots.
struct Shared<'a> {
    tiers: Vec<&'a ActiveTier>,
    /// DRAM of a microVM.
    needs: u64,
}

/// The runs of one cell.
struct Arm<'a> {
    at: At<'a>,
    tier: &'a ActiveTier,
    /// Whether it measures the cell a second time, to see the noise.
    again: bool,
    session: Session,
    host: Host,
    subject: Subject,
    runs: Vec<Run>,
}

impl Study<'_> {
    /// Sets a tier up and checks that its delays hold for `readers` guests at once. The inner error
    /// is why it is left out.
    pub(super) fn set_up(
        &self,
        candidate: Candidate<'_>,
        media: &mut Media,
        readers: u32,
    ) -> Result<Result<ActiveTier, String>, SystorError> {
        let mut active = match candidate.activate(media) {
            Ok(active) => active,
            Err(error) => return Ok(Err(error_chain(&error))),
        };
        let proved = self.prove(&mut active, readers);
        self.harness.interrupt.check()?;
        Ok(proved.map(|()| active).map_err(|error| error_chain(&error)))
    }

    /// Measures cold faults of guests that read at once from an emulated disk, without delays and
    /// with them, and checks that they are not faster than the delays let them.
    fn prove(&self, tier: &mut ActiveTier, readers: u32) -> Result<(), CellError> {
        let Some(delay) = tier.used.delay_for(readers) else { return Ok(()) };
        let players = PlayersConfig {
            gaps: GapFactor::NONE,
            again: None,
            ..self.players(tier, FAULTS, &[false])
        };
        tier.delay(None)?;
        let prepared = players.prepare(None, readers, readers, self.harness)?;
        let session = self.session(&prepared, readers, false);
        let pages = |report: &StartReport| report.replay.as_ref().map_or(0, |found| found.pages);
        let mut faults = [0.0; 2];
        for (fault, delayed) in faults.iter_mut().zip([false, true]) {
            tier.delay(delayed.then_some(readers))?;
            let turn = |run| self.turn(&session, &prepared.subjects[0], tier, run);
            let runs = (1..=self.config.runs).map(turn).collect::<Result<Vec<_>, _>>()?;
            let reports = || runs.iter().flat_map(|run| &run.reports);
            let times = reports().map(|report| {
                report.times.replay_ns.unwrap_or_default() as f64 / pages(report).max(1) as f64
            });
            *fault = Summary::of(&times.collect::<Vec<_>>()).map_or(0.0, |time| time.median);
            for run in runs.iter().filter(|_| delayed) {
                let reads = run.reports.iter().map(pages).sum();
                let all = delay.first_page_ns * reads as f64;
                let least = all / f64::from(readers.min(processors()));
                if (run.burst_ns as f64) < least {
                    let (ms, least) = (run.burst_ns as f64 / 1e6, least / 1e6);
                    return Err(CellError::Unlimited { reads, ms, least });
                }
            }
        }
        tier.delay(None)?;
        let [without_ns, with_ns] = faults;
        tier.used.guest_fault = Some(GuestFault { readers, without_ns, with_ns });
        Ok(())
    }

    fn players(&self, tier: &ActiveTier, trace: &str, readahead: &[bool]) -> PlayersConfig {
        PlayersConfig {
            planners: readahead.iter().map(|on| planner(*on)).collect(),
            traces: vec![trace.to_owned()],
            directory: Some(tier.path().to_owned()),
            leaves: Leaves::Recorded,
            gaps: GapFactor::FULL,
            dense: true,
            again: Some(Repeats::Recorded),
            medium: tier.used.model,
            ..PlayersConfig::default()
        }
    }

    fn session(&self, prepared: &Prepared, microvms: u32, warm: bool) -> Session {
        Session {
            program: self.harness.program.clone(),
            jails: Jails::default(),
            players: prepared.players.clone(),
            subjects: prepared.subjects.clone(),
            runs: self.config.runs,
            warm_up: 0,
            concurrency: microvms,
            replicas: None,
            caches: Vec::new(),
            standby: false,
            open_loop: 0,
            mix: None,
            faults: false,
            warm,
            shortened: true,
        }
    }

    /// One run. The first one checks all memory of its players; each one checks what it touches.
    fn turn(
        &self,
        session: &Session,
        subject: &Subject,
        tier: &ActiveTier,
        run: u32,
    ) -> Result<Run, SessionError> {
        let player = session.players.first().ok_or(SessionError::Nothing)?;
        let turn = Turn { player, subject, cache: tier.cache(), run, unchecked: run > 1 };
        session.turn(&turn, self.harness.interrupt)
    }

    /// Measures cells of one function. Numbers of microVMs that fit on all media at once have all
    /// tiers in turn; larger ones have one medium after the other.
    pub(super) fn measure(
        &self,
        tiers: &[(Candidate<'_>, ActiveTier)],
        cells: &[At<'_>],
        outcome: &mut SystorOutcome,
    ) -> Result<(), SystorError> {
        let Some(At { trace, .. }) = cells.first() else { return Ok(()) };
        let loaded = load(trace)?.trace;
        let mut shared: Vec<Shared<'_>> = Vec::new();
        for (candidate, tier) in tiers {
            if !cells.iter().any(|at| at.tier == tier.used.name) {
                continue;
            }
            match shared.iter_mut().find(|shared| shared.tiers[0].shares(tier)) {
                Some(shared) => shared.tiers.push(tier),
                None => {
                    shared.push(Shared { tiers: vec![tier], needs: candidate.needs(&loaded) });
                }
            }
        }
        let all: u64 = shared.iter().map(|shared| shared.needs).sum();
        let (together, alone): (Vec<At<'_>>, Vec<At<'_>>) =
            cells.iter().partition(|at| all * u64::from(at.microvms) <= self.room);
        self.measure_together(&shared, &together, outcome)?;
        for shared in &shared {
            self.measure_together(std::slice::from_ref(shared), &alone, outcome)?;
        }
        Ok(())
    }

    /// Measures the cells that are of these tiers.
    fn measure_together(
        &self,
        shared: &[Shared<'_>],
        cells: &[At<'_>],
        outcome: &mut SystorOutcome,
    ) -> Result<(), SystorError> {
        let mut prepared = Vec::new();
        for Shared { tiers, .. } in shared {
            let names = |at: &&At<'_>| tiers.iter().any(|tier| tier.used.name == at.tier);
            let cells: Vec<At<'_>> = cells.iter().filter(names).copied().collect();
            let Some(most) = cells.iter().map(|at| at.microvms).max() else { continue };
            self.harness.interrupt.check()?;
            match self.prepare(tiers[0], &cells, most) {
                Ok(players) => prepared.push((tiers, players, cells)),
                Err(error) => {
                    for at in cells {
                        outcome.leave_out(at.trace, at.tier, at.microvms, error_chain(&error));
                    }
                }
            }
        }
        let mut numbers: Vec<u32> = cells.iter().map(|at| at.microvms).collect();
        numbers.sort_unstable();
        numbers.dedup();
        for number in numbers {
            let mut arms = Vec::new();
            for (tiers, players, cells) in &prepared {
                for at in cells.iter().filter(|at| at.microvms == number) {
                    let tier = tiers.iter().find(|tier| tier.used.name == at.tier);
                    let Some(tier) = tier else { continue };
                    let wanted = planner(at.readahead);
                    let subject = players.subjects.iter().find(|found| found.planner == wanted);
                    let Some(subject) = subject else { continue };
                    // The first tier is measured twice.
                    let twice = outcome.tiers.first().is_some_and(|first| first.name == at.tier);
                    for again in [false, true].into_iter().filter(|again| twice || !again) {
                        arms.push(Some(Arm {
                            at: *at,
                            tier,
                            again,
                            session: self.session(players, number, true),
                            host: players.host.clone(),
                            subject: subject.clone(),
                            runs: Vec::new(),
                        }));
                    }
                }
            }
            self.run(&mut arms, outcome)?;
            for arm in arms.into_iter().flatten() {
                match arm.cell() {
                    Ok(cell) if arm.again => outcome.noise.push(cell),
                    Ok(cell) => outcome.cells.push(cell),
                    Err(error) => {
                        outcome.leave_out(arm.at.trace, arm.at.tier, number, error_chain(&error));
                    }
                }
            }
        }
        Ok(())
    }

    fn prepare(
        &self,
        tier: &ActiveTier,
        cells: &[At<'_>],
        most: u32,
    ) -> Result<Prepared, CellError> {
        let mut readahead: Vec<bool> = cells.iter().map(|at| at.readahead).collect();
        readahead.sort_unstable();
        readahead.dedup();
        tier.delay(None)?;
        let players = self.players(tier, cells[0].trace, &readahead);
        let quiet =
            Harness { progress: &Quiet, program: self.harness.program.clone(), ..*self.harness };
        Ok(players.prepare(None, most, most, &quiet)?)
    }

    /// Makes all runs, each with every arm in an order of its own. An arm that fails is left out.
    fn run(
        &self,
        arms: &mut [Option<Arm<'_>>],
        outcome: &mut SystorOutcome,
    ) -> Result<(), SystorError> {
        let steps = arms.len() as u64 * u64::from(self.config.runs);
        let mut steps = Steps::begin(self.harness.progress, steps);
        for run in 1..=self.config.runs {
            let seed = outcome.order.wrapping_add(run.into());
            for index in shuffled(arms.len(), &mut Rng::with_seed(seed)) {
                let Some(arm) = &mut arms[index] else { continue };
                let (At { trace, microvms, .. }, tier) = (arm.at, arm.name());
                match self.run_arm(arm, run) {
                    Ok(()) => steps.advance(&format!("{trace} on {tier}, {microvms} at once")),
                    Err(error) => {
                        self.harness.interrupt.check()?;
                        outcome.leave_out(trace, &tier, microvms, error_chain(&error));
                        arms[index] = None;
                    }
                }
            }
        }
        Ok(())
    }

    fn run_arm(&self, arm: &mut Arm<'_>, run: u32) -> Result<(), CellError> {
        arm.tier.delay(Some(arm.at.microvms))?;
        let made = self.turn(&arm.session, &arm.subject, arm.tier, run);
        arm.tier.delay(None)?;
        arm.runs.push(made?);
        Ok(())
    }
}

impl Arm<'_> {
    /// What it measures, for people.
    fn name(&self) -> String {
        let tier = self.at.tier;
        if self.again { format!("{tier} again") } else { tier.to_owned() }
    }

    fn cell(&self) -> Result<Cell, CellError> {
        let trace = load(self.at.trace).map_err(PlayersError::Trace)?.trace;
        let player = self.session.players.first().ok_or(SessionError::Nothing)?;
        let turn = Turn {
            player,
            subject: &self.subject,
            cache: self.tier.cache(),
            run: 1,
            unchecked: false,
        };
        Ok(Cell {
            tier: self.at.tier.to_owned(),
            microvms: self.at.microvms,
            readahead: self.at.readahead,
            pages: trace.touched_pages(),
            written: trace.written_pages(),
            period: trace.again().map_or(0, |again| again.period),
            times: Times::of(&self.runs),
            row: self.session.row(&turn, &self.host, &self.runs)?,
        })
    }
}

fn planner(readahead: bool) -> String {
    format!("firecracker:readahead={}", if readahead { "on" } else { "off" })
}
