//! Damaged and incomplete snapshots are refused, and no microVM is started.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use firn_tests::{HELLO, World, cache, frozen};

/// A copy of a snapshot with links to `memory.img` and `overlay.img`. A test may replace files but
/// not change them.
fn copy(world: &World, name: &str) -> PathBuf {
    let (from, to) = (frozen(&HELLO), world.file(name));
    fs::create_dir(&to).unwrap();
    fs::copy(from.join("snapshot.firn"), to.join("snapshot.firn")).unwrap();
    for image in ["memory.img", "overlay.img"] {
        fs::hard_link(from.join(image), to.join(image)).unwrap();
    }
    to
}

/// Fails unless thaw and plan refuse the snapshot.
#[track_caller]
fn refused(world: &World, snapshot: &Path, words: &[&str]) {
    world.firn(["thaw", "--invoke", HELLO.input_b]).arg(snapshot).run().refused(words);
    world.firn(["plan"]).arg(snapshot).run().refused(words);
    world.firn(["verify"]).arg(snapshot).run().refused(words);
    world.assert_nothing_left();
}

#[test]
fn all_planners_plan_an_intact_snapshot() {
    let world = World::default();
    let copy = copy(&world, "copy");
    world.firn(["verify"]).arg(&copy).run().ok();
    let plans = world.firn(["plan", "--planner", "all", "--json"]).arg(&copy).run().json();
    let names: Vec<_> = plans["plans"]
        .as_array()
        .unwrap()
        .iter()
        .map(|plan| plan["planner"].as_str().unwrap())
        .collect();
    for planner in ["firecracker:readahead=on", "dram_cached"] {
        assert!(names.iter().any(|name| name.starts_with(planner)), "{planner}: {names:?}");
    }
    let table = world.firn(["plan"]).arg(&copy).run();
    assert!(table.ok().contains("planner firecracker"), "{table:?}");
}

#[test]
fn files_that_are_not_snapshots_are_refused() {
    let world = World::default();
    refused(&world, &world.file("nothing"), &["no snapshot at", "nothing"]);
    fs::create_dir(world.file("folder")).unwrap();
    refused(&world, &world.file("folder"), &["folder is not a snapshot", "no snapshot.firn"]);
    refused(&world, &cache().join("root.erofs"), &["root.erofs is not a snapshot"]);
    let copy = copy(&world, "copy");
    fs::write(copy.join("snapshot.firn"), "something else").unwrap();
    refused(&world, &copy, &["snapshot.firn"]);
}

#[test]
fn a_flipped_bit_in_the_data_that_a_start_reads_is_found() {
    let world = World::default();
    let copy = copy(&world, "copy");
    let file = OpenOptions::new().read(true).write(true).open(copy.join("snapshot.firn")).unwrap();
    let length = file.metadata().unwrap().len();
    // Header, manifest, machine state, zero map, in steps shorter than any section, to the end
    // of the file. Digests are checked by verify.
    let mut refusals = 0;
    for offset in [0, 9, 20, 40, 100, 200, 400, 1000, 3000, length / 2, length - 1] {
        let mut byte = [0];
        file.read_exact_at(&mut byte, offset).unwrap();
        file.write_all_at(&[byte[0] ^ 0x10], offset).unwrap();
        let verified = world.firn(["verify"]).arg(&copy).run();
        verified.refused(&["snapshot.firn"]);
        let thaw = world.firn(["thaw", "--invoke", HELLO.input_b]).arg(&copy).run();
        if thaw.code == 0 {
            assert_eq!(thaw.stdout, HELLO.expected_b, "a flip at {offset} changes the answer");
            assert!(offset > 3000, "a thaw does not detect a flip at {offset}");
        } else {
            thaw.refused(&["snapshot.firn"]);
            refusals += 1;
        }
        file.write_all_at(&byte, offset).unwrap();
    }
    assert!(refusals >= 9, "{refusals}");
    world.firn(["verify"]).arg(&copy).run().ok();
}

#[test]
fn the_error_names_missing_and_truncated_files() {
    let world = World::default();
    for name in ["memory.img", "overlay.img"] {
        let copy = copy(&world, &format!("without-{name}"));
        fs::remove_file(copy.join(name)).unwrap();
        refused(&world, &copy, &[name, "is missing"]);
        // Truncated by one page, and to an empty file.
        let whole = fs::metadata(frozen(&HELLO).join(name)).unwrap().len();
        for length in [whole - 4096, 0] {
            fs::File::create(copy.join(name)).unwrap().set_len(length).unwrap();
            refused(&world, &copy, &[name, "truncated", &whole.to_string()]);
        }
        fs::File::create(copy.join(name)).unwrap().set_len(whole + 4096).unwrap();
        refused(&world, &copy, &[name, "too long"]);
    }
    let copy = copy(&world, "cut");
    let file = OpenOptions::new().write(true).open(copy.join("snapshot.firn")).unwrap();
    file.set_len(file.metadata().unwrap().len() / 2).unwrap();
    refused(&world, &copy, &["snapshot.firn", "truncated"]);
}

#[test]
fn verify_finds_a_changed_page() {
    let world = World::default();
    let copy = copy(&world, "copy");
    fs::remove_file(copy.join("memory.img")).unwrap();
    fs::copy(frozen(&HELLO).join("memory.img"), copy.join("memory.img")).unwrap();
    world.firn(["verify"]).arg(&copy).run().ok();
    let image = OpenOptions::new().read(true).write(true).open(copy.join("memory.img")).unwrap();
    let offset = 32 << 20;
    let mut byte = [0];
    image.read_exact_at(&mut byte, offset).unwrap();
    image.write_all_at(&[byte[0] ^ 1], offset).unwrap();
    world.firn(["verify"]).arg(&copy).run().refused(&["memory.img"]);
    let report = world.firn(["verify", "--json"]).arg(&copy).run();
    let report: serde_json::Value = {
        assert_eq!(report.code, 1, "{report:#?}");
        serde_json::from_str(&report.stdout).unwrap()
    };
    assert_eq!(report["whole"], false);
    assert!(report["error"].as_str().unwrap().contains("memory.img"), "{report}");
}

#[test]
fn a_changed_root_is_refused() {
    let world = World::default();
    let root = world.file("root.erofs");
    fs::copy(cache().join("root.erofs"), &root).unwrap();
    let thaw = || {
        let thaw = world.firn(["thaw", "--invoke", HELLO.input_b, "--root"]).arg(&root);
        thaw.arg(frozen(&HELLO)).run()
    };
    assert_eq!(thaw().ok(), HELLO.expected_b, "a moved root");
    let file = OpenOptions::new().write(true).open(&root).unwrap();
    let whole = file.metadata().unwrap().len();
    file.set_len(whole / 2 / 4096 * 4096).unwrap();
    thaw().refused(&["root", "differs from the disk at the freeze"]);
    fs::remove_file(&root).unwrap();
    thaw().refused(&["root.erofs", "No such file"]);
}

#[test]
fn invalid_planners_are_refused() {
    let world = World::default();
    for command in ["thaw", "plan"] {
        let run = |planner| world.firn([command, "--planner", planner]).arg(frozen(&HELLO)).run();
        run("nonesuch").refused(&["nonesuch", "firecracker", "dram_cached"]);
        run("firecracker:readahead=perhaps").refused(&["readahead", "perhaps"]);
        run("firecracker:speed=1").refused(&["speed"]);
        run("").refused(&["planner"]);
    }
}
