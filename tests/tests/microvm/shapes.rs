//! Sizes of microVMs: processors, memory, and the size of their snapshots on disk.

use std::fs;
use std::os::unix::fs::MetadataExt;

use firn_tests::{HELLO, World, workshop, workshop_folder};
use serde_json::json;

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;

/// Boots the workshop with options, and invokes it before the freeze and after the thaw.
fn cycle(options: &[&str], check: impl Fn(&World, &str)) {
    let world = World::default();
    let snapshot = world.file("snapshot");
    let boot = world.firn(["boot", "--name", "booted"]).args(options);
    let mut booted = boot.arg(workshop_folder(&world.work())).start().ready();
    check(&world, "booted");
    world.firn(["freeze", "booted"]).arg(&snapshot).run().ok();
    booted.end().ok();
    world.firn(["verify"]).arg(&snapshot).run().ok();
    let _thawed = world.firn(["thaw", "--name", "thawed"]).arg(&snapshot).start().ready();
    check(&world, "thawed");
}

fn processors(number: usize) -> impl Fn(&World, &str) {
    move |world, name| {
        let seen = world.ask(name, "machine", &json!({"do": "processors"}));
        let all: Vec<usize> = (0..number).collect();
        assert_eq!(seen, json!({"shown": number, "ran": all}), "{name}");
    }
}

#[test]
fn a_microvm_runs_with_one_vcpu() {
    let world = World::default();
    let _thawed = world.firn(["thaw", "--name", "thawed"]).arg(workshop()).start().ready();
    processors(1)(&world, "thawed");
}

#[test]
fn a_microvm_runs_with_two_vcpus() {
    cycle(&["--vcpus", "2"], |world, name| {
        processors(2)(world, name);
        if name == "thawed" {
            let record = world.firn(["record", "--invoke", "1", "--input", "a", "--out", "trace"]);
            record.arg(world.file("snapshot")).run().refused(&["2 vCPUs", "--vcpus 1"]);
        }
    });
}

#[test]
fn a_microvm_runs_with_four_vcpus_of_a_named_model() {
    cycle(&["--vcpus", "4", "--cpu", "x86-64-v2"], |world, name| {
        processors(4)(world, name);
        let info = world.ask(name, "machine", &json!({"do": "read", "path": "/proc/cpuinfo"}));
        let flags = info.as_str().unwrap().lines().find(|line| line.starts_with("flags")).unwrap();
        let has = |flag: &str| flags.split_whitespace().any(|there| there == flag);
        assert!(has("sse4_2") && has("popcnt"), "{name}: {flags}");
        assert!(!has("xsave") && !has("avx") && !has("aes"), "{name}: {flags}");
    });
}

/// Checks that the kernel has nearly all of `mebibytes`, and that data written before the freeze
/// exists after the thaw.
fn memory(mebibytes: u64) -> impl Fn(&World, &str) {
    move |world, name| {
        let seen = world.ask(name, "machine", &json!({"do": "memory"})).as_u64().unwrap();
        let all = mebibytes * MIB;
        assert!((all * 9 / 10..all).contains(&seen), "{name}: {seen} of {all}");
        if name == "booted" {
            assert_eq!(world.ask(name, "machine", &json!({"do": "fill", "mebibytes": 20})), 20);
        }
        assert_eq!(world.ask(name, "machine", &json!({"do": "check"})), json!([]), "{name}");
    }
}

#[test]
#[ignore = "long: make test-full"]
fn a_microvm_runs_with_2_gib() {
    cycle(&["--memory", "2G"], memory(2048));
}

/// Guest memory beyond 3 GiB starts at 4 GiB.
#[test]
fn a_microvm_runs_with_memory_on_both_sides_of_the_gap() {
    let host = rustix::system::sysinfo();
    let wanted = 3328;
    let there = host.totalram * u64::from(host.mem_unit) / MIB;
    assert!(
        there > wanted,
        "this test requires a machine with more than {wanted} MiB; this machine has {there} MiB"
    );
    cycle(&["--memory", "3328M"], memory(wanted));
}

#[test]
fn the_image_of_a_new_guest_contains_only_nonzero_pages() {
    let world = World::default();
    let boot = world.firn(["boot", "--name", "fresh", "--memory", "512M"]);
    let mut monitor = boot.arg(HELLO.write(&world.work())).start().ready();
    for (options, name) in [(vec!["--keep"], "sparse"), (vec!["--dense"], "dense")] {
        let freeze = world.firn(["freeze", "--json", "fresh", name]).args(options);
        let told = freeze.run().json();
        let checked = world.firn(["verify", "--json", name]).run().json();
        let count = |what: &str| checked["report"][what].as_u64().unwrap();
        assert_eq!(count("pages"), 512 * MIB / PAGE);
        // Debian's kernel and python3 touch far less than half of guest memory.
        assert!(count("zero_pages") > count("pages") / 2, "{checked}");
        let image = fs::metadata(world.file(name).join("memory.img")).unwrap();
        assert_eq!(image.len(), 512 * MIB);
        assert_eq!(told["zero_pages"].as_u64().unwrap(), count("zero_pages"));
        let taken = image.blocks() * 512;
        let nonzero = (count("pages") - count("zero_pages")) * PAGE;
        if name == "sparse" {
            assert!(taken <= nonzero + nonzero / 100, "{taken} bytes on disk for {nonzero}");
        } else {
            assert!(taken >= image.len(), "{taken} bytes on disk");
        }
        let thaw = world.firn(["thaw", "--invoke", HELLO.input_b, name]);
        assert_eq!(thaw.run().ok(), HELLO.expected_b);
    }
    monitor.end().ok();
}
