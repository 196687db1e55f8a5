//! What a monitor cannot do once its guest has taken it over. Root makes the threads of a real
//! monitor call what a hostile one would call (ptrace(2)), so no part of the monitor is changed for
//! the test. Requires root and any kind of KVM.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

use std::fs::File;
use std::io::Read;
use std::net::TcpListener;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use firn_run::cgroup::CgroupVersion;
use firn_run::jail::{Jail, JailMode};
use firn_run::monitor::{Monitor, Progress};
use firn_run::{
    Descriptors, HostSpec, Origin, ReplaySpec, SourceSpec, StartError, StartSpec, ThawSpec,
};
use firn_vmm::{KVM_DEVICE, open_kvm};
use libc::c_long;
use nix::errno::Errno;
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use rustix::process::geteuid;

const LIMIT: Duration = Duration::from_secs(60);

/// A thread of a monitor that makes the calls of a test.
struct Captive {
    thread: Pid,
    memory: File,
    /// An instruction `syscall` of the monitor's program.
    gate: u64,
}

/// What the kernel did with a call.
#[derive(Debug, PartialEq, Eq)]
enum Answer {
    /// The filter denied it.
    Denied,
    /// It was carried out; negative values are errors.
    Returned(i64),
}

impl Captive {
    fn of(process: u32, thread: i32) -> Self {
        let path = format!("/proc/{process}/mem");
        let memory = File::options().read(true).write(true).open(path).unwrap();
        Self { thread: Pid::from_raw(thread), gate: gate(process, &memory), memory }
    }

    fn wait(&self) -> WaitStatus {
        waitpid(self.thread, Some(WaitPidFlag::__WALL)).unwrap()
    }

    /// Makes the thread call. `text` is placed in its memory, and its address is the argument
    /// `text.0`.
    /// `None` if the thread has ended.
    fn call(
        &self,
        number: c_long,
        arguments: [u64; 6],
        text: Option<(usize, &[u8])>,
    ) -> Option<Answer> {
        match ptrace::attach(self.thread) {
            Err(Errno::ESRCH) => return None,
            attached => attached.unwrap(),
        }
        while !matches!(self.wait(), WaitStatus::Stopped(_, Signal::SIGSTOP)) {
            ptrace::cont(self.thread, None).unwrap();
        }
        let before = ptrace::getregs(self.thread).unwrap();
        let mut arguments = arguments;
        if let Some((argument, bytes)) = text {
            // Below the red zone of the x86-64 ABI, which the thread may use.
            let place = before.rsp - 4096;
            self.memory.write_all_at(bytes, place).unwrap();
            arguments[argument] = place;
        }
        let mut regs = before;
        [regs.rdi, regs.rsi, regs.rdx, regs.r10, regs.r8, regs.r9] = arguments;
        (regs.rax, regs.orig_rax) = (number.cast_unsigned(), u64::MAX);
        regs.rip = self.gate;
        ptrace::setregs(self.thread, regs).unwrap();
        // It stops when it enters the call, and when it returns.
        for _ in 0..2 {
            ptrace::syscall(self.thread, None).unwrap();
            assert!(matches!(self.wait(), WaitStatus::Stopped(_, Signal::SIGTRAP)));
        }
        let value = ptrace::getregs(self.thread).unwrap().rax.cast_signed();
        // The filter leaves the number in place, and sends a signal.
        let denied = value == number && {
            ptrace::cont(self.thread, None).unwrap();
            assert!(matches!(self.wait(), WaitStatus::Stopped(_, Signal::SIGSYS)));
            true
        };
        ptrace::setregs(self.thread, before).unwrap();
        ptrace::detach(self.thread, None).unwrap();
        Some(if denied { Answer::Denied } else { Answer::Returned(value) })
    }

