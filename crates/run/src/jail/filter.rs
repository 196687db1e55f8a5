//! The system calls of a monitor (seccomp(2)).
//!
//! Threads share memory, so what one thread may do every thread may: all have one filter. There are
//! two, and both hold once both are applied. The first is for a monitor that waits and restores:
//! it works with the descriptors that it has and receives, and can make no other but of memory,
//! pairs of sockets, events and timers. The second is applied before the guest's first instruction:
//! from then on nothing is mapped but memory, and no VM and no filter is made.
//!
//! A call that a filter denies ends the monitor with a line on standard error that names it. Two
//! calls fail instead, because the C library has another way without them: clone3, whose flags a
//! filter cannot read, and an mremap other than that of a chunk of guest memory.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::sync::atomic::{AtomicI32, Ordering};

use firn_base::{ErrorChain, end_with, handle_signal};
use libc::{c_int, c_long, c_void, siginfo_t};
use parking_lot::Mutex;
use seccompiler::SeccompCmpArgLen::{Dword, Qword};
use seccompiler::SeccompCmpOp::{Eq, MaskedEq, Ne};
use seccompiler::{
    BpfProgram, BpfProgramRef, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch, apply_filter, apply_filter_all_threads, sock_filter,
};
use syscalls::Sysno;

/// Calls that are allowed with any arguments. They reach what the monitor has, and nothing else.
const ALLOWED: &[c_long] = &[
    // Memory.
    libc::SYS_brk,
    libc::SYS_memfd_create,
    libc::SYS_mincore,
    libc::SYS_mremap,
    libc::SYS_msync,
    libc::SYS_munmap,
    // Threads.
    libc::SYS_clone3,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_membarrier,
    libc::SYS_rseq,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    // Open files.
    libc::SYS_close,
    libc::SYS_copy_file_range,
    libc::SYS_dup,
    libc::SYS_fadvise64,
    libc::SYS_fallocate,
    libc::SYS_fdatasync,
    libc::SYS_flock,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_lseek,
    libc::SYS_newfstatat,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_read,
    libc::SYS_readahead,
    libc::SYS_readv,
    libc::SYS_sendfile,
    libc::SYS_statx,
    libc::SYS_sync_file_range,
    libc::SYS_write,
    libc::SYS_writev,
    // Sockets that are open already.
    libc::SYS_accept4,
    libc::SYS_getpeername,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_shutdown,
    // Events and time.
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_wait,
    libc::SYS_eventfd2,
    libc::SYS_nanosleep,
    libc::SYS_pipe2,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_restart_syscall,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_gettime,
    libc::SYS_timerfd_settime,
    // Signals.
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    // Facts about this process and its kernel.
    libc::SYS_getrandom,
    libc::SYS_getrusage,
    libc::SYS_geteuid,
    libc::SYS_getuid,
    libc::SYS_sysinfo,
    libc::SYS_uname,
];

/// The kind of a request of ioctl(2): its second lowest byte.
const KIND: u64 = 0xff00;
const KVM: u64 = 0xae00;
const USERFAULTFD: u64 = 0xaa00;
/// Requests of KVM for new objects: `KVM_CREATE_VM`, `KVM_CREATE_VCPU`, `KVM_CREATE_DEVICE`.
const KVM_CREATE: [u64; 3] = [0xae01, 0xae41, 0xc00c_aee0];
/// `USERFAULTFD_IOC_NEW`.
const USERFAULTFD_NEW: u64 = 0xaa00;
/// `FS_IOC_MEASURE_VERITY`.
const MEASURE_VERITY: u64 = 0xc004_6686;
/// `PAGEMAP_SCAN` (Linux Documentation/admin-guide/mm/pagemap.rst), on the pagemap of this process.
const PAGEMAP_SCAN: u64 = 0xc060_6610;
/// Offloads of a tap device (Linux Documentation/networking/tuntap.rst).
const TUNSETOFFLOAD: u64 = 0x4004_54d0;
/// Options of sockets (socket(7)): time limits in both of the kernel's forms, the end of a
/// connection, and where a read without removal begins. Not among them is `SO_ZEROCOPY`, with which
/// a socket would read guest memory after it was unmapped, when it may be another's.
const SOCKET_OPTIONS: [c_int; 6] =
    [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO, 66, 67, libc::SO_LINGER, libc::SO_PEEK_OFF];
/// The size of what `mremap` may move, and to, bytes: a chunk of guest memory.
const CHUNK: u64 = 2 << 20;

/// Of prctl(2): `PR_GET_AUXV`, which libc does not have.
const PR_GET_AUXV: u64 = 0x4155_5856;

/// Commands of fcntl(2) for locks of a descriptor. A pool's manager knows by such a lock whether
/// guest memory is still mapped, and a process that has the descriptor could unlock it.
const LOCKS: [c_int; 2] = [libc::F_OFD_SETLK, libc::F_OFD_SETLKW];

