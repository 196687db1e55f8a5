//! `firn tier` as a process, with a list of tiers of its own, on real file systems.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::cell::Cell;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use firn_base::error_chain;
use firn_bench::tier::{ProbeConfig, ProbeError, Tier, TierError, TierMedium};
use firn_bench::{Harness, Interrupt, Progress};
use firn_vmm::{KVM_DEVICE, open_kvm};
use rustix::fs::{FallocateFlags, fallocate, statvfs};
use rustix::mount::{MountFlags, UnmountFlags, mount_remount, unmount};
use serde_json::Value;
use tempfile::TempDir;

const FIRN: &str = env!("CARGO_BIN_EXE_firn");
const MIB: u64 = 1 << 20;
/// The shortest probe: an area of 32 MiB, and then 32 files of 2 MiB.
const SHORT: [&str; 4] = ["--size", "32M", "--time", "1"];
/// The longest time until what a probe took is free.
const LIMIT: Duration = Duration::from_secs(60);
const RESERVED: &str = "/proc/sys/vm/nr_hugepages";

/// A cache directory with a list of tiers, and a directory for a tier.
struct World {
    cache: TempDir,
    directory: TempDir,
}

impl World {
    fn new() -> Self {
        let temporary = || tempfile::tempdir().unwrap();
        Self { cache: temporary(), directory: temporary() }
    }

    fn path(&self) -> &str {
        self.directory.path().to_str().unwrap()
    }

    fn tier(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(FIRN);
        command.arg("tier").args(arguments).env("FIRN_CACHE", self.cache.path());
        command.stdin(Stdio::null()).output().unwrap()
    }

    #[track_caller]
    fn ok(&self, arguments: &[&str]) -> String {
        let output = self.tier(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
        text(&output.stdout).to_owned()
    }

    #[track_caller]
    fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.ok(&[arguments, &["--json"]].concat())).unwrap()
    }

    /// A command that fails with these words, and leaves the list as it was.
    #[track_caller]
    fn refused(&self, arguments: &[&str], code: i32, words: &[&str]) {
        let before = self.list();
        let output = self.tier(arguments);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {error}");
        for word in words {
            assert!(error.contains(word), "{arguments:?}: {error}");
        }
        assert_eq!(text(&output.stdout), "");
        assert_eq!(self.list(), before, "{arguments:?}");
        let files = fs::read_dir(self.cache.path()).unwrap().count();
        assert_eq!(files, usize::from(before.is_some()), "{arguments:?}");
    }

    /// The bytes of the list's file.
    fn list(&self) -> Option<Vec<u8>> {
        fs::read(self.cache.path().join("tiers.json")).ok()
    }

    fn files(&self) -> usize {
        fs::read_dir(self.directory.path()).unwrap().count()
    }

    /// The reason of `firn tier ls` why a tier cannot be used; empty if it can.
    #[track_caller]
    fn state(&self, name: &str) -> String {
        let list = self.json(&["ls"]);
        let tier = list.as_array().unwrap().iter().find(|tier| tier["name"] == name).unwrap();
        tier["error"].as_str().unwrap_or_default().to_owned()
    }
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn is_root() -> bool {
    firn_required::has("root", rustix::process::geteuid().is_root())
}

/// An ext4 in a file, mounted in a directory until this is dropped.
struct Disk {
    image: PathBuf,
    point: PathBuf,
    _image: TempDir,
}

impl Disk {
    /// `None` without root or loop devices.
    fn mount(point: &Path) -> Option<Self> {
        // Loop devices are a property of the host that few other tests need.
        if !is_root() || !Path::new("/dev/loop-control").exists() {
            return None;
        }
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("image");
        File::create(&image).unwrap().set_len(160 * MIB).unwrap();
        run(Command::new("mkfs.ext4")
            .args(["-q", "-m", "0", "-E", "lazy_itable_init=0"])
            .arg(&image));
        let disk = Self { image, point: point.to_owned(), _image: directory };
        disk.attach();
        fs::remove_dir(point.join("lost+found")).unwrap();
        Some(disk)
    }

    fn attach(&self) {
        run(Command::new("mount").args(["-o", "loop"]).arg(&self.image).arg(&self.point));
    }

