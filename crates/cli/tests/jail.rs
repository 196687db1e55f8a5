//! What a monitor cannot do once its guest has taken it over. Root makes the threads of a real
//! monitor call what a hostile one would call (ptrace(2)), so no part of the monitor is changed for
//! the test. Requires root and any kind of KVM.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use firn_captive::{Gate, Hostile};
use firn_run::cgroup::CgroupVersion;
use firn_run::jail::{Jail, JailMode};
use firn_run::monitor::{Monitor, Progress};
use firn_run::{
    Descriptors, HostSpec, Origin, ReplaySpec, SourceSpec, StartError, StartSpec, ThawSpec,
};
use firn_vmm::{KVM_DEVICE, open_kvm};
use rustix::process::geteuid;

const LIMIT: Duration = Duration::from_secs(60);

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
    let program: &Path = env!("CARGO_BIN_EXE_firn-monitor").as_ref();
    let made = Command::new(env!("CARGO_BIN_EXE_firn"))
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
        record: None,
    };
    let spec = StartSpec::new(Origin::Thaw(thaw), HostSpec::default(), LIMIT);
    monitor.start(spec, &descriptors).unwrap();
    assert!(matches!(monitor.progress(Some(LIMIT)).unwrap(), Progress::Held));
    Some(Jailed { monitor, directory })
}

impl Jailed {
    fn hostile(&self) -> Hostile {
        // The thread of the start, of a vCPU, and of signals and orders.
        Hostile::of(self.monitor.pid(), 4)
    }

    /// Why the monitor has ended, or ends when the player goes on. The first error has the reason.
    fn ended(&mut self) -> StartError {
        let released = self.monitor.release();
        released.and_then(|()| self.monitor.started(Some(LIMIT)).map(drop)).unwrap_err()
    }
}

/// Attacks in each thread, after which the monitor runs on.
#[track_caller]
fn attack(attack: impl Fn(&Hostile)) {
    let Some(mut jailed) = jailed() else { return };
    attack(&jailed.hostile());
    jailed.monitor.release().unwrap();
    jailed.monitor.started(Some(LIMIT)).unwrap();
}

#[test]
fn a_hostile_monitor_opens_no_file_and_runs_no_program() {
    attack(Hostile::opens_no_file_and_runs_no_program);
}

#[test]
fn a_hostile_monitor_reaches_no_other_process_and_no_network() {
    attack(Hostile::reaches_no_other_process_and_no_network);
}

#[test]
fn a_hostile_monitor_maps_and_moves_nothing_but_its_own_memory() {
    attack(Hostile::maps_and_moves_nothing_but_its_own_memory);
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
    let gate = Gate::of(process);
    let rights = (libc::PROT_READ | libc::PROT_WRITE).cast_unsigned().into();
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE;
    let arguments = [0, 1 << 30, rights, flags.cast_unsigned().into(), u64::MAX, 0];
    gate.captive(i32::try_from(process).unwrap()).enter(Some((libc::SYS_mmap, arguments)));
    let error = jailed.ended();
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
        (Some((libc::SYS_socket, [0; 6])), "called socket, which its jail denies"),
        (None, "the monitor ended (signal: 11 (SIGSEGV)"),
    ] {
        let Some(mut jailed) = jailed() else { return };
        let process = jailed.monitor.pid();
        Gate::of(process).captive(i32::try_from(process).unwrap()).enter(call);
        let error = jailed.ended();
        let text = firn_base::error_chain(&error);
        assert!(matches!(error, StartError::Monitor(_)) && text.contains(reason), "{text}");
    }
}
