//! Virtual processors: one thread each, started paused, told what to do by the microVM's owner.

pub(crate) mod observer;
pub(crate) mod sealed;
pub(crate) mod state;

use std::io;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{Receiver, RecvError, SendError, Sender, channel};
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::thread::JoinHandle;

use firn_base::PAGE_SIZE;
use firn_memory::{CopyChunkError, LostMemory};
use kvm_bindings::CpuId;
use kvm_ioctls::{VcpuExit, VcpuFd};
use thiserror::Error;
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::signal::{Killable, SIGRTMIN, register_signal_handler};

use crate::bus::{Bus, PowerRequest};
use observer::{Observer, StoppedVcpu, VcpuThread};
use sealed::SealedMemory;
use state::{SaveVcpuError, VcpuState};

/// Why a vCPU stopped for good.
#[derive(Debug)]
pub(crate) enum VcpuEnd {
    /// The guest asked for power-off or a reset.
    Power(PowerRequest),
    /// A fault while handling a fault while handling a fault: the guest reset itself the hard way.
    TripleFault,
    /// KVM cannot go on.
    Failure(VcpuFailure),
}

/// Why KVM could not run a vCPU any further.
#[derive(Debug, Error)]
pub enum VcpuFailure {
    /// `KVM_RUN` itself failed. `EFAULT` means guest memory that the host cannot provide.
    #[error("vCPU {vcpu} cannot run at instruction {rip:#x}")]
    Run {
        /// Number of the vCPU.
        vcpu: u8,
        /// Guest instruction pointer; 0 when unknown.
        rip: u64,
        /// What KVM said.
        source: kvm_ioctls::Error,
    },
    /// The host cannot provide a page of guest memory any more.
    #[error("the host cannot provide {}", page(*address))]
    Memory {
        /// Guest-physical address, where KVM told it.
        address: Option<u64>,
        /// What is lost, where that could be found out.
        source: Option<LostMemory>,
    },
    /// The guest wrote to sealed memory in a way that the monitor cannot follow.
    #[error(
        "vCPU {vcpu} cannot write at instruction {rip:#x} (bytes {}): nothing sealed was found among what it writes; \
         pass, with a replica for each microVM, can run such a guest",
        hex(code)
    )]
    Sealed {
        /// Number of the vCPU.
        vcpu: u8,
        /// Guest instruction pointer.
        rip: u64,
        /// The bytes there, as far as they can be read.
        code: Vec<u8>,
    },
    /// The guest wrote to sealed memory, and there could be no copy of it.
    #[error("vCPU {vcpu} cannot write at instruction {rip:#x}")]
    Copy {
        /// Number of the vCPU.
        vcpu: u8,
        /// Guest instruction pointer; 0 when unknown.
        rip: u64,
        /// Why.
        source: CopyChunkError,
    },
    /// The processor refused to enter the guest.
    #[error("vCPU {vcpu} cannot be entered, hardware reason {reason:#x}: its state is invalid")]
    Entry {
        /// Number of the vCPU.
        vcpu: u8,
        /// The hardware's reason.
        reason: u64,
    },
    /// KVM met something that it cannot emulate.
    #[error("KVM cannot emulate an instruction of vCPU {vcpu} at {rip:#x}")]
    Internal {
        /// Number of the vCPU.
        vcpu: u8,
        /// Guest instruction pointer; 0 when unknown.
        rip: u64,
    },
    /// An exit that the monitor does not know.
    #[error("vCPU {vcpu} left guest mode for an unknown reason: {reason}")]
    UnknownExit {
        /// Number of the vCPU.
        vcpu: u8,
        /// KVM's exit, as text.
        reason: String,
    },
}

fn hex(bytes: &[u8]) -> String {
    let bytes: Vec<_> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    if bytes.is_empty() { "unreadable".to_owned() } else { bytes.join(" ") }
}