    fn detach(&self) {
        unmount(&self.point, UnmountFlags::DETACH).unwrap();
    }

    fn free(&self) -> u64 {
        let stat = statvfs(&self.point).unwrap();
        stat.f_bavail * stat.f_frsize
    }

    /// Waits until this many bytes are free: a process that another test starts has this one's
    /// open files until it runs its program, and with them the bytes of a file without a name.
    #[track_caller]
    fn wait_for_free(&self, bytes: u64) {
        let limit = Instant::now() + LIMIT;
        while self.free() != bytes {
            assert!(Instant::now() < limit, "{} bytes are free, not {bytes}", self.free());
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Takes all but `left` bytes.
    fn fill(&self, left: u64) {
        let filler = File::create(self.point.join("filler")).unwrap();
        fallocate(filler, FallocateFlags::empty(), 0, self.free() - left).unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // A test may have unmounted it.
        let _ = unmount(&self.point, UnmountFlags::DETACH);
    }
}

#[track_caller]
fn run(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", text(&output.stderr));
}

#[track_caller]
fn check_probe(probe: &Value) {
    let points = |list: &str, key: &str| {
        let points = probe[list].as_array().unwrap().iter();
        points.map(|point| point[key].as_u64().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(points("reads", "readers"), [1, 2, 4, 8, 16, 32], "{probe}");
    assert_eq!(points("micro", "threads"), [1, 2, 4, 8, 16, 32], "{probe}");
    assert_eq!(points("micro", "file"), [2 * MIB; 6], "{probe}");
    assert!(probe["latency_ns"]["median"].as_f64() > Some(0.0), "{probe}");
    assert!(probe["write"]["latency_ns"]["median"].as_f64() > Some(0.0), "{probe}");
    assert!(probe["host"]["kernel"].is_string(), "{probe}");
}

#[test]
fn tiers_are_added_listed_measured_and_removed() {
    let world = World::new();
    assert_eq!(world.json(&["ls"]), serde_json::json!([]));
    let add = ["add", "memory", "--medium", "dram", "--capacity", "1G", "--price", "16.61"];
    let added = world.json(&add);
    assert_eq!(added["medium"], serde_json::json!({ "kind": "dram" }), "{added}");
    let on_disk = firn_required::is_on_disk(File::open(world.path()).unwrap());
    if on_disk {
        let add = ["add", "ssd", "--medium", "disk", "--price", "0.35", "--path", world.path()];
        assert!(world.ok(&add).contains("added ssd"));
    }
    let listed = world.json(&["ls"]);
    assert_eq!(listed[0]["name"], "memory");
    assert_eq!((&listed[0]["capacity"], &listed[0]["price"]), (&(1 << 30).into(), &16.61.into()));
    assert!(listed[0]["free"].as_u64() > Some(0) && listed[0]["error"].is_null(), "{listed}");
    let table = world.ok(&["ls"]);
    assert!(table.contains("DRAM") && table.contains("16.61") && table.contains("ok"), "{table}");
    let names: &[&str] = if on_disk { &["memory", "ssd"] } else { &["memory"] };
    let probes = world.json(&[&["probe"], names, &SHORT].concat());
    for (probe, name) in probes.as_array().unwrap().iter().zip(names) {
        check_probe(probe);
        assert_eq!((&probe["tier"]["name"], &probe["size"]), (&(*name).into(), &(32 * MIB).into()));
    }
    let table = world.ok(&[&["probe", "memory"], &SHORT[..]].concat());
    assert!(table.contains("memory: DRAM") && table.contains("micro-benchmark"), "{table}");
    for name in names {
        assert_eq!(world.json(&["rm", name])["name"], **name);
    }
    assert_eq!(world.json(&["ls"]), serde_json::json!([]));
    assert_eq!(world.files(), 0);
}

#[test]
fn what_cannot_be_is_refused_and_changes_nothing() {
    let world = World::new();
    let path = world.path();
    let missing = world.directory.path().join("missing");
    let missing = missing.to_str().unwrap();
    let add = |words: &[&'static str]| {
        let words = words.iter().map(|word| match *word {
            "PATH" => path,
            "MISSING" => missing,
            word => word,
        });
        ["add"].into_iter().chain(words).map(str::to_owned).collect::<Vec<_>>()
    };
    let mut refusals = vec![
        (add(&["t", "--medium", "dram", "--price", "-1"]), 2, "not a price"),
        (add(&["t", "--medium", "dram", "--price", "nan"]), 2, "not a price"),
        (add(&["t", "--medium", "dram", "--price", "1", "--capacity", "0"]), 1, "0 bytes"),
        (
            add(&["t", "--medium", "dram", "--price", "1", "--capacity", "99999999G"]),
            1,
            "more than",
        ),
        (add(&["T t", "--medium", "dram", "--price", "1"]), 1, "not a name"),
        (add(&["t", "--medium", "disk", "--price", "1"]), 2, "--path"),
        (add(&["t", "--medium", "disk", "--price", "1", "--path", "MISSING"]), 1, "is missing"),
        (add(&["t", "--medium", "disk", "--price", "1", "--path", "/dev/null"]), 1, "directory"),
        (add(&["t", "--medium", "devdax", "--price", "1", "--path", "/dev/null"]), 1, "devdax"),
        (add(&["t", "--medium", "node", "--price", "1"]), 2, "--node"),
        (
            add(&["t", "--medium", "node", "--node", "900", "--price", "1"]),
            1,
            "node 900 is missing",
        ),
    ];
    if firn_required::is_on_disk(File::open(path).unwrap()) {
        let dax = add(&["t", "--medium", "dax", "--price", "1", "--path", "PATH"]);
        refusals.push((dax, 1, "without DAX"));
    }
    if Path::new("/dev/shm").is_dir() {
        let shm = add(&["t", "--medium", "disk", "--price", "1", "--path", "/dev/shm"]);
        refusals.push((shm, 1, "on tmpfs"));
    }
    let refused = |arguments: &[String], code, word: &str| {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        world.refused(&arguments, code, &["error", word]);
        assert_eq!(world.files(), 0, "{arguments:?}");
    };
    world.ok(&["add", "memory", "--medium", "dram", "--capacity", "64M", "--price", "1"]);
    for (arguments, code, word) in &refusals {
        refused(arguments, *code, word);
    }
    let again = add(&["memory", "--medium", "dram", "--price", "1"]);
    refused(&again, 1, "there is a tier \"memory\" already");
    for unknown in [["rm", "t"], ["probe", "t"]] {
        world.refused(&unknown, 1, &["no tier \"t\"", "the tiers are memory"]);
    }
    // A name that is not in the list is found out before anything is measured.
    world.refused(&["probe", "memory", "t"], 1, &["no tier \"t\""]);
    world.refused(&["probe", "memory", "--size", "33M"], 1, &["multiple of 32 MiB"]);
    world.refused(&["probe", "memory", "--size", "96M"], 1, &["capacity of 64.0 MiB", "96.0 MiB"]);
    world.refused(&["ls", "--snapshot", path], 1, &["snapshot.firn"]);
    assert_eq!(world.files(), 0);
}

/// Huge pages that are reserved until this is dropped.
struct Reserved(String);

impl Reserved {
    fn more(pages: u64) -> Option<Self> {
        if !is_root() {
            return None;
        }
        let before = fs::read_to_string(RESERVED).unwrap();
        let reserved = Self(before.clone());
        let wanted = before.trim().parse::<u64>().unwrap() + pages;
        fs::write(RESERVED, wanted.to_string()).unwrap();
        let found = fs::read_to_string(RESERVED).unwrap();
        assert_eq!(found.trim(), wanted.to_string(), "memory for huge pages");
        Some(reserved)
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        fs::write(RESERVED, &self.0).unwrap();
    }
}

#[test]
fn huge_pages_are_a_tier_while_they_are_reserved() {
    let world = World::new();
    let add = ["add", "huge", "--medium", "huge", "--price", "16.61"];
    let Some(reserved) = Reserved::more(32) else { return };
    let added = world.json(&add);
    assert!(added["capacity"].as_u64() >= Some(64 * MIB), "{added}");
    let probes = world.json(&[&["probe", "huge"], &SHORT[..]].concat());
    check_probe(&probes[0]);
    assert_eq!(probes[0]["host"]["medium"], "huge pages");
    let had = reserved.0.trim() != "0";
    drop(reserved);
    if !had {
        world.refused(&add, 1, &["huge pages are missing", "nr_hugepages"]);
        let error = world.state("huge");
        assert!(error.contains("nr_hugepages"), "{error}");
    }
}

#[test]
fn a_disk_that_is_full_or_read_only_is_refused() {
    let world = World::new();
    let Some(disk) = Disk::mount(world.directory.path()) else { return };
    world.ok(&["add", "ssd", "--medium", "disk", "--price", "0.35", "--path", world.path()]);
    world.ok(&["add", "memory", "--medium", "dram", "--price", "16.61"]);
    let probe = [&["probe", "ssd"], &SHORT[..]].concat();
    check_probe(&world.json(&probe)[0]);
    assert_eq!(world.files(), 0);
    disk.fill(40 * MIB);
    assert_eq!(world.state("ssd"), "");
    world.refused(&probe, 1, &["cannot measure the tier ssd", "is full", "64.0 MiB are needed"]);
    // The tiers that can be measured are.
    for names in [["ssd", "memory"], ["memory", "ssd"]] {
        let output = world.tier(&[&["probe", "--json"], &names[..], &SHORT].concat());
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(
            error.contains("cannot measure the tier ssd") && !error.contains("memory"),
            "{error}"
        );
        let probes: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(probes.as_array().unwrap().len(), 1, "{probes}");
        check_probe(&probes[0]);
        assert_eq!(probes[0]["tier"]["name"], "memory");
    }
    fs::remove_file(disk.point.join("filler")).unwrap();
    mount_remount(&disk.point, MountFlags::RDONLY, c"").unwrap();
    let error = world.state("ssd");
    assert!(error.contains("is read-only"), "{error}");
    world.refused(&probe, 1, &["cannot measure the tier ssd", "is read-only"]);
    assert_eq!(world.files(), 0);
}

/// An empty mount point is a valid directory, on the file system above it.
#[test]
fn a_tier_is_its_file_system_and_not_what_is_in_its_place() {
    let world = World::new();
    let Some(disk) = Disk::mount(world.directory.path()) else { return };
    world.ok(&["add", "ssd", "--medium", "disk", "--price", "0.35", "--path", world.path()]);
    let uuid = Command::new("blkid").args(["-s", "UUID", "-o", "value"]).arg(&disk.image).output();
    assert_eq!(world.json(&["ls"])[0]["file_system"], text(&uuid.unwrap().stdout).trim());
    let probe = [&["probe", "ssd"], &SHORT[..]].concat();
    disk.detach();
    let error = world.state("ssd");
    assert!(error.contains("on another file system"), "{error}");
    let table = world.ok(&["ls"]);
    assert!(table.contains("unusable") && table.contains(&format!("\nssd: {error}")), "{table}");
    world.refused(&probe, 1, &["cannot measure the tier ssd", "on another file system"]);
    assert_eq!(world.files(), 0);
    let other = Disk::mount(world.directory.path()).unwrap();
    world.refused(&probe, 1, &["on another file system"]);
    other.detach();
    // On another loop device, as disks may be after a restart.
    let _first = File::open(&disk.image).unwrap();
    disk.attach();
    assert_eq!(world.state("ssd"), "");
    world.ok(&probe);
    assert_eq!(world.files(), 0);
}

/// Does something after the first step of a measurement.
struct AtFirstStep<F>(Cell<Option<F>>);

impl<F: FnOnce()> Progress for AtFirstStep<F> {
    fn advance(&self, _finished: u64, _step: &str) {
        if let Some(action) = self.0.take() {
            action();
        }
    }
}

/// The error of a measurement during which something happens to the tier.
fn probe_while(path: &Path, action: impl FnOnce()) -> ProbeError {
    let medium = TierMedium::Disk { path: path.to_owned() };
    let tier = Tier::new("ssd", medium, None, "0.35".parse().unwrap()).unwrap();
    let interrupt = Interrupt::catch().unwrap();
    let progress = AtFirstStep(Cell::new(Some(action)));
    let harness =
        Harness { program: "/no/monitor".into(), interrupt: &interrupt, progress: &progress };
    let config = ProbeConfig { time: Duration::from_millis(1), size: 32 * MIB };
    config.run(&tier, &harness).unwrap_err()
}

#[test]
fn a_disk_that_becomes_full_during_a_measurement_is_named() {
    let world = World::new();
    let Some(disk) = Disk::mount(world.directory.path()) else { return };
    let before = disk.free();
    let error = probe_while(&disk.point, || disk.fill(4 * MIB));
    assert!(matches!(error, ProbeError::Filled(_)), "{}", error_chain(&error));
    let error = error_chain(&error);
    assert!(error.contains(world.path()) && error.contains("has become full"), "{error}");
    assert_eq!(world.files(), 1);
    fs::remove_file(disk.point.join("filler")).unwrap();
    disk.wait_for_free(before);
}

#[test]
fn a_tier_that_vanishes_during_a_measurement_is_named() {
    let world = World::new();
    let Some(disk) = Disk::mount(world.directory.path()) else { return };
    let before = disk.free();
    let error = probe_while(&disk.point, || disk.detach());
    let other = matches!(error, ProbeError::Tier(TierError::OtherFileSystem { .. }));
    assert!(other && error_chain(&error).contains(world.path()), "{}", error_chain(&error));
    assert_eq!(world.files(), 0);
    disk.attach();
    assert_eq!(world.files(), 0);
    disk.wait_for_free(before);
    let folder = disk.point.join("folder");
    fs::create_dir(&folder).unwrap();
    let error = probe_while(&folder, || fs::remove_dir(&folder).unwrap());
    let missing = matches!(error, ProbeError::Tier(TierError::Missing { .. }));
    assert!(missing && error_chain(&error).contains("folder"), "{}", error_chain(&error));
    disk.wait_for_free(before);
}

#[test]
fn a_snapshot_has_its_price_on_each_tier() {
    if !firn_required::has("kvm", open_kvm(KVM_DEVICE.as_ref()).is_ok()) {
        return;
    }
    let world = World::new();
    if !firn_required::is_on_disk(File::open(world.path()).unwrap()) {
        return;
    }
    let snapshot = world.directory.path().join("player");
    let player = ["player", "--trace", "sequential-read:16M", "--out"];
    run(Command::new(FIRN).args(player).arg(&snapshot));
    world.ok(&["add", "memory", "--medium", "dram", "--capacity", "64M", "--price", "16"]);
    world.ok(&["add", "ssd", "--medium", "disk", "--price", "0.5", "--path", world.path()]);
    let listed = world.json(&["ls", "--snapshot", snapshot.to_str().unwrap()]);
    let (memory, ssd) = (&listed[0]["snapshot"], &listed[1]["snapshot"]);
    let bytes = |on: &Value| on["bytes"].as_u64().unwrap();
    assert!((16 * MIB..32 * MIB).contains(&bytes(memory)), "{listed}");
    assert!((16 * MIB..32 * MIB).contains(&bytes(ssd)), "{listed}");
    assert_eq!(bytes(memory) % (2 * MIB), 0, "{listed}");
    let gib = |on: &Value| bytes(on) as f64 / f64::from(1 << 30);
    assert_eq!(memory["cost"].as_f64().unwrap(), gib(memory) * 16.0);
    assert_eq!(ssd["cost"].as_f64().unwrap(), gib(ssd) * 0.5);
    // The capacity is less than what is free.
    assert_eq!(memory["fit"], 64 * MIB / bytes(memory));
    let usable = listed[1]["free"].as_u64().unwrap().min(listed[1]["capacity"].as_u64().unwrap());
    assert_eq!(ssd["fit"], usable / bytes(ssd));
    let table = world.ok(&["ls", "--snapshot", snapshot.to_str().unwrap()]);
    assert!(table.contains("its price") && table.contains("fit"), "{table}");
    assert!(world.json(&["ls"])[0].get("snapshot").is_none());
}
