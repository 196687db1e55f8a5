//! Virtual processors: one thread for each, started paused, controlled by the microVM.

mod failure;
mod interrupt;
pub(crate) mod observer;
pub(crate) mod state;
mod worker;

use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvError, SendError, Sender, channel};
use std::thread::JoinHandle;

use firn_base::{now_ns, touch_stack};
use kvm_bindings::CpuId;
use kvm_ioctls::VcpuFd;
use parking_lot::Mutex;
use thiserror::Error;
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::signal::Killable;

use crate::bus::Bus;
use crate::cow::CowMemory;
use interrupt::ImmediateExit;
use observer::{Observer, VcpuThread};
use state::{RestoreVcpuError, SaveVcpuError, Timers, VcpuState};
use worker::{Answer, Command, Worker};

pub(crate) use failure::VcpuEnd;
pub use failure::VcpuFailure;
pub use worker::ExitCounters;

/// A vCPU's thread cannot be started or has ended.
#[derive(Debug, Error)]
pub enum VcpuThreadError {
    /// The thread cannot be created.
    #[error("cannot start the thread of vCPU {vcpu}")]
    Spawn {
        /// Number of the vCPU.
        vcpu: u8,
        /// The system's error.
        source: io::Error,
    },
    /// The signal that interrupts a vCPU cannot be set up.
    #[error("cannot install the handler of the signal that interrupts vCPUs")]
    Signal(#[source] vmm_sys_util::errno::Error),
    /// The thread has ended.
    #[error("the thread of vCPU {vcpu} ended")]
    Gone {
        /// Number of the vCPU.
        vcpu: u8,
    },
}

/// A vCPU and its thread. Dropping it stops the thread.
pub(crate) struct Vcpu {
    id: u8,
    /// What its thread gets with the first command: a thread that is woken for each of them runs
    /// later.
    job: Cell<Option<(Sender<Job>, Job)>>,
    commands: Option<Sender<Command>>,
    answers: Receiver<Answer>,
    immediate_exit: Arc<Mutex<Option<ImmediateExit>>>,
    thread: Option<JoinHandle<()>>,
    running: bool,
    exits: Arc<Mutex<ExitCounters>>,
}

/// When the first vCPU of a microVM began to run its guest.
#[derive(Clone, Debug, Default)]
pub struct FirstRun(Arc<AtomicU64>);

impl FirstRun {
    /// The time, ns of CLOCK_MONOTONIC; `None` before.
    #[must_use]
    pub fn ns(&self) -> Option<u64> {
        Some(self.0.load(Ordering::Relaxed)).filter(|ns| *ns != 0)
    }

    fn is_now(&self) {
        if self.ns().is_none() {
            // Fails where another vCPU was first.
            let _ = self.0.compare_exchange(0, now_ns(), Ordering::Relaxed, Ordering::Relaxed);
        }
    }
}

/// What vCPUs report to their microVM: when the first began to run, and the first end of one, whose
/// event wakes the loop.
pub(crate) struct Notices {
    pub(crate) first_run: FirstRun,
    pub(crate) end: Mutex<Option<VcpuEnd>>,
    pub(crate) event: Arc<EventFd>,
}

impl Notices {
    pub(crate) fn new(event: Arc<EventFd>) -> Self {
        Self { first_run: FirstRun::default(), end: Mutex::new(None), event }
    }

    pub(crate) fn give(&self, end: VcpuEnd) {
        self.end.lock().get_or_insert(end);
        // The write fails only when the counter is full; the loop is awake then.
        let _ = self.event.write(1);
    }
}

/// The thread of a vCPU that it does not have yet. Dropping it ends the thread.
pub(crate) struct IdleThread {
    id: u8,
    job: Sender<Job>,
    thread: JoinHandle<()>,
}

/// What a vCPU's thread uses of its stack before its guest runs, bytes.
const STACK: usize = 8 << 10;

/// What the thread of a vCPU gets to do.
type Job = (Worker, Receiver<Command>, Sender<Answer>);

impl IdleThread {
    /// Starts the thread of the vCPU `id`.
    pub(crate) fn start(id: u8) -> Result<Self, VcpuThreadError> {
        interrupt::install_handler().map_err(VcpuThreadError::Signal)?;
        let (job, jobs) = channel::<Job>();
        let thread = std::thread::Builder::new()
            .name(format!("vcpu{id}"))
            .spawn(move || {
                touch_stack::<STACK>();
                if let Ok((mut worker, commands, answers)) = jobs.recv() {
                    worker.serve(&commands, &answers);
                }
            })
            .map_err(|source| VcpuThreadError::Spawn { vcpu: id, source })?;
        Ok(Self { id, job, thread })
    }

