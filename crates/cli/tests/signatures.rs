//! Signed snapshots at the command line. Requires any kind of KVM.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use firn_snapshot::Signer;
use firn_vmm::{KVM_DEVICE, open_kvm};
use tempfile::TempDir;

/// The example keys of RFC 8410, section 10.
const SIGNING_KEY: &str = "-----BEGIN PRIVATE KEY-----
MC4CAQAwBQYDK2VwBCIEINTuctv5E1hK1bbY8fdp+K06/nwoy/HU++CXqI9EdVhC
-----END PRIVATE KEY-----
";
const PUBLIC_KEY: &str = "-----BEGIN PUBLIC KEY-----
MCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=
-----END PUBLIC KEY-----
";

const VERIFIED: [&str; 4] = ["--verify-key", "key.pub", "--tenant", "alice"];

/// A folder with a player and keys.
struct World(TempDir);

impl World {
    /// `None` without KVM.
    fn new() -> Option<Self> {
        if !firn_required::has("kvm", open_kvm(KVM_DEVICE.as_ref()).is_ok()) {
            return None;
        }
        let world = Self(tempfile::tempdir().unwrap());
        fs::write(world.path("key.pem"), SIGNING_KEY).unwrap();
        fs::set_permissions(world.path("key.pem"), Permissions::from_mode(0o600)).unwrap();
        fs::write(world.path("key.pub"), PUBLIC_KEY).unwrap();
        world.good(&["player", "--dense", "--trace", "sequential-read:4M", "--out", "player"]);
        Some(world)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_firn"));
        command.args(arguments).current_dir(&self.0).env("FIRN_RUN_DIR", self.path("run"));
        command.output().unwrap()
    }

    #[track_caller]
    fn good(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {error}");
        String::from_utf8(output.stdout).unwrap()
    }

