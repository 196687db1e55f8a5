//! Resources before the start, and the answer of `GET /vm/config`.

use std::fs;

use serde_json::{Value, json};

use crate::player::{Player, has_kvm, replay};
use crate::process::Process;

#[test]
fn the_machine_is_configured_in_whole_and_in_part() {
    let process = Process::start();
    let machine = |vcpus: u64, mib: u64, tracks: bool| {
        json!({
            "vcpu_count": vcpus, "mem_size_mib": mib, "smt": false,
            "track_dirty_pages": tracks, "huge_pages": "None",
        })
    };
    assert_eq!(process.get("/machine-config"), machine(1, 128, false));
    process.put("/machine-config", &json!({ "vcpu_count": 2, "mem_size_mib": 256 }));
    assert_eq!(process.get("/machine-config"), machine(2, 256, false));
    process.patch("/machine-config", &json!({ "mem_size_mib": 64, "track_dirty_pages": true }));
    assert_eq!(process.get("/machine-config"), machine(2, 64, true));
    process.put(
        "/machine-config",
        &json!({ "vcpu_count": 1, "mem_size_mib": 256, "cpu_template": "None" }),
    );
    assert_eq!(process.get("/machine-config")["track_dirty_pages"], false);
    let error = process.refused("PATCH", "/machine-config", &json!({}));
    assert!(error.contains("it changes nothing"), "{error}");
    process.refused("PATCH", "/machine-config", &json!({ "mem_size_mib": 1, "vcpu_count": 99 }));
    process.patch("/machine-config", &json!({ "vcpu_count": 2, "smt": true }));
    let error = process.refused("PATCH", "/machine-config", &json!({ "vcpu_count": 3 }));
    assert_eq!(error, "vcpu_count is not valid: with smt, use 1 or an even number");
    assert_eq!(process.get("/machine-config")["mem_size_mib"], 256, "no part of it is applied");
}

#[test]
fn a_kernel_that_cannot_be_opened_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let kernel = dir.path().join("kernel");
    fs::write(&kernel, "").unwrap();
    let process = Process::start();
    let error =
        process.refused("PUT", "/boot-source", &json!({ "kernel_image_path": "/nonesuch" }));
    assert!(error.starts_with("kernel_image_path is not valid"), "{error}");
    let both = json!({ "kernel_image_path": kernel, "initrd_path": "/nonesuch" });
    let error = process.refused("PUT", "/boot-source", &both);
    assert!(error.starts_with("initrd_path is not valid"), "{error}");
    let source = json!({ "kernel_image_path": kernel, "boot_args": "quiet" });
    process.put("/boot-source", &source);
    assert_eq!(process.get("/vm/config")["boot-source"], source);
}

#[test]
fn metadata_is_put_and_patched() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("metadata.json");
    fs::write(&file, r#"{"from": "file"}"#).unwrap();
    let process = Process::with(&["--level", "Off", "--metadata", file.to_str().unwrap()]);
    assert_eq!(process.get("/mmds"), json!({ "from": "file" }));
    process.put("/mmds", &json!({ "a": { "b": 1, "c": 2 } }));
    process.patch("/mmds", &json!({ "a": { "b": null, "d": 3 } }));
    assert_eq!(process.get("/mmds"), json!({ "a": { "c": 2, "d": 3 } }));
    let empty = Process::with(&["--level", "Off", "--mmds-size-limit", "20"]);
    assert_eq!(empty.get("/mmds"), json!({}));
    let error = empty.refused("PATCH", "/mmds", &json!({ "a": 1 }));
    assert!(error.contains("put a document first"), "{error}");
    let error = empty.refused("PUT", "/mmds", &json!({ "a": "x".repeat(20) }));
    assert!(error.contains("the limit is 20"), "{error}");
}

