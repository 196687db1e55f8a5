//! The CPU time of microVMs follows the memory of their functions.

use std::fs;
use std::path::{Path, PathBuf};

use firn_run::cgroup::CgroupPlace;
use firn_tests::{Daemon, World};
use serde_json::json;

use super::{SLEEPER, processes, until};

#[test]
fn microvms_that_serve_get_the_cpu_time_of_their_memory() {
    let place = CgroupPlace::find("cpu");
    if !firn_required::has("cpu_limits", place.is_ok()) {
        return;
    }
    let place = place.unwrap();
    let world = World::default();
    let daemon = Daemon::start(&world, &["--cpu-limit", "1769", "--standby", "1"]);
    daemon.publish("sleeper", SLEEPER);
    // The limits of all monitors once so many run besides the standby monitor.
    let limits = |running| {
        until(&daemon, |status| {
            let count = |name: &str| status["monitors"][name].as_u64().unwrap();
            (count("running"), count("standby")) == (running, 1)
        });
        let mut limits: Vec<_> =
            groups(&world, place.path()).iter().map(|group| limit(group)).collect();
        limits.sort_unstable();
        limits
    };
    assert_eq!(limits(0), [None], "a standby monitor has no limit");
    // Thawed, and booted: 128 MiB of 1769 in periods of 20 ms.
    assert_eq!(daemon.invoke("sleeper:1", &json!({})).status, 200);
    assert_eq!(limits(1), [None, Some(1448)]);
    assert_eq!(daemon.invoke("sleeper", &json!({})).status, 200);
    assert_eq!(limits(2), [None, Some(1448), Some(1448)]);
    let groups = groups(&world, place.path());
    daemon.end();
    assert!(groups.iter().all(|group| !group.exists()));
}

/// The groups of the monitors, below the folder of the daemons' groups.
fn groups(world: &World, place: &Path) -> Vec<PathBuf> {
    let group = |process| {
        let text = fs::read_to_string(format!("/proc/{process}/cgroup")).unwrap();
        let name = text.lines().find_map(|line| Some(line.split_once("/firn-monitors-")?.1));
        place.join(format!("firn-monitors-{}", name.unwrap()))
    };
    processes(world, "monitor").into_iter().map(group).collect()
}

/// The limit of a group, µs in each period.
fn limit(group: &Path) -> Option<u64> {
    let read = |file: &str| fs::read_to_string(group.join(file));
    let text = read("cpu.cfs_quota_us").or_else(|_| read("cpu.max")).unwrap();
    // "-1" and "max" are no limit.
    text.split_whitespace().next().unwrap().parse().ok()
}