    #[track_caller]
    fn refused(&self, arguments: &[&str], words: &[&str]) {
        let output = self.run(arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {error}");
        for word in words {
            assert!(error.contains(word), "{arguments:?}: without {word:?}: {error}");
        }
    }

    fn sign(&self, tenant: &str) {
        self.good(&["verify", "--signing-key", "key.pem", "--tenant", tenant, "player"]);
    }

    /// Fails unless each command that reads the snapshot refuses it for this reason.
    #[track_caller]
    fn all_refuse(&self, reason: &str) {
        for command in [
            &["thaw"][..],
            // The command does not read the manifest, and the monitor checks the signature.
            &["thaw", "--root", "key.pub"],
            &["plan", "--planner", "firecracker"],
            &["verify"],
            &["profile", "show"],
            &["profile", "record"],
            &["profile", "pack", "--planner", "reap"],
            &["record", "--invoke", "{}", "--out", "trace", "--input", "a"],
        ] {
            self.refused(&[command, &VERIFIED, &["player"]].concat(), &[reason]);
        }
        let tier = ["tier", "ls", "--snapshot", "player"];
        self.refused(&[&tier[..], &VERIFIED].concat(), &[reason]);
        let pager = ["pager", "--socket", "pager.sock", "--snapshot", "player"];
        self.refused(&[&pager[..], &VERIFIED].concat(), &[reason]);
    }
}

fn edit(file: &Path, edit: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(file).unwrap();
    edit(&mut bytes);
    fs::write(file, bytes).unwrap();
}

#[test]
fn a_signed_snapshot_is_thawed_for_its_tenant_alone() {
    let Some(world) = World::new() else { return };
    let thaw = [&["thaw"][..], &VERIFIED, &["player"]].concat();
    world.all_refuse("snapshot.sig is missing: the snapshot is not signed");
    world.sign("bob");
    world.all_refuse("no valid signature for the tenant \"alice\"");
    world.sign("alice");
    world.good(&thaw);
    world.good(&[&["verify"][..], &VERIFIED, &["player"]].concat());
    // Without a key, nothing is asked of a snapshot.
    world.good(&["thaw", "player"]);

    let container = world.path("player/snapshot.firn");
    let whole = fs::read(&container).unwrap();
    fs::write(&container, "no snapshot").unwrap();
    world.all_refuse("snapshot.firn is not the file that was signed");
    fs::write(&container, whole).unwrap();
    world.good(&thaw);
}

#[test]
fn the_image_is_compared_with_its_signature_where_it_is_read() {
    let Some(world) = World::new() else { return };
    world.sign("alice");
    let always = [&["thaw", "--verify", "always"][..], &VERIFIED, &["player"]].concat();
    world.good(&always);
    edit(&world.path("player/memory.img"), |bytes| *bytes.last_mut().unwrap() ^= 1);
    let reason = ["memory.img is not the file that was signed"];
    world.refused(&always, &reason);
    world.refused(&[&["verify"][..], &VERIFIED, &["player"]].concat(), &reason);
}

#[test]
fn a_recorded_profile_is_signed_with_the_key_that_is_given() {
    let Some(world) = World::new() else { return };
    world.sign("alice");
    let record = ["profile", "record", "--part", "faults"];
    let record = [&record[..], &VERIFIED, &["player"]].concat();
    let thaw = [&["thaw"][..], &VERIFIED, &["player"]].concat();
    world.good(&record);
    world.refused(&thaw, &["the snapshot is not signed"]);
    world.sign("alice");
    world.good(&[&record[..], &["--signing-key", "key.pem"]].concat());
    world.good(&thaw);
}

const IN_POOL: [&str; 2] = ["--pool", "pool"];

/// Freezes a player into the pool, with these arguments for a key.
fn freeze(world: &World, key: &[&str]) {
    let player = ["player", "--trace", "sequential-read:4M", "--out", "player"];
    world.good(&[&player[..], &IN_POOL, key].concat());
}

/// A world with a pool.
fn with_pool() -> Option<World> {
    let world = World::new()?;
    world.good(&["pool", "create", "--size", "64M", "--medium", "pool"]);
    Some(world)
}

#[test]
fn a_signed_snapshot_in_a_pool_is_thawed_for_its_tenant_alone() {
    let Some(world) = with_pool() else { return };
    let own = ["--signing-key", "key.pem", "--tenant", "alice"];
    let all_refuse = |reason: &str| {
        for command in [
            &["thaw", "--planner", "firn"][..],
            &["thaw", "--planner", "pass"],
            // The command does not read the manifest, and the monitor checks the signature.
            &["thaw", "--planner", "firn", "--root", "key.pub"],
            &["thaw", "--planner", "pass", "--root", "key.pub"],
            &["thaw", "--verify", "never"],
            &["plan"],
            &["verify"],
            &["profile", "show"],
            &["profile", "record"],
        ] {
            world.refused(&[command, &IN_POOL, &VERIFIED, &["player"]].concat(), &[reason]);
        }
    };
    freeze(&world, &[]);
    all_refuse("player in the pool is not signed");
    freeze(&world, &["--signing-key", "key.pem", "--tenant", "bob"]);
    all_refuse("no valid signature for the tenant \"alice\"");
    Signer::read_or_make(&world.path("other.pem"), "alice").unwrap();
    freeze(&world, &["--signing-key", "other.pem", "--tenant", "alice"]);
    all_refuse("no valid signature for the tenant \"alice\"");

    freeze(&world, &own);
    for planner in ["firn", "pass", "pass_shared"] {
        let thaw = ["thaw", "--planner", planner, "--verify", "always"];
        world.good(&[&thaw[..], &IN_POOL, &VERIFIED, &["player"]].concat());
    }
    world.good(&[&["verify"][..], &IN_POOL, &VERIFIED, &["player"]].concat());
    // Without a key, nothing is required of a snapshot.
    world.good(&[&["thaw"][..], &IN_POOL, &["player"]].concat());
}

#[test]
fn a_changed_medium_is_refused_by_the_signature() {
    let Some(world) = with_pool() else { return };
    freeze(&world, &["--signing-key", "key.pem", "--tenant", "alice"]);
    let listing = world.good(&["pool", "ls", "--json", "--pool", "pool"]);
    let listing: serde_json::Value = serde_json::from_str(&listing).unwrap();
    let extent = &listing["extents"][0]["extent"];
    let [guest, tail] = ["offset", "tail_offset"].map(|field| extent[field].as_u64().unwrap());
    // In place, because a manager may have the medium mapped.
    let medium = File::options().read(true).write(true).open(world.path("pool")).unwrap();
    let flip = |at| {
        let mut byte = [0];
        medium.read_exact_at(&mut byte, at).unwrap();
        medium.write_all_at(&[!byte[0]], at).unwrap();
    };
    let thaw =
        |verify| [&["thaw", "--verify", verify][..], &IN_POOL, &VERIFIED, &["player"]].concat();
    flip(tail);
    for verify in ["always", "once", "never"] {
        world.refused(&thaw(verify), &["the tail of player in the pool is not what was signed"]);
    }
    flip(tail);
    flip(guest);
    // The digests find it, too.
    world.refused(&thaw("once"), &["damaged"]);
    flip(guest);
    world.good(&thaw("always"));
}

#[test]
fn a_profile_in_a_pool_is_signed_with_the_key_that_is_given() {
    let Some(world) = with_pool() else { return };
    freeze(&world, &[]);
    let player = [&IN_POOL[..], &VERIFIED, &["player"]].concat();
    let sign = ["--signing-key", "key.pem"];
    let thaw = [&["thaw"][..], &player].concat();
    world.refused(&thaw, &["not signed"]);
    world.good(&[&["verify"][..], &IN_POOL, &sign, &["--tenant", "alice", "player"]].concat());
    world.good(&thaw);
    let record = [&["profile", "record", "--part", "faults"][..], &player].concat();
    world.good(&[&record[..], &sign].concat());
    world.good(&thaw);
    world.good(&record);
    world.refused(&thaw, &["not signed"]);
}

#[test]
fn keys_are_refused_before_anything_is_done_with_them() {
    let Some(world) = World::new() else { return };
    let sign = ["verify", "--signing-key", "key.pem", "player"];
    fs::set_permissions(world.path("key.pem"), Permissions::from_mode(0o644)).unwrap();
    world.refused(&sign, &["key.pem", "chmod 600"]);
    assert!(!world.path("player/snapshot.sig").exists());
    world.refused(&["thaw", "--verify-key", "none", "player"], &["cannot read the key none"]);
    world.refused(&["thaw", "--verify-key", "key.pem", "player"], &["openssl pkey"]);
}