#[test]
fn drives_are_configured_with_the_root_device_first() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| {
        let path = dir.path().join(name);
        fs::write(&path, [0; 4096]).unwrap();
        path
    };
    let process = Process::start();
    let data = json!({ "drive_id": "data", "is_root_device": false, "path_on_host": path("data"), "is_read_only": true });
    let root = json!({ "drive_id": "root", "is_root_device": true, "path_on_host": path("root"), "cache_type": "Writeback" });
    process.put("/drives/data", &data);
    process.put("/drives/root", &root);
    assert_eq!(process.get("/vm/config")["drives"], json!([root, data]));
    let mut second = root.clone();
    second["drive_id"] = json!("second");
    let error = process.refused("PUT", "/drives/second", &second);
    assert_eq!(error, "is_root_device is not valid: another drive is the root device");
    let mut replaced = data.clone();
    replaced["path_on_host"] = json!(path("other"));
    process.put("/drives/data", &replaced);
    assert_eq!(process.get("/vm/config")["drives"], json!([root, replaced]));
    let mut absent = data;
    absent["path_on_host"] = json!("/nonesuch");
    let error = process.refused("PUT", "/drives/data", &absent);
    assert!(error.starts_with("path_on_host is not valid: cannot open /nonesuch"), "{error}");
}

#[test]
fn vsock_balloon_entropy_and_serial_are_configured() {
    let process = Process::start();
    let error = process.refused("PUT", "/vsock", &json!({ "guest_cid": 2, "uds_path": "/x" }));
    assert_eq!(error, "guest_cid is not valid: use at least 3");
    let error = process.refused("PUT", "/vsock", &json!({ "guest_cid": 3, "uds_path": "" }));
    assert_eq!(error, "uds_path is not valid: it is empty");
    process.put("/vsock", &json!({ "guest_cid": 3, "uds_path": "/x", "vsock_id": "old" }));
    let error = process.refused("GET", "/balloon", &Value::Null);
    assert_eq!(error, "the microVM has no balloon");
    let balloon = json!({ "amount_mib": 0, "deflate_on_oom": true, "free_page_reporting": true });
    process.put("/balloon", &balloon);
    let found = process.get("/balloon");
    assert_eq!(
        (&found["deflate_on_oom"], &found["free_page_reporting"]),
        (&json!(true), &json!(true))
    );
    process.put("/entropy", &json!({}));
    process.put("/serial", &json!({}));
    let config = process.get("/vm/config");
    assert_eq!(config["vsock"]["guest_cid"], 3);
    assert_eq!(config["entropy"], json!({}));
    assert_eq!(config["serial"], json!({}));
}

#[test]
fn networks_that_are_not_valid_are_refused() {
    let process = Process::start();
    let network = |more: Value| {
        let mut body = json!({ "iface_id": "eth0", "host_dev_name": "firn-nonesuch" });
        for (name, value) in more.as_object().unwrap() {
            body[name] = value.clone();
        }
        process.refused("PUT", "/network-interfaces/eth0", &body)
    };
    assert!(network(json!({})).contains("there is no network interface firn-nonesuch"));
    assert!(network(json!({ "guest_mac": "1:2" })).starts_with("guest_mac is not valid"));
    assert!(network(json!({ "mtu": 67 })).starts_with("mtu is not valid"));
    let error = process.refused("PUT", "/mmds/config", &json!({ "network_interfaces": ["eth0"] }));
    assert_eq!(error, "network_interfaces is not valid: there is no network device \"eth0\"");
    let error = process.refused("PUT", "/mmds/config", &json!({ "network_interfaces": [] }));
    assert_eq!(error, "network_interfaces is not valid: name at least one");
}

