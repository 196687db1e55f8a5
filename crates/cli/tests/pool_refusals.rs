//! Requests that a pool refuses, at the command line. Each error names the reason, and the pool
//! does not change. And what `firn pool create` leaves of a pool that was there before.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use firn_pool::{Client, Extent, GRANULE};
use firn_vmm::{KVM_DEVICE, open_kvm};
use serde_json::Value;
use tempfile::TempDir;

const SIZE: u64 = 64 << 20;
const PAGE: u64 = 4096;

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn has_kvm() -> bool {
    firn_required::has("kvm", open_kvm(KVM_DEVICE.as_ref()).is_ok())
}

/// A pool on a file of 64 MiB, in a folder with a separate run directory.
struct World {
    folder: TempDir,
}

impl World {
    fn new() -> Self {
        let world = Self { folder: TempDir::new().unwrap() };
        world.ok(&["pool", "create", "--size", "64M", "--medium", text(&world.medium())]);
        world
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn medium(&self) -> PathBuf {
        self.path("medium")
    }

    fn socket(&self) -> PathBuf {
        self.path("pool.sock")
    }

    fn firn(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_firn"));
        command.args(arguments).env("FIRN_RUN_DIR", self.path("run"));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.firn(arguments).output().unwrap()
    }

    fn ok(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {error}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs a command that must fail with a one-line error that contains all of `parts`.
    #[track_caller]
    fn refused(&self, arguments: &[&str], parts: &[&str]) {
        let output = self.run(arguments);
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{arguments:?}");
        assert_eq!(error.trim_end().lines().count(), 1, "{arguments:?}: {error}");
        for part in parts {
            assert!(error.contains(part), "{arguments:?}: {error}");
        }
    }

    fn serve(&self) -> Manager {
        let (medium, socket) = (self.medium(), self.socket());
        let serve = ["pool", "serve", "--medium", text(&medium), "--socket", text(&socket)];
        let mut child = self.firn(&serve).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains("serving"), "{line}");
        Manager(child)
    }

    /// Freezes a player into the served pool.
    fn player(&self, name: &str) {
        let (socket, trace) = (self.socket(), "sequential-read:4M");
        self.ok(&["player", "--pool", text(&socket), "--trace", trace, "--out", name]);
    }

    fn listing(&self) -> Value {
        let listing = self.ok(&["pool", "ls", "--json", "--pool", text(&self.medium())]);
        let mut listing: Value = serde_json::from_str(&listing).unwrap();
        // The manager's facts contain the time of its indexing, which varies, and how much it has
        // zeroed so far.
        listing.as_object_mut().unwrap().remove("medium");
        listing.as_object_mut().unwrap().remove("zeroed_bytes");
        listing
    }

    /// Changes the medium while another process has it open.
    fn overwrite(&self, at: u64, bytes: &[u8]) {
        let file = OpenOptions::new().write(true).open(self.medium()).unwrap();
        file.write_all_at(bytes, at).unwrap();
    }
}

/// A manager, which is killed on drop.
struct Manager(Child);

impl Drop for Manager {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The snapshot of a name and its replicas, as bytes of the medium.
fn extents(world: &World, name: &str) -> Vec<Range<u64>> {
    let listing = Client::connect(&world.socket()).unwrap().list().unwrap();
    let named = listing.extents.iter().filter(|listed| listed.name.as_deref() == Some(name));
    named.map(|listed| listed.extent.offset..listed.extent.offset + listed.extent.len).collect()
}

fn extent(world: &World, name: &str) -> Extent {
    Client::connect(&world.socket()).unwrap().snapshot(name).unwrap().extent()
}

#[test]
fn unknown_unfinished_and_inconsistent_snapshots_are_refused() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    let _manager = world.serve();
    let socket = world.socket();
    let thaw = |name: &'static str| ["thaw", "--pool", text(&socket), name].map(str::to_owned);
    let refused = |name, parts: &[&str]| {
        let words = thaw(name);
        for planner in ["pass_shared", "pass", "firn"] {
            let mut words: Vec<&str> = words.iter().map(String::as_str).collect();
            words.extend(["--planner", planner]);
            world.refused(&words, parts);
        }
    };
    refused("snow", &["the pool has no snapshot \"snow\"", "firn pool ls"]);
    world.refused(&["pool", "rm", "--pool", text(&socket), "snow"], &["no snapshot \"snow\""]);
    world.refused(&["pool", "show", "--pool", text(&socket), "snow"], &["no snapshot \"snow\""]);

