//! A pool whose manager is killed repeatedly while clients freeze into it. In the lab the pool
//! is on the real /dev/dax0.0, elsewhere in a file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use firn_pool::{Access, Client, ClientError, GRANULE, MappedExtent, MappedMedium, PoolReader};
use firn_tests::{Monitor, World};
use rustix::process::Signal;

const NAMES: [&str; 2] = ["snow", "ice"];
const ROUNDS: u64 = 6;
const GUEST: u64 = GRANULE;
const TAIL: u64 = 5000;
const PAGE: u64 = 4096;

/// Writes a version into every page.
fn write(extent: &MappedExtent, version: u64) {
    let bytes = version.to_le_bytes();
    for page in (0..GUEST).step_by(4096) {
        extent.write_guest(page + page / PAGE * 8 % PAGE, &bytes).unwrap();
    }
    extent.write_tail(TAIL - 8, &bytes).unwrap();
    extent.flush().unwrap();
}

/// The version in an extent. Fails if it is not the same in all pages.
fn version(read_guest: impl Fn(u64, &mut [u8]), read_tail: impl Fn(u64, &mut [u8])) -> u64 {
    let mut tail = [0; 8];
    read_tail(TAIL - 8, &mut tail);
    for page in (0..GUEST).step_by(4096) {
        let mut bytes = [0; 8];
        read_guest(page + page / PAGE * 8 % PAGE, &mut bytes);
        assert_eq!(bytes, tail, "page {}", page / PAGE);
    }
    u64::from_le_bytes(tail)
}

fn medium(world: &World) -> PathBuf {
    if std::env::var_os("FIRN_LAB").is_some() {
        return PathBuf::from("/dev/dax0.0");
    }
    let path = world.file("medium");
    let make = ["pool", "create", "--size", "32M", "--names", "4", "--medium"];
    world.firn(make).arg(&path).run().ok();
    path
}

fn serve(world: &World, medium: &Path, socket: &Path) -> Monitor {
    let manager = world.firn(["pool", "serve", "--medium"]).arg(medium).arg("--socket").arg(socket);
    manager.start().ready()
}

/// The versions that a name may have: the last acknowledged one, and the one that was in
/// progress.
type Allowed = BTreeMap<&'static str, [Option<u64>; 2]>;

/// Freezes until the manager is killed, or abandons a freeze after this many. Counts the
/// acknowledged freezes.
fn freeze(
    client: &mut Client,
    mut version: u64,
    most: u64,
    done: &AtomicU64,
    allowed: &mut Allowed,
) {
    loop {
        version += 1;
        for name in NAMES {
            let known = allowed.entry(name).or_default();
            known[1] = Some(version);
            let frozen = client.begin(name, GUEST, TAIL).and_then(|grant| {
                write(&grant.map().unwrap(), version);
                if done.load(Ordering::Relaxed) == most {
                    return Ok(None);
                }
                client.commit(grant.extent().generation).map(Some)
            });
            match frozen {
                Ok(None) => return,
                Ok(Some(_)) => known[0] = Some(version),
                Err(ClientError::Closed(_)) => return,
                Err(error) => panic!("{error}"),
            }
            done.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Checks the pool before recovery: every snapshot is complete and as new as acknowledged.
fn check(medium: &Path, allowed: &mut Allowed) {
    let medium = MappedMedium::open(medium, Access::Read).unwrap();
    let reader = PoolReader::open(Arc::new(medium)).unwrap();
    let mut found = BTreeMap::new();
    let report = reader.verify(&mut |name, content| {
        let guest = |at, bytes: &mut [u8]| content.read_guest(at, bytes);
        found.insert(name.to_owned(), version(guest, |at, bytes| content.read_tail(at, bytes)));
        Ok(())
    });
    assert_eq!(report.problems, []);
    for (name, versions) in allowed {
        let found = found.get(*name).copied();
        assert!(versions.contains(&found), "{name}: {found:?}, not one of {versions:?}");
        *versions = [found, None];
    }
}

#[test]
fn a_killed_manager_loses_no_published_snapshot() {
    let world = World::default();
    let medium = medium(&world);
    let socket = world.file("pool.sock");
    if medium.starts_with("/dev") {
        let make = ["pool", "create", "--names", "4", "--overwrite", "--medium"];
        world.firn(make).arg(&medium).run().ok();
    }
    let mut allowed = Allowed::new();
    let mut orphans = 0;
    for round in 1..=ROUNDS {
        let mut manager = serve(&world, &medium, &socket);
        let make = ["pool", "create", "--overwrite", "--medium"];
        world.firn(make).arg(&medium).run().refused(&["in use"]);
        let mut client = Client::connect(&socket).unwrap();
        orphans += client.describe().unwrap().recovery.freed_extents;
        let done = AtomicU64::new(0);
        // The manager is killed later in every round: during a freeze, or between writing and
        // publishing a snapshot.
        let most = if round.is_multiple_of(2) { u64::MAX } else { round };
        std::thread::scope(|scope| {
            let freezing =
                scope.spawn(|| freeze(&mut client, round << 32, most, &done, &mut allowed));
            while done.load(Ordering::Relaxed) < round && !freezing.is_finished() {
                std::thread::yield_now();
            }
            if most == round {
                freezing.join().unwrap();
            }
            manager.signal(Signal::KILL);
        });
        assert_eq!(manager.end().code, 137);
        check(&medium, &mut allowed);
    }
    assert!(orphans >= ROUNDS / 2 - 1, "{orphans}");
    // The next manager removes the files of the killed one from the run directory.
    let mut manager = serve(&world, &medium, &socket);
    manager.signal(Signal::TERM);
    manager.end().ok();
    let collected = world.firn(["pool", "gc", "--json", "--pool"]).arg(&medium).run().json();
    let listing = world.firn(["pool", "ls", "--json", "--pool"]).arg(&medium).run().json();
    let used = 2 * 2 * GRANULE;
    let data = listing["pool"]["data_end"].as_u64().unwrap()
        - listing["pool"]["data_begin"].as_u64().unwrap();
    assert_eq!(collected["free_bytes"], data - used, "{listing}");
    let verified =
        world.firn(["pool", "verify", "--metadata", "--json", "--pool"]).arg(&medium).run().json();
    assert_eq!((&verified["whole"], &verified["snapshots"]), (&true.into(), &2.into()));
}