#[test]
fn a_microvm_with_devices_is_saved_and_loaded() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let player = Player::new(dir.path());
    for name in ["disk", "other"] {
        fs::write(path(name), [0; 1 << 16]).unwrap();
    }
    let drive = json!({ "drive_id": "d", "is_root_device": false, "path_on_host": path("disk") });
    let process = Process::start();
    process.put("/drives/d", &drive);
    process.put("/vsock", &json!({ "guest_cid": 7, "uds_path": path("vsock") }));
    process.put("/entropy", &json!({}));
    process.put(
        "/balloon",
        &json!({ "amount_mib": 1, "deflate_on_oom": false, "stats_polling_interval_s": 1 }),
    );
    player.boot(&process);
    assert!(path("vsock").exists());
    process.patch("/drives/d", &json!({ "drive_id": "d", "path_on_host": path("other") }));
    let limit = json!({ "bandwidth": { "size": 1000, "refill_time": 100, "one_time_burst": 5 } });
    process.patch("/drives/d", &json!({ "drive_id": "d", "rate_limiter": limit }));
    assert_eq!(process.get("/vm/config")["drives"][0]["path_on_host"], json!(path("other")));
    let error = process.refused("PATCH", "/drives/x", &json!({ "drive_id": "x" }));
    assert_eq!(error, "the microVM has no drive \"x\"");
    process.patch("/balloon", &json!({ "amount_mib": 2 }));
    assert_eq!(process.get("/balloon")["amount_mib"], 2);
    let error = process.refused("PATCH", "/balloon", &json!({ "amount_mib": player.memory + 1 }));
    let memory = format!("amount_mib is not valid: the guest has {} MiB of memory", player.memory);
    assert_eq!(error, memory);
    assert_eq!(
        process.get("/balloon/statistics"),
        json!({ "target_pages": 512, "target_mib": 2, "actual_pages": 0, "actual_mib": 0 })
    );
    process.patch("/balloon/statistics", &json!({ "stats_polling_interval_s": 2 }));
    let error =
        process.refused("PATCH", "/balloon/statistics", &json!({ "stats_polling_interval_s": 0 }));
    assert!(error.contains("statistics are enabled before the boot"), "{error}");
    let files = process.save(dir.path());
    let config = process.get("/vm/config");
    drop(process);

    let mut load = files;
    load["resume_vm"] = json!(true);
    let mut process = Process::start();
    // The first process left its socket.
    let error = process.refused("PUT", "/snapshot/load", &load);
    assert!(error.starts_with("uds_path is not valid: cannot bind "), "{error}");
    load["vsock_override"] = json!({ "uds_path": path("vsock2") });
    process.put("/snapshot/load", &load);
    assert!(path("vsock2").exists());
    let loaded = process.get("/vm/config");
    for name in ["drives", "entropy", "balloon"] {
        assert_eq!(loaded[name], config[name], "{name}");
    }
    assert_eq!(loaded["vsock"]["uds_path"], json!(path("vsock2")));
    assert_eq!(loaded["vsock"]["guest_cid"], 7);
    assert_eq!(process.get("/balloon/statistics")["target_mib"], 2);
    replay(&mut process);
}

#[test]
fn overrides_of_devices_that_the_snapshot_lacks_are_refused() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let process = Process::start();
    Player::new(dir.path()).boot(&process);
    let files = process.save(dir.path());
    let process = Process::start();
    let mut load = files.clone();
    load["network_overrides"] = json!([{ "iface_id": "eth0", "host_dev_name": "tap0" }]);
    let error = process.refused("PUT", "/snapshot/load", &load);
    assert_eq!(error, "the microVM has no network device \"eth0\"");
    let mut load = files;
    load["vsock_override"] = json!({ "uds_path": path("vsock") });
    let error = process.refused("PUT", "/snapshot/load", &load);
    assert_eq!(error, "the snapshot's microVM has no vsock");
}

#[test]
fn the_serial_port_writes_to_a_file() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("serial");
    let player = Player::new(dir.path());
    let process = Process::start();
    process.put("/serial", &json!({ "serial_out_path": output }));
    player.configure(&process, false);
    process.start_instance();
    let begin = std::time::Instant::now();
    while fs::read_to_string(&output).unwrap() != "READY\n" {
        assert!(begin.elapsed().as_secs() < 60);
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}
