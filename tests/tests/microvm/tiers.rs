//! Tiers on the memories that only the lab has: a devdax device, a DAX file system and a NUMA node
//! without processors; and huge pages. On other hosts the test passes without a check.

use std::fs;
use std::thread;
use std::time::Duration;

use firn_tests::{Firn, World};
use serde_json::Value;

use crate::dax::Dax;

const MIB: u64 = 1 << 20;
const RESERVED: &str = "/proc/sys/vm/nr_hugepages";
const DRIVER: &str = "/sys/bus/dax/drivers/device_dax";

fn tier(world: &World, arguments: &[&str]) -> Firn {
    let cache = world.file("cache");
    world.firn(["tier"]).args(arguments).with(|command| command.env("FIRN_CACHE", cache))
}

#[test]
fn every_kind_of_byte_addressable_memory_is_measured() {
    let world = World::default();
    let Some(dax) = Dax::mount(&world) else { return };
    if std::env::var_os("FIRN_LAB").is_none() {
        return;
    }
    fs::write(RESERVED, "32").unwrap();
    let folder = dax.file("tier");
    fs::create_dir(&folder).unwrap();
    let folder = folder.to_str().unwrap();
    let media = [
        ("devdax", &["--path", "/dev/dax0.0"][..], "the devdax device /dev/dax0.0"),
        ("dax", &["--path", folder], "ext4 dax on /dev/pmem1"),
        ("node", &["--node", "1"], "NUMA node 1"),
        ("huge", &[], "huge pages"),
    ];
    for (kind, more, _) in media {
        let add = ["add", kind, "--medium", kind, "--price", "7.85"];
        tier(&world, &add).args(more).run().ok();
    }
    let refused = ["add", "disk", "--medium", "disk", "--price", "1", "--path", folder];
    tier(&world, &refused).run().refused(&["on a DAX file system", "--medium dax"]);
    let list = tier(&world, &["ls", "--json"]).run().json();
    for listed in list.as_array().unwrap() {
        assert!(listed["error"].is_null() && listed["free"].as_u64() >= Some(64 * MIB), "{listed}");
    }
    for (kind, _, medium) in media {
        let probe = ["probe", "--json", "--size", "32M", "--time", "2", kind];
        let probes: Value = tier(&world, &probe).run().json();
        let probe = &probes[0];
        // A devdax device may hold a pool.
        assert_eq!(probe["write"].is_null(), kind == "devdax", "{probe}");
        assert!(probe["host"]["medium"].as_str().unwrap().starts_with(medium), "{probe}");
        for (list, key) in
            [("reads", "iops"), ("reads", "bandwidth"), ("micro", "bytes_per_second")]
        {
            let points = probe[list].as_array().unwrap();
            assert_eq!(points.len(), 6, "{probe}");
            assert!(points.iter().all(|point| point[key].as_f64() > Some(0.0)), "{probe}");
        }
        assert_eq!(fs::read_dir(folder).unwrap().count(), 0, "{kind}");
    }
    fs::write(RESERVED, "0").unwrap();
    let probe = ["probe", "--size", "32M", "huge"];
    tier(&world, &probe).run().refused(&["cannot measure the tier huge", "nr_hugepages"]);
    fs::remove_dir(folder).unwrap();
}

#[test]
fn a_devdax_device_that_is_unbound_ends_its_probe_with_the_reason() {
    let world = World::default();
    if Dax::mount(&world).is_none() || std::env::var_os("FIRN_LAB").is_none() {
        return;
    }
    let add = ["add", "d", "--medium", "devdax", "--path", "/dev/dax0.0", "--price", "7.85"];
    tier(&world, &add).run().ok();
    let probe = ["probe", "--json", "--size", "32M", "--time", "60", "d"];
    let (_, probe) = tier(&world, &probe).spawn();
    let maps = format!("/proc/{}/maps", probe.id());
    while !fs::read_to_string(&maps).unwrap().contains("/dev/dax0.0") {
        thread::sleep(Duration::from_millis(10));
    }
    fs::write(format!("{DRIVER}/unbind"), "dax0.0").unwrap();
    let ended = probe.wait_with_output().unwrap();
    fs::write(format!("{DRIVER}/bind"), "dax0.0").unwrap();
    let message = String::from_utf8(ended.stderr).unwrap();
    assert!(!ended.status.success() && ended.stdout.is_empty(), "{message}");
    assert!(message.contains("of /dev/dax0.0. ") && message.contains("device failed"), "{message}");
    // The device serves again.
    tier(&world, &["probe", "--size", "32M", "--time", "1", "d"]).run().ok();
}
