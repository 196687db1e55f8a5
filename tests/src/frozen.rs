//! One frozen snapshot of each function, for tests that only read it.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::function::{client_folder, workshop_folder};
use crate::{Function, HELLO, JSON, World};

static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();

/// The folder of the shared snapshots. It is removed when the test program exits.
fn directory() -> &'static Path {
    extern "C" fn remove() {
        if let Some(directory) = DIRECTORY.get() {
            let _ = std::fs::remove_dir_all(directory);
        }
    }
    DIRECTORY.get_or_init(|| {
        // SAFETY: the function is safe to call at exit: it reads a path and removes
        // that folder.
        unsafe { libc::atexit(remove) };
        tempfile::Builder::new().prefix("e2e-snapshots-").tempdir().unwrap().keep()
    })
}

/// The snapshot of a function with known answers: booted, invoked once with its first event, and
/// frozen. Its microVM has ended.
#[track_caller]
pub fn frozen(function: &Function) -> &'static Path {
    static SNAPSHOTS: [OnceLock<PathBuf>; 2] = [const { OnceLock::new() }; 2];
    let at = [HELLO, JSON].iter().position(|known| known.name == function.name).unwrap();
    SNAPSHOTS[at].get_or_init(|| {
        let world = World::default();
        let snapshot = directory().join(function.name);
        let boot = world.firn(["boot", "--name", "first"]).arg(function.write(&world.work()));
        let mut monitor = boot.start().ready();
        let answer = world.firn(["invoke", "first", function.input_a]).run();
        assert_eq!(answer.ok(), function.expected_a, "before the freeze");
        world.firn(["freeze", "first"]).arg(&snapshot).run().ok();
        monitor.end().ok();
        snapshot
    })
}

/// A dense snapshot of hello or json, frozen again after a thaw, with all parts of a profile
/// recorded on input a and the files of all planners that need one.
#[track_caller]
pub fn profiled(function: &Function) -> &'static Path {
    static SNAPSHOTS: [OnceLock<PathBuf>; 2] = [const { OnceLock::new() }; 2];
    let at = [HELLO, JSON].iter().position(|known| known.name == function.name).unwrap();
    SNAPSHOTS[at].get_or_init(|| {
        let world = World::default();
        let snapshot = directory().join(format!("{}-profiled", function.name));
        let thaw = world.firn(["thaw", "--name", "again"]).arg(frozen(function));
        let mut thawed = thaw.start().ready();
        world.firn(["freeze", "--dense", "again"]).arg(&snapshot).run().ok();
        thawed.end().ok();
        let parts = "faults,writes,groups,cache,free";
        let record =
            world.firn(["profile", "record", "--invoke", function.input_a, "--input", "a"]);
        record.args(["--part", parts]).arg(&snapshot).run().ok();
        for planner in ["reap", "faast", "faasnap"] {
            world.firn(["profile", "pack", "--planner", planner]).arg(&snapshot).run().ok();
        }
        snapshot
    })
}

/// The snapshot of the workshop, which contains the tests' own functions: see [`workshop_folder`].
#[track_caller]
pub fn workshop() -> &'static Path {
    static SNAPSHOT: OnceLock<PathBuf> = OnceLock::new();
    SNAPSHOT.get_or_init(|| {
        let world = World::default();
        let snapshot = directory().join("workshop");
        let boot = world.firn(["boot", "--name", "first"]).arg(workshop_folder(&world.work()));
        let mut monitor = boot.start().ready();
        world.firn(["freeze", "first"]).arg(&snapshot).run().ok();
        monitor.end().ok();
        snapshot
    })
}

/// The snapshot of a function that uses clients in the guest over its network, and trusts the
/// certificate authority of the file `authority`. It was booted with `--net proxy`.
#[track_caller]
pub fn client(authority: &Path) -> &'static Path {
    static SNAPSHOT: OnceLock<PathBuf> = OnceLock::new();
    SNAPSHOT.get_or_init(|| {
        let world = World::default();
        let snapshot = directory().join("client");
        let function = client_folder(&world.work(), authority);
        let boot = world.firn(["boot", "--name", "first", "--image", "curl", "--net", "proxy"]);
        let mut monitor = boot.args(["--time-limit", "300"]).arg(function).start().ready();
        world.firn(["freeze", "first"]).arg(&snapshot).run().ok();
        monitor.end().ok();
        snapshot
    })
}
