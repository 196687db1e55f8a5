//! Typed requests to monitors in separate processes. Requires any kind of KVM.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use firn_base::now_ns;
use firn_run::cgroup::CgroupVersion;
use firn_run::jail::{Jail, JailMode, Wall};
use firn_run::monitor::{Monitor, Progress};
use firn_run::{
    Descriptors, HostSpec, Making, Origin, ReadyUse, ReplaySpec, SourceSpec, StandbyUse,
    StartError, StartSpec, ThawSpec,
};
use firn_snapshot::MemoryLayout;
use firn_vmm::{KVM_DEVICE, Shape, open_kvm};

const LIMIT: Duration = Duration::from_secs(120);

fn monitor() -> Monitor {
    let jail = Jail::new(JailMode::Auto);
    Monitor::spawn(&jail, env!("CARGO_BIN_EXE_firn-monitor").as_ref(), KVM_DEVICE.as_ref()).unwrap()
}

/// A player in `directory`; `None` without KVM.
fn player(directory: &Path, trace: &str) -> Option<PathBuf> {
    if !firn_required::has("kvm", open_kvm(KVM_DEVICE.as_ref()).is_ok()) {
        return None;
    }
    let snapshot = directory.join("snapshot");
    let made = Command::new(env!("CARGO_BIN_EXE_firn"))
        .args(["player", "--trace", trace, "--dense", "--out"])
        .arg(&snapshot)
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    Some(snapshot)
}

fn spec(snapshot: &Path, planner: &str, hold: bool, descriptors: &mut Descriptors) -> StartSpec {
    let thaw = ThawSpec {
        source: SourceSpec::directory(snapshot, descriptors).unwrap(),
        planner: planner.to_owned(),
        preloaded: false,
        root: None,
        invoke: None,
        replay: ReplaySpec { hold, ..ReplaySpec::default() },
        record: None,
    };
    StartSpec::new(Origin::Thaw(thaw), HostSpec::default(), LIMIT)
}

/// Starts a player, and waits for its report.
fn thaw(snapshot: &Path, planner: &str) -> Result<u64, StartError> {
    let (mut monitor, mut descriptors) = (monitor(), Descriptors::default());
    let spec = spec(snapshot, planner, false, &mut descriptors);
    monitor.start(spec, &descriptors)?;
    let report = monitor.started(Some(LIMIT))?;
    monitor.wait()?;
    Ok(report.replay.unwrap().pages)
}

#[test]
fn a_monitor_reports_a_start_and_a_typed_error() {
    let directory = tempfile::tempdir().unwrap();
    let Some(snapshot) = player(directory.path(), "sequential-read:4M") else { return };
    assert_eq!(thaw(&snapshot, "dram_cached").unwrap(), 1024);
    let error = thaw(&snapshot, "no such planner").unwrap_err();
    assert!(matches!(error, StartError::Planner(_)), "{error:?}");
    let image = OpenOptions::new().write(true).open(snapshot.join("memory.img")).unwrap();
    image.write_all_at(&[1], 0x2a_0000).unwrap();
    match thaw(&snapshot, "firecracker").unwrap_err() {
        StartError::Wrong { planner, wrong } => {
            assert_eq!(planner, "firecracker:readahead=on");
            assert!(wrong.contains("(0x2a0)"), "{wrong}");
        }
        error => panic!("{error:?}"),
    }
    std::fs::remove_file(snapshot.join("snapshot.firn")).unwrap();
    let error = SourceSpec::directory(&snapshot, &mut Descriptors::default()).unwrap_err();
    assert!(matches!(error, StartError::Open(_)), "{error:?}");
}

#[test]
fn a_held_player_waits_for_its_release() {
    let directory = tempfile::tempdir().unwrap();
    let Some(snapshot) = player(directory.path(), "sequential-read:4M") else { return };
    let (mut monitor, mut descriptors) = (monitor(), Descriptors::default());
    let spec = spec(&snapshot, "firecracker", true, &mut descriptors);
    monitor.start(spec, &descriptors).unwrap();
    assert!(matches!(monitor.progress(Some(LIMIT)).unwrap(), Progress::Held));
    assert!(monitor.is_alive());
    monitor.release().unwrap();
    assert!(matches!(monitor.progress(Some(LIMIT)).unwrap(), Progress::Started(_)));
    monitor.wait().unwrap();
}