/// The fewest rules that are divided.
const PART: usize = 6;
/// Instructions of classic BPF (Linux Documentation/networking/filter.rst):
/// `BPF_LD | BPF_W | BPF_ABS`, of the call's number; `BPF_JMP | BPF_JGE | BPF_K`;
/// `BPF_JMP | BPF_JA`.
const LOAD: u16 = 0x20;
const JUMP_IF_GREATER_OR_EQUAL: u16 = 0x35;
const JUMP: u16 = 0x05;

type Rules = BTreeMap<c_long, Vec<SeccompRule>>;
type Result<T> = std::result::Result<T, seccompiler::Error>;

/// The second filter of a process that has the first one. It is compiled before a start needs it.
static SECOND: Mutex<Option<BpfProgram>> = Mutex::new(None);

/// The code with which this process ends at a call that is denied.
static EXIT_CODE: AtomicI32 = AtomicI32::new(1);

/// Applies the first filter to this process, which has one thread.
pub(super) fn apply() -> io::Result<()> {
    apply_by(apply_filter_all_threads)?;
    let second =
        denied().and_then(|denied| compile(denied, SeccompAction::Allow, SeccompAction::Trap));
    *SECOND.lock() = Some(second.map_err(as_io)?);
    Ok(())
}

/// Applies the first filter to this thread, and to those that it makes. A call that it denies ends
/// the process with this code.
pub(super) fn apply_to_thread(exit_code: i32) -> io::Result<()> {
    EXIT_CODE.store(exit_code, Ordering::SeqCst);
    apply_by(apply_filter)
}

fn apply_by(install: Install) -> io::Result<()> {
    // SAFETY: the handler only calls async-signal-safe functions.
    unsafe { handle_signal(libc::SIGSYS, on_denied, 0) }?;
    let applied = || {
        let first = compile(allowed()?, SeccompAction::Trap, SeccompAction::Allow)?;
        install(&first)?;
        let fail = SeccompAction::Errno(libc::ENOSYS.unsigned_abs());
        install(&compile(failing()?, SeccompAction::Allow, fail)?)
    };
    applied().map_err(as_io)
}

/// Applies the second filter to all threads, if this process has the first and not the second.
/// Returns whether it had.
pub(super) fn narrow() -> io::Result<bool> {
    let Some(second) = SECOND.lock().take() else { return Ok(false) };
    apply_filter_all_threads(&second).map_err(as_io)?;
    Ok(true)
}

