//! The monitor's side of a player's reports: registers in a window of guest-physical memory.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};

use firn_base::{ErrorChain, now_ns};
use firn_memory::GuestMemory;
use firn_player::format::{PAGE, REPORT_ADDRESS, REPORTED_PAGES, TIMES, register};
use firn_vmm::{KvmCounters, MmioDevice, MmioWindow};

use crate::life::read_counters;
use crate::report::Counters;

/// What a player has reported.
#[derive(Default)]
pub(crate) struct Reports {
    /// When the timed loop ended, ns of CLOCK_MONOTONIC, and what was counted then.
    pub(crate) done: Option<(u64, Result<Counters, ErrorChain>)>,
    pub(crate) touches: u64,
    pub(crate) pages: u64,
    /// How long the touches took, in ticks of the time-stamp counter, where that was asked for.
    pub(crate) waited: u64,
    /// The number of touches of each class of times, where that was asked for.
    pub(crate) touch_times: [u64; TIMES],
    /// How long the guest took to the first touch that serves the request, ticks; 0 if unknown.
    pub(crate) connected: u64,
    /// How long the second invocation took, ticks, where there was one.
    pub(crate) warm: Option<u64>,
    /// Repeated accesses of the first invocation.
    pub(crate) repeated: u64,
    /// Its loads from pages that it never writes.
    pub(crate) read_only_loads: u64,
    pub(crate) wrong_in_loop: Wrong,
    pub(crate) wrong_in_pass: Wrong,
    /// The player's own region is wrong.
    pub(crate) wrong_own: bool,
    /// When the second pass ended, ns of CLOCK_MONOTONIC.
    pub(crate) ended_ns: u64,
}

/// Wrong pages: how many, and the first of them.
#[derive(Default)]
pub(crate) struct Wrong {
    pub(crate) count: u64,
    pub(crate) pages: Vec<u64>,
}

impl Wrong {
    /// A guest may report anything: no more is kept than a player reports.
    fn add(&mut self, page: u64) {
        if self.pages.len() < REPORTED_PAGES {
            self.pages.push(page);
        }
    }
}

/// What the counters are read from, known once the microVM is made.
pub(crate) struct Meters {
    pub(crate) kvm: Arc<KvmCounters>,
    pub(crate) memory: Arc<GuestMemory>,
    /// Called when the last invocation has ended.
    pub(crate) hold: Option<Box<dyn Fn() + Send + Sync>>,
    /// The register whose write reports that end.
    pub(crate) hold_at: u64,
}

impl Meters {
    /// The guest has reported the end of an invocation.
    fn hold(&self, register: u64) {
        if let Some(hold) = self.hold.as_ref().filter(|_| self.hold_at == register) {
            hold();
        }
    }
}

/// The registers; the reports leave them when the player has ended.
pub(crate) struct Registers {
    meters: Arc<OnceLock<Meters>>,
    reports: Reports,
    ended: SyncSender<Reports>,
}

/// The window of the registers, where their meters go, and where the reports come out.
pub(crate) fn window() -> (MmioWindow, Arc<OnceLock<Meters>>, Receiver<Reports>) {
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
                reports.wrong_in_loop.count = value;
                if reports.done.is_none() {
                    let counters = match self.meters.get() {
                        Some(meters) => {
                            read_counters(&meters.kvm, &meters.memory, || meters.hold(offset))
                        }
                        None => Err(ErrorChain::new("the guest ran before it could be measured")),
                    };
                    reports.done = Some((now, counters));
                }
            }
            register::WRONG_IN_LOOP => reports.wrong_in_loop.add(value),
            register::WRONG_IN_PASS => reports.wrong_in_pass.add(value),
            register::WRONG_OWN => reports.wrong_own = true,
            register::WARM => {
                if let (None, Some(meters)) = (reports.warm, self.meters.get()) {
                    meters.hold(offset);
                }
                reports.warm.get_or_insert(value);
            }
            register::WAITED => reports.waited = value,
            register::TOUCH_TIMES => {
                let class = usize::try_from(value >> register::CLASS_SHIFT).ok();
                if let Some(count) = class.and_then(|class| reports.touch_times.get_mut(class)) {
                    *count = value & !(u64::MAX << register::CLASS_SHIFT);
                }
            }
            register::CONNECTED => reports.connected = value,
            register::REPEATED => reports.repeated = value,
            register::READ_ONLY_LOADS => reports.read_only_loads = value,
            register::TOUCHES => reports.touches = value,
            register::PAGES => reports.pages = value,
            register::END => {
                reports.wrong_in_pass.count = value;
                reports.ended_ns = now;
                // This fails if the player has ended before, or if no receiver is left.
                let _ = self.ended.try_send(std::mem::take(reports));
            }
            _ => {}
        }
    }
}
