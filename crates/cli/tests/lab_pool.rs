//! Kills the lab's machine during freezes into a pool on its /dev/dax0.0, or after its manager has
//! learnt, starts it again, and checks the pool. The lab runs this program too. `make lab-tests`
//! runs this test.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use firn_base::PageRange;
use firn_pool::{
    Access, Client, CreateOptions, ExtentReader, GRANULE, MappedExtent, MappedMedium, OpenError,
    Pool, PoolReader, Server,
};

const NAMES: [&str; 2] = ["snow", "ice"];
const TAIL: u64 = 4096;
/// Freezes that are acknowledged before the machine is killed.
const FREEZES: usize = 5;
const ROUNDS: u64 = 2;
const FROZEN: &str = "frozen ";
const FOUND: &str = "found ";
const NAME: &str = "a_pool_is_consistent_after_its_machine_is_killed_during_a_freeze";
const LEARNT: &str = "learnt ";
const LEARNS: &str = "what_a_manager_learnt_outlives_a_killed_machine";
const KEY: &str = "written=1";

/// Writes a version into every page and into the tail.
fn write(extent: &MappedExtent, version: u64) {
    let page: Vec<u8> = version.to_le_bytes().repeat(512);
    for at in (0..GRANULE).step_by(page.len()) {
        extent.write_guest(at, &page).unwrap();
    }
    extent.write_tail(0, &page).unwrap();
    extent.flush().unwrap();
}

/// The version in a complete extent.
fn version(content: &ExtentReader<'_>) -> Result<u64, String> {
    let (mut tail, mut page) = (vec![0; 4096], vec![0; 4096]);
    content.read_tail(0, &mut tail);
    for at in (0..GRANULE).step_by(page.len()) {
        content.read_guest(at, &mut page);
        if page != tail {
            return Err(format!("{at:#x} differs from the tail"));
        }
    }
    Ok(u64::from_le_bytes(tail[..8].try_into().unwrap()))
}

/// In the lab: reports the snapshots, then freezes until the machine is killed.
fn in_the_lab(from: u64) {
    let open = |access| Arc::new(MappedMedium::open(Path::new("/dev/dax0.0"), access).unwrap());
    if from > 0 {
        let reader = PoolReader::open(open(Access::Read)).unwrap();
        let report = reader.verify(&mut |name, content| {
            send_line(&format!("{FOUND}{name} {}", version(content)?));
            Ok(())
        });
        assert_eq!(report.problems, []);
    }
    let pool = match Pool::open(open(Access::Write)) {
        Err(OpenError::NoPool(_)) if from == 0 => {
            Pool::create(open(Access::Write), &CreateOptions::default()).unwrap()
        }
        pool => pool.unwrap(),
    };
    let free = pool.list().free_bytes();
    let snapshots = pool.names().len() as u64;
    let facts = pool.facts();
    assert_eq!(free + snapshots * 2 * GRANULE, facts.data_end - facts.data_begin, "space leaks");
    for number in from + 1.. {
        for name in NAMES {
            let staging = pool.allocate(name, GRANULE, TAIL).unwrap();
            write(&staging.map().unwrap(), number);
            staging.publish().unwrap();
            send_line(&format!("{FROZEN}{name} {number}"));
        }
    }
}

/// Sends a line to the test outside the lab.
fn send_line(text: &str) {
    let mut stdout = std::io::stdout();
    writeln!(stdout, "{text}").unwrap();
}