#[test]
fn a_monitor_is_jailed_before_its_guest_runs() {
    let directory = tempfile::tempdir().unwrap();
    let Some(snapshot) = player(directory.path(), "sequential-read:4M") else { return };
    for (mode, jailed) in [(JailMode::Auto, true), (JailMode::Off, false)] {
        let (program, kvm) = (env!("CARGO_BIN_EXE_firn-monitor").as_ref(), KVM_DEVICE.as_ref());
        let mut monitor = Monitor::spawn(&Jail::new(mode), program, kvm).unwrap();
        let mut descriptors = Descriptors::default();
        let spec = spec(&snapshot, "firecracker", true, &mut descriptors);
        monitor.start(spec, &descriptors).unwrap();
        assert!(matches!(monitor.progress(Some(LIMIT)).unwrap(), Progress::Held));
        let process = format!("/proc/{}", monitor.pid());
        let read = |file: &str| std::fs::read(format!("{process}/{file}")).unwrap();
        let status = String::from_utf8(read("status")).unwrap();
        assert_eq!(status.contains("\nNoNewPrivs:\t1\n"), jailed, "{status}");
        assert_eq!(String::from_utf8_lossy(&read("environ")), "");
        monitor.release().unwrap();
        let report = monitor.started(Some(LIMIT)).unwrap();
        monitor.wait().unwrap();
        let walls = report.jail.map(|jail| jail.walls);
        assert_eq!(walls.is_some_and(|walls| walls.contains(&Wall::Privileges)), jailed);
    }
}

#[test]
fn a_start_without_kvm_reports_what_is_missing() {
    let directory = tempfile::tempdir().unwrap();
    let Some(snapshot) = player(directory.path(), "sequential-read:4M") else { return };
    let (program, kvm) = (env!("CARGO_BIN_EXE_firn-monitor").as_ref(), "/nowhere/kvm".as_ref());
    let mut monitor = Monitor::spawn(&Jail::new(JailMode::Auto), program, kvm).unwrap();
    let mut descriptors = Descriptors::default();
    let spec = spec(&snapshot, "firecracker", false, &mut descriptors);
    monitor.start(spec, &descriptors).unwrap();
    let error = monitor.started(Some(LIMIT)).unwrap_err();
    assert!(matches!(error, StartError::Incompatible(_)), "{error:?}");
    assert!(error.to_string().contains("/nowhere/kvm does not exist: load the kvm"), "{error}");
}

/// CPU time of a process's threads, ns.
fn cpu_ns(process: u32) -> u64 {
    let threads = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let of = |thread: PathBuf| {
        // A thread can end meanwhile.
        let text = std::fs::read_to_string(thread.join("schedstat")).unwrap_or_default();
        text.split(' ').next().and_then(|ns| ns.parse::<u64>().ok()).unwrap_or(0)
    };
    threads.map(|thread| of(thread.unwrap().path())).sum()
}

#[test]
fn a_guest_gets_no_more_cpu_time_than_its_group() {
    let directory = tempfile::tempdir().unwrap();
    let Some(snapshot) = player(directory.path(), "sequential-read:64M") else { return };
    let jail = Jail::with_cpu_limits(JailMode::Off);
    if !firn_required::has("cpu_limits", jail.is_ok()) {
        return;
    }
    let program = env!("CARGO_BIN_EXE_firn-monitor").as_ref();
    let mut monitor = Monitor::spawn(&jail.unwrap(), program, KVM_DEVICE.as_ref()).unwrap();
    let group = monitor.limits().unwrap().group("cpu").unwrap();
    // A tenth of a CPU.
    match group.version() {
        CgroupVersion::V1 => {
            group.write("cpu.cfs_period_us", "20000").unwrap();
            group.write("cpu.cfs_quota_us", "2000").unwrap();
        }
        CgroupVersion::V2 => group.write("cpu.max", "2000 20000").unwrap(),
    }
    let path = group.path().to_owned();
    let mut descriptors = Descriptors::default();
    let spec = spec(&snapshot, "firecracker", true, &mut descriptors);
    monitor.start(spec, &descriptors).unwrap();
    // The guest touches its pages without a pause, then waits.
    assert!(matches!(monitor.progress(Some(LIMIT)).unwrap(), Progress::Held));
    let groups = std::fs::read_to_string(format!("/proc/{}/cgroup", monitor.pid())).unwrap();
    assert!(groups.contains("/firn-monitors-"), "{groups}");
    let used = cpu_ns(monitor.pid());
    let value = |name| {
        let group = monitor.limits().unwrap().group("cpu").unwrap();
        group.value("cpu.stat", name).unwrap()
    };
    let (periods, throttled) = (value("nr_periods"), value("nr_throttled"));
    let allowed = periods * 2_000_000;
    assert!(throttled > 0 && used > 10_000_000, "{used} ns, {throttled} periods");
    assert!(used < allowed * 13 / 10, "{used} ns of {allowed} ns in {periods} periods");
    drop(monitor);
    assert!(!path.exists(), "the group ends with its monitor");
}