    let mut writer = Client::connect(&socket).unwrap();
    let staging = writer.begin("ice", GRANULE, 100).unwrap();
    refused("ice", &["the snapshot \"ice\" is being written"]);
    world.refused(&["pool", "show", "--pool", text(&socket), "ice"], &["being written"]);
    world.refused(
        &["player", "--pool", text(&socket), "--trace", "sequential-read:4M", "--out", "ice"],
        &["a snapshot \"ice\" is being written"],
    );
    drop((staging, writer));

    // A tail that declares more guest memory than its extent has.
    world.player("player");
    let mut client = Client::connect(&socket).unwrap();
    let sealed = client.snapshot("player").unwrap();
    let (extent, whole) = (sealed.extent(), sealed.map().unwrap());
    let grant = client.begin("less", extent.guest_bytes - GRANULE, extent.tail_bytes).unwrap();
    let less = grant.map().unwrap();
    let mut tail = vec![0; usize::try_from(extent.tail_bytes).unwrap()];
    whole.read_tail(0, &mut tail);
    less.write_tail(0, &tail).unwrap();
    less.flush().unwrap();
    client.commit(grant.extent().generation).unwrap();
    refused("less", &["its guest memory is not as large as that of its extent"]);
    let report = world.run(&["pool", "verify", "--pool", text(&socket)]);
    let report = String::from_utf8(report.stdout).unwrap();
    assert!(report.contains("less") && report.lines().count() == 1, "{report}");
    world.ok(&["thaw", "--pool", text(&socket), "player"]);
}

#[test]
fn a_byte_that_changed_while_the_pool_was_closed_is_found_before_a_start() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    let (medium, socket) = (world.medium(), world.socket());
    let extent = {
        let _manager = world.serve();
        world.player("good");
        world.player("bad");
        world.ok(&["thaw", "--pool", text(&socket), "bad"]);
        extent(&world, "bad")
    };
    world.overwrite(extent.offset + 77 * PAGE + 5, &[0x5a]);

    let _manager = world.serve();
    let thaw = |planner: &str, verify: &str| {
        let socket = text(&socket).to_owned();
        ["thaw", "--planner", planner, "--verify", verify, "--pool", &socket, "bad"]
            .map(str::to_owned)
    };
    let refused = |planner, verify| {
        let words = thaw(planner, verify);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        world.refused(&words, &["the snapshot bad in the pool", "is damaged", "page 77"]);
    };
    // Every attempt is refused: a failed check does not mark the snapshot as checked.
    for planner in ["pass_shared", "pass", "firn"] {
        for verify in ["once", "always", "once"] {
            refused(planner, verify);
        }
    }
    // Without verification the run starts, and the player detects the page at its end.
    let words = thaw("pass_shared", "never");
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    world.refused(&words, &["restored wrong memory", "0x4d"]);
    refused("pass_shared", "once");
    world.ok(&["thaw", "--pool", text(&socket), "good"]);
    let verified = world.run(&["pool", "verify", "--json", "--pool", text(&medium)]);
    let verified: Value = serde_json::from_slice(&verified.stdout).unwrap();
    let problems = verified["problems"].as_array().unwrap();
    assert!(problems.len() == 1, "{verified}");
    let message = problems[0]["text"].as_str().unwrap();
    assert!(message.contains("bad") && message.contains("page 77"), "{message}");
}

#[test]
fn verify_always_finds_a_byte_that_changed_after_the_first_check() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    let _manager = world.serve();
    let socket = world.socket();
    world.player("player");
    world.ok(&["thaw", "--pool", text(&socket), "player"]);
    world.overwrite(extent(&world, "player").offset + 77 * PAGE + 5, &[0x5a]);
    for planner in ["pass_shared", "pass", "firn"] {
        let thaw = ["thaw", "--planner", planner, "--verify", "always", "--pool", text(&socket)];
        world.refused(&[&thaw[..], &["player"]].concat(), &["is damaged", "page 77"]);
    }
}

