//! `firn env` and `firn aws` as processes, with a shell and an aws command of the test's own.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

/// A command without the variables of AWS's clients.
fn command(program: &str) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("AWS_") {
            command.env_remove(name);
        }
    }
    command
}

const FIRN: &str = env!("CARGO_BIN_EXE_firn");
const SHOW: &str = "env | grep ^AWS_ | sort";

/// What a shell has after `eval $(firn env …)`.
fn evaluated(arguments: &str, set: &[(&str, &str)]) -> Vec<String> {
    let script = format!("eval $('{FIRN}' env {arguments}); eval $('{FIRN}' env); {SHOW}");
    let mut shell = command("sh");
    let output = shell.args(["-c", &script]).envs(set.iter().copied()).output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().lines().map(ToOwned::to_owned).collect()
}

#[test]
fn a_shell_evaluates_the_variables() {
    let local = "http://127.0.0.1:9700";
    let expected = |endpoint: &str, credentials: &[&str]| {
        let mut lines = vec![
            "AWS_DEFAULT_REGION=us-east-1".to_owned(),
            format!("AWS_ENDPOINT_URL_LAMBDA={endpoint}"),
            format!("AWS_ENDPOINT_URL_STS={endpoint}"),
            "AWS_REGION=us-east-1".to_owned(),
        ];
        lines.extend(credentials.iter().map(|line| (*line).to_owned()));
        lines.sort();
        lines
    };
    let any = ["AWS_ACCESS_KEY_ID=firn", "AWS_SECRET_ACCESS_KEY=firn"];
    assert_eq!(evaluated("", &[]), expected(local, &any));
    // The second `firn env` keeps the endpoint of the first.
    let other = "http://127.0.0.1:4566";
    assert_eq!(evaluated(&format!("--endpoint {other}"), &[]), expected(other, &any));
    let profile = evaluated("", &[("AWS_PROFILE", "mine")]);
    assert_eq!(profile, expected(local, &["AWS_PROFILE=mine"]));
    let file = evaluated("--credentials '/a b/$c;d'", &[]);
    assert_eq!(file, expected(local, &["AWS_SHARED_CREDENTIALS_FILE=/a b/$c;d"]));
    let output = command(FIRN).args(["env", "--endpoint", "127.0.0.1:9700"]).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("http://HOST:PORT"), "{output:?}");
}

#[test]
fn top_reads_the_variables_that_env_sets() {
    let error = |words: &str, set: &[(&str, &str)]| {
        let top =
            command(FIRN).arg("top").args(words.split(' ')).envs(set.iter().copied()).output();
        let output = top.unwrap();
        assert!(output.status.code() == Some(1) && output.stdout.is_empty(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    // Nothing listens on the ports 1 to 3.
    let [one, two, three] = ["http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3"];
    let lambda = ("AWS_ENDPOINT_URL_LAMBDA", one);
    let all = ("AWS_ENDPOINT_URL", two);
    let asked = |words: &str, set: &[(&str, &str)], endpoint: &str| {
        let error = error(words, set);
        assert!(error.contains(&format!("no daemon answers at {endpoint}: ")), "{error}");
    };
    asked("--once --json", &[lambda, all], one);
    asked("--json", &[all], two);
    asked("--once", &[("AWS_ENDPOINT_URL_LAMBDA", ""), all], two);
    let option = format!("--once --endpoint {three}");
    asked(&option, &[lambda, all], three);
    let error = error("--once", &[lambda, ("AWS_SHARED_CREDENTIALS_FILE", "/nonesuch/keys")]);
    assert!(error.contains("/nonesuch/keys"), "{error}");
}

#[test]
fn the_aws_command_gets_all_words_and_the_variables() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("aws");
    fs::write(&path, format!("#!/bin/sh\nfor word; do echo \"[$word]\"; done\n{SHOW}\nexit 7\n"))
        .unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    let search = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
    let words = ["lambda", "invoke", "--region", "x y", "--endpoint", "e", "--help"];
    let options = ["aws", "--endpoint", "http://127.0.0.1:4566"];
    let run = || command(FIRN).args(options).args(words).env("PATH", &search).output().unwrap();
    let output = run();
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let shown: String = words.iter().map(|word| format!("[{word}]\n")).collect();
    assert!(text.starts_with(&shown), "{text}");
    assert!(text.contains("AWS_ENDPOINT_URL_LAMBDA=http://127.0.0.1:4566\n"), "{text}");

    fs::remove_file(&path).unwrap();
    let output = command(FIRN).args(["aws", "sts"]).env("PATH", folder.path()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && text.contains("pip install awscli"), "{output:?}");
}