    /// Lets the thread run on at an address, with a call's number and arguments.
    fn enter(&self, address: u64, number: c_long, arguments: [u64; 6]) {
        ptrace::attach(self.thread).unwrap();
        assert!(matches!(self.wait(), WaitStatus::Stopped(_, Signal::SIGSTOP)));
        let mut regs = ptrace::getregs(self.thread).unwrap();
        (regs.rax, regs.orig_rax, regs.rip) = (number.cast_unsigned(), u64::MAX, address);
        [regs.rdi, regs.rsi, regs.rdx, regs.r10, regs.r8, regs.r9] = arguments;
        ptrace::setregs(self.thread, regs).unwrap();
        ptrace::detach(self.thread, None).unwrap();
    }
}

/// The address of an instruction `syscall` in the program of a process.
fn gate(process: u32, memory: &File) -> u64 {
    let maps = std::fs::read_to_string(format!("/proc/{process}/maps")).unwrap();
    let text = maps.lines().find(|line| line.contains(" r-xp ")).unwrap();
    let (start, end) = text.split_once(' ').unwrap().0.split_once('-').unwrap();
    let [start, end] = [start, end].map(|number| u64::from_str_radix(number, 16).unwrap());
    let mut code = vec![0; usize::try_from(end - start).unwrap()];
    memory.read_exact_at(&mut code, start).unwrap();
    start + code.windows(2).position(|bytes| bytes == [0x0f, 0x05]).unwrap() as u64
}

/// A player that waits, with all its guest's memory touched, in a jail with all walls.
struct Jailed {
    monitor: Monitor,
    directory: tempfile::TempDir,
}

/// `None` where this host lacks what it takes.
fn jailed() -> Option<Jailed> {
    let able = geteuid().is_root() && open_kvm(KVM_DEVICE.as_ref()).is_ok();
    if !firn_required::has("kvm", able) {
        return None;
    }
    let directory = tempfile::tempdir().unwrap();
    let snapshot = directory.path().join("snapshot");
    let program: &Path = env!("CARGO_BIN_EXE_firn").as_ref();
    let made = Command::new(program)
        .args(["player", "--trace", "sequential-read:4M", "--out"])
        .arg(&snapshot)
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let jail = Jail::new(JailMode::Require);
    let mut monitor = Monitor::spawn(&jail, program, KVM_DEVICE.as_ref()).unwrap();
    let mut descriptors = Descriptors::default();
    let thaw = ThawSpec {
        source: SourceSpec::directory(&snapshot, &mut descriptors).unwrap(),
        planner: "firecracker".to_owned(),
        preloaded: false,
        root: None,
        invoke: None,
        replay: ReplaySpec { hold: true, ..ReplaySpec::default() },
    };
    let spec = StartSpec::new(Origin::Thaw(thaw), HostSpec::default(), LIMIT);
    monitor.start(spec, &descriptors).unwrap();
    assert!(matches!(monitor.progress(Some(LIMIT)).unwrap(), Progress::Held));
    Some(Jailed { monitor, directory })
}

impl Jailed {
    /// Its threads, without those of KVM in the kernel.
    fn threads(&self) -> Vec<i32> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.monitor.pid())).unwrap();
        let tasks = tasks.map(|task| task.unwrap().path());
        let ours = tasks.filter(|task| {
            !std::fs::read_to_string(task.join("comm")).unwrap().starts_with("kvm-")
        });
        let number = |task: PathBuf| task.file_name().unwrap().to_str().unwrap().parse().unwrap();
        ours.map(number).collect()
    }

    /// Calls in each thread of the monitor; `check` gets each answer.
    fn each(
        &self,
        number: c_long,
        arguments: [u64; 6],
        text: Option<(usize, &[u8])>,
        check: impl Fn(&Answer) -> bool,
    ) {
        let mut called = 0;
        for thread in self.threads() {
            let captive = Captive::of(self.monitor.pid(), thread);
            let Some(answer) = captive.call(number, arguments, text) else { continue };
            assert!(check(&answer), "call {number} in thread {thread}: {answer:?}");
            called += 1;
        }
        // The thread of the start, of a vCPU, and of signals and orders.
        assert!(called >= 4, "{called}");
    }

    fn denied(&self, number: c_long, arguments: [u64; 6], text: Option<(usize, &[u8])>) {
        self.each(number, arguments, text, |answer| *answer == Answer::Denied);
    }
}