fn start(pmem: &Path, test: &str, from: u64) -> Child {
    let program = std::env::current_exe().unwrap();
    let name = program.file_name().unwrap().to_str().unwrap();
    Command::new(env!("CARGO_BIN_EXE_firn"))
        .args(["lab", "run", "--pmem-size", "64M", "--pmem"])
        .arg(pmem)
        .args(["--env", &format!("FIRN_TEST_FROM={from}"), "--in"])
        .arg(&program)
        .args(["--", &format!("/in/{name}"), "--ignored", "--nocapture", "--exact", test])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
#[ignore = "needs the lab: make lab-tests"]
fn a_pool_is_consistent_after_its_machine_is_killed_during_a_freeze() {
    if let Ok(from) = std::env::var("FIRN_TEST_FROM") {
        in_the_lab(from.parse().unwrap());
        return;
    }
    let here = tempfile::tempdir().unwrap();
    let pmem = here.path().join("pmem");
    // The last acknowledged version of each name.
    let mut last: BTreeMap<String, u64> = BTreeMap::new();
    for round in 0..=ROUNDS {
        let from = round << 32;
        let mut firn = start(&pmem, NAME, from);
        let mut found = BTreeMap::new();
        let mut lines = BufReader::new(firn.stdout.take().unwrap()).lines();
        let mut frozen = 0;
        while frozen < FREEZES {
            let line =
                lines.next().unwrap_or_else(|| panic!("the lab of round {round} exited early"));
            let line = line.unwrap();
            let words = |prefix| {
                let (name, version) = line.split_once(prefix)?.1.split_once(' ')?;
                Some((name.to_owned(), version.parse::<u64>().unwrap()))
            };
            if let Some((name, version)) = words(FOUND) {
                found.insert(name, version);
            } else if let Some((name, version)) = words(FROZEN) {
                if frozen == 0 {
                    check(&found, &last);
                }
                last.insert(name, version);
                frozen += 1;
            }
        }
        // QEMU exits with firn, at an arbitrary point of a freeze.
        firn.kill().unwrap();
        // Freezes that were reported before the kill are acknowledged too.
        for line in lines.map_while(Result::ok) {
            if let Some((name, version)) =
                line.strip_prefix(FROZEN).and_then(|line| line.split_once(' '))
                && let Ok(version) = version.parse()
            {
                last.insert(name.to_owned(), version);
            }
        }
        firn.wait().unwrap();
    }
    assert_eq!(last.len(), NAMES.len());
}

/// Checks that every found version is at least as new as the acknowledged one.
#[track_caller]
fn check(found: &BTreeMap<String, u64>, last: &BTreeMap<String, u64>) {
    for (name, version) in last {
        assert!(found.get(name).is_some_and(|found| found >= version), "{found:?}, after {last:?}");
    }
    assert!(found.len() >= last.len());
}

/// In the lab: a manager reports the copy set that its predecessor stored, and stores the next
/// one.
fn learn_in_the_lab(round: u64) {
    let open = |access| Arc::new(MappedMedium::open(Path::new("/dev/dax0.0"), access).unwrap());
    let pool = match round {
        0 => Pool::create(open(Access::Write), &CreateOptions::default()),
        _ => Ok(Pool::open(open(Access::Write)).unwrap()),
    };
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("pool.sock");
    let _server = Server::start(&socket, pool.unwrap()).unwrap();
    let mut client = Client::connect(&socket).unwrap();
    if round == 0 {
        let grant = client.begin("snow", 4 * GRANULE, TAIL).unwrap();
        client.commit(grant.extent().generation).unwrap();
    }
    let generation = client.snapshot("snow").unwrap().extent().generation;
    let set = client.copy_set(generation, KEY).unwrap();
    let revision = set.as_ref().map(|set| set.revision);
    let found = set.map_or_else(String::new, |set| String::from_utf8(set.state).unwrap());
    let runs = [PageRange { first: 512, pages: round + 1 }];
    let state = format!("round {round}").into_bytes();
    assert!(client.store_copy_set(generation, KEY, revision, &runs, state).unwrap());
    // The manager stores it in the background.
    let reader = PoolReader::open(open(Access::Read)).unwrap();
    while reader.list().extents[0].learnt.first().map(|set| set.bytes) != Some((round + 1) * 4096) {
        std::thread::yield_now();
    }
    send_line(&format!("{LEARNT}{found}"));
    loop {
        std::thread::park();
    }
}

#[test]
#[ignore = "needs the lab: make lab-tests"]
fn what_a_manager_learnt_outlives_a_killed_machine() {
    if let Ok(round) = std::env::var("FIRN_TEST_FROM") {
        learn_in_the_lab(round.parse().unwrap());
        return;
    }
    let here = tempfile::tempdir().unwrap();
    for round in 0..=ROUNDS {
        let mut firn = start(&here.path().join("pmem"), LEARNS, round);
        let lines = BufReader::new(firn.stdout.take().unwrap()).lines();
        let found = lines
            .map_while(Result::ok)
            .find_map(|line| line.split_once(LEARNT).map(|(_, found)| found.trim().to_owned()));
        // QEMU exits with it.
        firn.kill().unwrap();
        firn.wait().unwrap();
        let expected =
            round.checked_sub(1).map_or_else(String::new, |last| format!("round {last}"));
        assert_eq!(found, Some(expected), "round {round}");
    }
}