fn page(address: Option<u64>) -> String {
    address.map_or("a page of guest memory".to_owned(), |address| {
        format!("guest page {:#x}", address / PAGE_SIZE)
    })
}

/// A vCPU's thread cannot be started or has died.
#[derive(Debug, Error)]
pub enum VcpuThreadError {
    /// The thread cannot be created.
    #[error("starting the thread of vCPU {vcpu}")]
    Spawn {
        /// Number of the vCPU.
        vcpu: u8,
        /// What the system said.
        source: io::Error,
    },
    /// The signal that interrupts a vCPU cannot be set up.
    #[error("installing the handler of the signal that interrupts vCPUs")]
    Signal(#[source] vmm_sys_util::errno::Error),
    /// The thread is gone.
    #[error("the thread of vCPU {vcpu} ended")]
    Gone {
        /// Number of the vCPU.
        vcpu: u8,
    },
}

enum Command {
    Run,
    Save { msr_indices: Arc<[u32]>, xsave_size: i32 },
    Observe(Arc<dyn Observer>),
}

enum Answer {
    /// Out of `KVM_RUN`, no exit left to complete.
    Paused,
    Saved(Box<Result<VcpuState, SaveVcpuError>>),
    Observed(VcpuThread),
}

/// The byte of `kvm_run` that makes the next `KVM_RUN` return at once.
struct ImmediateExit(*const AtomicU8);

// SAFETY: from the first run on the byte is only accessed atomically, and the pointer is taken out of
// its mutex before the mapping that holds it goes away.
unsafe impl Send for ImmediateExit {}

impl ImmediateExit {
    fn of(fd: &mut VcpuFd) -> Self {
        let flag = std::ptr::from_mut(&mut fd.get_kvm_run().immediate_exit);
        Self(flag.cast::<AtomicU8>().cast_const())
    }

    fn set(&self, value: u8) {
        // SAFETY: whoever has this holds the mutex, in which it is only while the mapping lives.
        unsafe { &*self.0 }.store(value, Ordering::SeqCst);
    }

