use super::*;

const MOUNTS_V1: &str = "cgroup /sys/fs/cgroup/cpu cgroup rw,relatime,cpu 0 0
cgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0
cgroup2 /sys/fs/cgroup/unified cgroup2 rw,relatime 0 0
";

#[test]
fn version_1_is_found_where_it_has_the_memory_controller() {
    let groups = "4:cpuset,memory:/some/group\n1:cpu:/\n0::/\n";
    let place = find(groups, MOUNTS_V1).unwrap();
    assert_eq!(place.parent, Path::new("/sys/fs/cgroup/memory/some/group"));
    assert_eq!(place.own, place.parent);
    assert_eq!(place.interface.limit, "memory.limit_in_bytes");
}

#[test]
fn version_2_is_used_below_its_root() {
    let mounts = "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n";
    let place = find("0::/user.slice/a.scope\n", mounts).unwrap();
    assert_eq!(place.parent, Path::new("/sys/fs/cgroup"));
    assert_eq!(place.own, Path::new("/sys/fs/cgroup/user.slice/a.scope"));
    assert_eq!(place.interface.limit, "memory.max");
    assert!(find("0::/\n", "tmpfs /tmp tmpfs rw 0 0\n").is_none());
}
