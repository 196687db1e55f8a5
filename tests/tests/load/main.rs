//! Many requests at once while monitors, the pool's manager and the daemon are killed at random:
//! no accepted request stays without an answer or an error, nothing leaks, no version is lost.
//!
//! With `FIRN_PLAYER=1` the program `FIRN` has the feature `player-agent`, and its microVMs are
//! players; otherwise they run Linux. `FIRN_REQUESTS` is the number of requests, `FIRN_SEED` the
//! seed of the kills.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a test that cannot go on fails, and reports what it did"
)]

mod events;
mod kills;
mod versions;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, RwLock};
use std::time::Duration;

use firn_tests::{Daemon, Reply, World, try_reply, try_send};
use serde_json::{Value, json};

use events::Events;
use kills::Killer;
use versions::Versions;

/// Requests that are under way at the same time.
const AT_ONCE: usize = 64;

/// How many requests end between two kills.
const BETWEEN_KILLS: usize = 25;

const FUNCTIONS: [&str; 3] = ["one", "two", "three"];

const ECHO: &str = "def handler(event, context):\n    return event\n";

#[test]
fn requests_beside_kills_are_answered_or_refused() {
    let count = number("FIRN_REQUESTS", 1000);
    let house = House::new();
    let world = &house.world;
    let life = Life::begin(&house);
    let versions = Versions::publish(&life);
    let events = Events::default();

    let next = AtomicUsize::new(0);
    let tally = Mutex::new(Tally::default());
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..AT_ONCE)
            .map(|_| {
                scope.spawn(|| {
                    loop {
                        let number = next.fetch_add(1, Ordering::SeqCst);
                        if number >= count {
                            return;
                        }
                        let end = invoke(&life, number);
                        tally.lock().unwrap().add(end);
                        life.ended.fetch_add(1, Ordering::SeqCst);
                    }
                })
            })
            .collect();
        scope.spawn(|| Killer::new(number("FIRN_SEED", 1) as u64).run(world, &life));
        scope.spawn(|| versions.change(&life));
        scope.spawn(|| events.send(&life));
        let clients = clients.into_iter().map(std::thread::ScopedJoinHandle::join);
        let clients: Result<Vec<()>, _> = clients.collect();
        life.stop.store(true, Ordering::SeqCst);
        clients.unwrap();
    });
    let tally = tally.into_inner().unwrap();
    eprintln!("{count} requests: {tally:?}; {} kills", life.kills.load(Ordering::SeqCst));
    assert_eq!(tally.answered + tally.refused + tally.cut_off, count);
    // Few of the requests that no daemon's death has cut off end with an error.
    assert!(tally.answered * 10 >= (count - tally.cut_off) * 9, "{tally:?}");

    versions.all_are_there(&life);
    versions.only_they_have_snapshots(&life, &house);
    events.until_served(world);
    let log = life.end();
    events.were_served(&log);
    assert!(!log.contains("wrong"), "{log}");
    assert!(!log.contains("panicked"), "{log}");
    world.assert_nothing_left();
}

/// A daemon whose monitors alone are killed has as many processes, descriptors and files
/// afterwards as before.
#[test]
fn killed_monitors_leave_nothing_in_the_daemon() {
    let house = House::new();
    let life = Life::begin(&house);
    let versions = Versions::publish(&life);
    let round = |seed: u64| {
        std::thread::scope(|scope| {
            let clients: Vec<_> = (0..16)
                .map(|client| {
                    let life = &life;
                    scope.spawn(move || {
                        for turn in 0..10 {
                            invoke(life, client * 10 + turn);
                            life.ended.fetch_add(1, Ordering::SeqCst);
                        }
                    })
                })
                .collect();
            scope.spawn(|| Killer::of_monitors(seed).run(&house.world, &life));
            clients.into_iter().for_each(|client| client.join().unwrap());
            life.stop.store(true, Ordering::SeqCst);
        });
        life.stop.store(false, Ordering::SeqCst);
        life.until_idle();
        life.resources(&house.world)
    };
    // The first round fills what the daemon keeps: threads' stacks, connections to the manager.
    round(1);
    let (before, after) = (round(2), round(3));
    assert_eq!(before, after);
    versions.all_are_there(&life);
    life.end();
    house.world.assert_nothing_left();
}

/// Where a daemon runs.
struct House {
    world: World,
    pool: PathBuf,
    /// What the daemon is started with, besides its pool.
    options: Vec<String>,
    /// A folder of memory for the pool.
    _memory: tempfile::TempDir,
}

impl House {
    fn new() -> Self {
        let world = World::default();
        // The lab has no such folder, and all its files are in memory.
        let memory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let pool = memory.path().join("pool");
        let players = number("FIRN_PLAYER", 0) == 1;
        // Room for 12 snapshots.
        let size = if players { "4G" } else { "2600M" };
        world.firn(["pool", "create", "--size", size, "--medium"]).arg(&pool).run().ok();
        let words = "--standby 4 --keep-alive 2 --queue 1000 --queue-wait 600 --monitors 80";
        let mut options: Vec<String> = words.split(' ').map(str::to_owned).collect();
        if players {
            let seed = world.file("seed");
            world.firn(["player", "--trace", "hello-a", "--out"]).arg(&seed).run().ok();
            let file = seed.join("snapshot.firn").display().to_string();
            options.push("--software-kvm".to_owned());
            for part in ["--kernel", "--initramfs", "--root", "--overlay"] {
                options.extend([part.to_owned(), file.clone()]);
            }
        }
        Self { world, pool, options, _memory: memory }
    }

