//! Programs that are started in a control group.
//!
//! A process that is moved to a group of version 2 waits for a lock that takes milliseconds: the
//! kernel waits until each processor has been in no critical section. clone3(2) with
//! `CLONE_INTO_CGROUP` (Linux 5.7) starts a process in the group instead. The standard library has
//! no such option.

use std::ffi::{CString, OsStr, c_char, c_int, c_long};
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::ptr;

use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, setpgid, waitpid};
use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout};

/// Units of 16 bytes of the stack on which a child calls execve(2).
const STACK: usize = 4096;
/// `CLONE_CLEAR_SIGHAND` and `CLONE_INTO_CGROUP` (linux/sched.h), which libc has with another type.
const CLONE_CLEAR_SIGHAND: u64 = 1 << 32;
const CLONE_INTO_CGROUP: u64 = 1 << 33;

/// A program that is to be started without an environment, in a process group of its own.
#[derive(Debug)]
pub(crate) struct Program {
    /// The path, and the arguments.
    words: Vec<CString>,
    stdin: OwnedFd,
    stdout: OwnedFd,
}

impl Program {
    /// A program with these standard files; standard error is a pipe to this process.
    pub(crate) fn new(path: &Path, stdin: OwnedFd, stdout: OwnedFd) -> io::Result<Self> {
        Ok(Self { words: vec![CString::new(path.as_os_str().as_bytes())?], stdin, stdout })
    }

    /// Adds an argument.
    pub(crate) fn arg(mut self, word: impl AsRef<OsStr>) -> io::Result<Self> {
        self.words.push(CString::new(word.as_ref().as_bytes())?);
        Ok(self)
    }

    /// Starts it in a group of version 2, whose directory is open, if there is one; else in the
    /// groups of this thread.
    pub(super) fn spawn(self, group: Option<BorrowedFd<'_>>) -> io::Result<Process> {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
        let pid = match group {
            Some(group) => self.spawn_in(group, &writer)?,
            None => self.spawn_here(writer)?,
        };
        Ok(Process { pid, ended: None, stderr: Some(reader.into()) })
    }

    /// Does not need clone3, which some containers deny.
    fn spawn_here(self, stderr: OwnedFd) -> io::Result<Pid> {
        let word = |word: &CString| OsStr::from_bytes(word.as_bytes()).to_owned();
        let mut words = self.words.iter().map(word);
        let mut command = Command::new(words.next().unwrap_or_default());
        command.args(words).env_clear().process_group(0);
        command.stdin(Stdio::from(self.stdin)).stdout(Stdio::from(self.stdout));
        let child = command.stderr(Stdio::from(stderr)).spawn()?;
        Ok(Pid::from_child(&child))
    }

    fn spawn_in(&self, group: BorrowedFd<'_>, stderr: &OwnedFd) -> io::Result<Pid> {
        let mut stack: Box<[MaybeUninit<u128>]> = Box::new_uninit_slice(STACK);
        let mut words: Vec<*const c_char> = self.words.iter().map(|word| word.as_ptr()).collect();
        words.push(ptr::null());
        let files = [self.stdin.as_fd(), self.stdout.as_fd(), stderr.as_fd()];
        let signals = Blocked::all()?;
        let mut exec =
            Exec { words: words.as_ptr(), files, signals: &raw const signals.0, errno: 0 };
        // SAFETY: zeros are valid for this type.
        let mut arguments: libc::clone_args = unsafe { MaybeUninit::zeroed().assume_init() };
        let vfork = libc::CLONE_VM | libc::CLONE_VFORK;
        arguments.flags =
            u64::from(vfork.cast_unsigned()) | CLONE_CLEAR_SIGHAND | CLONE_INTO_CGROUP;
        arguments.exit_signal = u64::from(libc::SIGCHLD.cast_unsigned());
        arguments.stack = stack.as_mut_ptr().expose_provenance() as u64;
        arguments.stack_size = size_of_val(&*stack) as u64;
        arguments.cgroup = u64::from(group.as_raw_fd().cast_unsigned());
        // SAFETY: until the child has called execve or has ended, this thread waits, so all that
        // the child uses is alive, and nothing else uses the stack. No signal handler runs in
        // either, and the child calls async-signal-safe functions alone.
        let child = unsafe { clone_vfork(&arguments, &mut exec) };
        drop(signals);
        let child = c_int::try_from(child).map_err(io::Error::other)?;
        let Some(pid) = Pid::from_raw(child.max(0)) else {
            return Err(io::Error::from_raw_os_error(-child));
        };
        if exec.errno != 0 {
            let _ = waitpid(Some(pid), WaitOptions::empty());
            return Err(io::Error::from_raw_os_error(exec.errno));
        }
        Ok(pid)
    }
}

