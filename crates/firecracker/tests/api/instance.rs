//! The life of a microVM: boot, pause, resume, end.

use serde_json::json;

use crate::player::{Player, has_kvm, replay};
use crate::process::Process;

#[test]
fn an_instance_describes_itself() {
    let process = Process::with(&["--level", "Off", "--id", "vm-1"]);
    let instance = process.get("/");
    let version = instance["vmm_version"].clone();
    let expected = json!({
        "app_name": "Firecracker", "id": "vm-1", "state": "Not started", "vmm_version": version,
    });
    assert_eq!(instance, expected);
    assert_eq!(process.get("/version"), json!({ "firecracker_version": version }));
}

#[test]
fn a_kernel_boots_and_pauses_and_resumes() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let player = Player::new(dir.path());
    let mut process = Process::start();
    player.boot(&process);
    assert_eq!(process.get("/")["state"], "Running");
    process.pause();
    process.pause();
    assert_eq!(process.get("/")["state"], "Paused");
    process.resume();
    assert_eq!(process.get("/")["state"], "Running");
    replay(&mut process);
    assert!(process.runs());
}

#[test]
fn what_comes_too_early_or_too_late_is_refused() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let player = Player::new(dir.path());
    let process = Process::start();
    let early = "The requested operation is not supported before starting the microVM.";
    let late = "The requested operation is not supported after starting the microVM.";
    let create = json!({ "snapshot_path": "/x", "mem_file_path": "/y" });
    let act = |action: &str| json!({ "action_type": action });
    let only_after = [
        ("PATCH", "/vm", json!({ "state": "Paused" })),
        ("PUT", "/snapshot/create", create),
        ("PUT", "/actions", act("SendCtrlAltDel")),
        ("PATCH", "/drives/a", json!({ "drive_id": "a" })),
        ("PATCH", "/network-interfaces/a", json!({ "iface_id": "a" })),
        ("PATCH", "/balloon", json!({ "amount_mib": 0 })),
    ];
    for (method, path, body) in &only_after {
        assert_eq!(process.refused(method, path, body), early, "{method} {path}");
    }
    let error = process.refused("PUT", "/actions", &act("InstanceStart"));
    assert_eq!(error, "there is no kernel: PUT /boot-source");
    player.boot(&process);
    let file = dir.path().join("file");
    std::fs::write(&file, [0; 512]).unwrap();
    let drive = json!({ "drive_id": "a", "is_root_device": false, "path_on_host": file });
    let only_before = [
        ("PUT", "/machine-config", json!({ "vcpu_count": 1, "mem_size_mib": 128 })),
        ("PATCH", "/machine-config", json!({ "vcpu_count": 1 })),
        ("PUT", "/boot-source", json!({ "kernel_image_path": player.kernel })),
        ("PUT", "/actions", act("InstanceStart")),
        ("PUT", "/logger", json!({ "level": "Info" })),
        ("PUT", "/metrics", json!({ "metrics_path": dir.path().join("metrics") })),
        ("PUT", "/firn/planner", json!({ "planner": "firecracker" })),
        ("PUT", "/drives/a", drive),
        ("PUT", "/network-interfaces/a", json!({ "iface_id": "a", "host_dev_name": "tap0" })),
        ("PUT", "/vsock", json!({ "guest_cid": 3, "uds_path": "/x" })),
        ("PUT", "/mmds/config", json!({ "network_interfaces": ["a"] })),
        ("PUT", "/balloon", json!({ "amount_mib": 0, "deflate_on_oom": true })),
        ("PUT", "/entropy", json!({})),
        ("PUT", "/serial", json!({})),
        ("PUT", "/snapshot/load", json!({ "snapshot_path": "/x", "mem_file_path": "/y" })),
    ];
    for (method, path, body) in &only_before {
        assert_eq!(process.refused(method, path, body), late, "{method} {path}");
    }
}

#[test]
fn a_start_that_failed_can_be_repeated() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let player = Player::new(dir.path());
    let process = Process::start();
    let text = dir.path().join("text");
    std::fs::write(&text, "no kernel").unwrap();
    process.put("/boot-source", &json!({ "kernel_image_path": text }));
    let error = process.refused("PUT", "/actions", &json!({ "action_type": "InstanceStart" }));
    assert!(error.contains("is not a bootable kernel"), "{error}");
    assert_eq!(process.get("/")["state"], "Not started");
    player.boot(&process);
}

#[test]
fn a_guest_that_ends_ends_the_process() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let player = Player::new(dir.path());
    // Without its entry's first instructions the guest faults, without a handler.
    let mut kernel = std::fs::read(&player.kernel).unwrap();
    kernel[4096..8192].fill(0xff);
    std::fs::write(&player.kernel, kernel).unwrap();
    let process = Process::start();
    player.configure(&process, false);
    process.start_instance();
    assert_eq!(process.wait().code(), Some(0));
}

#[test]
fn ctrl_alt_del_is_sent() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let process = Process::start();
    Player::new(dir.path()).boot(&process);
    // The player reads no keyboard, so it goes on.
    process.put("/actions", &json!({ "action_type": "SendCtrlAltDel" }));
    assert_eq!(process.get("/")["state"], "Running");
}