    fn start(&self) -> Daemon {
        let pool = self.pool.display().to_string();
        let mut options = vec!["--pool", &pool];
        options.extend(self.options.iter().map(String::as_str));
        Daemon::start(&self.world, &options)
    }
}

/// The daemon, which is killed and started again meanwhile.
struct Life<'a> {
    house: &'a House,
    daemon: RwLock<Option<Daemon>>,
    /// How often the daemon was killed.
    deaths: AtomicUsize,
    kills: AtomicUsize,
    /// Requests that have ended.
    ended: AtomicUsize,
    stop: AtomicBool,
    /// What the killed daemons have logged.
    log: Mutex<String>,
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// With the function's answer.
    Answered,
    /// With an error of the daemon.
    Refused,
    /// By the end of the daemon.
    CutOff,
}

#[derive(Debug, Default)]
struct Tally {
    answered: usize,
    refused: usize,
    cut_off: usize,
}

impl Tally {
    fn add(&mut self, end: End) {
        match end {
            End::Answered => self.answered += 1,
            End::Refused => self.refused += 1,
            End::CutOff => self.cut_off += 1,
        }
    }
}

impl<'a> Life<'a> {
    fn begin(house: &'a House) -> Self {
        Self {
            house,
            daemon: RwLock::new(Some(house.start())),
            deaths: AtomicUsize::new(0),
            kills: AtomicUsize::new(0),
            ended: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            log: Mutex::new(String::new()),
        }
    }

    /// Kills the daemon, and starts the next.
    fn restart(&self) {
        let mut daemon = self.daemon.write().unwrap();
        let log = daemon.take().unwrap().kill().stderr;
        self.log.lock().unwrap().push_str(&log);
        *daemon = Some(self.house.start());
        self.deaths.fetch_add(1, Ordering::SeqCst);
    }

    /// Sends a request; `None` if the daemon was killed before it answered. Fails if a daemon that
    /// lives does not answer.
    fn ask(&self, method: &str, path: &str, body: &Value) -> Option<Reply> {
        self.ask_with(&[], method, path, body)
    }

    /// The same for an event, which is not answered but accepted.
    fn send_event(&self, path: &str, event: &Value) -> Option<Reply> {
        self.ask_with(&["x-amz-invocation-type: Event"], "POST", path, event)
    }

    fn ask_with(&self, head: &[&str], method: &str, path: &str, body: &Value) -> Option<Reply> {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let address = self.daemon.read().unwrap().as_ref().unwrap().address().to_owned();
        let deaths = self.deaths.load(Ordering::SeqCst);
        let sent = try_send(&address, method, path, (head, &body), body.len());
        let reply = sent.and_then(try_reply).ok().filter(|reply| reply.status != 0);
        if reply.is_none() {
            // Waits for the next daemon.
            drop(self.daemon.read().unwrap());
            assert_ne!(deaths, self.deaths.load(Ordering::SeqCst), "no answer: {method} {path}");
        }
        reply
    }

    /// The same, again until a daemon answers.
    fn ask_again(&self, method: &str, path: &str, body: &Value) -> Reply {
        loop {
            if let Some(reply) = self.ask(method, path, body) {
                return reply;
            }
        }
    }

    /// Waits until no microVM runs but standby monitors.
    fn until_idle(&self) {
        for _ in 0..600 {
            let status = self.ask_again("GET", "/status", &Value::Null).body;
            let monitors = &status["monitors"];
            if (&monitors["running"], &monitors["standby"]) == (&json!(0), &json!(4)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        panic!("microVMs remain: {:?}", self.ask("GET", "/status", &Value::Null));
    }

    /// Processes, the daemon's descriptors, and files of microVMs.
    fn resources(&self, world: &World) -> (usize, usize, Vec<String>) {
        let pid = self.daemon.read().unwrap().as_ref().unwrap().pid().as_raw_nonzero();
        let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
        let mut files = world.leftovers();
        files.retain(|found| !found.starts_with("process "));
        (world.processes().len(), descriptors, files)
    }

    /// Stops the daemon, and returns what all have logged.
    fn end(self) -> String {
        let last = self.daemon.into_inner().unwrap().unwrap().end();
        self.log.into_inner().unwrap() + &last
    }
}

fn invoke(life: &Life<'_>, number: usize) -> End {
    let function = FUNCTIONS[number % FUNCTIONS.len()];
    let event = json!({ "number": number });
    let path = format!("/2015-03-31/functions/{function}:1/invocations");
    match life.ask("POST", &path, &event) {
        None => End::CutOff,
        Some(reply) if reply.status == 200 && reply.body == event => End::Answered,
        Some(reply) => {
            let is_error = reply.status >= 400 && reply.body["Message"].is_string();
            assert!(is_error, "neither an answer nor an error: {reply:?}");
            End::Refused
        }
    }
}

/// A number in the environment.
fn number(variable: &str, otherwise: usize) -> usize {
    std::env::var(variable).map_or(otherwise, |text| text.parse().unwrap())
}
