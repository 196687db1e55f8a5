use procfs::FromRead;

use super::*;

const MOUNTS: &str = "\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:25 / /dev/shm rw,relatime - tmpfs tmpfs rw,size=24684100k
31 22 0:26 / /srv/a\\040b rw - tmpfs none rw,huge=always
32 22 259:1 / /pmem rw - ext4 /dev/pmem0 rw,dax=always
33 30 0:27 / /dev/shm rw - tmpfs tmpfs rw,huge=within_size
";

fn mounts() -> Vec<MountInfo> {
    MOUNTS.lines().map(|line| MountInfo::from_line(line).unwrap()).collect()
}

fn name_at(path: &str) -> String {
    name(mount_of(&mounts(), Path::new(path)).unwrap(), u64::MAX)
}

#[test]
fn the_deepest_and_last_mount_is_used() {
    assert_eq!(name_at("/tmp/x"), "ext4 on /dev/vda");
    assert_eq!(name_at("/srv/a b/c"), "tmpfs huge=always");
    assert_eq!(name_at("/srv/a bc"), "ext4 on /dev/vda");
    assert_eq!(name_at("/pmem"), "ext4 dax on /dev/pmem0");
    assert_eq!(name_at("/dev/shm/x"), "tmpfs huge=within_size");
    assert!(mount_of(&[], Path::new("/")).is_none());
}

#[test]
fn this_host_can_be_described() {
    let directory = tempfile::tempdir().unwrap();
    let host = Host::of(directory.path()).unwrap();
    assert!(host.cpus > 0 && host.machine.starts_with(&host.cpus.to_string()));
    assert!(!host.medium.is_empty() && !host.commit.is_empty());
    assert!(host.line().contains(&host.kernel));
    assert!(Host::of(&directory.path().join("missing")).is_err());
}

#[test]
fn the_processor_model_comes_from_cpuinfo() {
    let cpuinfo = |text: &str| CpuInfo::from_read(text.as_bytes()).unwrap();
    let named = "processor\t: 0\nmodel name\t: AMD EPYC 9\nflags\t: fpu\n";
    assert_eq!(model(&cpuinfo(named)), "AMD EPYC 9");
    assert_eq!(model(&cpuinfo("processor\t: 0\n")), std::env::consts::ARCH);
}

#[test]
fn a_pool_is_on_a_file_system_or_on_what_its_manager_names() {
    let directory = tempfile::tempdir().unwrap();
    let medium = directory.path().join("medium");
    fs::write(&medium, []).unwrap();
    let host = Host::of(directory.path()).unwrap();
    assert_eq!(medium_of_pool(medium.to_str().unwrap()), host.medium);
    for name in ["memfd", "/dev/null", "/dev/dax9.9"] {
        assert_eq!(medium_of_pool(name), name);
    }
}
