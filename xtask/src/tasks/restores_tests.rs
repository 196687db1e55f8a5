use std::fs;

use super::{PLANNERS, SHAPES, Settings, measure, sessions};
use crate::tasks::tests::context_with_firn;

/// A program in place of firn. A measurement writes its file, except that of a trace named `bad`. A
/// table lists its files.
const FIRN: &str = r#"#!/bin/sh
log=$(dirname "$0")/log
echo "$*" >>"$log"
case $* in
    *"--trace bad "*) exit 1 ;;
    "bench thaw"*) echo {} >"$4" ;;
    "bench table"*) shift 2; echo "$#" ;;
esac
"#;

fn lines(shapes: &str, pool: Option<&str>) -> Vec<String> {
    let settings = Settings {
        out: "/o".into(),
        traces: vec!["json-a".to_owned()],
        shapes: shapes.split(' ').map(str::to_owned).collect(),
        planners: "reap,faast".to_owned(),
        runs: "3".to_owned(),
        runs_of_ten: "1".to_owned(),
        pool: pool.map(str::to_owned),
    };
    let sessions = sessions(&settings).unwrap();
    sessions.into_iter().map(|session| format!("{}: {}", session.name, session.arguments)).collect()
}

#[test]
fn every_shape_has_its_sessions() {
    let ten = "--cache cold,cached --runs 1 --warm-up 0 --concurrency 10";
    assert_eq!(
        lines(SHAPES, None),
        [
            "json-a.one: --trace json-a --planner reap,faast --dense --unsanitised --cache cold,cached --runs 3 --warm-up 0".to_owned(),
            format!("json-a.ten: --trace json-a --planner reap,faast --dense --unsanitised {ten}"),
            format!("json-a.different: --trace json-a --planner reap,faast --dense --unsanitised {ten} --snapshots different"),
            "json-a.sparse: --trace json-a --planner reap,faast --cache cold --runs 3".to_owned(),
            "json-a.sanitised: --trace json-a --planner reap,faast --cache cold --runs 3 --dense".to_owned(),
        ]
    );
}

#[test]
fn a_pool_serves_all_planners_but_no_sparse_images() {
    assert_eq!(
        lines("ten sparse", Some("/p")),
        [
            "json-a.ten: --trace json-a --planner all --dense --unsanitised --cache cold,cached --runs 1 --warm-up 2 \
             --concurrency 10 --pool /p",
            "json-a.sparse: --trace json-a --planner reap,faast --cache cold --runs 3",
        ]
    );
}

#[test]
fn an_unknown_shape_is_an_error() {
    let settings = Settings {
        out: "/o".into(),
        traces: vec!["json-a".to_owned()],
        shapes: vec!["eleven".to_owned()],
        planners: PLANNERS.to_owned(),
        runs: "1".to_owned(),
        runs_of_ten: "1".to_owned(),
        pool: None,
    };
    let error = sessions(&settings).err().unwrap().to_string();
    assert_eq!(
        error,
        "there is no shape eleven; the shapes are one, ten, different, sparse, sanitised"
    );
}

#[test]
fn a_session_with_a_result_is_not_measured_again() {
    let folder = tempfile::tempdir().unwrap();
    let context = context_with_firn(folder.path(), FIRN);
    let mut settings = Settings {
        out: folder.path().join("out"),
        traces: vec!["bad".to_owned(), "json-a".to_owned()],
        shapes: vec!["sparse".to_owned()],
        planners: PLANNERS.to_owned(),
        runs: "1".to_owned(),
        runs_of_ten: "1".to_owned(),
        pool: None,
    };
    let error = measure(&context, &settings).unwrap_err().to_string();
    assert_eq!(error, "failed: bad.sparse");
    assert_eq!(fs::read_to_string(folder.path().join("out/restores.md")).unwrap(), "1\n");
    settings.traces.remove(0);
    measure(&context, &settings).unwrap();
    let log = fs::read_to_string(folder.path().join("release/log")).unwrap();
    let thaws = log.lines().filter(|line| line.starts_with("bench thaw")).count();
    assert_eq!((thaws, log.lines().count()), (2, 4));
}
