use procfs::{FromRead, ProcessCGroups};

use super::*;

const MOUNTS_V1: &str = "30 24 0:26 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
31 24 0:27 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
32 24 0:28 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";

fn find_in(groups: &str, mounts: &str) -> Option<CgroupPlace> {
    let groups = ProcessCGroups::from_read(groups.as_bytes()).unwrap();
    let mounts: Vec<_> = mounts.lines().map(|line| MountInfo::from_line(line).unwrap()).collect();
    find(Controller { v1: "memory", v2: Some("memory") }, &groups.0, &mounts)
}

#[test]
fn version_1_is_used_if_it_has_the_controller() {
    let groups = "4:cpuset,memory:/some/group\n1:cpu:/\n0::/\n";
    let place = find_in(groups, MOUNTS_V1).unwrap();
    assert_eq!(place.parent, Path::new("/sys/fs/cgroup/memory/some/group"));
    assert_eq!(place.own, place.parent);
    assert_eq!(place.version, CgroupVersion::V1);
}

#[test]
fn version_2_is_used_below_its_root() {
    let mounts = "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n";
    let place = find_in("0::/user.slice/a.scope\n", mounts).unwrap();
    assert_eq!(place.parent, Path::new("/sys/fs/cgroup"));
    assert_eq!(place.own, Path::new("/sys/fs/cgroup/user.slice/a.scope"));
    assert_eq!(place.version, CgroupVersion::V2);
    assert!(find_in("0::/\n", "40 24 0:30 / /tmp rw - tmpfs tmpfs rw\n").is_none());
}

#[test]
fn version_2_gets_the_controller_and_a_group_is_removed_with_those_in_it() {
    // The files of version 2 in a plain folder.
    let root = tempfile::tempdir().unwrap();
    let control = root.path().join("cgroup.subtree_control");
    fs::write(&control, "cpuset memory\n").unwrap();
    let group = create(vec!["cpu", "memory", "io"], root.path(), "a", CgroupVersion::V2).unwrap();
    assert_eq!(fs::read_to_string(&control).unwrap(), "+cpu +io");
    let path = root.path().join("a");
    let error = group.create("b").unwrap_err();
    assert!(error.to_string().contains("a/cgroup.subtree_control of a control group"), "{error}");
    let v1 = create(vec!["cpu"], &path, "b", CgroupVersion::V1).unwrap();
    fs::create_dir(path.join("b/c")).unwrap();
    drop(v1);
    assert!(path.is_dir() && !path.join("b").exists());
}
