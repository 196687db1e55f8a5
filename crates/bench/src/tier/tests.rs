use std::fs;
use std::path::Path;
use std::time::Duration;

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use tempfile::TempDir;

use super::*;
use crate::batch::Interrupt;
use crate::harness::Harness;
use crate::progress::Quiet;

fn disk(path: &Path) -> TierMedium {
    TierMedium::Disk { path: path.to_owned() }
}

fn price() -> Price {
    "7.85".parse().unwrap()
}

/// A directory that is not on tmpfs; `None` without one.
fn on_disk() -> Option<TempDir> {
    let directory = tempfile::tempdir().unwrap();
    let file = fs::File::open(directory.path()).unwrap();
    firn_required::is_on_disk(file).then_some(directory)
}

fn dram(name: &str) -> Tier {
    Tier::new(name, TierMedium::Dram {}, Some(1 << 30), price()).unwrap()
}

#[test]
fn prices_that_cannot_be_are_refused() {
    for text in ["-1", "nan", "inf", "1e10", "", "7,85", "cheap"] {
        assert!(text.parse::<Price>().is_err(), "{text}");
    }
    assert_eq!("0".parse::<Price>().unwrap().amount(), 0.0);
    let stored = serde_json::from_str::<Price>("-3.0");
    assert!(stored.unwrap_err().to_string().contains("is not a price"));
}

#[test]
fn capacities_that_cannot_be_are_refused() {
    let of = |capacity| Tier::new("memory", TierMedium::Dram {}, Some(capacity), price());
    assert!(matches!(of(0), Err(TierError::NoCapacity)));
    let error = of(1 << 60).unwrap_err();
    assert!(matches!(error, TierError::Capacity { .. }), "{error}");
    assert!(error.to_string().contains("more than DRAM has"), "{error}");
    let all = Tier::new("memory", TierMedium::Dram {}, None, price()).unwrap();
    assert_eq!(all.capacity, all.check().unwrap().total);
}

#[test]
fn names_that_cannot_be_are_refused() {
    for name in ["", "A", "a b", "../a", "ä", &"a".repeat(65)] {
        let error = Tier::new(name, TierMedium::Dram {}, None, price()).unwrap_err();
        assert!(matches!(error, TierError::Name(_)), "{name}: {error}");
    }
}

#[test]
fn media_that_are_not_there_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("missing");
    for medium in [
        disk(&missing),
        TierMedium::DaxFs { path: missing.clone() },
        TierMedium::Devdax { path: missing.clone() },
        TierMedium::Node { node: 999 },
    ] {
        let error = Tier::new("t", medium, None, price()).unwrap_err();
        assert!(matches!(error, TierError::Missing { .. }), "{error}");
    }
    let null = TierMedium::Devdax { path: "/dev/null".into() };
    for medium in [null, disk(Path::new("/dev/null"))] {
        let error = Tier::new("t", medium, None, price()).unwrap_err();
        assert!(matches!(error, TierError::Kind { .. }), "{error}");
    }
}

#[test]
fn tmpfs_and_file_systems_without_dax_are_refused_by_kind() {
    if let Some(directory) = on_disk() {
        let path = directory.path().to_owned();
        let error = Tier::new("t", TierMedium::DaxFs { path }, None, price()).unwrap_err();
        assert!(error.to_string().contains("without DAX"), "{error}");
    }
    let Ok(memory) = tempfile::tempdir_in("/dev/shm") else { return };
    let error = Tier::new("t", disk(memory.path()), None, price()).unwrap_err();
    assert!(error.to_string().contains("on tmpfs, which is DRAM"), "{error}");
}

#[test]
fn no_more_than_the_capacity_and_what_is_free_can_be_used() {
    let tier = dram("memory");
    let usable = |free| tier.usable(Space { total: 8 << 30, free });
    assert_eq!([usable(0), usable(5), usable(2 << 30)], [0, 5, 1 << 30]);
    tier.require(1 << 20).unwrap();
    let error = tier.require((1 << 30) + 1).unwrap_err();
    assert!(error.to_string().contains("memory has a capacity of 1.0 GiB"), "{error}");
    assert_eq!((tier.cost(0), tier.cost(1 << 29)), (0.0, 7.85 / 2.0));
}

#[test]
fn a_directory_on_another_file_system_is_refused() {
    let Some(directory) = on_disk() else { return };
    let tier = Tier::new("disk", disk(directory.path()), None, price()).unwrap();
    assert!(tier.file_system.as_ref().is_some_and(|id| !id.is_empty()), "{tier:?}");
    tier.check().unwrap();
    let other = Some("11111111-0000-0000-0000-000000000000".to_owned());
    let tier = Tier { file_system: other, ..tier };
    let error = tier.check().unwrap_err();
    assert!(matches!(error, TierError::OtherFileSystem { .. }), "{error}");
    let stored = serde_json::to_string(&tier).unwrap();
    assert_eq!(serde_json::from_str::<Tier>(&stored).unwrap(), tier);
}

#[test]
fn a_read_only_file_system_is_refused() {
    if !firn_required::has("root", rustix::process::geteuid().is_root()) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let options = MountFlags::RDONLY;
    mount("firn-test", directory.path(), "tmpfs", options, c"size=1M").unwrap();
    let refused = Tier::new("t", disk(directory.path()), None, price());
    unmount(directory.path(), UnmountFlags::empty()).unwrap();
    assert!(matches!(refused, Err(TierError::ReadOnly(_))), "{refused:?}");
}

