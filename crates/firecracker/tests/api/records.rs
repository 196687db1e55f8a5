//! Log and metrics.

use std::fs;

use serde_json::{Value, json};

use crate::player::{Player, has_kvm};
use crate::process::Process;

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn metrics_count_requests_since_the_last_flush() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("metrics");
    let process =
        Process::with(&["--level", "Off", "--start-time-us", "1", "--start-time-cpu-us", "0"]);
    let flush = json!({ "action_type": "FlushMetrics" });
    // Without a file there is nothing to do.
    process.put("/actions", &flush);
    process.put("/metrics", &json!({ "metrics_path": file }));
    let error = process.refused("PUT", "/metrics", &json!({ "metrics_path": file }));
    assert_eq!(error, "the metrics have a file already: it cannot be changed");
    process.put("/machine-config", &json!({ "vcpu_count": 1, "mem_size_mib": 128 }));
    process.refused("PUT", "/machine-config", &json!({ "vcpu_count": 0, "mem_size_mib": 128 }));
    process.get("/");
    process.put("/actions", &flush);
    process.put("/actions", &flush);
    let found = lines(&fs::read_to_string(file).unwrap());
    let [first, second] = &found[..] else { panic!("{found:?}") };
    let puts = &first["put_api_requests"];
    assert_eq!((&puts["machine_cfg_count"], &puts["machine_cfg_fails"]), (&json!(2), &json!(1)));
    assert_eq!((&puts["actions_count"], &puts["actions_fails"]), (&json!(1), &json!(0)));
    assert_eq!(first["get_api_requests"]["instance_info_count"], 1);
    assert!(first["utc_timestamp_ms"].as_u64().unwrap() > 1_600_000_000_000);
    assert!(first["api_server"]["process_startup_time_us"].as_u64().unwrap() > 0);
    assert!(first["api_server"]["process_startup_time_cpu_us"].as_u64().unwrap() > 0);
    assert_eq!(second["put_api_requests"]["machine_cfg_count"], 0);
    assert_eq!(second["put_api_requests"]["actions_count"], 1);
}

#[test]
fn metrics_have_times_and_are_flushed_at_the_end() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("metrics");
    let player = Player::new(dir.path());
    let process = Process::with(&["--level", "Off", "--metrics-path", file.to_str().unwrap()]);
    player.boot(&process);
    process.pause();
    let files =
        json!({ "snapshot_path": dir.path().join("s"), "mem_file_path": dir.path().join("m") });
    process.put("/snapshot/create", &files);
    process.resume();
    process.put("/actions", &json!({ "action_type": "FlushMetrics" }));
    let found = lines(&fs::read_to_string(&file).unwrap());
    // The first line is that of the start.
    assert_eq!(found[0]["put_api_requests"]["actions_count"], 1);
    let latency = |name: &str| found[1]["latencies_us"][name].as_u64().unwrap();
    for name in ["full_create_snapshot", "pause_vm", "resume_vm"] {
        let own = latency(&format!("vmm_{name}"));
        assert!(own <= latency(name), "{found:?}");
    }
    assert!(latency("vmm_full_create_snapshot") > 0, "{found:?}");
    assert_eq!((latency("diff_create_snapshot"), latency("vmm_load_snapshot")), (0, 0));
}

#[test]
fn metrics_count_what_devices_and_processors_do() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("metrics");
    let process = Process::with(&["--level", "Off", "--metrics-path", file.to_str().unwrap()]);
    let disk = dir.path().join("disk");
    fs::write(&disk, [0; 4096]).unwrap();
    let drive = json!({ "drive_id": "data", "is_root_device": false, "path_on_host": disk });
    process.put("/drives/data", &drive);
    process.refused("PUT", "/drives/data", &json!({ "drive_id": 1 }));
    Player::new(dir.path()).boot(&process);
    process.patch("/drives/data", &json!({ "drive_id": "data", "path_on_host": disk }));
    let absent = json!({ "drive_id": "data", "path_on_host": "/nonesuch/disk" });
    process.refused("PATCH", "/drives/data", &absent);
    let flush = json!({ "action_type": "FlushMetrics" });
    process.put("/actions", &flush);
    process.put("/actions", &flush);
    let found = lines(&fs::read_to_string(&file).unwrap());
    let [first, second, last] = &found[..] else { panic!("{found:?}") };
    let of = |line: &Value, group: &str, name: &str| line[group][name].as_u64().unwrap();
    let count = |group: &str, name: &str| of(first, group, name) + of(second, group, name);
    // The player writes to its console.
    assert!(count("uart", "write_count") > 0, "{found:?}");
    assert!(count("vcpu", "exit_io_out") >= count("uart", "write_count"), "{found:?}");
    let time = &second["vcpu"]["exit_io_out_agg"];
    let [shortest, longest, sum] =
        ["min_us", "max_us", "sum_us"].map(|name| time[name].as_u64().unwrap());
    assert!(shortest <= longest && longest > 0, "{time}");
    assert!(sum + first["vcpu"]["exit_io_out_agg"]["sum_us"].as_u64().unwrap() >= longest);
    assert!(count("vmm", "device_events") > 0, "{found:?}");
    assert_eq!(count("put_api_requests", "drive_count"), 2);
    assert_eq!(count("put_api_requests", "drive_fails"), 1);
    for group in ["block", "block_data"] {
        assert_eq!((count(group, "update_count"), count(group, "update_fails")), (1, 1));
        assert_eq!(count(group, "read_count"), 0);
        assert_eq!(of(last, group, "update_count"), 0);
    }
    // The guest has none of these.
    for (group, name) in [("net", "rx_count"), ("vsock", "conns_added"), ("i8042", "error_count")] {
        assert_eq!(count(group, name), 0);
    }
}

#[test]
fn a_file_of_metrics_that_cannot_be_opened_is_refused() {
    let process = Process::start();
    let error = process.refused("PUT", "/metrics", &json!({ "metrics_path": "/nonesuch/metrics" }));
    assert!(
        error.starts_with("metrics_path is not valid: cannot open /nonesuch/metrics"),
        "{error}"
    );
}

#[test]
fn the_log_has_requests_and_errors() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("log");
    let process = Process::start();
    let error = process.refused("PUT", "/logger", &json!({ "level": "Loud" }));
    assert!(error.contains("unknown level \"Loud\""), "{error}");
    let error = process.refused("PUT", "/logger", &json!({ "log_path": "/nonesuch/log" }));
    assert!(error.starts_with("cannot open log_path"), "{error}");
    let logger = json!({
        "log_path": file, "level": "info", "show_level": true, "show_log_origin": true,
    });
    process.put("/logger", &logger);
    process.get("/version");
    process.refused("GET", "/nonesuch", &Value::Null);
    process.put("/logger", &json!({ "level": "Error", "show_log_origin": false }));
    process.get("/version");
    process.refused("GET", "/nonesuch", &Value::Null);
    let log = fs::read_to_string(file).unwrap();
    let found: Vec<_> = log.lines().map(|line| line.split_once(" [").unwrap().1).collect();
    let requests = found.iter().filter(|line| line.contains("received a GET request")).count();
    assert_eq!(requests, 2, "{log}");
    let origin = found.iter().find(|line| line.contains("\"/version\"")).unwrap();
    assert!(
        origin.starts_with("anonymous-instance:fc_api:INFO:crates/firecracker/src/api/mod.rs:")
    );
    let last = found.last().unwrap();
    assert!(last.starts_with("anonymous-instance:fc_api:ERROR] Received Error."), "{last}");
}
