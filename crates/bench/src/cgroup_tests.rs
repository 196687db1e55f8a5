use procfs::{FromRead, ProcessCGroups};

use super::*;

const MOUNTS_V1: &str = "30 24 0:26 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
31 24 0:27 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
32 24 0:28 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";

fn find_in(groups: &str, mounts: &str) -> Option<Place> {
    let groups = ProcessCGroups::from_read(groups.as_bytes()).unwrap();
    let mounts: Vec<_> = mounts.lines().map(|line| MountInfo::from_line(line).unwrap()).collect();
    find(&groups.0, &mounts)
}

#[test]
fn version_1_is_used_if_it_has_the_memory_controller() {
    let groups = "4:cpuset,memory:/some/group\n1:cpu:/\n0::/\n";
    let place = find_in(groups, MOUNTS_V1).unwrap();
    assert_eq!(place.parent, Path::new("/sys/fs/cgroup/memory/some/group"));
    assert_eq!(place.own, place.parent);
    assert_eq!(place.interface.limit, "memory.limit_in_bytes");
}

#[test]
fn version_2_is_used_below_its_root() {
    let mounts = "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n";
    let place = find_in("0::/user.slice/a.scope\n", mounts).unwrap();
    assert_eq!(place.parent, Path::new("/sys/fs/cgroup"));
    assert_eq!(place.own, Path::new("/sys/fs/cgroup/user.slice/a.scope"));
    assert_eq!(place.interface.limit, "memory.max");
    assert!(find_in("0::/\n", "40 24 0:30 / /tmp rw - tmpfs tmpfs rw\n").is_none());
}
