//! What clients teach a pool's manager outlives the manager: it is killed, and started again.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use firn_base::PageRange;
use firn_pool::{COPY_CHUNK, Client};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

const KEY: &str = "written=1,read=32,granule=16k";
const RUNS: [PageRange; 2] =
    [PageRange { first: 512, pages: 512 }, PageRange { first: 1200, pages: 8 }];

struct World {
    folder: TempDir,
}

impl World {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn firn(&self, arguments: &[&str]) -> String {
        let mut command = Command::new(env!("CARGO_BIN_EXE_firn"));
        command.args(arguments).env("FIRN_RUN_DIR", self.path("run")).stdin(Stdio::null());
        let output = command.output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {error}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Starts a manager and returns its process.
    fn serve(&self) -> u32 {
        let (medium, socket) = (self.path("medium"), self.path("pool.sock"));
        let paths = [&medium, &socket].map(|path| path.to_str().unwrap());
        let [medium, socket] = paths;
        let serve = ["pool", "serve", "--detach", "--json", "--medium", medium, "--socket", socket];
        let serving: Value = serde_json::from_str(&self.firn(&serve)).unwrap();
        u32::try_from(serving["pid"].as_u64().unwrap()).unwrap()
    }

    fn client(&self) -> Client {
        Client::connect(&self.path("pool.sock")).unwrap()
    }

    /// A client that has pinned the snapshot.
    fn pinned(&self) -> (Client, u64) {
        let mut client = self.client();
        let generation = client.snapshot("snow").unwrap().extent().generation;
        (client, generation)
    }

    /// `learnt` of the snapshot, by the manager or by the medium.
    fn learnt(&self, pool: &str) -> Value {
        let listing =
            self.firn(&["pool", "ls", "--json", "--pool", self.path(pool).to_str().unwrap()]);
        let listing: Value = serde_json::from_str(&listing).unwrap();
        listing["extents"][0]["learnt"].clone()
    }
}

fn end(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid.try_into().unwrap()).unwrap(), signal).unwrap();
    // A process without a wait is a zombie.
    let alive = || {
        std::fs::read_to_string(format!("/proc/{pid}/stat"))
            .is_ok_and(|stat| !stat.contains(") Z "))
    };
    while alive() {
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn next_manager_expects_what_a_killed_one_has_learnt() {
    let world = World { folder: TempDir::new().unwrap() };
    let medium = world.path("medium");
    world.firn(&["pool", "create", "--size", "64M", "--medium", medium.to_str().unwrap()]);
    let first = world.serve();
    {
        let mut client = world.client();
        let grant = client.begin("snow", 8 * COPY_CHUNK, 100).unwrap();
        client.commit(grant.extent().generation).unwrap();
        let (mut run, generation) = world.pinned();
        assert!(run.copy(generation, KEY).unwrap().is_none());
        let state = b"scores".to_vec();
        assert!(run.store_copy_set(generation, KEY, None, &RUNS, state).unwrap());
        assert!(run.copy(generation, KEY).unwrap().is_some());
        // The manager stores it in the background.
        while client.list().unwrap().extents[0].learnt.is_empty() || stored(&medium).is_empty() {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    end(first, Signal::KILL);
    assert_eq!(world.learnt("medium")[0]["bytes"], 520 * 4096);

    let second = world.serve();
    {
        let (mut run, generation) = world.pinned();
        let expected = run.copy(generation, KEY).unwrap().expect("the expectation is there");
        assert_eq!(expected.runs, RUNS);
        let set = run.copy_set(generation, KEY).unwrap().unwrap();
        assert_eq!(set.state, b"scores");
        // A run that changes the expectation, and a manager that ends in order.
        let runs = [PageRange { first: 512, pages: 512 }];
        assert!(run.store_copy_set(generation, KEY, Some(set.revision), &runs, vec![7]).unwrap());
    }
    let shown = world.firn(&["pool", "show", "--pool", world.path("pool.sock").to_str().unwrap()]);
    assert!(shown.contains("expects writes to 2.0 MiB"), "{shown}");
    end(second, Signal::TERM);
    assert_eq!(world.learnt("medium")[0]["bytes"], COPY_CHUNK);

    let third = world.serve();
    assert_eq!(world.learnt("pool.sock")[0]["key"], KEY);
    world.client().reclaim("snow").unwrap();
    {
        let mut client = world.client();
        let grant = client.begin("snow", 8 * COPY_CHUNK, 100).unwrap();
        client.commit(grant.extent().generation).unwrap();
        let (mut run, generation) = world.pinned();
        assert!(run.copy(generation, KEY).unwrap().is_none(), "it went with its snapshot");
    }
    end(third, Signal::TERM);
    assert_eq!(world.learnt("medium"), Value::Array(vec![]));
}

/// What the medium has stored about its first extent.
fn stored(medium: &std::path::Path) -> Vec<firn_pool::Learnt> {
    let medium = firn_pool::MappedMedium::open(medium, firn_pool::Access::Read).unwrap();
    let reader = firn_pool::PoolReader::open(std::sync::Arc::new(medium)).unwrap();
    reader.list().extents.remove(0).learnt
}
