//! What a monitor cannot do once its guest has taken it over. Root makes the threads of a real
//! monitor call what a hostile one would call (ptrace(2)), so no part of the monitor is changed for
//! the test. The calls leave no trace in the monitor, which runs on after them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod captive;

use std::fs::{read_dir, read_link, read_to_string};
use std::net::TcpListener;
use std::path::{Path, PathBuf};

use libc::c_long;

pub use captive::{Answer, Captive, Gate, Held};

const CURRENT: u64 = libc::AT_FDCWD.cast_unsigned() as u64;

/// A monitor that does what a hostile guest has it do.
#[derive(Debug)]
pub struct Hostile {
    process: u32,
    threads: usize,
    gate: Gate,
}

impl Hostile {
    /// The monitor that is this process, and has this number of threads at least.
    #[must_use]
    pub fn of(process: u32, threads: usize) -> Self {
        Self { process, threads, gate: Gate::of(process) }
    }

    /// Makes all attacks in each of its threads. The monitor must be in a jail with all walls.
    #[track_caller]
    pub fn attack(&self) {
        self.opens_no_file_and_runs_no_program();
        self.reaches_no_other_process_and_no_network();
        self.maps_and_moves_nothing_but_its_own_memory();
    }

    /// Files, programs and processes.
    #[track_caller]
    pub fn opens_no_file_and_runs_no_program(&self) {
        // The gate works.
        let own = |answer: &Answer| *answer == Answer::Returned(1);
        self.each(libc::SYS_getpid, [0; 6], None, own);
        for path in [c"/etc/passwd", c"/proc/self/map_files", c"/proc/1/mem", c".", c"/dev/kvm"] {
            let path = path.to_bytes_with_nul();
            self.denied(libc::SYS_openat, [CURRENT, 0, 0, 0, 0, 0], Some((1, path)));
            self.denied(libc::SYS_open, [0; 6], Some((0, path)));
        }
        self.denied(libc::SYS_execve, [0; 6], Some((0, c"/bin/true".to_bytes_with_nul())));
        self.denied(
            libc::SYS_execveat,
            [0, 0, 0, 0, libc::AT_EMPTY_PATH.cast_unsigned().into(), 0],
            None,
        );
        self.denied(libc::SYS_clone, [libc::SIGCHLD.cast_unsigned().into(), 0, 0, 0, 0, 0], None);
        let absent = |answer: &Answer| *answer == Answer::Returned(-i64::from(libc::ENOSYS));
        self.each(libc::SYS_clone3, [0; 6], None, absent);
        // What is not denied by its number finds nothing.
        let nothing = |answer: &Answer| *answer == Answer::Returned(-i64::from(libc::ENOENT));
        let stat = [CURRENT, 0, 0, 0, 0, 0];
        let passwd = c"/etc/passwd".to_bytes_with_nul();
        self.each(libc::SYS_newfstatat, stat, Some((1, passwd)), nothing);
    }