const CURRENT: u64 = libc::AT_FDCWD.cast_unsigned() as u64;

#[test]
fn a_hostile_monitor_opens_no_file_and_runs_no_program() {
    let Some(jailed) = jailed() else { return };
    // The gate works.
    let own = |answer: &Answer| *answer == Answer::Returned(1);
    jailed.each(libc::SYS_getpid, [0; 6], None, own);
    for path in [c"/etc/passwd", c"/proc/self/map_files", c"/proc/1/mem", c".", c"/dev/kvm"] {
        let path = path.to_bytes_with_nul();
        jailed.denied(libc::SYS_openat, [CURRENT, 0, 0, 0, 0, 0], Some((1, path)));
        jailed.denied(libc::SYS_open, [0; 6], Some((0, path)));
    }
    jailed.denied(libc::SYS_execve, [0; 6], Some((0, c"/bin/true".to_bytes_with_nul())));
    jailed.denied(
        libc::SYS_execveat,
        [0, 0, 0, 0, libc::AT_EMPTY_PATH.cast_unsigned().into(), 0],
        None,
    );
    jailed.denied(libc::SYS_clone, [libc::SIGCHLD.cast_unsigned().into(), 0, 0, 0, 0, 0], None);
    let absent = |answer: &Answer| *answer == Answer::Returned(-i64::from(libc::ENOSYS));
    jailed.each(libc::SYS_clone3, [0; 6], None, absent);
    // What is not denied by its number finds nothing.
    let nothing = |answer: &Answer| *answer == Answer::Returned(-i64::from(libc::ENOENT));
    let stat = [CURRENT, 0, 0, 0, 0, 0];
    jailed.each(libc::SYS_newfstatat, stat, Some((1, c"/etc/passwd".to_bytes_with_nul())), nothing);
}

#[test]
fn a_hostile_monitor_reaches_no_other_process_and_no_network() {
    let Some(jailed) = jailed() else { return };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    for family in [libc::AF_INET, libc::AF_UNIX, libc::AF_VSOCK, libc::AF_NETLINK] {
        let arguments = [family.cast_unsigned().into(), libc::SOCK_STREAM as u64, 0, 0, 0, 0];
        jailed.denied(libc::SYS_socket, arguments, None);
    }
    jailed.denied(libc::SYS_connect, [0, 0, 16, 0, 0, 0], Some((1, &[2; 16])));
    drop(listener);
    let other = u64::from(std::process::id());
    jailed.denied(libc::SYS_kill, [other, 0, 0, 0, 0, 0], None);
    jailed.denied(libc::SYS_tgkill, [other, other, 0, 0, 0, 0], None);
    jailed.denied(libc::SYS_ptrace, [16, other, 0, 0, 0, 0], None);
    jailed.denied(libc::SYS_pidfd_open, [other, 0, 0, 0, 0, 0], None);
    for call in [libc::SYS_process_vm_readv, libc::SYS_process_vm_writev] {
        jailed.denied(call, [other, 0, 0, 0, 0, 0], None);
    }
    for call in [libc::SYS_unshare, libc::SYS_setns, libc::SYS_setresuid, libc::SYS_capset] {
        jailed.denied(call, [0; 6], None);
    }
    for call in [libc::SYS_bpf, libc::SYS_perf_event_open, libc::SYS_io_uring_setup] {
        jailed.denied(call, [0; 6], None);
    }
}

