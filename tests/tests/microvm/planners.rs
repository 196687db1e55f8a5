//! Planners that page from a directory. Profiles are recorded on one input, and the function is
//! invoked with the other. Every page that the run did not write equals the image.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::Path;

use firn_base::PageRange;
use firn_memory::page_cache::{cached, evict};
use firn_snapshot::Snapshot;
use firn_tests::{
    BlockedLoader, Function, HELLO, JSON, World, at_once, check_memory, free_lists, profiled,
    workshop_folder,
};
use rustix::process::Signal;
use serde_json::{Value, json};

/// All planners for a snapshot in a directory without DAX. A comparison touches every page, and a
/// pager fault for each page takes half a minute in the lab, so the pager installs several pages
/// for each fault here, and one with [`PAGE_BY_PAGE`].
const PLANNERS: [&str; 7] = [
    "firecracker",
    "firecracker:readahead=off",
    "dram_cached",
    "reap:granule=64",
    "faast:granule=64",
    "faasnap",
    "snapbpf",
];

/// The papers' configurations.
const PAGE_BY_PAGE: [&str; 2] = ["reap", "faast"];

fn count(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("no number: {value}"))
}

/// Thaws a profiled function with a planner and invokes it with input b. Checks the answer, guest
/// memory, and the planner's counters.
fn thaw(world: &World, function: &Function, planner: &str, free: &BTreeSet<u64>) -> Value {
    let snapshot = profiled(function);
    let thaw = world.firn(["thaw", "--json", "--compare", "--planner", planner]);
    let report = thaw.args(["--invoke", function.input_b]).arg(snapshot).run().json();
    let expected: Value = serde_json::from_str(function.expected_b).unwrap();
    assert_eq!(report["outcome"]["answer"], expected, "{planner}");
    let name = planner.split(':').next().unwrap();
    let none = BTreeSet::new();
    check_memory(&report, if name == "faast" { free } else { &none });
    let (execute, pager, loader) = (&report["execute"], &report["pager"], &report["loader"]);
    match name {
        "reap" | "faast" => {
            assert_eq!(pager["direct_reads"], 1, "{report}");
            assert_eq!(pager["install_wakes"], 1, "{report}");
            let installed = count(&pager["installed_pages"]);
            assert_eq!(count(&pager["packed_bytes"]), installed * 4096, "{report}");
            assert!(installed > 500, "{report}");
            assert_eq!(count(&pager["zero_pages"]), 0, "{report}");
            assert_eq!(count(&execute["zero_bytes"]) > 0, name == "faast", "{report}");
        }
        "faasnap" => {
            assert!(count(&execute["packed_regions"]) > 10, "{report}");
            assert!(count(&execute["zero_bytes"]) > 0, "{report}");
            assert_eq!(loader["ranges"], 1, "{report}");
            assert_eq!(loader["bytes"], execute["packed_bytes"], "{report}");
            assert_eq!(loader["done"], true, "{report}");
        }
        "snapbpf" => {
            assert_eq!(execute["packed_bytes"], 0, "{report}");
            assert!(count(&loader["ranges"]) > 1, "{report}");
        }
        "dram_cached" => assert!(count(&execute["steps"][0]["preloaded_bytes"]) > 0, "{report}"),
        _ => assert_eq!((pager, loader), (&Value::Null, &Value::Null), "{report}"),
    }
    report
}

fn by_each(planners: &[&str], function: &Function) {
    let world = World::default();
    let free = free_lists(profiled(function)).pages;
    for planner in planners {
        thaw(&world, function, planner, &free);
    }
}

#[test]
fn every_planner_thaws_hello() {
    by_each(&PLANNERS, &HELLO);
}

#[test]
fn every_planner_thaws_json() {
    by_each(&PLANNERS, &JSON);
}

#[test]
#[ignore = "long: make test-full"]
fn page_by_page_planners_thaw_json() {
    by_each(&PAGE_BY_PAGE, &JSON);
}

/// Four microVMs of one snapshot at once.
fn four_at_once(planner: &str) -> [Value; 4] {
    let world = World::default();
    let free = free_lists(profiled(&HELLO)).pages;
    at_once(|| thaw(&world, &HELLO, planner, &free))
}

#[test]
fn faasnap_loads_once_for_four_microvms_at_once() {
    for file in ["loading-set.img", "memory.img"] {
        let file = File::open(profiled(&HELLO).join(file)).unwrap();
        assert!(evict(&file).unwrap().is_cold(), "{file:?}");
    }
    let reports = four_at_once("faasnap");
    let loaders = reports.iter().map(|report| &report["loader"]);
    let read: Vec<u64> = loaders.map(|loader| count(&loader["read_bytes"])).collect();
    assert_eq!(read.iter().filter(|bytes| **bytes > 0).count(), 1, "{reports:?}");
    let sum: u64 = read.iter().sum();
    assert!(sum <= count(&reports[0]["execute"]["packed_bytes"]), "{reports:?}");
}