#[test]
fn a_full_pool_reports_the_missing_space_and_changes_nothing() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    let _manager = world.serve();
    let socket = world.socket();
    world.player("player");
    let before = world.listing();
    let large =
        ["player", "--pool", text(&socket), "--trace", "sequential-read:128M", "--out", "player"];
    world.refused(&large, &["the pool lacks ", " bytes: ", "are needed in one piece"]);
    assert_eq!(world.listing(), before);
    world.ok(&["thaw", "--pool", text(&socket), "player"]);
}

#[test]
fn a_manager_stops_writing_to_a_medium_that_another_process_changed() {
    if !has_kvm() {
        return;
    }
    for resized in [true, false] {
        let world = World::new();
        let _manager = world.serve();
        let (medium, socket) = (world.medium(), world.socket());
        world.player("player");
        if resized {
            File::options().write(true).open(&medium).unwrap().set_len(2 * SIZE).unwrap();
        } else {
            world.overwrite(16, &[0; 16]);
        }
        let message =
            if resized { "67108864 bytes and has 134217728 now" } else { "was overwritten" };
        let bytes = std::fs::read(&medium).unwrap();
        let freeze =
            ["player", "--pool", text(&socket), "--trace", "sequential-read:4M", "--out", "next"];
        world.refused(&freeze, &[message, "firn does not write to it any more"]);
        let message = if resized { message } else { "an earlier operation on the pool's medium" };
        world.refused(&["pool", "rm", "--pool", text(&socket), "player"], &[message]);
        world.refused(&["pool", "gc", "--pool", text(&socket)], &[message]);
        assert!(std::fs::read(&medium).unwrap() == bytes, "something was written");
    }
}

/// Writes both copies of the superblock with another version and a correct CRC.
fn make_newer(world: &World) {
    let mut block = [0; 256];
    File::open(world.medium()).unwrap().read_exact_at(&mut block, 0).unwrap();
    block[8] += 2;
    let crc = crc32(&block[..252]);
    block[252..].copy_from_slice(&crc.to_le_bytes());
    world.overwrite(0, &block);
    world.overwrite(SIZE - PAGE, &block);
}

/// CRC-32 (IEEE), bit by bit.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 }
        })
    })
}

#[test]
fn media_without_a_supported_pool_are_refused() {
    let world = World::new();
    let medium = world.medium();
    let small = world.path("small");
    for (size, what) in [("1M", "at least 2097152"), ("4M", "needs at least 6291456")] {
        let create = ["pool", "create", "--size", size, "--medium", text(&small)];
        world.refused(&create, &["bytes", what]);
        assert!(!small.exists(), "the unusable medium is removed");
    }
    world.refused(&["pool", "create", "--medium", "/dev/null"], &["not a devdax"]);
    world.refused(&["pool", "create", "--medium", text(&medium)], &["--overwrite"]);
    std::fs::write(&small, vec![0; 8 << 20]).unwrap();

    let socket = world.socket();
    let each = |medium: &Path, parts: &[&str]| {
        let medium = text(medium);
        for command in ["ls", "show", "verify", "gc"] {
            world.refused(&["pool", command, "--pool", medium], parts);
        }
        let serve = ["pool", "serve", "--medium", medium, "--socket", text(&socket)];
        world.refused(&serve, parts);
        world.refused(&["thaw", "--pool", medium, "snow"], parts);
        assert!(!socket.exists());
    };
    each(&small, &["holds no pool", "firn pool create"]);
    make_newer(&world);
    let newer = std::fs::read(&medium).unwrap();
    each(&medium, &["has version 3, this firn supports 2"]);
    let repair = ["pool", "verify", "--repair", "--pool", text(&medium)];
    world.refused(&repair, &["has version 3"]);
    assert!(std::fs::read(&medium).unwrap() == newer, "something was written");
}

