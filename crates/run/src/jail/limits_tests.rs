use std::io::Read;
use std::os::unix::process::ExitStatusExt;

use rustix::process::{Pid, Signal, kill_process_group};

use super::*;
use crate::jail::process::{Process, Program};
use crate::jail::spawner::Spawner;

/// The groups of a supervisor; `None` where this process may not make them all.
fn limits() -> Option<Arc<Limits>> {
    let limits = Limits::make(ALL).unwrap();
    let able = limits.missing().is_none();
    if !able {
        eprintln!("skipped: {:?}", limits.missing());
    }
    firn_required::has("cpu_limits", able).then(|| Arc::new(limits))
}

/// A shell in groups of its own.
fn shell(limits: &Arc<Limits>, script: &str) -> (Process, Limited) {
    let mut spawner = Spawner::start(Some(limits.clone()), false).unwrap();
    spawner.wait().unwrap();
    let null = || File::options().read(true).write(true).open("/dev/null").unwrap().into();
    let program = Program::new("/bin/sh".as_ref(), null(), null()).unwrap();
    let program = program.arg("-c").unwrap().arg(script).unwrap();
    spawner.begin(program).unwrap();
    let (process, limited) = spawner.started().unwrap();
    (process, limited.unwrap())
}

/// What a process has written to standard error at its end.
fn text(process: &mut Process) -> String {
    let mut text = String::new();
    process.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    text
}

#[test]
fn a_process_opens_no_device_but_those_of_random_numbers() {
    let Some(limits) = limits() else { return };
    let devices = ["/dev/random", "/dev/urandom", "/dev/null", "/dev/kvm"];
    for (device, allowed) in devices.into_iter().zip([true, true, false, false]) {
        let (mut child, _limited) = shell(&limits, &format!("exec < {device}"));
        let text = text(&mut child);
        assert_eq!(child.wait().unwrap().success(), allowed, "{device}: {text}");
        if Path::new(device).exists() {
            assert_eq!(text.contains("Operation not permitted"), !allowed, "{device}: {text}");
        }
    }
}

#[test]
fn a_process_that_takes_more_memory_than_its_limit_is_killed() {
    let Some(limits) = limits() else { return };
    // It buffers all of its input.
    let script = "yes | head -c 64000000 | tail -c 64000000";
    for (limit, killed) in [(256 << 20, false), (32 << 20, true)] {
        let (mut child, limited) = shell(&limits, script);
        limited.limit_memory(limit).unwrap();
        let status = child.wait().unwrap();
        let end = status.code().or(status.signal().map(|signal| 128 + signal));
        assert_eq!(end, Some(if killed { 137 } else { 0 }), "{status}");
    }
}

#[test]
fn a_process_makes_no_more_processes_than_its_limit() {
    let Some(limits) = limits() else { return };
    let script = vec!["sleep 60"; THREADS + 2 * processors() + 10].join(" | ");
    let (mut child, limited) = shell(&limits, &script);
    let pids = limited.group("pids").unwrap();
    let most = pids.number("pids.max").unwrap();
    assert_eq!(most, (THREADS + 2 * processors()) as u64);
    // The shell ends when it cannot fork, and the others wait.
    assert!(!child.wait().unwrap().success());
    assert!(pids.value("pids.events", "max").unwrap() > 0);
    assert!(pids.number("pids.current").unwrap() <= most);
    let group = Pid::from_raw(child.id().cast_signed()).unwrap();
    kill_process_group(group, Signal::KILL).unwrap();
    let text = text(&mut child);
    assert!(text.contains("fork"), "{text}");
}

#[test]
fn the_groups_end_with_their_monitor_and_their_supervisor() {
    let Some(limits) = limits() else { return };
    let (mut child, limited) = shell(&limits, "exec sleep 60");
    let groups = fs::read_to_string(format!("/proc/{}/cgroup", child.id())).unwrap();
    let ours = groups.lines().filter(|line| line.contains(PREFIX)).count();
    let paths: Vec<_> = limited.groups.iter().map(|group| group.path().to_owned()).collect();
    assert_eq!(ours, paths.len(), "{groups}");
    assert!(paths.iter().all(|path| path.is_dir()));
    child.kill().unwrap();
    child.wait().unwrap();
    drop(limited);
    assert!(!paths.iter().any(|path| path.exists()), "{paths:?}");
    let own: Vec<_> = limits.groups.iter().map(|owned| owned.group.path().to_owned()).collect();
    assert!(own.iter().all(|path| path.is_dir()));
    drop(limits);
    assert!(!own.iter().any(|path| path.exists()), "{own:?}");
}

#[test]
fn the_groups_of_a_supervisor_that_was_killed_are_removed_by_the_next_one() {
    let Some(limits) = limits() else { return };
    let mut limited = limits.group().unwrap();
    let mut left: Vec<_> = limited.groups.iter().map(|group| group.path().to_owned()).collect();
    limited.groups.drain(..).for_each(std::mem::forget);
    drop(limited);
    // The kernel ends the lock with the process.
    for Owned { group, lock } in Arc::into_inner(limits).unwrap().groups {
        left.push(group.path().to_owned());
        std::mem::forget(group);
        drop(lock);
    }
    assert!(left.iter().all(|path| path.is_dir()));
    let _next = Limits::make(ALL).unwrap();
    assert!(!left.iter().any(|path| path.exists()), "{left:?}");
}

#[test]
fn a_spawner_that_is_not_used_leaves_nothing() {
    let Some(limits) = limits() else { return };
    drop(Spawner::start(Some(limits.clone()), true).unwrap());
    for owned in &limits.groups {
        let inner = fs::read_dir(owned.group.path()).unwrap().flatten();
        assert_eq!(inner.filter(|entry| entry.path().is_dir()).count(), 0);
    }
}

#[test]
fn groups_that_are_locked_are_not_removed() {
    let folder = tempfile::tempdir().unwrap();
    let used = folder.path().join(format!("{PREFIX}a"));
    let left = folder.path().join(format!("{PREFIX}b"));
    for path in [&used, &left.join("0"), &folder.path().join("other-1")] {
        fs::create_dir_all(path).unwrap();
    }
    let supervisor = lock(&used).unwrap();
    sweep(folder.path());
    assert!(used.exists() && !left.exists() && folder.path().join("other-1").exists());
    drop(supervisor);
    sweep(folder.path());
    assert!(!used.exists());
}

#[test]
fn a_guest_may_fill_its_memory_and_its_disk_and_be_frozen() {
    assert_eq!(memory_limit(128 << 20, 0), (256 + 64) << 20);
    assert_eq!(memory_limit(128 << 20, 512 << 20), (1280 + 64) << 20);
    assert_eq!(memory_limit(u64::MAX, 1), u64::MAX);
}

#[test]
fn supervisors_that_start_at_once_leave_each_other_their_groups() {
    let Some(_limits) = limits() else { return };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..100 {
                    let limits = Limits::make(ALL).unwrap();
                    assert_eq!(limits.missing(), None);
                    let there = |owned: &Owned| owned.group.path().exists();
                    assert!(limits.groups.iter().all(there));
                }
            });
        }
    });
}