/// Only the exit of the process waits for the loader.
#[test]
fn starts_and_answers_do_not_wait_for_a_loader() {
    let world = World::default();
    let snapshot = profiled(&HELLO);
    let thaw = || world.firn(["thaw", "--planner", "faasnap"]);
    let held = BlockedLoader::of(&snapshot.join("loading-set.img"));
    let mut serves = thaw().args(["--json", "--name", "it"]).arg(snapshot).start().ready();
    let report: Value = serde_json::from_str(&serves.first_line).unwrap();
    assert_eq!(report["loader"]["done"], false, "{report}");
    assert_eq!(report["loader"]["bytes"], report["execute"]["packed_bytes"], "{report}");
    assert!(held.holds());
    assert_eq!(world.firn(["invoke", "it", HELLO.input_b]).run().ok(), HELLO.expected_b);
    drop(held);
    serves.signal(Signal::TERM);
    serves.end().ok();

    let held = BlockedLoader::of(&snapshot.join("loading-set.img"));
    let mut answers = thaw().args(["--invoke", HELLO.input_b]).arg(snapshot).start().ready();
    assert_eq!(answers.first_line, HELLO.expected_b);
    assert!(held.holds());
    drop(held);
    let outcome = answers.end();
    assert!(
        outcome.ok() == HELLO.expected_b && outcome.stderr.contains(": thawed by "),
        "{outcome:#?}"
    );
}

/// Slow, so for `make test-full`.
#[test]
#[ignore = "long: make test-full"]
fn every_planner_thaws_four_microvms_at_once() {
    for planner in PLANNERS.into_iter().chain(PAGE_BY_PAGE) {
        four_at_once(planner);
    }
}

/// Like [`every_planner_thaws_four_microvms_at_once`], with `merge=0`, which uses a separate
/// loading-set file.
#[test]
#[ignore = "long: make test-full"]
fn faasnap_without_merging_thaws_four_microvms_at_once() {
    let world = World::default();
    let pack = |planner| {
        let pack = world.firn(["profile", "pack", "--planner", planner]);
        pack.arg(profiled(&HELLO)).run().ok();
    };
    pack("faasnap:merge=0");
    four_at_once("faasnap:merge=0");
    pack("faasnap");
}

/// The free pages in the snapshot's profile.
fn recorded_free(snapshot: &Path) -> BTreeSet<u64> {
    let profile = Snapshot::open(snapshot).unwrap().profile().unwrap().unwrap();
    profile.free.unwrap().iter().flat_map(PageRange::range).collect()
}

#[test]
fn free_pages_are_those_on_the_allocators_lists() {
    let lists = free_lists(profiled(&HELLO));
    assert_eq!(lists.blocks, lists.counted);
    assert_eq!(recorded_free(profiled(&HELLO)), lists.pages);
    assert!(lists.pages.len() > 10_000, "{lists:?}");
}

/// Two processors, so that per-CPU lists exist, and memory that was full and was freed again.
/// While 128 MiB are being reported, the rest is enough for the function.
#[test]
fn freed_pages_are_recorded_and_reported_pages_are_never_read() {
    let world = World::default();
    let snapshot = world.file("snapshot");
    let boot =
        world.firn(["boot", "--name", "first", "--vcpus", "2", "--memory", "320M", "--cmdline"]);
    let boot = boot.arg("page_reporting.page_reporting_order=0");
    let mut booted = boot.arg(workshop_folder(&world.work())).start().ready();
    let exhaust = json!({"do": "exhaust", "mebibytes": 100});
    world.ask("first", "machine", &exhaust);
    let buddyinfo =
        world.ask("first", "machine", &json!({"do": "read", "path": "/proc/buddyinfo"}));
    world.firn(["freeze", "--dense", "first"]).arg(&snapshot).run().ok();
    booted.end().ok();
    let event = |what: &Value| json!({"module": "machine", "event": what}).to_string();
    let record = world.firn(["profile", "record", "--part", "cache,free", "--invoke"]);
    let recorded = record.arg(event(&json!({"do": "memory"}))).arg(&snapshot).run();
    recorded.ok();
    assert!(recorded.stderr.contains("firn: the page cache is watched at the "), "{recorded:?}");

    let lists = free_lists(&snapshot);
    assert_eq!(lists.blocks, lists.counted);
    assert_eq!(recorded_free(&snapshot), lists.pages);
    let counts = buddyinfo.as_str().unwrap().lines().flat_map(|zone| {
        let counts = zone.split_whitespace().skip(4).map(|count| count.parse::<u64>().unwrap());
        counts.zip(0..).map(|(count, order)| count << order).collect::<Vec<_>>()
    });
    // Between the two counts the guest collects garbage and writes files back. Blocks that it is
    // reporting, up to 32 of 1024 pages, are on no list (Linux mm/page_reporting.c).
    let (buddyinfo, found): (u64, _) = (counts.sum(), lists.pages.len() as u64);
    let reporting = 32 * 1024;
    assert!(
        found < buddyinfo + buddyinfo / 10 && found + reporting > buddyinfo - buddyinfo / 10,
        "the guest counts {buddyinfo}, the snapshot has {found}"
    );

    let opened = Snapshot::open(&snapshot).unwrap();
    let (image, pages) = (opened.image_file().unwrap(), opened.manifest().layout.pages());
    let reported = opened.profile().unwrap().unwrap().reported.unwrap();
    let reported: BTreeSet<u64> = reported.iter().flat_map(PageRange::range).collect();
    assert!(reported.len() > 1000, "{}", reported.len());
    let read = |planner: &str| {
        assert!(evict(image).unwrap().is_cold());
        let thaw = world.firn(["thaw", "--json", "--planner", planner, "--invoke"]);
        let report = thaw.arg(event(&exhaust)).arg(&snapshot).run().json();
        let cached = cached(image, pages).unwrap();
        let read = |pages: &BTreeSet<u64>| pages.iter().filter(|page| cached.get(**page)).count();
        let zeros = count(&report["execute"]["zero_bytes"]) / 4096;
        (read(&reported), read(&lists.pages), zeros)
    };
    // The guest allocates free pages. Without `snapbpf` the image is read for them, even without
    // read-ahead.
    let (of_reported, of_free, _) = read("firecracker:readahead=off");
    assert!(of_reported > 1000, "{of_reported} of {}", reported.len());
    let (none, fewer, zeros) = read("snapbpf");
    assert_eq!((none, zeros), (0, reported.len() as u64));
    // Free pages that are not reported equal the image until the guest reports them.
    assert!(fewer < of_free, "{fewer} free pages are read, {of_free} by demand paging");
}

