use std::cell::RefCell;
use std::fs;
use std::sync::Arc;

use firn_pool::{CreateOptions, MappedMedium, MemfdOptions, Pool, Server};

use super::*;
use crate::players::PooledPlayer;
use crate::progress::Quiet;
use crate::testing::{REPORT, monitor_program, one_at_a_time};

fn subject(planner: &str) -> Subject {
    Subject {
        planner: planner.to_owned(),
        preloads: false,
        in_pool: false,
        packs: false,
        ready: false,
        jailed: true,
    }
}

fn frozen(snapshot: PathBuf) -> FrozenPlayer {
    let trace = "t".to_owned();
    let inputs = vec![trace.clone(), "other".to_owned()];
    FrozenPlayer {
        trace,
        snapshot,
        pooled: None,
        inputs,
        recorded_on: None,
        others: Vec::new(),
        sanitised: None,
    }
}

/// A session with a program that logs each planner and prints a report.
fn session(directory: &std::path::Path, planners: &[&str], runs: u32, script: &str) -> Session {
    let log = directory.join("log");
    let script = format!("echo $1 >> {}\n{script}\ncat <<'END'\n{REPORT}\nEND\n", log.display());
    let program = monitor_program(directory, &script);
    let snapshot = directory.join("snapshot");
    fs::create_dir(&snapshot).unwrap();
    fs::write(snapshot.join("memory.img"), [1; 4096]).unwrap();
    // The session opens it, and no process reads it.
    fs::write(snapshot.join("snapshot.firn"), []).unwrap();
    Session {
        program,
        jails: Jails::in_one_group(),
        players: vec![frozen(snapshot)],
        subjects: planners.iter().map(|planner| subject(planner)).collect(),
        runs,
        warm_up: 0,
        concurrency: 1,
        replicas: None,
        caches: vec![Cache::Cached],
        faults: false,
        warm: false,
        shortened: false,
        standby: false,
        open_loop: 0,
        mix: None,
    }
}

/// The planners of the finished steps.
#[derive(Default)]
struct Seen(RefCell<Vec<String>>);

impl Progress for Seen {
    fn advance(&self, _: u64, step: &str) {
        self.0.borrow_mut().push(step.split(' ').next().unwrap().to_owned());
    }
}

fn host(directory: &std::path::Path) -> Host {
    Host::of(directory).unwrap()
}

#[test]
fn the_order_is_random_by_its_seed() {
    let rounds = |seed| -> Vec<Vec<usize>> {
        let mut random = Rng::with_seed(seed);
        (0..64).map(|_| shuffled(3, &mut random)).collect()
    };
    assert_eq!(rounds(1), rounds(1));
    assert_ne!(rounds(1), rounds(2));
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        assert!(rounds(1).iter().any(|round| *round == order), "{order:?}");
    }
    assert!(shuffled(0, &mut Rng::with_seed(1)).is_empty());
}

#[test]
fn repeated_planners_are_labelled() {
    assert_eq!([0, 1, 25, 26].map(label), ["a", "b", "z", "26"]);
}

#[test]
fn planners_take_turns() {
    let _alone = one_at_a_time();
    let directory = tempfile::tempdir().unwrap();
    let session = session(directory.path(), &["p", "q"], 3, "");
    let interrupt = Interrupt::catch().unwrap();
    let seen = Seen::default();
    let results = session.run(host(directory.path()), 1, &interrupt, &seen).unwrap();
    let seen = seen.0;
    assert_eq!(seen.borrow().len(), 6);
    for round in seen.borrow().chunks(2) {
        assert!(round.contains(&"p".to_owned()) && round.contains(&"q".to_owned()), "{round:?}");
    }
    assert_eq!(results.order, Some(1));
    assert_eq!(seen.borrow().len() as u64, session.batches(&[]));
    let log = fs::read_to_string(directory.path().join("log")).unwrap();
    assert_eq!(log.lines().collect::<Vec<_>>(), *seen.borrow());
    let rows: Vec<_> = results.results.iter().map(|r| (r.planner.as_str(), r.runs)).collect();
    assert_eq!(rows, [("p", 3), ("q", 3)]);
    assert!(results.noise.is_empty() && results.results[0].label.is_none());
    assert_eq!(results.results[0].batch_page_cache_bytes, 4096);
}

