use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use super::*;
use crate::testing::{REPORT, one_at_a_time};

fn player<'a>(
    program: &'a Path,
    snapshot: &'a [OsString],
    planner: &'a str,
    preloaded: bool,
) -> Player<'a> {
    Player { program, snapshot, planner, preloaded, faults: false }
}

/// A program that runs a script with its arguments.
fn program(directory: &Path, script: &str) -> PathBuf {
    let path = directory.join("firn");
    fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
    path
}

fn batch(script: &str, preloaded: bool, count: u32) -> Result<Vec<StartReport>, BatchError> {
    let _alone = one_at_a_time();
    let directory = tempfile::tempdir().unwrap();
    let interrupt = Interrupt::catch().unwrap();
    let program = program(directory.path(), script);
    let mut held = 0;
    let snapshot = [directory.path().into()];
    let hold = || held += 1;
    let result =
        run(&[player(&program, &snapshot, "pass:x=1", preloaded)], count, &interrupt, hold);
    assert!(interrupt.state.lock().running.is_empty());
    assert_eq!(held, 1);
    result.map(|(reports, ())| reports)
}

fn printing(report: &str) -> String {
    format!("cat <<'END'\n{report}\nEND")
}

#[test]
fn every_process_reports() {
    let reports = batch(&printing(REPORT), false, 3).unwrap();
    assert_eq!(reports.len(), 3);
    let report = &reports[0];
    let replay = report.replay.as_ref().unwrap();
    assert_eq!((replay.pages, replay.touches), (10, 11));
    assert_eq!(report.times.replay_ns, Some(600_000));
}

#[test]
fn no_player_checks_memory_before_all_have_touched_their_last_page() {
    let _alone = one_at_a_time();
    let directory = tempfile::tempdir().unwrap();
    let held_and_checked = "echo > $5/held-$$; echo held; cat >/dev/null; echo > $5/checked-$$";
    let program = program(directory.path(), &format!("{held_and_checked}\n{}", printing(REPORT)));
    let files = |name: &str| {
        let entries = fs::read_dir(directory.path()).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|file| file.starts_with(name)).count()
    };
    let snapshot = [directory.path().into()];
    let interrupt = Interrupt::catch().unwrap();
    let held = || (files("held"), files("checked"));
    let (reports, held) =
        run(&[player(&program, &snapshot, "p", false)], 3, &interrupt, held).unwrap();
    assert_eq!((reports.len(), held), (3, (3, 0)));
    assert_eq!(files("checked"), 3);
}

#[test]
fn arguments_name_the_planner_and_the_snapshot() {
    let script = "echo \"$1 $2 $3 $4 $5 ${FIRN_REQUEST_NS:+request}\" >&2; exit 1";
    let error = batch(script, true, 1).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("thaw --json --planner pass:x=1 --preloaded request"), "{text}");
    assert!(!batch(script, false, 1).unwrap_err().to_string().contains("--preloaded"));
}

#[test]
fn one_failure_fails_the_batch() {
    let script =
        format!("if mkdir \"$5/once\"; then echo bad page 7 >&2; exit 1; fi\n{}", printing(REPORT));
    match batch(&script, false, 3).unwrap_err() {
        BatchError::Failed { status, reason, .. } => {
            assert_eq!((status.as_str(), reason.as_str()), ("exit status: 1", "bad page 7"));
        }
        other => panic!("{other}"),
    }
    let error = batch("kill -9 $$", false, 1).unwrap_err();
    assert!(error.to_string().contains("signal: 9"), "{error}");
    let error = batch("echo '{}'", false, 1).unwrap_err();
    assert!(matches!(error, BatchError::Report { member: 1, .. }), "{error}");
    let interrupt = Interrupt::catch().unwrap();
    let missing =
        run(&[player(Path::new("/no/firn"), &["/".into()], "p", false)], 1, &interrupt, || ());
    assert!(matches!(missing, Err(BatchError::Start { .. })));
}
