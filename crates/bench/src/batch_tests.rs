use std::fs;
use std::sync::OnceLock;

use firn_base::error_chain;

use super::*;
use crate::testing::{REPORT, monitor_program, one_at_a_time};

static JAIL: OnceLock<Jail> = OnceLock::new();

fn player<'a>(
    program: &'a Path,
    snapshot: &'a Path,
    planner: &'a str,
    preloaded: bool,
) -> Player<'a> {
    Player {
        program,
        snapshot: Place::Directory(snapshot),
        planner,
        preloaded,
        faults: false,
        input: None,
        warm: false,
        unchecked: false,
        jail: JAIL.get_or_init(in_one_group),
    }
}

/// A directory with the file that a supervisor opens.
fn snapshot() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("snapshot.firn"), []).unwrap();
    directory
}

fn batch(script: &str, preloaded: bool, count: u32) -> Result<Vec<StartReport>, BatchError> {
    let _alone = one_at_a_time();
    let directory = snapshot();
    let interrupt = Interrupt::catch().unwrap();
    let program = monitor_program(directory.path(), script);
    let mut held = 0;
    let hold = || held += 1;
    let player = player(&program, directory.path(), "pass:x=1", preloaded);
    let result = run(&[player], count, count, Vec::new(), &interrupt, hold);
    assert!(interrupt.state.lock().running.is_empty());
    assert_eq!(held, 1);
    result.map(|batch| batch.reports)
}

fn script_that_prints(report: &str) -> String {
    format!("cat <<'END'\n{report}\nEND")
}

#[test]
fn every_process_reports() {
    let reports = batch(&script_that_prints(REPORT), false, 3).unwrap();
    assert_eq!(reports.len(), 3);
    let report = &reports[0];
    let replay = report.replay.as_ref().unwrap();
    assert_eq!((replay.pages, replay.touches), (10, 11));
    assert_eq!(report.times.replay_ns, Some(600_000));
}

#[test]
fn no_player_checks_memory_before_all_have_touched_their_last_page() {
    let _alone = one_at_a_time();
    let directory = snapshot();
    // Each process is the first of a pid namespace.
    let note = |name: &str| format!("mktemp $2/{name}-XXXXXX > /dev/null");
    let (held, checked) = (note("held"), note("checked"));
    let report = script_that_prints(REPORT);
    let script = format!("{held}; echo held; cat > /dev/null; {checked}\n{report}");
    let program = monitor_program(directory.path(), &script);
    let files = |name: &str| {
        let entries = fs::read_dir(directory.path()).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|file| file.starts_with(name)).count()
    };
    let interrupt = Interrupt::catch().unwrap();
    let held = || (files("held"), files("checked"));
    let player = player(&program, directory.path(), "p", false);
    let Reports { reports, held, .. } = run(&[player], 3, 3, Vec::new(), &interrupt, held).unwrap();
    assert_eq!((reports.len(), held), (3, (3, 0)));
    assert_eq!(files("checked"), 3);
}

#[test]
fn players_beyond_the_limit_wait_for_earlier_ones() {
    let _alone = one_at_a_time();
    let directory = snapshot();
    // A process leaves a file for as long as it runs.
    let report = script_that_prints(REPORT);
    let script = format!(
        "f=$(mktemp $2/runs-XXXXXX); ls $2/runs-* | wc -l >> $2/together; echo \"$ORDER\" >> $2/orders\n\
         echo held; cat > /dev/null; rm $f\n{report}"
    );
    let program = monitor_program(directory.path(), &script);
    let interrupt = Interrupt::catch().unwrap();
    let player = player(&program, directory.path(), "p", false);
    let ran = run(&[player], 5, 2, Vec::new(), &interrupt, || ()).unwrap();
    assert_eq!(ran.reports.len(), 5);
    let lines = |name: &str| -> Vec<String> {
        let text = fs::read_to_string(directory.path().join(name)).unwrap();
        text.lines().map(ToOwned::to_owned).collect()
    };
    assert!(lines("together").iter().all(|together| together == "1" || together == "2"));
    let orders = lines("orders");
    let unchecked = orders.iter().filter(|order| order.contains("\"unchecked\":true")).count();
    assert_eq!((orders.len(), unchecked), (5, 3), "the last two check all their memory");
    let request = |order: &String| -> u64 {
        let (_, rest) = order.split_once("\"request_ns\":").unwrap();
        rest.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap()
    };
    let requests: Vec<u64> = orders.iter().map(request).collect();
    let last = requests.iter().max().unwrap();
    assert_eq!(requests.iter().filter(|request| *request == last).count(), 3, "{requests:?}");
}

#[test]
fn the_request_names_planner_and_snapshot() {
    let script = "echo \"$1 $ORDER\" >&2; exit 1";
    let text = error_chain(&batch(script, true, 1).unwrap_err());
    assert!(text.contains("pass:x=1 {\"start\":"), "{text}");
    for part in ["\"preloaded\":true", "\"hold\":true", "\"fault_time\":false"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("\"request_ns\":null"), "{text}");
    let text = error_chain(&batch(script, false, 1).unwrap_err());
    assert!(text.contains("\"preloaded\":false"), "{text}");
}

#[test]
fn one_failure_fails_the_batch() {
    let script = format!(
        "if mkdir \"$2/once\"; then echo bad page 7 >&2; exit 1; fi\n{}",
        script_that_prints(REPORT)
    );
    let error = batch(&script, false, 3).unwrap_err();
    assert!(matches!(error, BatchError::Failed { .. }), "{error}");
    let text = error_chain(&error);
    assert!(text.contains("exit status: 1") && text.contains("bad page 7"), "{text}");
    let error = batch("echo '{}'", false, 1).unwrap_err();
    assert!(matches!(error, BatchError::Failed { instance: 1, .. }), "{error}");
    assert!(error_chain(&error).contains("not valid"), "{}", error_chain(&error));
    let interrupt = Interrupt::catch().unwrap();
    let missing = player(Path::new("/no/firn"), Path::new("/"), "p", false);
    let missing = run(&[missing], 1, 1, Vec::new(), &interrupt, || ());
    assert!(matches!(missing, Err(BatchError::Start { .. })));
}
