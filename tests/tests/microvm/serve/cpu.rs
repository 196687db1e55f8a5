//! The CPU time of microVMs follows the memory of their functions.

use std::fs;
use std::path::{Path, PathBuf};

use firn_run::cgroup::CgroupPlace;
use firn_tests::{Daemon, World};
use serde_json::json;

use super::{SLEEPER, until};

#[test]
fn microvms_that_serve_get_the_cpu_time_of_their_memory() {
    let place = CgroupPlace::find("cpu");
    if !firn_required::has("cpu_limits", place.is_ok()) {
        return;
    }
    let world = World::default();
    let daemon = Daemon::start(&world, &["--cpu-limit", "1769", "--standby", "1"]);
    let group = format!("firn-serve-{}", daemon.pid().as_raw_nonzero());
    let groups = place.unwrap().path().join(group);
    daemon.publish("sleeper", SLEEPER);
    let idle = |monitors| {
        until(&daemon, |status| {
            let count = |name: &str| status["monitors"][name].as_u64().unwrap();
            (count("running"), count("standby")) == (monitors, 1)
        });
    };
    idle(0);
    assert_eq!(limits(&groups), [None], "a standby monitor has no limit");
    // Thawed, and booted: 128 MiB of 1769 in periods of 20 ms.
    for (monitors, function) in [(1, "sleeper:1"), (2, "sleeper")] {
        assert_eq!(daemon.invoke(function, &json!({})).status, 200);
        idle(monitors);
        let mut expected = vec![None];
        expected.resize(usize::try_from(monitors).unwrap() + 1, Some(1448));
        assert_eq!(limits(&groups), expected, "{function}");
    }
    daemon.end();
    assert!(!groups.exists());
}

/// The limits of all groups that have a process, µs, in order.
fn limits(groups: &Path) -> Vec<Option<u64>> {
    let read = |group: &Path, file: &str| fs::read_to_string(group.join(file));
    let limit = |group: PathBuf| {
        let text = read(&group, "cpu.cfs_quota_us").or_else(|_| read(&group, "cpu.max")).unwrap();
        // "-1" and "max" are no limit.
        text.split_whitespace().next().unwrap().parse().ok()
    };
    let entries = fs::read_dir(groups).unwrap().map(|entry| entry.unwrap().path());
    let used = |group: &PathBuf| read(group, "cgroup.procs").is_ok_and(|text| !text.is_empty());
    let mut limits: Vec<Option<u64>> = entries.filter(used).map(limit).collect();
    limits.sort_unstable();
    limits
}
