//! A thread of another process that makes the calls of a test (ptrace(2)).

use std::fs::{File, read_to_string};
use std::os::unix::fs::FileExt;

use libc::c_long;
use nix::errno::Errno;
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

/// The instruction `syscall`.
const SYSCALL: [u8; 2] = [0x0f, 0x05];

/// Where the threads of a process make calls.
#[derive(Debug)]
pub struct Gate {
    memory: File,
    /// An instruction `syscall` of the process's program.
    address: u64,
}

/// A thread of a monitor that makes the calls of a test.
#[derive(Debug)]
pub struct Captive<'a> {
    thread: Pid,
    gate: &'a Gate,
}

/// All threads of a monitor, stopped until this is dropped. One of them makes calls.
#[derive(Debug)]
pub struct Held<'a> {
    threads: Vec<Captive<'a>>,
}

/// What the kernel did with a call.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    /// The filter denied it.
    Denied,
    /// It was carried out; negative values are errors.
    Returned(i64),
}

impl Gate {
    /// The gate of a process.
    #[must_use]
    pub fn of(process: u32) -> Self {
        let path = format!("/proc/{process}/mem");
        let memory = File::options().read(true).write(true).open(path).unwrap();
        let maps = read_to_string(format!("/proc/{process}/maps")).unwrap();
        let text = maps.lines().find(|line| line.contains(" r-xp ")).unwrap();
        let (start, end) = text.split_once(' ').unwrap().0.split_once('-').unwrap();
        let [start, end] = [start, end].map(|number| u64::from_str_radix(number, 16).unwrap());
        let mut code = vec![0; usize::try_from(end - start).unwrap()];
        memory.read_exact_at(&mut code, start).unwrap();
        let found = code.windows(2).position(|bytes| bytes == SYSCALL).unwrap();
        Self { memory, address: start + found as u64 }
    }

    /// A thread of the process.
    #[must_use]
    pub fn captive(&self, thread: i32) -> Captive<'_> {
        Captive { thread: Pid::from_raw(thread), gate: self }
    }
}

impl Captive<'_> {
    /// Waits until the thread stops, and returns the signal. `None` for a real-time signal, which
    /// has no name here: a monitor interrupts its vCPUs with one, and any stop interrupts them too.
    fn stopped(&self) -> Option<Signal> {
        match waitpid(self.thread, Some(WaitPidFlag::__WALL)) {
            Ok(WaitStatus::Stopped(_, signal)) => Some(signal),
            Err(Errno::EINVAL) => None,
            other => panic!("{other:?}"),
        }
    }

    /// Has the thread run on by `resume` until it stops with a signal.
    fn until(&self, signal: Signal, resume: impl Fn(Pid) -> nix::Result<()>) {
        let mut stopped = None;
        while stopped.is_none() {
            resume(self.thread).unwrap();
            stopped = self.stopped();
        }
        assert_eq!(stopped, Some(signal));
    }

    /// Stops the thread. `false` if it has ended.
    fn hold(&self) -> bool {
        match ptrace::attach(self.thread) {
            Err(Errno::ESRCH) => return false,
            attached => attached.unwrap(),
        }
        while self.stopped() != Some(Signal::SIGSTOP) {
            ptrace::cont(self.thread, None).unwrap();
        }
        true
    }

    fn release(&self) {
        ptrace::detach(self.thread, None).unwrap();
    }

    /// Makes the thread call. `text` is placed in its memory, and its address is the argument
    /// `text.0`. `None` if the thread has ended.
    #[must_use]
    pub fn call(
        &self,
        number: c_long,
        arguments: [u64; 6],
        text: Option<(usize, &[u8])>,
    ) -> Option<Answer> {
        self.hold().then(|| {
            let answer = self.call_held(number, arguments, text);
            self.release();
            answer
        })
    }

    /// The same for a thread that is stopped, and stays so.
    fn call_held(
        &self,
        number: c_long,
        arguments: [u64; 6],
        text: Option<(usize, &[u8])>,
    ) -> Answer {
        let before = ptrace::getregs(self.thread).unwrap();
        let mut arguments = arguments;
        if let Some((argument, bytes)) = text {
            // Below the red zone of the x86-64 ABI, which the thread may use.
            let place = before.rsp - 4096;
            self.gate.memory.write_all_at(bytes, place).unwrap();
            arguments[argument] = place;
        }
        let mut regs = before;
        [regs.rdi, regs.rsi, regs.rdx, regs.r10, regs.r8, regs.r9] = arguments;
        (regs.rax, regs.orig_rax) = (number.cast_unsigned(), u64::MAX);
        regs.rip = self.gate.address;
        ptrace::setregs(self.thread, regs).unwrap();
        // It stops when it enters the call, and when it returns.
        for _ in 0..2 {
            self.until(Signal::SIGTRAP, |thread| ptrace::syscall(thread, None));
        }
        let value = ptrace::getregs(self.thread).unwrap().rax.cast_signed();
        // The filter leaves the number in place, and sends a signal.
        let denied = value == number;
        if denied {
            self.until(Signal::SIGSYS, |thread| ptrace::cont(thread, None));
        }
        // As after every signal, the kernel has the thread make a call again that it was in.
        ptrace::setregs(self.thread, before).unwrap();
        if denied { Answer::Denied } else { Answer::Returned(value) }
    }

    /// Lets the thread run on at a call of this number, or at an address that is not mapped.
    pub fn enter(&self, call: Option<(c_long, [u64; 6])>) {
        ptrace::attach(self.thread).unwrap();
        assert_eq!(self.stopped(), Some(Signal::SIGSTOP));
        let mut regs = ptrace::getregs(self.thread).unwrap();
        let (number, arguments) = call.unwrap_or_default();
        (regs.rax, regs.orig_rax) = (number.cast_unsigned(), u64::MAX);
        [regs.rdi, regs.rsi, regs.rdx, regs.r10, regs.r8, regs.r9] = arguments;
        regs.rip = call.map_or(0, |_| self.gate.address);
        ptrace::setregs(self.thread, regs).unwrap();
        self.release();
    }
}

impl<'a> Held<'a> {
    pub(crate) fn new(threads: impl Iterator<Item = Captive<'a>>) -> Self {
        Self { threads: threads.filter(Captive::hold).collect() }
    }

    /// Makes a thread call, as [`Captive::call`] does. The others do not run meanwhile or after it.
    #[must_use]
    pub fn call(
        &self,
        number: c_long,
        arguments: [u64; 6],
        text: Option<(usize, &[u8])>,
    ) -> Answer {
        self.threads.first().unwrap().call_held(number, arguments, text)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.threads.iter().for_each(Captive::release);
    }
}