#[test]
fn a_pool_over_another_has_no_byte_of_it_if_it_scrubs() {
    let world = World::new();
    let medium = world.medium();
    let old = [7; 4096];
    world.overwrite(SIZE / 2, &old);
    let left = |options: &[&str]| {
        let create = ["pool", "create", "--overwrite", "--medium", text(&medium)];
        world.ok(&[&create, options].concat());
        let mut found = [0; 4096];
        File::open(&medium).unwrap().read_exact_at(&mut found, SIZE / 2).unwrap();
        found
    };
    assert!(left(&[]) == old && left(&["--scrub"]) == [0; 4096]);
}

#[test]
fn a_medium_that_another_process_manages_is_not_changed() {
    let world = World::new();
    let _manager = world.serve();
    let medium = world.medium();
    let other = world.path("other.sock");
    let serve = ["pool", "serve", "--medium", text(&medium), "--socket", text(&other)];
    world.refused(&serve, &["in use by another process"]);
    let create = ["pool", "create", "--overwrite", "--medium", text(&medium)];
    world.refused(&create, &["in use by another process"]);
    assert!(!other.exists());
    // Reading commands still work: through the manager or from the medium.
    world.ok(&["pool", "ls", "--pool", text(&medium)]);
    world.ok(&["pool", "verify", "--pool", text(&medium)]);
}

/// The access modes (`rw-p`) and the offsets of a process's mappings of the medium, and the number
/// of its descriptors of it.
fn holds(process: u32, medium: &Path) -> (Vec<(String, Range<u64>)>, usize) {
    let proc = PathBuf::from(format!("/proc/{process}"));
    let maps = std::fs::read_to_string(proc.join("maps")).unwrap();
    let ours = maps.lines().filter(|line| line.ends_with(text(medium)));
    let number = |text: &str| u64::from_str_radix(text, 16).unwrap();
    let mappings = ours.map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (begin, end) = fields[0].split_once('-').unwrap();
        let offset = number(fields[2]);
        (fields[1].to_owned(), offset..offset + number(end) - number(begin))
    });
    let descriptors = std::fs::read_dir(proc.join("fd")).unwrap().filter(|entry| {
        let target = std::fs::read_link(entry.as_ref().unwrap().path());
        target.is_ok_and(|target| target == medium)
    });
    (mappings.collect(), descriptors.count())
}

#[test]
fn a_monitor_reaches_its_extents_alone_and_writes_only_a_replica() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    let _manager = world.serve();
    let socket = world.socket();
    let trace = "sequential-write:4M";
    world.ok(&["player", "--pool", text(&socket), "--trace", trace, "--out", "player"]);
    world.player("other");
    let sealed = extent(&world, "player");
    let bytes = || {
        let mut bytes = vec![0; usize::try_from(sealed.guest_bytes).unwrap()];
        File::open(world.medium()).unwrap().read_exact_at(&mut bytes, sealed.offset).unwrap();
        bytes
    };
    let before = bytes();
    for planner in ["pass_shared", "firn", "pass"] {
        let thaw = ["thaw", "--hold", "--planner", planner, "--pool", text(&socket), "player"];
        let mut supervisor = world.firn(&thaw).stdin(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(supervisor.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains("held"), "{line}");
        let (mappings, descriptors) = holds(supervisor.id(), &world.medium());
        assert_eq!((mappings.len(), descriptors), (0, 0), "{planner}: the supervisor");
        let children = format!("/proc/{0}/task/{0}/children", supervisor.id());
        let monitor = std::fs::read_to_string(children).unwrap().trim().parse().unwrap();
        let (mappings, descriptors) = holds(monitor, &world.medium());
        assert!(!mappings.is_empty(), "{planner}");
        assert_eq!(descriptors, 0, "{planner}: a descriptor gives access to all extents");
        let extents = extents(&world, "player");
        let granted = |part: &Range<u64>| {
            extents.iter().any(|at| at.start <= part.start && part.end <= at.end)
        };
        assert!(mappings.iter().all(|(_, part)| granted(part)), "{mappings:x?}");
        // Only a replica may be written; it is not a sealed extent.
        let mut writable = mappings.iter().filter(|(access, _)| access == "rw-s");
        assert_eq!(writable.next().is_some(), planner == "pass", "{mappings:x?}");
        drop(supervisor.stdin.take());
        assert!(supervisor.wait().unwrap().success());
        assert!(bytes() == before, "{planner} changed sealed bytes");
    }
}
