//! The system calls of a monitor (seccomp(2)).
//!
//! Threads share memory, so what one thread may do every thread may: all have one filter. There are
//! two for a monitor, and both hold once both are applied. The first is for one that waits and
//! restores: it works with the descriptors that it has and receives, and can make no other but of
//! memory, pairs of sockets, events and timers. The second is applied before the guest's first
//! instruction: from then on nothing is mapped but memory, and no VM and no filter is made.
//!
//! `firn-firecracker`, whose clients name files, has the first filter in the threads that serve its
//! microVM, and one in the others that allows to open files, unix sockets and tap devices.
//!
//! A call that a filter denies ends the monitor with a line on standard error that names it. Two
//! calls fail instead, because the C library has another way without them: clone3, whose flags a
//! filter cannot read, and an mremap other than that of a chunk of guest memory.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

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

use super::ThreadRole;

/// Calls that are allowed with any arguments. They reach what the monitor has, and nothing else.
const ALLOWED: &[c_long] = &[
    // Memory.
    libc::SYS_brk,
    libc::SYS_memfd_create,
    libc::SYS_mincore,
    libc::SYS_msync,
    libc::SYS_munmap,
    // Threads.
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

/// Calls that are allowed besides to a thread that opens what a client names.
const OPENING: &[c_long] = &[
    // Files by their paths.
    libc::SYS_access,
    libc::SYS_chmod,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_getcwd,
    libc::SYS_getdents64,
    libc::SYS_linkat,
    libc::SYS_lstat,
    libc::SYS_mkdir,
    libc::SYS_mkdirat,
    libc::SYS_open,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_readlink,
    libc::SYS_readlinkat,
    libc::SYS_rename,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_rmdir,
    libc::SYS_stat,
    libc::SYS_statfs,
    libc::SYS_unlink,
    libc::SYS_unlinkat,
    // Locks of files.
    libc::SYS_fcntl,
    // Sockets, whose family `socket` limits.
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_listen,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_setsockopt,
    // For a page fault handler.
    libc::SYS_userfaultfd,
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
/// Attaching to a tap device, the length of its headers, and the number of a network device
/// (netdevice(7)).
const TUNSETIFF: u64 = 0x4004_54ca;
const TUNSETVNETHDRSZ: u64 = 0x4004_54d8;
const SIOCGIFINDEX: u64 = 0x8933;
/// `FS_IOC_GETFLAGS`, of a file (ioctl_iflags(2)).
const GETFLAGS: u64 = 0x8008_6601;
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

/// Instructions of classic BPF (Linux Documentation/networking/filter.rst):
/// `BPF_LD | BPF_W | BPF_ABS`, of the call's number; `BPF_JMP | BPF_JGE | BPF_K`;
/// `BPF_JMP | BPF_JA`; `BPF_RET | BPF_K`.
const LOAD: u16 = 0x20;
const JUMP_IF_GREATER_OR_EQUAL: u16 = 0x35;
const JUMP: u16 = 0x05;
const RETURN: u16 = 0x06;

type Rules = BTreeMap<c_long, Vec<SeccompRule>>;

/// Calls for which a filter has two answers.
struct Group {
    /// A call without a rule always matches.
    rules: Rules,
    matched: SeccompAction,
    not_matched: SeccompAction,
}

type Result<T> = std::result::Result<T, seccompiler::Error>;

/// The second filter of a process that has the first one.
static SECOND: Mutex<Option<Second>> = Mutex::new(None);

/// How far the second filter is.
enum Second {
    /// Compiled, before a start needs it.
    Compiled(BpfProgram),
    /// A thread applies it to all threads once the first has a message, and sends the result.
    InThread(SyncSender<()>, Receiver<io::Result<()>>),
}

/// The code with which this process ends at a call that is denied.
static EXIT_CODE: AtomicI32 = AtomicI32::new(1);

/// Applies the first filter to all threads of this process.
pub(super) fn apply() -> io::Result<()> {
    apply_by(apply_filter_all_threads, first)?;
    let second = second().and_then(|denied| compile(denied, SeccompAction::Allow));
    *SECOND.lock() = Some(Second::Compiled(second.map_err(as_io)?));
    Ok(())
}

/// Applies the filter of a role to this thread, and to those that it makes. A call that it denies
/// ends the process with this code.
pub(super) fn apply_to_thread(role: ThreadRole, exit_code: i32) -> io::Result<()> {
    EXIT_CODE.store(exit_code, Ordering::SeqCst);
    let groups = match role {
        ThreadRole::Serve => first,
        ThreadRole::Open => opening,
    };
    apply_by(apply_filter, groups)
}

fn apply_by(install: Install, groups: fn() -> Result<Vec<Group>>) -> io::Result<()> {
    // SAFETY: the handler only calls async-signal-safe functions.
    unsafe { handle_signal(libc::SIGSYS, on_denied, 0) }?;
    let applied = || install(&compile(groups()?, SeccompAction::Trap)?);
    applied().map_err(as_io)
}

/// Starts a thread that can apply the second filter beside a start, if this process has the first
/// and not the second.
pub(super) fn wait_to_narrow() -> io::Result<()> {
    let mut second = SECOND.lock();
    let Some(Second::Compiled(program)) = &*second else { return Ok(()) };
    let program = program.clone();
    let (begin, begun) = sync_channel(1);
    let (done, applied) = sync_channel(1);
    let apply = move || {
        if begun.recv().is_ok() {
            let _ = done.send(apply_filter_all_threads(&program).map_err(as_io));
        }
    };
    std::thread::Builder::new().name("narrow".into()).spawn(apply)?;
    *second = Some(Second::InThread(begin, applied));
    Ok(())
}

/// Lets the thread that waits apply the second filter to all threads. Without such a thread,
/// nothing happens.
pub(super) fn begin_to_narrow() {
    if let Some(Second::InThread(begin, _)) = &*SECOND.lock() {
        // One message is enough, and a thread that has ended fails `narrow`.
        let _ = begin.try_send(());
    }
}

/// Applies the second filter to all threads, or waits for the thread that does, if this process has
/// the first and not the second. Returns whether it had.
pub(super) fn narrow() -> io::Result<bool> {
    begin_to_narrow();
    match SECOND.lock().take() {
        None => return Ok(false),
        Some(Second::Compiled(program)) => apply_filter_all_threads(&program).map_err(as_io)?,
        Some(Second::InThread(_, applied)) => applied.recv().map_err(io::Error::other)??,
    }
    Ok(true)
}

/// Installs a filter for this thread, or for all.
type Install = fn(BpfProgramRef<'_>) -> Result<()>;

/// Compiles answers, with `otherwise` for all other calls. A call is found by halves of the ranges
/// with one answer: the kernel translates each instruction of a filter, and runs the filter for all
/// numbers when it is applied (`seccomp_cache_prepare` in kernel/seccomp.c).
fn compile(groups: Vec<Group>, otherwise: SeccompAction) -> Result<BpfProgram> {
    let filter = |rules, otherwise, matched| -> Result<BpfProgram> {
        Ok(SeccompFilter::new(rules, otherwise, matched, TargetArch::x86_64)?.try_into()?)
    };
    // One without rules is the check of the architecture, which all begin with, and an answer.
    let mut program = filter(Rules::new(), SeccompAction::Trap, SeccompAction::Allow)?;
    program.pop();
    let answer = |action: SeccompAction| vec![instruction(RETURN, 0, 0, action.into())];
    let otherwise = answer(otherwise);
    let mut ranges = BTreeMap::from([(0, otherwise.clone())]);
    for Group { rules, matched, not_matched } in groups {
        for (call, rules) in rules {
            let range = if rules.is_empty() {
                answer(matched.clone())
            } else {
                let rules = BTreeMap::from([(call, rules)]);
                let whole = filter(rules, not_matched.clone(), matched.clone())?;
                whole.strip_prefix(&program[..]).unwrap_or(&whole).to_vec()
            };
            // No call has a negative number.
            let call = u32::try_from(call).unwrap_or(u32::MAX);
            ranges.insert(call, range);
            ranges.entry(call.saturating_add(1)).or_insert_with(|| otherwise.clone());
        }
    }
    let mut ranges: Vec<_> = ranges.into_iter().collect();
    ranges.dedup_by(|next, range| next.1 == range.1);
    program.push(instruction(LOAD, 0, 0, 0));
    program.extend(find(&ranges));
    Ok(program)
}

/// Goes to the program of the range in which the call's number, which was loaded, is. Each range
/// comes with its first number.
fn find(ranges: &[(u32, BpfProgram)]) -> BpfProgram {
    if let [(_, program)] = ranges {
        return program.clone();
    }
    let (low, high) = ranges.split_at(ranges.len() / 2);
    let (middle, low, high) = (high.first().map_or(0, |range| range.0), find(low), find(high));
    let mut program = match u8::try_from(low.len()) {
        Ok(over_low) => vec![instruction(JUMP_IF_GREATER_OR_EQUAL, over_low, 0, middle)],
        // The kernel refuses a jump that is too long.
        Err(_) => vec![
            instruction(JUMP_IF_GREATER_OR_EQUAL, 0, 1, middle),
            instruction(JUMP, 0, 0, u32::try_from(low.len()).unwrap_or(u32::MAX)),
        ],
    };
    program.extend(low);
    program.extend(high);
    program
}

fn instruction(code: u16, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn as_io(error: seccompiler::Error) -> io::Error {
    io::Error::other(ErrorChain::of(&error))
}

/// The first filter, but for the calls that it denies without an exception.
fn first() -> Result<Vec<Group>> {
    with_failing(allowed()?)
}

/// The filter of a thread that opens what a client names, in the same way.
fn opening() -> Result<Vec<Group>> {
    let mut rules = allowed()?;
    rules.extend(OPENING.iter().map(|call| (*call, Vec::new())));
    let unix = all(&[(0, Dword, Eq, number(libc::AF_UNIX))])?;
    rules.insert(libc::SYS_socket, vec![unix]);
    let requests = [TUNSETIFF, TUNSETVNETHDRSZ, SIOCGIFINDEX, GETFLAGS];
    let requests: Result<Vec<_>> =
        requests.into_iter().map(|request| all(&[(1, Dword, Eq, request)])).collect();
    rules.entry(libc::SYS_ioctl).or_default().extend(requests?);
    with_failing(rules)
}

/// Calls that are allowed, and those that fail.
fn with_failing(allowed: Rules) -> Result<Vec<Group>> {
    let fail = SeccompAction::Errno(libc::ENOSYS.unsigned_abs());
    let (trap, allow) = (SeccompAction::Trap, SeccompAction::Allow);
    Ok(vec![
        Group { rules: allowed, matched: allow.clone(), not_matched: trap },
        Group { rules: failing()?, matched: fail, not_matched: allow },
    ])
}

/// The second filter, but for what it allows without an exception.
fn second() -> Result<Vec<Group>> {
    let (trap, allow) = (SeccompAction::Trap, SeccompAction::Allow);
    Ok(vec![Group { rules: denied()?, matched: trap, not_matched: allow }])
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