#[test]
fn a_monitor_without_control_groups_is_reported_or_refused() {
    let directory = tempfile::tempdir().unwrap();
    let Some(snapshot) = player(directory.path(), "sequential-read:4M") else { return };
    let (program, kvm) = (env!("CARGO_BIN_EXE_firn-monitor").as_ref(), KVM_DEVICE.as_ref());
    let jail = Jail::without_limits(JailMode::Auto, "a test");
    let mut monitor = Monitor::spawn(&jail, program, kvm).unwrap();
    let mut descriptors = Descriptors::default();
    let spec = spec(&snapshot, "firecracker", false, &mut descriptors);
    monitor.start(spec, &descriptors).unwrap();
    let report = monitor.started(Some(LIMIT)).unwrap().jail.unwrap();
    assert!(report.missing.contains(&(Wall::Limits, "a test".to_owned())), "{report:?}");
    assert!(!report.walls.contains(&Wall::Limits), "{report:?}");
    let jail = Jail::without_limits(JailMode::Require, "a test");
    let error = Monitor::spawn(&jail, program, kvm).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("no wall limits: a test; with --jail auto"), "{text}");
}

#[test]
fn a_monitor_returns_a_plan_without_a_start() {
    let directory = tempfile::tempdir().unwrap();
    let Some(snapshot) = player(directory.path(), "sequential-read:4M") else { return };
    let plan = |planner: &str| {
        let mut descriptors = Descriptors::default();
        let spec = spec(&snapshot, planner, false, &mut descriptors);
        monitor().plan(spec, &descriptors, LIMIT)
    };
    plan("firecracker").unwrap();
    let error = plan("pass_shared").unwrap_err();
    assert!(matches!(error, StartError::Plan(_)), "{error:?}");
}

#[test]
fn a_standby_monitor_starts_in_the_vm_that_it_made() {
    let directory = tempfile::tempdir().unwrap();
    let Some(snapshot) = player(directory.path(), "sequential-read:4M") else { return };
    let planner = "dram_cached";
    let mut descriptors = Descriptors::default();
    let spec_of_plan = spec(&snapshot, planner, false, &mut descriptors);
    let shape = monitor().plan(spec_of_plan, &descriptors, LIMIT).unwrap();
    let mut larger = shape.clone();
    larger.layout = MemoryLayout::for_size(1 << 30).unwrap();
    let cases = [
        (vec![], StandbyUse::Miss),
        (vec![&shape], StandbyUse::Hit),
        (vec![&larger], StandbyUse::Miss),
        (vec![&larger, &shape], StandbyUse::Hit),
    ];
    for (shapes, found) in cases {
        let mut monitor = monitor();
        for shape in shapes {
            monitor.stand_by(shape, None).unwrap();
            monitor.wait_ready(LIMIT).unwrap();
        }
        assert!(monitor.take_notes().is_empty());
        // Long enough for the process to wait.
        std::thread::sleep(Duration::from_millis(200));
        let mut descriptors = Descriptors::default();
        let spec = spec(&snapshot, planner, false, &mut descriptors);
        monitor.start(spec, &descriptors).unwrap();
        let report = monitor.started(Some(LIMIT)).unwrap();
        monitor.wait().unwrap();
        assert_eq!((report.standby, report.replay.unwrap().pages), (Some(found), 1024));
    }
    // More vCPUs than a VM can have: the monitor reports it, and is usable all the same.
    let mut impossible = serde_json::to_value(&shape).unwrap();
    let cpuid = impossible["cpuids"][0].clone();
    impossible["cpuids"] = vec![cpuid; 300].into();
    let impossible: Shape = serde_json::from_value(impossible).unwrap();
    let mut monitor = monitor();
    monitor.stand_by(&impossible, None).unwrap();
    monitor.wait_ready(LIMIT).unwrap();
    assert_eq!(monitor.take_notes().len(), 1);
    let mut descriptors = Descriptors::default();
    let spec = spec(&snapshot, planner, false, &mut descriptors);
    monitor.start(spec, &descriptors).unwrap();
    assert_eq!(monitor.started(Some(LIMIT)).unwrap().replay.unwrap().pages, 1024);
    monitor.wait().unwrap();
}