    /// Passes its vCPU to it, whose CPUID is `cpuid`, paused.
    pub(crate) fn take(
        self,
        mut fd: VcpuFd,
        cpuid: CpuId,
        bus: Arc<Bus>,
        memory: CowMemory,
        notices: Arc<Notices>,
    ) -> Vcpu {
        let Self { id, job, thread } = self;
        let (commands, command_receiver) = channel();
        let (answer_sender, answers) = channel();
        // Set before the thread has the vCPU, so that an early kick is not lost.
        let immediate_exit = Arc::new(Mutex::new(Some(ImmediateExit::of(&mut fd))));
        let exits = Arc::new(Mutex::new(ExitCounters::default()));
        let worker = Worker {
            id,
            fd,
            cpuid,
            bus,
            memory,
            notices,
            immediate_exit: immediate_exit.clone(),
            observer: None,
            exits: exits.clone(),
        };
        Vcpu {
            id,
            job: Cell::new(Some((job, (worker, command_receiver, answer_sender)))),
            commands: Some(commands),
            answers,
            immediate_exit,
            thread: Some(thread),
            running: false,
            exits,
        }
    }
}

impl Vcpu {
    /// Runs the vCPU until [`Vcpu::pause`] or its end.
    pub(crate) fn run(&mut self) -> Result<(), VcpuThreadError> {
        if !self.running {
            self.send(Command::Run)?;
            self.running = true;
        }
        Ok(())
    }

    /// The guest's exits so far.
    pub(crate) fn exits(&self) -> ExitCounters {
        *self.exits.lock()
    }

    /// Requests a running vCPU to leave `KVM_RUN`; [`Vcpu::pause`] waits for it.
    pub(crate) fn kick(&self) {
        if !self.running {
            return;
        }
        // The flag is set first: a `KVM_RUN` that starts after the signal checks the flag.
        self.set_immediate_exit(1);
        if let Some(thread) = &self.thread {
            // Fails only for a thread that has ended.
            let _ = thread.kill(interrupt::signal());
        }
    }

    /// Brings the vCPU out of `KVM_RUN`, with every exit completed.
    pub(crate) fn pause(&mut self) -> Result<(), VcpuThreadError> {
        if self.running {
            self.kick();
            self.answer()?;
            self.running = false;
            // Cleared here: the thread may have stopped before the kick.
            self.set_immediate_exit(0);
        }
        Ok(())
    }

    fn set_immediate_exit(&self, value: u8) {
        if let Some(flag) = &*self.immediate_exit.lock() {
            flag.set(value);
        }
    }

    /// Saves a paused vCPU.
    pub(crate) fn save(
        &self,
        msr_indices: &Arc<[u32]>,
        xsave_size: i32,
    ) -> Result<Result<VcpuState, SaveVcpuError>, VcpuThreadError> {
        self.send(Command::Save { msr_indices: msr_indices.clone(), xsave_size })?;
        match self.answer()? {
            Answer::Saved(state) => Ok(*state),
            _ => Err(VcpuThreadError::Gone { vcpu: self.id }),
        }
    }

    /// Calls an observer at every interruption of a paused vCPU from now on.
    pub(crate) fn observe(
        &self,
        observer: Arc<dyn Observer>,
    ) -> Result<VcpuThread, VcpuThreadError> {
        self.send(Command::Observe(observer))?;
        match self.answer()? {
            Answer::Observed(thread) => Ok(thread),
            _ => Err(VcpuThreadError::Gone { vcpu: self.id }),
        }
    }

    /// Begins to set the timers of a paused vCPU; [`Vcpu::timers_set`] waits for it.
    pub(crate) fn set_timers(&self, timers: Timers) -> Result<(), VcpuThreadError> {
        self.send(Command::SetTimers(timers))
    }

    /// Waits until they are set.
    pub(crate) fn timers_set(&self) -> Result<Result<(), RestoreVcpuError>, VcpuThreadError> {
        match self.answer()? {
            Answer::TimersSet(result) => Ok(result),
            _ => Err(VcpuThreadError::Gone { vcpu: self.id }),
        }
    }

    fn send(&self, command: Command) -> Result<(), VcpuThreadError> {
        let gone = || VcpuThreadError::Gone { vcpu: self.id };
        let commands = self.commands.as_ref().ok_or_else(gone)?;
        commands.send(command).map_err(|SendError(_)| gone())?;
        let Some((thread, job)) = self.job.take() else { return Ok(()) };
        thread.send(job).map_err(|SendError(_)| gone())
    }

    fn answer(&self) -> Result<Answer, VcpuThreadError> {
        self.answers.recv().map_err(|RecvError| VcpuThreadError::Gone { vcpu: self.id })
    }
}

impl Drop for Vcpu {
    fn drop(&mut self) {
        (self.job, self.commands) = (Cell::default(), None);
        self.kick();
        if let Some(thread) = self.thread.take() {
            // The error of a thread that panicked is not needed.
            let _ = thread.join();
        }
    }
}
