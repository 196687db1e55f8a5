//! The command line, the configuration file and exit codes.

use std::fs;
use std::io::Write;
use std::process::Stdio;

use serde_json::json;

use crate::player::{Player, has_kvm, replay};
use crate::process::{Process, command, run};

#[test]
fn the_version_is_printed() {
    let output = run(&["--version"]);
    assert_eq!(output.status.code(), Some(0));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.starts_with("Firecracker v1."), "{text}");
}

#[test]
fn wrong_arguments_have_an_exit_code_of_their_own() {
    for words in [
        &["--nonesuch"][..],
        &["--no-api"],
        &["--id", "under_score"],
        &["--level", "Loud"],
        &["--seccomp-filter", "x"],
        &["--boot-timer"],
        &["--http-api-max-payload-size", "many"],
    ] {
        assert_eq!(run(words).status.code(), Some(153), "{words:?}");
    }
    assert_eq!(run(&["--help"]).status.code(), Some(0));
}

#[test]
fn a_socket_that_exists_is_refused() {
    let process = Process::start();
    let output = run(&["--api-sock", process.socket().to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("Failed to open the API socket at: "), "{text}");
}

#[test]
fn a_configuration_that_is_not_valid_has_an_exit_code_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("api.sock");
    let file = dir.path().join("config.json");
    for text in [
        "{",
        "{}",
        r#"{"nonesuch": 1}"#,
        r#"{"boot-source": {"kernel_image_path": "/nonesuch"}}"#,
        r#"{"boot-source": {"kernel_image_path": "/dev/null"}, "machine-config": {"vcpu_count": 0, "mem_size_mib": 1}}"#,
    ] {
        fs::write(&file, text).unwrap();
        let words =
            ["--config-file", file.to_str().unwrap(), "--api-sock", socket.to_str().unwrap()];
        assert_eq!(run(&words).status.code(), Some(152), "{text}");
        let _ = fs::remove_file(&socket);
        let words = ["--config-file", file.to_str().unwrap(), "--no-api"];
        assert_eq!(run(&words).status.code(), Some(152), "{text}");
    }
    let words = ["--config-file", "/nonesuch", "--no-api"];
    assert_eq!(run(&words).status.code(), Some(152));
}

#[test]
fn a_configuration_file_starts_the_microvm() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let player = Player::new(dir.path());
    let file = dir.path().join("config.json");
    let config = json!({
        "boot-source": { "kernel_image_path": player.kernel },
        "machine-config": { "vcpu_count": 1, "mem_size_mib": player.memory },
        "drives": [],
        // Clients write what they do not use, too.
        "cpu-config": null,
        "logger": { "level": "Off" },
        "metrics": { "metrics_path": dir.path().join("metrics") },
    });
    fs::write(&file, config.to_string()).unwrap();
    let mut process = Process::with(&["--level", "Off", "--config-file", file.to_str().unwrap()]);
    assert_eq!(process.line(), "READY");
    assert_eq!(process.get("/")["state"], "Running");
    let found = process.get("/vm/config");
    for name in ["boot-source", "metrics", "logger"] {
        assert_eq!(found[name], config[name], "{name}");
    }
    replay(&mut process);
}

#[test]
fn a_configuration_file_without_a_kernel_selects_a_planner() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config.json");
    let planner = json!({ "planner": "dram_cached" });
    fs::write(&file, json!({ "firn-planner": planner }).to_string()).unwrap();
    let process = Process::with(&["--level", "Off", "--config-file", file.to_str().unwrap()]);
    assert_eq!(process.get("/vm/config")["firn-planner"], planner);
    assert_eq!(process.get("/")["state"], "Not started");
}

#[test]
fn without_an_api_there_is_no_socket() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let player = Player::new(dir.path());
    let (file, socket) = (dir.path().join("config.json"), dir.path().join("api.sock"));
    let config = json!({
        "boot-source": { "kernel_image_path": player.kernel },
        "machine-config": { "vcpu_count": 1, "mem_size_mib": player.memory },
    });
    fs::write(&file, config.to_string()).unwrap();
    let mut child = command()
        .args(["--no-api", "--level", "Off", "--config-file"])
        .arg(&file)
        .arg("--api-sock")
        .arg(&socket)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"\n").unwrap();
    let stdout = std::io::BufReader::new(child.stdout.take().unwrap());
    let mut lines = std::io::BufRead::lines(stdout);
    assert_eq!(lines.next().unwrap().unwrap(), "READY");
    assert!(lines.next().unwrap().unwrap().starts_with("DONE 1024 "));
    assert_eq!(lines.next().unwrap().unwrap(), "END 0");
    assert!(!socket.exists());
    child.kill().unwrap();
    child.wait().unwrap();
}
