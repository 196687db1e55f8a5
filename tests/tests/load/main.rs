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
mod signed;
mod versions;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, RwLock};
use std::thread;
use std::time::Duration;

use firn_tests::{Daemon, Reply, Resources, World, try_reply, try_send};
use serde_json::{Value, json};

use events::Events;
use kills::{Killer, Kind};
use versions::Versions;

/// Requests that are under way at the same time.
const AT_ONCE: usize = 64;

const FUNCTIONS: [&str; 3] = ["one", "two", "three"];

const ECHO: &str = "def handler(event, context):\n    return event\n";

#[test]
fn requests_beside_kills_are_answered_or_refused() {
    let count = number("FIRN_REQUESTS", 1000);
    let seed = number("FIRN_SEED", 1) as u64;
    let house = House::new();
    let life = Life::begin(&house);
    let versions = Versions::publish(&life);
    let events = Events::default();
    // A round takes 250 requests.
    let least = if count < 500 { 1 } else { 2 };
    let round = [(Kind::Monitor, 7), (Kind::Manager, 2), (Kind::Daemon, 1)];
    let killer = Killer::new(seed, least, &round);
    let beside: [Work<'_>; 2] = [&|| versions.change(&life), &|| events.send(&life)];
    let tally = life.send(AT_ONCE, count, &killer, &beside);
    let killed = killer.killed();
    eprintln!("seed {seed}: {} requests: {tally:?}, killed: {killed:?}", tally.requests());
    assert!(tally.requests() >= count && killer.is_done());
    // Few of the requests that no daemon's death has cut off end with an error.
    assert!(tally.answered * 10 >= (tally.requests() - tally.cut_off) * 9, "{tally:?}");

    versions.all_are_there(&life);
    versions.only_they_have_snapshots(&life, &house);
    events.until_served(&house.world);
    let log = life.end();
    events.were_served(&log);
    assert!(!log.contains("restored wrong memory"), "{log}");
    assert!(!log.contains("panicked"), "{log}");
    house.world.assert_nothing_left();
}

/// A daemon whose monitors and managers are killed has as many processes, descriptors, files and as
/// much memory afterwards as before.
#[test]
fn killed_processes_leave_nothing_in_the_daemon() {
    let house = House::new();
    let life = Life::begin(&house);
    let versions = Versions::publish(&life);
    let round = |seed: u64| {
        let killer = Killer::new(seed, 2, &[(Kind::Monitor, 4), (Kind::Manager, 1)]);
        life.send(16, 160, &killer, &[]);
        eprintln!("killed: {:?}", killer.killed());
        assert!(killer.is_done());
        life.until_idle();
        // A thaw starts the pool's manager if it was the last to be killed.
        FUNCTIONS.iter().enumerate().for_each(|(number, _)| {
            assert_eq!(invoke(&life, number), End::Answered);
        });
        life.until_idle();
        let daemon = life.daemon.read().unwrap();
        Resources::of(&house.world, daemon.as_ref().unwrap())
    };
    // The first round fills what the daemon keeps: threads' stacks, connections to the manager.
    round(1);
    let before = round(2);
    round(3).assert_same_as(&before);
    versions.all_are_there(&life);
    life.end();
    house.world.assert_nothing_left();
}

/// The microVMs of a killed manager use its pool, and requests follow one another so closely that
/// they would never end.
#[test]
fn a_killed_manager_is_replaced_while_requests_go_on() {
    let house = House::new();
    let life = Life::begin(&house);
    let versions = Versions::publish(&life);
    let work = || {
        while life.ended.load(Ordering::SeqCst) < 100 {
            thread::sleep(Duration::from_millis(1));
        }
        kills::kill_manager(&life);
        versions.publish_and_wait(&life);
        life.stop.store(true, Ordering::SeqCst);
    };
    let tally = life.send(8, usize::MAX, &Killer::new(1, 0, &[]), &[&work]);
    eprintln!("{} requests: {tally:?}", tally.requests());
    assert_eq!((tally.refused, tally.cut_off), (0, 0));
    life.end();
    house.world.assert_nothing_left();
}

/// What a thread does.
type Work<'a> = &'a (dyn Fn() + Sync);

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
        // Under emulation more guests at once exceed the time of a restore.
        let monitors = if players { "80" } else { "8" };
        let words = "--standby 4 --keep-alive 2 --queue 1000 --queue-wait 600 --monitors";
        let words = words.split(' ').chain([monitors]);
        let options = words.map(str::to_owned).chain(players_in(&world)).collect();
        Self { world, pool, options, _memory: memory }
    }

    fn start(&self) -> Daemon {
        let pool = self.pool.display().to_string();
        let mut options = vec!["--pool", &pool];
        options.extend(self.options.iter().map(String::as_str));
        Daemon::start(&self.world, &options)
    }
}