#[test]
fn a_shortened_session_has_few_long_runs() {
    let _alone = one_at_a_time();
    let runs = |total_ns: &str, shortened| {
        let directory = tempfile::tempdir().unwrap();
        let report = REPORT.replace("\"total_ns\":654321", &format!("\"total_ns\":{total_ns}"));
        let script = format!("cat <<'END'\n{report}\nEND\nexit 0\n");
        let session = session(directory.path(), &["p"], LONG_RUNS + 1, &script);
        let session = Session { shortened, ..session };
        let interrupt = Interrupt::catch().unwrap();
        let results = session.run(host(directory.path()), 1, &interrupt, &Quiet).unwrap();
        results.results[0].runs
    };
    assert_eq!(runs("10000000000", true), LONG_RUNS);
    assert_eq!(runs("9999999999", true), LONG_RUNS + 1);
    assert_eq!(runs("10000000000", false), LONG_RUNS + 1);
}

#[test]
fn a_planner_listed_twice_is_compared_with_itself() {
    let _alone = one_at_a_time();
    let directory = tempfile::tempdir().unwrap();
    let session = session(directory.path(), &["p", "q", "p"], 2, "");
    let interrupt = Interrupt::catch().unwrap();
    let results = session.run(host(directory.path()), 1, &interrupt, &Quiet).unwrap();
    let labels: Vec<_> = results.results.iter().map(|row| row.label.as_deref()).collect();
    assert_eq!(labels, [Some("a"), None, Some("b")]);
    assert_eq!(results.noise.len(), 1);
    assert_eq!((results.noise[0].ratio.pairs, results.noise[0].ratio.median), (2, 1.0));
}

#[test]
fn starts_at_random_intervals_follow_the_runs() {
    let _alone = one_at_a_time();
    let directory = tempfile::tempdir().unwrap();
    let session = Session { open_loop: 3, ..session(directory.path(), &["p", "q"], 1, "") };
    let interrupt = Interrupt::catch().unwrap();
    let seen = Seen::default();
    let results = session.run(host(directory.path()), 1, &interrupt, &seen).unwrap();
    assert_eq!(seen.0.borrow()[2..], ["p", "p", "p", "q", "q", "q"]);
    assert_eq!(seen.0.borrow().len() as u64, session.batches(&[]));
    for row in &results.results {
        let open = row.open_loop.as_ref().unwrap();
        assert_eq!((row.runs, open.starts, open.p95_to_idle_median), (1, 3, 1.0));
    }
}

#[test]
fn one_failure_leaves_no_results() {
    let _alone = one_at_a_time();
    let directory = tempfile::tempdir().unwrap();
    let script = "[ $(wc -l < \"$2/../log\") -lt 4 ] || { echo bad page 7 >&2; exit 1; }";
    let session = session(directory.path(), &["p", "q"], 5, script);
    let interrupt = Interrupt::catch().unwrap();
    let error = session.run(host(directory.path()), 1, &interrupt, &Quiet).unwrap_err();
    let text = firn_base::error_chain(&error);
    assert!(text.contains("failed on t in run 2"), "{text}");
    assert!(text.contains("bad page 7"), "{text}");
}

#[test]
fn a_mix_replays_the_same_inputs_by_each_planner() {
    let _alone = one_at_a_time();
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("inputs");
    let script = format!("echo $ORDER | grep -o '\"input\":\"[a-z]*\"' >> {}", log.display());
    let session = Session { mix: Some(1), ..session(directory.path(), &["p", "q"], 8, &script) };
    let interrupt = Interrupt::catch().unwrap();
    let results = session.run(host(directory.path()), 1, &interrupt, &Quiet).unwrap();
    assert_eq!(results.mix, Some(1));
    let inputs = fs::read_to_string(&log).unwrap();
    let inputs: Vec<_> = inputs.lines().collect();
    assert_eq!(inputs.len(), 16);
    assert!(inputs.chunks(2).all(|round| round[0] == round[1]), "{inputs:?}");
    for input in [r#""input":"t""#, r#""input":"other""#] {
        assert!(inputs.contains(&input), "{inputs:?}");
    }
}

