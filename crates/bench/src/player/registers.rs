//! The monitor's side of a player's reports.

use std::error::Error as StdError;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};

use firn_base::{cpu_ns, now_ns};
use firn_memory::pager::{Pager, PagerReport};
use firn_memory::{ChunkCopies, GuestMemory, MemoryUsage, ProcessCounters};
use firn_player::format::{PAGE, REPORT_ADDRESS, REPORTED_PAGES, register};
use firn_vmm::{KvmCounters, KvmStats, MmioDevice, MmioWindow};

/// Why something was not measured.
pub(super) type MeasureError = Box<dyn StdError + Send + Sync>;

/// What is read at the end of the timed loop, while the guest waits for its store.
pub(super) struct Counters {
    pub(super) kvm: KvmStats,
    pub(super) process: ProcessCounters,
    pub(super) chunk_copies: ChunkCopies,
    pub(super) memory: MemoryUsage,
    pub(super) cpu_ns: u64,
    /// Where a pager serves guest memory.
    pub(super) pager: Option<PagerReport>,
}

/// What a player has reported.
#[derive(Default)]
pub(super) struct Reports {
    /// When the timed loop ended, ns of CLOCK_MONOTONIC, and what was counted then.
    pub(super) done: Option<(u64, Result<Counters, MeasureError>)>,
    pub(super) touches: u64,
    pub(super) pages: u64,
    /// How long the touches took, in ticks of the time-stamp counter, where that was asked for.
    pub(super) waited: u64,
    pub(super) wrong_in_loop: Wrong,
    pub(super) wrong_in_pass: Wrong,
    /// The player's own region is wrong.
    pub(super) wrong_own: bool,
    /// When the second pass ended, ns of CLOCK_MONOTONIC.
    pub(super) ended_ns: u64,
}

/// Wrong pages: how many, and the first of them.
#[derive(Default)]
pub(super) struct Wrong {
    pub(super) count: u64,
    pub(super) pages: Vec<u64>,
}

impl Wrong {
    /// A guest may report whatever it wants: no more is kept than a player reports.
    fn add(&mut self, page: u64) {
        if self.pages.len() < REPORTED_PAGES {
            self.pages.push(page);
        }
    }
}

/// What the counters are read from, known once the microVM is made.
pub(super) struct Meters {
    pub(super) kvm: Arc<KvmCounters>,
    pub(super) memory: Arc<GuestMemory>,
    /// Called once they are read.
    pub(super) hold: Option<Box<dyn Fn() + Send + Sync>>,
}

impl Meters {
    fn read(&self) -> Result<Counters, MeasureError> {
        // First what goes on by being read.
        let cpu_ns = cpu_ns();
        let process = ProcessCounters::read()?;
        let chunk_copies = self.memory.vm_memory().chunk_copies();
        let pager = self.memory.pager().map(Pager::report);
        let (kvm, memory) = (self.kvm.read()?, self.memory.usage()?);
        Ok(Counters { cpu_ns, process, kvm, chunk_copies, pager, memory })
    }
}

/// The registers; the reports leave them when the player has ended.
pub(super) struct Registers {
    meters: Arc<OnceLock<Meters>>,
    reports: Reports,
    ended: SyncSender<Reports>,
}

/// The window of the registers, where their meters go, and where the reports come out.
pub(super) fn window() -> (MmioWindow, Arc<OnceLock<Meters>>, Receiver<Reports>) {
    // One end is enough: a guest may report as many as it wants.
    let (ended, reports) = sync_channel(1);
    let meters = Arc::new(OnceLock::new());
    let registers = Registers { meters: meters.clone(), reports: Reports::default(), ended };
    let device = Box::new(registers);
    (MmioWindow { start: REPORT_ADDRESS, len: PAGE, device }, meters, reports)
}

impl MmioDevice for Registers {
    fn read(&mut self, _: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let now = now_ns();
        let Ok(value) = data.try_into().map(u64::from_le_bytes) else { return };
        let reports = &mut self.reports;
        match offset {
            register::DONE => {
                let counters = match self.meters.get() {
                    Some(meters) => meters.read(),
                    None => Err("the guest ran before it could be measured".into()),
                };
                if reports.done.is_none()
                    && let Some(hold) = self.meters.get().and_then(|meters| meters.hold.as_ref())
                {
                    hold();
                }
                reports.done.get_or_insert((now, counters));
                reports.wrong_in_loop.count = value;
            }
            register::WRONG_IN_LOOP => reports.wrong_in_loop.add(value),
            register::WRONG_IN_PASS => reports.wrong_in_pass.add(value),
            register::WRONG_OWN => reports.wrong_own = true,
            register::WAITED => reports.waited = value,
            register::TOUCHES => reports.touches = value,
            register::PAGES => reports.pages = value,
            register::END => {
                reports.wrong_in_pass.count = value;
                reports.ended_ns = now;
                // The player has ended before, or nobody waits any more, when this fails.
                let _ = self.ended.try_send(std::mem::take(reports));
            }
            _ => {}
        }
    }
}