    /// Sockets, other processes, and the kernel's other doors.
    #[track_caller]
    pub fn reaches_no_other_process_and_no_network(&self) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        for family in [libc::AF_INET, libc::AF_UNIX, libc::AF_VSOCK, libc::AF_NETLINK] {
            let arguments = [family.cast_unsigned().into(), libc::SOCK_STREAM as u64, 0, 0, 0, 0];
            self.denied(libc::SYS_socket, arguments, None);
        }
        self.denied(libc::SYS_connect, [0, 0, 16, 0, 0, 0], Some((1, &[2; 16])));
        drop(listener);
        // A connected socket is used for no other address, whatever descriptor it is.
        let address = [2; 16];
        self.denied(libc::SYS_sendto, [0, 0, 0, 0, 0, 16], Some((4, &address)));
        for call in [libc::SYS_sendmsg, libc::SYS_sendmmsg, libc::SYS_bind, libc::SYS_listen] {
            self.denied(call, [0; 6], None);
        }
        self.denies_option(libc::SOL_SOCKET, libc::SO_BINDTODEVICE);
        self.denies_option(libc::IPPROTO_IP, libc::IP_TRANSPARENT);
        let other = u64::from(std::process::id());
        self.denied(libc::SYS_kill, [other, 0, 0, 0, 0, 0], None);
        self.denied(libc::SYS_tgkill, [other, other, 0, 0, 0, 0], None);
        self.denied(libc::SYS_ptrace, [16, other, 0, 0, 0, 0], None);
        self.denied(libc::SYS_pidfd_open, [other, 0, 0, 0, 0, 0], None);
        for call in [libc::SYS_process_vm_readv, libc::SYS_process_vm_writev] {
            self.denied(call, [other, 0, 0, 0, 0, 0], None);
        }
        for call in [libc::SYS_unshare, libc::SYS_setns, libc::SYS_setresuid, libc::SYS_capset] {
            self.denied(call, [0; 6], None);
        }
        for call in [libc::SYS_bpf, libc::SYS_perf_event_open, libc::SYS_io_uring_setup] {
            self.denied(call, [0; 6], None);
        }
    }

    #[track_caller]
    fn denies_option(&self, level: i32, option: i32) {
        let [level, option] = [level, option].map(|number| number.cast_unsigned().into());
        self.denied(libc::SYS_setsockopt, [0, level, option, 0, 0, 0], None);
    }

    /// Memory, and what descriptors give access to.
    #[track_caller]
    pub fn maps_and_moves_nothing_but_its_own_memory(&self) {
        let (read, shared) = (libc::PROT_READ as u64, libc::MAP_SHARED as u64);
        let descriptors = self.descriptors();
        assert!(!descriptors.is_empty());
        // Whatever descriptors it has: files are mapped before the guest runs, and not after.
        for &(descriptor, _) in &descriptors {
            self.denied(libc::SYS_mmap, [0, 4096, read, shared, descriptor, 0], None);
        }
        let (all, private) = (libc::PROT_EXEC as u64 | read, libc::MAP_PRIVATE as u64 | 0x20);
        self.denied(libc::SYS_mmap, [0, 4096, all, private, u64::MAX, 0], None);
        // A mapping that grows would reach what is beside it in a pool.
        let absent = |answer: &Answer| *answer == Answer::Returned(-i64::from(libc::ENOSYS));
        let (chunk, moves) = (2 << 20, libc::MREMAP_MAYMOVE as u64);
        for arguments in [
            [0, chunk, 2 * chunk, moves, 0, 0],
            [0, 4096, chunk, moves | libc::MREMAP_FIXED as u64, chunk, 0],
            [0, 0, chunk, moves | libc::MREMAP_FIXED as u64, chunk, 0],
            [0, chunk, chunk, moves, 0, 0],
        ] {
            self.each(libc::SYS_mremap, arguments, None, absent);
        }
        // What a pool's manager relies on: a lock of a descriptor lasts as long as the mapping, no
        // page of a file is freed by a mapping, and no socket keeps a page that is not mapped.
        let lock = libc::F_OFD_SETLK as u64;
        for command in [lock, libc::F_OFD_SETLKW as u64] {
            self.denied(libc::SYS_fcntl, [0, command, 0, 0, 0, 0], None);
        }
        self.denied(libc::SYS_madvise, [0, chunk, libc::MADV_REMOVE as u64, 0, 0, 0], None);
        self.denies_option(libc::SOL_SOCKET, libc::SO_ZEROCOPY);
        // A new VM, and a new userfaultfd.
        for request in [0xae01, 0xaa00] {
            for &(descriptor, _) in &descriptors {
                self.denied(libc::SYS_ioctl, [descriptor, request, 0, 0, 0, 0], None);
            }
        }
        self.denied(libc::SYS_seccomp, [0; 6], None);
        self.denied(libc::SYS_prctl, [libc::PR_SET_DUMPABLE as u64, 1, 0, 0, 0, 0], None);
    }

    /// Its open descriptors, and what each refers to.
    #[must_use]
    pub fn descriptors(&self) -> Vec<(u64, PathBuf)> {
        let open = read_dir(format!("/proc/{}/fd", self.process)).unwrap();
        // It may close one meanwhile.
        let open = open.filter_map(|entry| {
            let path = entry.unwrap().path();
            Some((number(&path), read_link(&path).ok()?))
        });
        open.collect()
    }

    /// Its threads, without those of KVM in the kernel.
    fn ids(&self) -> Vec<i32> {
        let tasks = read_dir(format!("/proc/{}/task", self.process)).unwrap();
        let tasks = tasks.map(|task| task.unwrap().path());
        // One may end meanwhile.
        let name = |task: &PathBuf| read_to_string(task.join("comm")).unwrap_or_default();
        tasks.filter(|task| !name(task).starts_with("kvm-")).map(|task| number(&task)).collect()
    }

    /// Stops all of its threads, so that what a call makes another process send stays unread.
    #[must_use]
    pub fn hold(&self) -> Held<'_> {
        Held::new(self.ids().into_iter().map(|thread| self.gate.captive(thread)))
    }

    /// Calls in each thread of the monitor; `check` gets each answer. `text` is placed in its
    /// memory, and its address is the argument `text.0`.
    #[track_caller]
    pub fn each(
        &self,
        call: c_long,
        arguments: [u64; 6],
        text: Option<(usize, &[u8])>,
        check: impl Fn(&Answer) -> bool,
    ) {
        let mut called = 0;
        for thread in self.ids() {
            let answer = self.gate.captive(thread).call(call, arguments, text);
            let Some(answer) = answer else { continue };
            assert!(check(&answer), "call {call} {arguments:x?} in thread {thread}: {answer:?}");
            called += 1;
        }
        assert!(called >= self.threads, "{called} threads");
    }

    /// The same; the filter must deny the call.
    #[track_caller]
    pub fn denied(&self, call: c_long, arguments: [u64; 6], text: Option<(usize, &[u8])>) {
        self.each(call, arguments, text, |answer| *answer == Answer::Denied);
    }
}

/// The number that a path ends with.
fn number<N: std::str::FromStr<Err: std::fmt::Debug>>(path: &Path) -> N {
    path.file_name().unwrap().to_str().unwrap().parse().unwrap()
}