#[test]
fn a_hostile_monitor_maps_and_moves_nothing_but_its_own_memory() {
    let Some(jailed) = jailed() else { return };
    let (read, shared) = (libc::PROT_READ as u64, libc::MAP_SHARED as u64);
    // Whatever descriptors it has: files are mapped before the guest runs, and not after.
    for descriptor in 0..32 {
        jailed.denied(libc::SYS_mmap, [0, 4096, read, shared, descriptor, 0], None);
    }
    let (all, private) = (libc::PROT_EXEC as u64 | read, libc::MAP_PRIVATE as u64 | 0x20);
    jailed.denied(libc::SYS_mmap, [0, 4096, all, private, u64::MAX, 0], None);
    // A mapping that grows would reach what is beside it in a pool.
    let absent = |answer: &Answer| *answer == Answer::Returned(-i64::from(libc::ENOSYS));
    let (chunk, moves) = (2 << 20, libc::MREMAP_MAYMOVE as u64);
    for arguments in [
        [0, chunk, 2 * chunk, moves, 0, 0],
        [0, 4096, chunk, moves | libc::MREMAP_FIXED as u64, chunk, 0],
        [0, 0, chunk, moves | libc::MREMAP_FIXED as u64, chunk, 0],
        [0, chunk, chunk, moves, 0, 0],
    ] {
        jailed.each(libc::SYS_mremap, arguments, None, absent);
    }
    // What a pool's manager relies on: a lock of a descriptor lasts as long as the mapping, no page
    // of a file is freed by a mapping, and no socket keeps a page that is not mapped any more.
    let lock = libc::F_OFD_SETLK as u64;
    for command in [lock, libc::F_OFD_SETLKW as u64] {
        jailed.denied(libc::SYS_fcntl, [0, command, 0, 0, 0, 0], None);
    }
    jailed.denied(libc::SYS_madvise, [0, chunk, libc::MADV_REMOVE as u64, 0, 0, 0], None);
    let (level, name) = (libc::SOL_SOCKET as u64, libc::SO_ZEROCOPY as u64);
    jailed.denied(libc::SYS_setsockopt, [0, level, name, 0, 0, 0], None);
    // A new VM, and a new userfaultfd.
    for request in [0xae01, 0xaa00] {
        for descriptor in 0..32 {
            jailed.denied(libc::SYS_ioctl, [descriptor, request, 0, 0, 0, 0], None);
        }
    }
    jailed.denied(libc::SYS_seccomp, [0; 6], None);
    jailed.denied(libc::SYS_prctl, [libc::PR_SET_DUMPABLE as u64, 1, 0, 0, 0, 0], None);
}

/// Each wall without the filter: what the kernel shows of a monitor.
#[test]
fn the_walls_of_a_monitor_stand() {
    let Some(jailed) = jailed() else { return };
    let process = PathBuf::from(format!("/proc/{}", jailed.monitor.pid()));
    let text = |file: &str| {
        let mut bytes = Vec::new();
        File::open(process.join(file)).unwrap().read_to_end(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    let root: Vec<_> = std::fs::read_dir(process.join("root")).unwrap().collect();
    assert!(root.is_empty(), "{root:?}");
    let written = std::fs::write(process.join("root/file"), "");
    assert_eq!(written.unwrap_err().kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    for kind in ["net", "ipc", "uts", "mnt", "pid", "user"] {
        let namespace = |process: &Path| std::fs::read_link(process.join("ns").join(kind)).unwrap();
        assert_ne!(namespace(&process), namespace(Path::new("/proc/self")), "{kind}");
    }
    let status = text("status");
    let value = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(":\t"));
        line.unwrap_or_else(|| panic!("{name}: {status}")).to_owned()
    };
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(value(set), "0000000000000000", "{set}");
    }
    assert_eq!((value("NoNewPrivs"), value("Seccomp")), ("1".to_owned(), "2".to_owned()));
    assert_eq!(value("NSpid").split('\t').next_back(), Some("1"));
    let users = value("Uid");
    let users: Vec<u32> = users.split('\t').map(|user| user.parse().unwrap()).collect();
    assert_eq!(users, [0x7000_0000 + jailed.monitor.pid(); 4]);
    assert_eq!(value("Groups").trim(), "");
    let limits = text("limits");
    assert!(limits.contains("Max core file size        0                    0"), "{limits}");
    assert!(limits.contains("Max open files            2048                 2048"), "{limits}");
    let most = 64 << 20;
    assert!(limits.contains(&format!("Max file size             {most}             {most}")));
    assert_eq!(text("environ"), "");
}