#[test]
fn a_monitor_ends_with_its_connection() {
    let directory = tempfile::tempdir().unwrap();
    let Some(snapshot) = player(directory.path(), "sequential-read:4M") else { return };
    // One monitor without a request, and one with a held player.
    let mut held = monitor();
    let mut descriptors = Descriptors::default();
    held.start(spec(&snapshot, "firecracker", true, &mut descriptors), &descriptors).unwrap();
    assert!(matches!(held.progress(Some(LIMIT)).unwrap(), Progress::Held));
    for monitor in [monitor(), held] {
        let begin = Instant::now();
        monitor.end(LIMIT);
        assert!(begin.elapsed() < LIMIT, "the monitor was killed");
    }
}

/// A monitor with a ready clone of the snapshot.
fn ready(snapshot: &Path, planner: &str, hold: bool) -> Result<(Monitor, Making), StartError> {
    let (mut monitor, mut descriptors) = (monitor(), Descriptors::default());
    let spec = spec(snapshot, planner, hold, &mut descriptors);
    monitor.make_ready(spec, &descriptors)?;
    let making = monitor.wait_made_ready(LIMIT)?;
    Ok((monitor, making))
}

#[test]
fn a_ready_clone_resumes_and_reports_only_what_came_after_its_request() {
    let directory = tempfile::tempdir().unwrap();
    let Some(snapshot) = player(directory.path(), "sequential-read:4M") else { return };
    for planner in ["dram_cached", "firecracker"] {
        let (mut monitor, making) = ready(&snapshot, planner, true).unwrap();
        assert!(making.dram_bytes > 0 && making.ns > 0, "{making:?}");
        let request_ns = now_ns();
        monitor.resume(request_ns, None).unwrap();
        assert!(matches!(monitor.progress(Some(LIMIT)).unwrap(), Progress::Held));
        monitor.release().unwrap();
        let report = monitor.started(Some(LIMIT)).unwrap();
        assert_eq!((report.ready, report.standby), (Some(ReadyUse::Hit), Some(StandbyUse::Hit)));
        assert_eq!(report.making, Some(making));
        let times = &report.times;
        assert_eq!((times.load_ns, times.plan_ns, times.execute_ns), (0, 0, 0));
        assert!(times.process_start_ns.is_some() && times.resume_ns > 0, "{times:?}");
        // The monitor's clock began at the request.
        assert!(times.total_ns <= now_ns() - request_ns);
        assert_eq!(report.replay.unwrap().pages, 1024);
        monitor.wait().unwrap();
    }
}

#[test]
fn a_clone_of_a_snapshot_that_was_replaced_or_removed_is_not_resumed() {
    let directory = tempfile::tempdir().unwrap();
    let Some(snapshot) = player(directory.path(), "sequential-read:4M") else { return };
    let gone = directory.path().join("gone");
    let outdated = |change: &dyn Fn()| {
        let (mut monitor, _) = ready(&snapshot, "dram_cached", false).unwrap();
        change();
        let error = monitor.resume(now_ns(), None).unwrap_err();
        assert!(matches!(error, StartError::Outdated(_)), "{error:?}");
    };
    outdated(&|| std::fs::rename(&snapshot, &gone).unwrap());
    std::fs::rename(&gone, &snapshot).unwrap();
    // Another snapshot at its path.
    outdated(&|| {
        std::fs::rename(&snapshot, &gone).unwrap();
        player(directory.path(), "sequential-read:4M").unwrap();
    });
    outdated(&|| std::fs::remove_dir_all(&snapshot).unwrap());
    // What was moved away can be used from there.
    let (mut monitor, _) = ready(&gone, "dram_cached", false).unwrap();
    monitor.resume(now_ns(), None).unwrap();
    assert_eq!(monitor.started(Some(LIMIT)).unwrap().replay.unwrap().pages, 1024);
}

#[test]
fn a_making_that_fails_is_reported_and_a_ready_clone_ends_with_its_owner() {
    let directory = tempfile::tempdir().unwrap();
    let Some(snapshot) = player(directory.path(), "sequential-read:4M") else { return };
    let error = ready(&snapshot, "no such planner", false).unwrap_err();
    assert!(matches!(error, StartError::Planner(_)), "{error:?}");
    let (monitor, _) = ready(&snapshot, "dram_cached", false).unwrap();
    let begin = Instant::now();
    monitor.end(LIMIT);
    assert!(begin.elapsed() < LIMIT, "the monitor was killed");
    // Only a resume follows.
    let (mut monitor, _) = ready(&snapshot, "dram_cached", false).unwrap();
    monitor.release().unwrap();
    let error = monitor.started(Some(LIMIT)).unwrap_err();
    assert!(matches!(error, StartError::Spec(_)), "{error:?}");
}