#[test]
fn nothing_to_measure_is_an_error() {
    let _alone = one_at_a_time();
    let directory = tempfile::tempdir().unwrap();
    let interrupt = Interrupt::catch().unwrap();
    let session = Session { runs: 0, ..session(directory.path(), &["p"], 1, "") };
    let result = session.run(host(directory.path()), 1, &interrupt, &Quiet);
    assert!(matches!(result, Err(SessionError::Nothing)));
    let session = Session { runs: 1, subjects: Vec::new(), ..session };
    let result = session.run(host(directory.path()), 1, &interrupt, &Quiet);
    assert!(matches!(result, Err(SessionError::Nothing)));
}

#[test]
fn microvms_and_their_snapshots_rotate_together() {
    let _alone = one_at_a_time();
    let directory = tempfile::tempdir().unwrap();
    let script = format!("echo $2 >> {}", directory.path().join("places").display());
    let session = session(directory.path(), &["p"], 1, &script);
    let other = directory.path().join("other");
    fs::create_dir(&other).unwrap();
    fs::write(other.join("memory.img"), [1; 8192]).unwrap();
    fs::write(other.join("snapshot.firn"), []).unwrap();
    let player = FrozenPlayer { others: vec![frozen(other.clone())], ..session.players[0].clone() };
    let first = player.snapshot.display().to_string();
    let session = Session { players: vec![player], concurrency: 3, ..session };
    let interrupt = Interrupt::catch().unwrap();
    let results = session.run(host(directory.path()), 1, &interrupt, &Quiet).unwrap();
    let places = fs::read_to_string(directory.path().join("places")).unwrap();
    let of = |place: &str| places.lines().filter(|line| *line == place).count();
    assert_eq!((of(&first), of(other.to_str().unwrap())), (2, 1));
    assert_eq!(results.results[0].snapshots, 2);
    assert_eq!(results.results[0].batch_page_cache_bytes, 3 * 4096);
    // One alone takes nothing of the other's snapshot.
    let session = Session { concurrency: 1, ..session };
    let results = session.run(host(directory.path()), 1, &interrupt, &Quiet).unwrap();
    assert_eq!(results.results[0].batch_page_cache_bytes, 4096);
}

#[test]
fn a_planner_of_a_pool_gets_the_pool_and_uses_no_page_cache() {
    let _alone = one_at_a_time();
    let directory = tempfile::tempdir().unwrap();
    let script = format!("echo $2 $3 >> {}", directory.path().join("places").display());
    let mut session = session(directory.path(), &["p"], 1, &script);
    session.subjects.push(Subject { in_pool: true, ..subject("q") });
    session.caches = vec![Cache::Cached, Cache::Cached];
    session.warm_up = 2;
    let socket = directory.path().join("pool.sock");
    let options = MemfdOptions { size: 16 << 20, huge: None, node: None };
    let medium = Arc::new(MappedMedium::memfd(options).unwrap());
    let pool = Pool::create(medium, &CreateOptions::default()).unwrap();
    let _manager = Server::start(&socket, pool).unwrap();
    session.players[0].pooled =
        Some(PooledPlayer { socket: socket.clone(), name: "player".to_owned() });
    let interrupt = Interrupt::catch().unwrap();
    let results = session.run(host(directory.path()), 1, &interrupt, &Quiet).unwrap();
    let places = fs::read_to_string(directory.path().join("places")).unwrap();
    let snapshot = session.players[0].snapshot.display();
    let of_pool = "pool player\n";
    let of_file = format!("{snapshot}\n");
    assert_eq!(places, format!("{}{of_file}{of_pool}{of_file}", of_pool.repeat(2)));
    assert_eq!((session.batches(&[]), results.warm_up), (5, 2));
    assert!(results.results.iter().all(|row| row.runs == 1));
    let caches: Vec<_> = results.results.iter().map(|row| row.cache).collect();
    assert_eq!(caches, [Cache::Cached, Cache::Unused, Cache::Cached]);
    // Only planners of a pool have a settle time.
    let settled: Vec<_> = results.results.iter().map(|row| row.settle_ms.is_some()).collect();
    assert_eq!(settled, [false, true, false]);
    assert_eq!(results.results[1].batch_page_cache_bytes, 0);
}