/// What the control groups of a monitor allow it.
#[test]
fn a_hostile_monitor_takes_no_more_than_its_control_groups_have() {
    let Some(mut jailed) = jailed() else { return };
    let process = jailed.monitor.pid();
    let groups = std::fs::read_to_string(format!("/proc/{process}/cgroup")).unwrap();
    let limits = jailed.monitor.limits().unwrap();
    let memory = limits.group("memory").unwrap();
    let v1 = memory.version() == CgroupVersion::V1;
    for controller in ["memory", "cpu", "cpuset", "pids", "devices", "freezer", "blkio"] {
        let has = |line: &&str| {
            let (_, rest) = line.split_once(':').unwrap();
            let name = if v1 { controller } else { "" };
            rest.split_once(':').unwrap().0.split(',').any(|found| found == name)
        };
        let line = groups.lines().find(has).unwrap_or_else(|| panic!("{controller}: {groups}"));
        assert!(line.contains("/firn-monitors-"), "{controller}: {groups}");
    }
    let (limit, kills) = if v1 {
        ("memory.limit_in_bytes", "memory.oom_control")
    } else {
        ("memory.max", "memory.events")
    };
    let guest = std::fs::metadata(jailed.directory.path().join("snapshot/memory.img")).unwrap();
    assert_eq!(memory.number(limit).unwrap(), 2 * guest.len() + (64 << 20));
    let pids = limits.group("pids").unwrap();
    let (now, most) = (pids.number("pids.current").unwrap(), pids.number("pids.max").unwrap());
    assert!((4..most).contains(&now) && most < 1000, "{now} of {most}");
    if v1 {
        let devices = limits.group("devices").unwrap().read("devices.list").unwrap();
        assert_eq!(devices, "c 1:8 r\nc 1:9 r\n");
    }
    let path = memory.path().to_owned();
    // All at once: the kernel kills the monitor in this call.
    let captive = Captive::of(process, i32::try_from(process).unwrap());
    let rights = (libc::PROT_READ | libc::PROT_WRITE).cast_unsigned().into();
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE;
    let arguments = [0, 1 << 30, rights, flags.cast_unsigned().into(), u64::MAX, 0];
    captive.enter(captive.gate, libc::SYS_mmap, arguments);
    let _ = jailed.monitor.release();
    let error = jailed.monitor.started(Some(LIMIT)).unwrap_err();
    let text = firn_base::error_chain(&error);
    assert!(text.contains("the monitor ended (signal: 9 (SIGKILL)"), "{text}");
    let killed = jailed.monitor.limits().unwrap().group("memory").unwrap();
    assert!(killed.value(kills, "oom_kill").unwrap() > 0);
    drop(jailed);
    assert!(!path.exists(), "the group ends with its monitor");
}

#[test]
fn a_call_that_is_denied_ends_the_monitor_with_its_name_and_a_crash_with_its_signal() {
    // The first process of a pid namespace ignores signals that others send it, and not its own.
    for (call, reason) in [
        (Some(libc::SYS_socket), "called socket, which its jail denies"),
        (None, "the monitor ended (signal: 11 (SIGSEGV)"),
    ] {
        let Some(mut jailed) = jailed() else { return };
        let process = jailed.monitor.pid();
        let captive = Captive::of(process, i32::try_from(process).unwrap());
        captive.enter(call.map_or(0, |_| captive.gate), call.unwrap_or_default(), [0; 6]);
        // It may have ended already.
        let _ = jailed.monitor.release();
        let error = jailed.monitor.started(Some(LIMIT)).unwrap_err();
        let text = firn_base::error_chain(&error);
        assert!(matches!(error, StartError::Monitor(_)) && text.contains(reason), "{text}");
    }
}