/// What a child does.
struct Exec<'a> {
    words: *const *const c_char,
    /// Its standard files.
    files: [BorrowedFd<'a>; 3],
    /// The signals that it blocks.
    signals: *const libc::sigset_t,
    /// Why execve failed.
    errno: c_int,
}

/// Makes a child that shares this process's memory, and waits until it has called execve or has
/// ended. Returns its id, or the negative error of clone3.
///
/// # Safety
/// The arguments are of a child with a stack of its own, which it alone uses, and all signals are
/// blocked. All that `exec` points to is valid.
unsafe fn clone_vfork(arguments: &libc::clone_args, exec: &mut Exec<'_>) -> c_long {
    let result;
    // SAFETY: the parent's registers are kept, but for those that a system call changes. The child
    // is on its own stack, whose end is aligned to 16 bytes, and does not return from `run`.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r13",
            "call r12",
            "ud2",
            "2:",
            inlateout("rax") libc::SYS_clone3 => result,
            in("rdi") ptr::from_ref(arguments),
            in("rsi") size_of::<libc::clone_args>(),
            in("r12") run as extern "C" fn(&mut Exec<'_>) -> !,
            in("r13") ptr::from_mut(exec),
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    result
}

/// The child. What it calls is async-signal-safe: rustix makes system calls by itself.
extern "C" fn run(exec: &mut Exec<'_>) -> ! {
    let [stdin, stdout, stderr] = exec.files;
    let ready = setpgid(None, None)
        .and_then(|()| dup2_stdin(stdin))
        .and_then(|()| dup2_stdout(stdout))
        .and_then(|()| dup2_stderr(stderr));
    exec.errno = match ready {
        Ok(()) => execute(exec),
        Err(errno) => errno.raw_os_error(),
    };
    // SAFETY: the parent goes on after it.
    unsafe { libc::_exit(127) }
}

/// Becomes the program. Returns why that failed.
fn execute(exec: &Exec<'_>) -> c_int {
    let environment = [ptr::null::<c_char>()];
    // SAFETY: the pointer is to a signal set.
    unsafe { libc::sigprocmask(libc::SIG_SETMASK, exec.signals, ptr::null_mut()) };
    // SAFETY: the first word is there.
    let path = unsafe { *exec.words };
    // SAFETY: the words and the environment end with a null pointer.
    unsafe { libc::execve(path, exec.words, environment.as_ptr()) };
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

/// All signals of this thread are blocked as long as this lives, which has those that were before.
struct Blocked(libc::sigset_t);

impl Blocked {
    fn all() -> io::Result<Self> {
        let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: the pointer is to a signal set, which the function writes.
        unsafe { libc::sigfillset(all.as_mut_ptr()) };
        // SAFETY: the same.
        let result =
            unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) };
        if result != 0 {
            return Err(io::Error::from_raw_os_error(result));
        }
        // SAFETY: the call succeeded, so it has written the set.
        Ok(Self(unsafe { before.assume_init() }))
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // SAFETY: the pointer is to a signal set.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, ptr::null_mut()) };
    }
}

/// A child of this process. Dropped, it runs on.
#[derive(Debug)]
pub(crate) struct Process {
    pid: Pid,
    ended: Option<ExitStatus>,
    /// Its standard error.
    pub(crate) stderr: Option<File>,
}

impl Process {
    /// Its id.
    pub(crate) fn id(&self) -> u32 {
        self.pid.as_raw_nonzero().get().cast_unsigned()
    }

    /// Its end, if it has ended.
    pub(crate) fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        self.wait_with(WaitOptions::NOHANG)
    }

    /// Waits for its end.
    pub(crate) fn wait(&mut self) -> io::Result<ExitStatus> {
        let ended = self.wait_with(WaitOptions::empty())?;
        ended.ok_or_else(|| io::Error::other("waitpid returned without an end"))
    }

    fn wait_with(&mut self, options: WaitOptions) -> io::Result<Option<ExitStatus>> {
        if self.ended.is_none() {
            let found = rustix::io::retry_on_intr(|| waitpid(Some(self.pid), options))?;
            self.ended = found.map(|(_, status)| ExitStatus::from_raw(status.as_raw()));
        }
        Ok(self.ended)
    }

    /// Kills it, unless its end is known.
    pub(crate) fn kill(&mut self) -> io::Result<()> {
        // Until it was waited for, no other process has its id.
        match self.ended {
            None => Ok(kill_process(self.pid, Signal::KILL)?),
            Some(_) => Ok(()),
        }
    }
}

#[cfg(test)]
#[path = "process_tests.rs"]
mod tests;