/// Installs a filter for this thread, or for all.
type Install = fn(BpfProgramRef<'_>) -> Result<()>;

/// Compiles rules. A part of them is found by halves, because its program compares a call's number
/// with each of its rules in turn, and the kernel runs a filter for all numbers when it is applied
/// (`seccomp_cache_prepare` in kernel/seccomp.c).
fn compile(
    mut rules: Rules,
    otherwise: SeccompAction,
    matched: SeccompAction,
) -> Result<BpfProgram> {
    let middle = rules.keys().nth(rules.len() / 2).copied();
    let (PART.., Some(middle)) = (rules.len(), middle) else {
        let filter = SeccompFilter::new(rules, otherwise, matched, TargetArch::x86_64)?;
        return Ok(filter.try_into()?);
    };
    let high = rules.split_off(&middle);
    let low = compile(rules, otherwise.clone(), matched.clone())?;
    let high = compile(high, otherwise, matched)?;
    // The kernel refuses a jump that is too long, and no call has a negative number.
    let over_low = u32::try_from(low.len()).unwrap_or(u32::MAX);
    let middle = u32::try_from(middle).unwrap_or(u32::MAX);
    let head = vec![
        sock_filter { code: LOAD, jt: 0, jf: 0, k: 0 },
        sock_filter { code: JUMP_IF_GREATER_OR_EQUAL, jt: 0, jf: 1, k: middle },
        sock_filter { code: JUMP, jt: 0, jf: 0, k: over_low },
    ];
    Ok([head, low, high].concat())
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn as_io(error: seccompiler::Error) -> io::Error {
    io::Error::other(ErrorChain::of(&error))
}

/// What is allowed from the beginning.
fn allowed() -> Result<Rules> {
    let mut rules: Rules = ALLOWED.iter().map(|call| (*call, Vec::new())).collect();
    let executable = number(libc::PROT_EXEC);
    let thread = number(libc::CLONE_THREAD);
    let new = libc::CLONE_NEWCGROUP
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWNET
        | libc::CLONE_NEWNS
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWUSER
        | libc::CLONE_NEWUTS;
    let (new, own) = (number(new), u64::from(std::process::id()));
    let own_level = number(libc::SOL_SOCKET);
    let socket_options: Result<_> = SOCKET_OPTIONS
        .iter()
        .map(|option| all(&[(1, Dword, Eq, own_level), (2, Dword, Eq, number(*option))]))
        .collect();
    let no_lock = LOCKS.map(|command| (1, Dword, Ne, number(command)));
    rules.extend([
        (libc::SYS_fcntl, vec![all(&no_lock)?]),
        // It would free the pages of a file, and so those of a pool.
        (libc::SYS_madvise, vec![all(&[(2, Dword, Ne, number(libc::MADV_REMOVE))])?]),
        // Without an address: to the one that the socket is connected to, which was checked.
        (libc::SYS_sendto, vec![all(&[(4, Qword, Eq, 0)])?]),
        (libc::SYS_setsockopt, socket_options?),
        (libc::SYS_mmap, vec![all(&[(2, Dword, MaskedEq(executable), 0)])?]),
        (libc::SYS_mprotect, vec![all(&[(2, Dword, MaskedEq(executable), 0)])?]),
        (libc::SYS_clone, vec![all(&[(0, Qword, MaskedEq(new | thread), thread)])?]),
        (libc::SYS_tgkill, vec![all(&[(0, Dword, Eq, own)])?]),
        (libc::SYS_prlimit64, vec![all(&[(0, Dword, Eq, 0)])?]),
        (libc::SYS_socketpair, vec![all(&[(0, Dword, Eq, number(libc::AF_UNIX))])?]),
        (
            libc::SYS_prctl,
            vec![
                all(&[(0, Dword, Eq, number(libc::PR_SET_NAME))])?,
                all(&[(0, Dword, Eq, number(libc::PR_SET_VMA))])?,
                all(&[(0, Dword, Eq, PR_GET_AUXV)])?,
                all(&[(0, Dword, Eq, number(libc::PR_SET_NO_NEW_PRIVS))])?,
            ],
        ),
        (libc::SYS_seccomp, Vec::new()),
        (
            libc::SYS_ioctl,
            vec![
                all(&[(1, Dword, MaskedEq(KIND), KVM)])?,
                all(&[(1, Dword, MaskedEq(KIND), USERFAULTFD)])?,
                all(&[(1, Dword, Eq, libc::FIONBIO)])?,
                all(&[(1, Dword, Eq, TUNSETOFFLOAD)])?,
                all(&[(1, Dword, Eq, MEASURE_VERITY)])?,
                all(&[(1, Dword, Eq, PAGEMAP_SCAN)])?,
            ],
        ),
    ]);
    Ok(rules)
}

/// What is denied from the guest's first instruction on.
fn denied() -> Result<Rules> {
    let anonymous = number(libc::MAP_ANONYMOUS);
    let denied = KVM_CREATE.into_iter().chain([USERFAULTFD_NEW]);
    let denied = denied.map(|request| all(&[(1, Dword, Eq, request)]));
    Ok(BTreeMap::from([
        (libc::SYS_mmap, vec![all(&[(3, Dword, MaskedEq(anonymous), 0)])?]),
        (libc::SYS_ioctl, denied.collect::<Result<_>>()?),
        (libc::SYS_seccomp, Vec::new()),
    ]))
}

/// What fails as in a kernel without it, from the beginning.
fn failing() -> Result<Rules> {
    let placed = number(libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED);
    Ok(BTreeMap::from([
        (libc::SYS_clone3, Vec::new()),
        (
            libc::SYS_mremap,
            vec![
                all(&[(1, Qword, Ne, CHUNK)])?,
                all(&[(2, Qword, Ne, CHUNK)])?,
                all(&[(3, Dword, Ne, placed)])?,
            ],
        ),
    ]))
}

/// A constant of the kernel as the argument of a call, which has its low 32 bits.
fn number(constant: c_int) -> u64 {
    constant.cast_unsigned().into()
}

/// A rule that matches if all conditions on arguments do.
fn all(conditions: &[(u8, SeccompCmpArgLen, SeccompCmpOp, u64)]) -> Result<SeccompRule> {
    let conditions = conditions.iter().map(|(argument, size, operator, value)| {
        SeccompCondition::new(*argument, size.clone(), operator.clone(), *value)
    });
    Ok(SeccompRule::new(conditions.collect::<std::result::Result<_, _>>()?)?)
}

/// The beginning of the kernel's siginfo of SIGSYS (sigaction(2)), which libc does not have.
#[repr(C)]
struct Denied {
    _signal: [c_int; 4],
    _address: *mut c_void,
    call: c_int,
}

/// Ends this process at a call that is denied, with a line that names the call.
extern "C" fn on_denied(_: c_int, info: *mut siginfo_t, _: *mut c_void) {
    // SAFETY: the kernel passes a siginfo of this signal.
    let call = unsafe { (*info.cast::<Denied>()).call };
    let mut line = [0; 128];
    let mut rest = &mut line[..];
    // Shorter than the line.
    let _ = match Sysno::new(usize::try_from(call).unwrap_or(usize::MAX)) {
        Some(call) => {
            writeln!(rest, "firn: error: the monitor called {call}, which its jail denies")
        }
        None => writeln!(rest, "firn: error: the monitor made call {call}, which its jail denies"),
    };
    let left = rest.len();
    end_with(&line[..line.len() - left], EXIT_CODE.load(Ordering::SeqCst))
}

#[cfg(test)]
#[path = "filter_tests.rs"]
mod tests;