    fn is_set(&self) -> bool {
        // SAFETY: as above.
        unsafe { &*self.0 }.load(Ordering::SeqCst) != 0
    }
}

/// A vCPU and its thread. Dropping it stops the thread.
pub(crate) struct Vcpu {
    id: u8,
    commands: Option<Sender<Command>>,
    answers: Receiver<Answer>,
    immediate_exit: Arc<Mutex<Option<ImmediateExit>>>,
    thread: Option<JoinHandle<()>>,
    running: bool,
}

/// How a vCPU tells the microVM's owner that it ended: the first end is kept, the event wakes.
pub(crate) struct EndNotice {
    pub(crate) end: Mutex<Option<VcpuEnd>>,
    pub(crate) event: Arc<EventFd>,
}

impl EndNotice {
    pub(crate) fn give(&self, end: VcpuEnd) {
        self.end.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(end);
        // An eventfd write fails only when its counter is full: the owner is awake then.
        let _ = self.event.write(1);
    }
}

fn interrupt_signal() -> libc::c_int {
    SIGRTMIN()
}

extern "C" fn on_interrupt(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

impl Vcpu {
    /// Starts the thread of a vCPU that was given `cpuid`, paused.
    pub(crate) fn start(
        id: u8,
        mut fd: VcpuFd,
        cpuid: CpuId,
        bus: Arc<Bus>,
        memory: SealedMemory,
        notice: Arc<EndNotice>,
    ) -> Result<Self, VcpuThreadError> {
        static HANDLER: Once = Once::new();
        let mut installed = Ok(());
        HANDLER.call_once(|| {
            installed = register_signal_handler(interrupt_signal(), on_interrupt);
        });
        installed.map_err(VcpuThreadError::Signal)?;

        let (commands, command_receiver) = channel();
        let (answer_sender, answers) = channel();
        // Before the thread runs: a kick that comes first must not be lost.
        let immediate_exit = Arc::new(Mutex::new(Some(ImmediateExit::of(&mut fd))));
        let mut worker = Worker {
            id,
            fd,
            cpuid,
            bus,
            memory,
            notice,
            immediate_exit: immediate_exit.clone(),
            observer: None,
        };
        let thread = std::thread::Builder::new()
            .name(format!("vcpu{id}"))
            .spawn(move || worker.serve(&command_receiver, &answer_sender))
            .map_err(|source| VcpuThreadError::Spawn { vcpu: id, source })?;
        Ok(Self {
            id,
            commands: Some(commands),
            answers,
            immediate_exit,
            thread: Some(thread),
            running: false,
        })
    }

    /// Lets the vCPU run until [`Vcpu::pause`] or its end.
    pub(crate) fn run(&mut self) -> Result<(), VcpuThreadError> {
        if !self.running {
            self.send(Command::Run)?;
            self.running = true;
        }
        Ok(())
    }

    /// Asks a running vCPU to leave `KVM_RUN`; [`Vcpu::pause`] waits for it.
    pub(crate) fn kick(&self) {
        if !self.running {
            return;
        }
        // The flag first: a signal that comes before `KVM_RUN` begins is not seen by it, the flag is.
        self.set_immediate_exit(1);
        if let Some(thread) = &self.thread {
            // Fails only for a thread that ended, which needs no waking.
            let _ = thread.kill(interrupt_signal());
        }
    }

    /// Brings the vCPU out of `KVM_RUN`, with every exit completed.
    pub(crate) fn pause(&mut self) -> Result<(), VcpuThreadError> {
        if self.running {
            self.kick();
            self.answer()?;
            self.running = false;
            // Here and not in the thread, which may have stopped before the kick and never seen it.
            self.set_immediate_exit(0);
        }
        Ok(())
    }

    fn set_immediate_exit(&self, value: u8) {
        if let Some(flag) = &*self.immediate_exit.lock().unwrap_or_else(PoisonError::into_inner) {
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
            Answer::Paused | Answer::Observed(_) => Err(VcpuThreadError::Gone { vcpu: self.id }),
        }
    }

    /// Shows an observer every interruption of a paused vCPU from now on.
    pub(crate) fn observe(
        &self,
        observer: Arc<dyn Observer>,
    ) -> Result<VcpuThread, VcpuThreadError> {
        self.send(Command::Observe(observer))?;
        match self.answer()? {
            Answer::Observed(thread) => Ok(thread),
            Answer::Paused | Answer::Saved(_) => Err(VcpuThreadError::Gone { vcpu: self.id }),
        }
    }

    fn send(&self, command: Command) -> Result<(), VcpuThreadError> {
        let gone = VcpuThreadError::Gone { vcpu: self.id };
        let Some(commands) = &self.commands else { return Err(gone) };
        commands.send(command).map_err(|SendError(_)| gone)
    }

    fn answer(&self) -> Result<Answer, VcpuThreadError> {
        self.answers.recv().map_err(|RecvError| VcpuThreadError::Gone { vcpu: self.id })
    }
}

impl Drop for Vcpu {
    fn drop(&mut self) {
        self.commands = None;
        self.kick();
        if let Some(thread) = self.thread.take() {
            // A worker that panicked has nothing more to tell.
            let _ = thread.join();
        }
    }
}

struct Worker {
    id: u8,
    fd: VcpuFd,
    cpuid: CpuId,
    bus: Arc<Bus>,
    memory: SealedMemory,
    notice: Arc<EndNotice>,
    immediate_exit: Arc<Mutex<Option<ImmediateExit>>>,
    observer: Option<Arc<dyn Observer>>,
}

impl Worker {
    fn serve(&mut self, commands: &Receiver<Command>, answers: &Sender<Answer>) {
        while let Ok(command) = commands.recv() {
            let answer = match command {
                Command::Run => {
                    if let Some(end) = self.run() {
                        self.notice.give(end);
                    }
                    Answer::Paused
                }
                Command::Save { msr_indices, xsave_size } => {
                    let state =
                        state::save(&self.fd, self.id, &self.cpuid, &msr_indices, xsave_size);
                    Answer::Saved(Box::new(state))
                }
                Command::Observe(observer) => {
                    self.observer = Some(observer);
                    Answer::Observed(VcpuThread::current())
                }
            };
            if answers.send(answer).is_err() {
                break;
            }
        }
    }

    /// Runs the guest until it is told to stop (`None`) or cannot go on. When told to stop, KVM has
    /// completed the last exit: it does so on entry, before it looks at the flag.
    fn run(&mut self) -> Option<VcpuEnd> {
        loop {
            match self.fd.run() {
                Ok(VcpuExit::IoIn(port, data)) => self.bus.port_read(port, data),
                Ok(VcpuExit::IoOut(port, data)) => {
                    if let Some(request) = self.bus.port_write(port, data) {
                        return Some(VcpuEnd::Power(request));
                    }
                }
                Ok(VcpuExit::MmioRead(address, data)) => self.bus.mmio_read(address, data),
                Ok(VcpuExit::MmioWrite(address, data)) => {
                    match self.memory.write(self.id, address, data) {
                        Ok(true) => {}
                        Ok(false) => self.bus.mmio_write(address, data),
                        Err(failure) => return Some(VcpuEnd::Failure(failure)),
                    }
                }
                Ok(VcpuExit::Intr) => {}
                Ok(VcpuExit::Shutdown) => return Some(VcpuEnd::TripleFault),
                Ok(VcpuExit::FailEntry(reason, _)) => {
                    let failure = VcpuFailure::Entry { vcpu: self.id, reason };
                    return Some(VcpuEnd::Failure(failure));
                }
                Ok(VcpuExit::InternalError) => {
                    let rip = self.rip();
                    let failure = VcpuFailure::Internal { vcpu: self.id, rip };
                    return Some(VcpuEnd::Failure(failure));
                }
                Ok(VcpuExit::MemoryFault { gpa, .. }) if self.memory.is_sealed() => {
                    if let Err(failure) = self.memory.resolve(self.id, &self.fd, Some(gpa)) {
                        return Some(VcpuEnd::Failure(failure));
                    }
                }
                Ok(VcpuExit::MemoryFault { gpa, .. }) => {
                    let failure = VcpuFailure::Memory { address: Some(gpa), source: None };
                    return Some(VcpuEnd::Failure(failure));
                }
                Ok(exit) => {
                    let reason = format!("{exit:?}");
                    let failure = VcpuFailure::UnknownExit { vcpu: self.id, reason };
                    return Some(VcpuEnd::Failure(failure));
                }
                Err(error) if error.errno() == libc::EINTR => {
                    if let Some(observer) = &self.observer {
                        observer.interrupted(&StoppedVcpu { fd: &self.fd });
                    }
                    if self.told_to_stop() {
                        return None;
                    }
                }
                Err(error) if error.errno() == libc::EAGAIN => {}
                Err(error) if error.errno() == libc::EFAULT && self.memory.is_sealed() => {
                    if let Err(failure) = self.memory.resolve(self.id, &self.fd, None) {
                        return Some(VcpuEnd::Failure(failure));
                    }
                }
                Err(source) => {
                    let rip = self.rip();
                    let failure = VcpuFailure::Run { vcpu: self.id, rip, source };
                    return Some(VcpuEnd::Failure(failure));
                }
            }
        }
    }

    fn told_to_stop(&self) -> bool {
        let guard = self.immediate_exit.lock().unwrap_or_else(PoisonError::into_inner);
        guard.as_ref().is_some_and(ImmediateExit::is_set)
    }

    fn rip(&self) -> u64 {
        self.fd.get_regs().map_or(0, |regs| regs.rip)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // The mapping goes with `fd`, which drops after this, when the thread panics too.
        *self.immediate_exit.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}