/// The options of a daemon whose microVMs are players; none if they are guests with Linux.
fn players_in(world: &World) -> Vec<String> {
    if number("FIRN_PLAYER", 0) != 1 {
        return Vec::new();
    }
    let seed = world.file("seed");
    world.firn(["player", "--trace", "hello-a", "--out"]).arg(&seed).run().ok();
    let file = |name: &str| seed.join(name).display().to_string();
    let parts = [
        ("--kernel", "snapshot.firn"),
        ("--initramfs", "memory.img"),
        ("--root", "memory.img"),
        ("--overlay", "snapshot.firn"),
    ];
    let files = parts.into_iter().flat_map(|(part, name)| [part.to_owned(), file(name)]);
    std::iter::once("--software-kvm".to_owned()).chain(files).collect()
}

/// The daemon, which is killed and started again meanwhile.
struct Life<'a> {
    house: &'a House,
    daemon: RwLock<Option<Daemon>>,
    /// How often the daemon was killed.
    deaths: AtomicUsize,
    /// Requests that have ended.
    ended: AtomicUsize,
    /// Set when all requests have ended, or a thread has panicked.
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
    fn requests(&self) -> usize {
        self.answered + self.refused + self.cut_off
    }

    fn add(&mut self, end: End) {
        match end {
            End::Answered => self.answered += 1,
            End::Refused => self.refused += 1,
            End::CutOff => self.cut_off += 1,
        }
    }
}

/// Sets the flag if its thread panics.
struct StopOnPanic<'a>(&'a AtomicBool);

impl Drop for StopOnPanic<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.store(true, Ordering::SeqCst);
        }
    }
}

impl<'a> Life<'a> {
    fn begin(house: &'a House) -> Self {
        Self {
            house,
            daemon: RwLock::new(Some(house.start())),
            deaths: AtomicUsize::new(0),
            ended: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            log: Mutex::new(String::new()),
        }
    }

    /// Sends `count` requests from a number of clients at once, and more until the killer is done,
    /// which runs meanwhile, as does what is `beside` it.
    fn send(&self, clients: usize, count: usize, killer: &Killer, beside: &[Work<'_>]) -> Tally {
        let (next, tally) = (AtomicUsize::new(0), Mutex::new(Tally::default()));
        let client = || {
            while !self.stop.load(Ordering::SeqCst) {
                let number = next.fetch_add(1, Ordering::SeqCst);
                if number >= count && killer.is_done() {
                    return;
                }
                let end = invoke(self, number);
                tally.lock().unwrap().add(end);
                let ended = self.ended.fetch_add(1, Ordering::SeqCst) + 1;
                if ended.is_multiple_of(100) {
                    eprintln!("{ended} requests");
                }
            }
        };
        let kill = || killer.run(self);
        thread::scope(|scope| {
            for work in beside.iter().copied().chain([&kill as Work<'_>]) {
                scope.spawn(move || self.work(work));
            }
            let clients = (0..clients).map(|_| scope.spawn(|| self.work(&client)));
            let clients: Vec<_> = clients.collect();
            let ended: Vec<_> = clients.into_iter().map(thread::ScopedJoinHandle::join).collect();
            self.stop.store(true, Ordering::SeqCst);
            ended.into_iter().for_each(|client| client.unwrap());
        });
        self.stop.store(false, Ordering::SeqCst);
        tally.into_inner().unwrap()
    }

    /// What a thread does. If it panics, the others end.
    fn work(&self, work: Work<'_>) {
        let _stop = StopOnPanic(&self.stop);
        work();
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
        let (address, deaths) = {
            let daemon = self.daemon.read().unwrap();
            (daemon.as_ref().unwrap().address().to_owned(), self.deaths.load(Ordering::SeqCst))
        };
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
            thread::sleep(Duration::from_millis(100));
        }
        panic!("microVMs remain: {:?}", self.ask("GET", "/status", &Value::Null));
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
            eprintln!("refused: {} {}", reply.status, reply.body["Message"]);
            End::Refused
        }
    }
}

/// A number in the environment.
fn number(variable: &str, otherwise: usize) -> usize {
    std::env::var(variable).map_or(otherwise, |text| text.parse().unwrap())
}