#[test]
fn a_profile_is_recorded_and_shown() {
    let world = World::default();
    let snapshot = profiled(&HELLO);
    let picture = world.file("hello.svg");
    let show = world.firn(["profile", "show", "--json", "--plot"]).arg(&picture).arg(snapshot);
    let summary = show.run().json();
    assert_eq!(summary["inputs"], json!(["a"]));
    let parts: Vec<&str> =
        summary["parts"].as_array().unwrap().iter().map(|p| p["part"].as_str().unwrap()).collect();
    for part in ["faults", "writes", "groups", "cache", "free"] {
        assert!(parts.contains(&part), "{part}: {summary}");
    }
    // The guest touches fewer pages than the host reads ahead, and writes fewer than it touches.
    assert!(count(&summary["groups"]) > 1, "{summary}");
    assert!(count(&summary["read_pages"]) > 100, "{summary}");
    assert!(count(&summary["read_ahead_pages"]) > 0, "{summary}");
    let drawn = std::fs::read_to_string(&picture).unwrap();
    assert!(drawn.starts_with("<svg"), "{}", &drawn[..80]);
    let text = world.firn(["profile", "show"]).arg(snapshot).run();
    assert!(text.ok().contains("working-set groups"), "{text:?}");
}

#[test]
#[ignore = "long: make test-full"]
fn a_recorded_run_is_frozen_again_and_thawed_by_faasnap() {
    let world = World::default();
    let (first, second) = (profiled(&HELLO), world.file("second"));
    let before = Snapshot::open(first).unwrap().profile().unwrap();
    let record = || world.firn(["profile", "record", "--json", "--invoke", HELLO.input_a]);
    let freeze = |more: &[&str]| record().args(more).arg("--freeze").arg(&second).arg(first).run();
    freeze(&["--part", "faults"]).refused(&["--freeze", "groups"]);
    let summary = freeze(&["--input", "a"]).json();
    assert!(count(&summary["groups"]) > 1, "{summary}");
    assert_eq!(summary["inputs"], json!(["a"]));

    let manifest = |path: &Path| Snapshot::open(path).unwrap().manifest().clone();
    assert_eq!(manifest(&second).description.parent, Some(manifest(first).description.id));
    assert_eq!(manifest(&second).image.kind, manifest(first).image.kind);
    assert_eq!(Snapshot::open(first).unwrap().profile().unwrap(), before);
    world.firn(["verify"]).arg(&second).run().ok();
    let thaw = world.firn(["thaw", "--json", "--compare", "--planner", "faasnap", "--invoke"]);
    let report = thaw.arg(HELLO.input_b).arg(&second).run().json();
    let expected: Value = serde_json::from_str(HELLO.expected_b).unwrap();
    assert_eq!(report["outcome"]["answer"], expected, "{report}");
    check_memory(&report, &BTreeSet::new());
    assert!(count(&report["execute"]["packed_regions"]) > 10, "{report}");
    assert_eq!(report["loader"]["bytes"], report["execute"]["packed_bytes"], "{report}");
}