#[test]
fn a_list_survives_its_file_and_refuses_what_it_must() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("state/tiers.json");
    assert!(TierList::read(&path).unwrap().tiers().is_empty());
    let mut list = TierList::lock(&path).unwrap();
    list.add(dram("fast")).unwrap();
    list.add(dram("other")).unwrap();
    let error = list.add(dram("fast")).unwrap_err();
    assert!(matches!(error, TierListError::Exists(_)), "{error}");
    let error = list.remove("slow").unwrap_err();
    assert!(error.to_string().contains("the tiers are fast, other"), "{error}");
    assert_eq!(list.remove("other").unwrap(), dram("other"));
    drop(list);
    assert_eq!(TierList::read(&path).unwrap().tiers(), [dram("fast")]);
    assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
}

#[test]
fn a_damaged_list_is_refused_and_stays() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("tiers.json");
    for text in ["", "{}", "[]", r#"{"version":1,"tiers":[{"name":"a"}]}"#] {
        fs::write(&path, text).unwrap();
        let error = TierList::lock(&path).unwrap_err();
        assert!(matches!(error, TierListError::Parse { .. }), "{text}: {error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
    }
    fs::write(&path, r#"{"version":2,"tiers":[]}"#).unwrap();
    let error = TierList::read(&path).unwrap_err();
    assert!(matches!(error, TierListError::Version { found: 2, .. }), "{error}");
}

#[test]
fn a_list_of_this_version_stays_readable() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("tiers.json");
    let media = r#"{"version":1,"tiers":[
        {"name":"a","medium":{"kind":"dram"},"capacity":1,"price":16.61},
        {"name":"b","medium":{"kind":"huge_pages"},"capacity":1,"price":16.61},
        {"name":"c","medium":{"kind":"node","node":1},"capacity":1,"price":7},
        {"name":"d","medium":{"kind":"devdax","path":"/dev/dax0.0"},"capacity":1,"price":7.85},
        {"name":"e","medium":{"kind":"dax_fs","path":"/mnt/dax"},"capacity":1,"price":7.85},
        {"name":"f","medium":{"kind":"disk","path":"/mnt/ssd"},"capacity":1,"price":0.35}]}"#;
    fs::write(&path, media).unwrap();
    let list = TierList::read(&path).unwrap();
    let kinds: Vec<String> = list.tiers().iter().map(|tier| tier.medium.to_string()).collect();
    assert_eq!(kinds[2], "NUMA node 1");
    assert_eq!((kinds.len(), list.get("f").unwrap().price.amount()), (6, 0.35));
}

fn probe(tier: &Tier) -> Result<Probe, ProbeError> {
    let interrupt = Interrupt::catch().unwrap();
    let harness = Harness { program: "firn".into(), interrupt: &interrupt, progress: &Quiet };
    ProbeConfig { time: Duration::from_millis(2), size: 32 << 20 }.run(tier, &harness)
}

#[test]
fn every_point_of_a_tier_is_measured_and_nothing_is_left() {
    let disks = on_disk();
    let tiers = disks
        .iter()
        .map(|directory| Tier::new("disk", disk(directory.path()), None, price()).unwrap());
    for tier in [dram("memory")].into_iter().chain(tiers) {
        let probe = probe(&tier).unwrap();
        let readers: Vec<u32> = probe.reads.iter().map(|point| point.readers).collect();
        let threads: Vec<u32> = probe.micro.iter().map(|point| point.threads).collect();
        assert_eq!((&readers[..], &threads[..]), (&[1, 2, 4, 8, 16, 32][..], &readers[..]));
        assert!(probe.reads.iter().all(|rate| rate.iops > 0.0 && rate.bandwidth > 0.0));
        assert!(probe.micro.iter().all(|rate| rate.bytes_per_second > 0.0));
        assert!(probe.latency_ns.median > 0.0 && probe.write.unwrap().bandwidth > 0.0);
        assert!(probe.text().contains(&format!("{}: ", tier.name)));
        let json = serde_json::to_string(&probe).unwrap();
        let read = serde_json::from_str::<Probe>(&json).unwrap();
        assert_eq!((read.tier, read.size, read.reads.len()), (probe.tier, probe.size, 6));
    }
    if let Some(directory) = disks {
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}

#[test]
fn a_tier_that_vanished_or_is_full_is_not_measured() {
    let Some(directory) = on_disk() else { return };
    let tier = Tier::new("disk", disk(directory.path()), None, price()).unwrap();
    fs::remove_dir(directory.path()).unwrap();
    let error = probe(&tier).unwrap_err();
    assert!(matches!(error, ProbeError::Tier(TierError::Missing { .. })), "{error}");
    let interrupt = Interrupt::catch().unwrap();
    let harness = Harness { program: "firn".into(), interrupt: &interrupt, progress: &Quiet };
    let tier = Tier { capacity: 1 << 50, ..dram("memory") };
    let run = |size| ProbeConfig { size, ..ProbeConfig::default() }.run(&tier, &harness);
    let error = run(1 << 50).unwrap_err();
    assert!(matches!(error, ProbeError::Tier(TierError::Full { .. })), "{error}");
    let error = run(1 << 51).unwrap_err();
    assert!(matches!(error, ProbeError::Tier(TierError::BeyondCapacity { .. })), "{error}");
    for size in [0, 1 << 20, (32 << 20) + 1] {
        assert!(matches!(run(size), Err(ProbeError::Size(_))), "{size}");
    }
}
