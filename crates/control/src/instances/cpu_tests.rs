use std::process::{Child, Command};

use firn_run::cgroup::CgroupPlace;

use super::*;

/// A process in a group that uses its processor all the time.
fn spinner(group: &Cgroup) -> Child {
    let door = group.path().join("cgroup.procs");
    let script = format!("echo 0 > {}; while :; do :; done", door.display());
    Command::new("sh").args(["-c", &script]).spawn().unwrap()
}

/// CPU time of a process, ns.
fn cpu_ns(process: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{process}/schedstat")).unwrap();
    text.split(' ').next().unwrap().parse().unwrap()
}

#[test]
fn a_process_that_spins_gets_the_share_of_its_memory() {
    let name = format!("firn-test-share-{}", std::process::id());
    let group = CgroupPlace::find("cpu").and_then(|place| place.create(&name));
    if !firn_required::has("cpu_limits", group.is_ok()) {
        return;
    }
    let (cpus, group) = (Cpus { one: 1769 }, group.unwrap());
    the_limit_follows_the_memory(cpus, &group);
    // A tenth of a CPU: 2 ms in each period of 20 ms.
    cpus.limit_group(&group, 177).unwrap();
    let mut child = spinner(&group);
    let value = |name| group.value("cpu.stat", name).unwrap();
    let wait = |periods: u64| {
        while value("nr_periods") < periods {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    };
    wait(5);
    let (periods, used) = (value("nr_periods"), cpu_ns(child.id()));
    wait(periods + 50);
    let (periods, used) = (value("nr_periods") - periods, cpu_ns(child.id()) - used);
    child.kill().unwrap();
    child.wait().unwrap();
    let allowed = periods * 2_000_000;
    // A slice that was taken before the limit is paid back in a later period.
    assert!(used < allowed * 13 / 10, "{used} of {allowed} ns");
    assert!(used > 0 && value("nr_throttled") > 0);
}

fn the_limit_follows_the_memory(cpus: Cpus, group: &Cgroup) {
    for (memory, quota) in [(128, 1448), (1769, 20_000), (10_240, 115_772), (1, 1000)] {
        cpus.limit_group(group, memory).unwrap();
        let found = match group.version() {
            CgroupVersion::V1 => group.number("cpu.cfs_quota_us").unwrap(),
            CgroupVersion::V2 => {
                let text = group.read("cpu.max").unwrap();
                text.split(' ').next().unwrap().parse().unwrap()
            }
        };
        assert_eq!(found, quota);
    }
}
