//! A pool and snapshots on a real ext4 with DAX, which `firn lab run --fsdax` provides. On other
//! hosts these tests pass without a check.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use firn_tests::{Function, HELLO, JSON, World, at_once, check_memory, profiled};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use serde_json::Value;

const MIB: u64 = 1 << 20;
const DEVICE: &str = "/dev/pmem1";

/// The file system, mounted until this is dropped.
pub(crate) struct Dax(PathBuf);

impl Dax {
    pub(crate) fn mount(world: &World) -> Option<Self> {
        if !firn_required::has("dax", Path::new(DEVICE).exists()) {
            return None;
        }
        let path = world.file("dax");
        fs::create_dir(&path).unwrap();
        mount(DEVICE, &path, "ext4", MountFlags::NOATIME, c"dax=always").unwrap();
        Some(Self(path))
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Dax {
    fn drop(&mut self) {
        unmount(&self.0, UnmountFlags::DETACH).unwrap();
    }
}

/// A copy without zero pages.
fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let (mut from, to) =
            (File::open(entry.path()).unwrap(), File::create(to.join(entry.file_name())).unwrap());
        to.set_len(from.metadata().unwrap().len()).unwrap();
        let (mut page, mut at) = (Vec::new(), 0);
        while from.by_ref().take(4096).read_to_end(&mut page).unwrap() > 0 {
            if page.iter().any(|byte| *byte != 0) {
                to.write_all_at(&page, at).unwrap();
            }
            at += page.len() as u64;
            page.clear();
        }
    }
}

fn thaw(world: &World, function: &Function, words: &[&str]) -> Value {
    let thaw = ["thaw", "--json", "--invoke", function.input_b];
    let report = world.firn(thaw).args(words).run().json();
    let expected: Value = serde_json::from_str(function.expected_b).unwrap();
    assert_eq!(report["outcome"]["answer"], expected, "{report}");
    report
}

/// Guest memory is mapped from the file, and none of it is in the page cache.
fn vanilla(world: &World, function: &Function, snapshot: &Path) {
    let words = ["--compare", "--planner", "vanilla_dax", snapshot.to_str().unwrap()];
    let report = thaw(world, function, &words);
    check_memory(&report, &BTreeSet::new());
    assert_eq!(report["shared_bytes"], 0, "{report}");
    // The kernel may have evicted a page of the program.
    assert!(report["read_bytes"].as_u64().unwrap() < 1 << 20, "{report}");
}

#[test]
fn a_dax_file_system_holds_pools_and_images_without_a_page_cache() {
    let world = World::default();
    let Some(dax) = Dax::mount(&world) else { return };
    let text = |path: &Path| path.to_str().unwrap().to_owned();

    let medium = text(&dax.file("pool"));
    world.firn(["pool", "create", "--size", "320M", "--medium", &medium]).run().ok();
    let socket = text(&world.file("pool.sock"));
    let serve = ["pool", "serve", "--json", "--medium", &medium, "--socket", &socket];
    let mut manager = world.firn(serve).start().ready();
    let listing = world.firn(["pool", "ls", "--json", "--pool", &medium]).run().json();
    // MAP_SYNC is in use, and the file's alignment allows huge leaves.
    assert_eq!(listing["medium"]["kind"], "dax_file", "{listing}");
    assert_eq!(listing["medium"]["index"]["leaf"], 2 * MIB, "{listing}");
    assert!(listing["medium"]["durability"]["cache_lines"].is_string(), "{listing}");
    let boot = world.firn(["boot", "--name", "first", "--memory", "256M"]);
    let mut monitor = boot.arg(HELLO.write(&world.work())).start().ready();
    world.firn(["invoke", "first", HELLO.input_a]).run().ok();
    world.firn(["freeze", "--pool", &medium, "first", "hello"]).run().ok();
    monitor.end().ok();
    let report = thaw(&world, &HELLO, &["--planner", "pass_shared", "--pool", &medium, "hello"]);
    // Reads use leaves of 2 MiB on the medium; the kernel copies writes, 4 KiB each.
    assert_eq!(report["shared_bytes"], 0, "{report}");
    assert!(report["kvm"]["pages_2m"].as_u64().unwrap() > 0, "{report}");
    assert_eq!(report["chunk_copies"]["chunks"], 0, "{report}");
    // Copies of whole chunks would take 50 MiB (docs/concepts/devdax-sharing.md).
    let private = report["private_bytes"].as_u64().unwrap();
    assert!((1..32 * MIB).contains(&private), "{report}");
    world.firn(["pool", "verify", "--pool", &medium]).run().ok();
    manager.signal(rustix::process::Signal::TERM);
    manager.end().ok();
    fs::remove_file(&medium).unwrap();

    for function in [HELLO, JSON] {
        let snapshot = dax.file(function.name);
        copy(profiled(&function), &snapshot);
        vanilla(&world, &function, &snapshot);
        fs::remove_dir_all(&snapshot).unwrap();
    }
    let thaw = ["thaw", "--planner", "vanilla_dax", "--invoke", "{}"];
    world.firn(thaw).arg(profiled(&HELLO)).run().refused(&["DAX", "-o dax"]);
}

#[test]
#[ignore = "long: make test-full"]
fn vanilla_dax_thaws_four_microvms_at_once() {
    let world = World::default();
    let Some(dax) = Dax::mount(&world) else { return };
    let snapshot = dax.file(HELLO.name);
    copy(profiled(&HELLO), &snapshot);
    at_once::<4, _>(|| vanilla(&world, &HELLO, &snapshot));
    fs::remove_dir_all(&snapshot).unwrap();
}
