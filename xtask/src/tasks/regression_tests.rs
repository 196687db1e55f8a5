use std::fs;

use super::{SESSIONS, regression_since};
use crate::tasks::tests::context_with_firn;

/// A program in place of firn. A comparison finds a regression in the session `ten`.
const FIRN: &str = r#"#!/bin/sh
echo "$*" >>"$(dirname "$0")/log"
case $* in
    "bench thaw"*) echo {} >"$4" ;;
    *"/ten.json "*) exit 4 ;;
esac
"#;

#[test]
fn later_runs_are_compared_with_the_first() {
    let folder = tempfile::tempdir().unwrap();
    let context = context_with_firn(folder.path(), FIRN);
    let base = folder.path().join("base");
    let log = || {
        let text = fs::read_to_string(folder.path().join("release/log")).unwrap();
        fs::remove_file(folder.path().join("release/log")).unwrap();
        text.replace(&base.display().to_string(), "base")
    };
    regression_since(&context, &base, None).unwrap();
    let first = log();
    for (line, (name, arguments)) in first.lines().zip(SESSIONS) {
        assert_eq!(line, format!("bench thaw --json base/{name}.json {arguments}"));
    }
    assert_eq!(first.lines().count(), SESSIONS.len());
    let error = regression_since(&context, &base, None).unwrap_err().to_string();
    assert_eq!(error, "regressed or failed: ten");
    let second = log();
    assert!(second.contains("bench compare base/cold.json base/new/cold.json\n"), "{second}");
    assert_eq!(second.lines().count(), 2 * SESSIONS.len());
    fs::remove_file(base.join("ten.json")).unwrap();
    regression_since(&context, &base, Some("/p")).unwrap();
    let third = log();
    let of_ten = SESSIONS.iter().find(|(name, _)| *name == "ten").map(|(_, arguments)| arguments);
    let measured = format!("--json base/ten.json {} --warm-up 1 --pool /p\n", of_ten.unwrap());
    assert!(third.ends_with(&measured), "{third}");
}
