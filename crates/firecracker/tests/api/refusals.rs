//! Requests that are not valid.

use serde_json::{Value, json};

use crate::process::{Process, fault};

#[test]
fn paths_and_methods_that_do_not_exist_are_refused() {
    let process = Process::start();
    for (method, path) in [
        ("GET", "/nonesuch"),
        ("GET", "/machine-config/"),
        ("GET", "/actions"),
        ("DELETE", "/machine-config"),
        ("POST", "/actions"),
        ("PUT", "/drives"),
        ("PATCH", "/boot-source"),
    ] {
        let error = process.refused(method, path, &Value::Null);
        assert_eq!(error, format!("Invalid request method and/or path: {method} {path}."));
    }
}

#[test]
fn bodies_that_are_not_valid_are_refused() {
    let process = Process::start();
    assert_eq!(process.refused("PUT", "/actions", &Value::Null), "the request has no body");
    assert_eq!(process.refused("GET", "/", &json!({})), "a GET request cannot have a body");
    let (status, answer) = process.send("PUT", "/actions", b"{");
    assert_eq!(status, 400);
    assert!(fault(&answer).starts_with("the body is not valid: EOF"), "{answer}");
    let error = process.refused("PUT", "/mmds", &json!([1]));
    assert_eq!(error, "the body is not a JSON object");
}

#[test]
fn unknown_fields_and_values_are_refused_everywhere() {
    let process = Process::start();
    let required = [
        ("PUT", "/actions", json!({ "action_type": "InstanceStart" })),
        ("PUT", "/machine-config", json!({ "vcpu_count": 1, "mem_size_mib": 128 })),
        ("PATCH", "/machine-config", json!({ "vcpu_count": 1 })),
        ("PUT", "/boot-source", json!({ "kernel_image_path": "/x" })),
        ("PATCH", "/vm", json!({ "state": "Paused" })),
        ("PUT", "/snapshot/create", json!({ "snapshot_path": "/x", "mem_file_path": "/y" })),
        ("PUT", "/snapshot/load", json!({ "snapshot_path": "/x", "mem_file_path": "/y" })),
        ("PUT", "/firn/planner", json!({ "planner": "firecracker" })),
        ("PUT", "/logger", json!({})),
        ("PUT", "/metrics", json!({ "metrics_path": "/x" })),
        ("PUT", "/drives/a", json!({ "drive_id": "a", "is_root_device": false })),
        ("PATCH", "/drives/a", json!({ "drive_id": "a" })),
        ("PUT", "/network-interfaces/a", json!({ "iface_id": "a", "host_dev_name": "tap0" })),
        ("PATCH", "/network-interfaces/a", json!({ "iface_id": "a" })),
        ("PUT", "/vsock", json!({ "guest_cid": 3, "uds_path": "/x" })),
        ("PUT", "/mmds/config", json!({ "network_interfaces": [] })),
        ("PUT", "/balloon", json!({ "amount_mib": 0, "deflate_on_oom": true })),
        ("PATCH", "/balloon", json!({ "amount_mib": 0 })),
        ("PATCH", "/balloon/statistics", json!({ "stats_polling_interval_s": 1 })),
        ("PUT", "/entropy", json!({})),
        ("PUT", "/serial", json!({})),
    ];
    for (method, path, body) in required {
        for name in body.as_object().unwrap().keys() {
            let mut other = body.clone();
            other[name] = json!({ "of": "another type" });
            let error = process.refused(method, path, &other);
            assert!(
                error.starts_with("the body is not valid: "),
                "{method} {path} {name}: {error}"
            );
        }
        let mut more = body;
        more["nonesuch"] = json!(1);
        let error = process.refused(method, path, &more);
        let expected = "the body is not valid: unknown field `nonesuch`";
        assert!(error.starts_with(expected), "{method} {path}: {error}");
    }
    let error = process.refused("PUT", "/actions", &json!({ "action_type": "Reboot" }));
    assert!(error.contains("unknown variant `Reboot`"), "{error}");
    let error = process.refused("PATCH", "/vm", &json!({ "state": "Stopped" }));
    assert!(error.contains("unknown variant `Stopped`"), "{error}");
}

#[test]
fn ids_in_path_and_body_are_checked() {
    let process = Process::start();
    let drive = json!({ "drive_id": "b", "is_root_device": false });
    let error = process.refused("PUT", "/drives/a", &drive);
    assert_eq!(error, "drive_id is not valid: \"b\" is not the id in the path, \"a\"");
    let network = json!({ "iface_id": "a-b", "host_dev_name": "tap0" });
    let error = process.refused("PUT", "/network-interfaces/a-b", &network);
    assert!(error.starts_with("the id \"a-b\" in the path is not valid"), "{error}");
}

#[test]
fn a_body_beyond_the_limit_is_refused() {
    let process = Process::with(&["--level", "Off", "--http-api-max-payload-size", "64"]);
    let fits = json!({ "a": "x".repeat(50) });
    process.put("/mmds", &fits);
    let body = json!({ "a": "x".repeat(64) }).to_string();
    let (status, answer) = process.send("PUT", "/mmds", body.as_bytes());
    assert_eq!(status, 413);
    assert!(fault(&answer).contains("more than 64 bytes"), "{answer}");
    assert_eq!(process.get("/mmds"), fits);
}

#[test]
fn what_firn_does_not_have_is_refused_by_name() {
    let process = Process::start();
    for (method, path) in [
        ("PUT", "/cpu-config"),
        ("PUT", "/pmem/a"),
        ("PATCH", "/pmem/a"),
        ("PUT", "/hotplug/memory"),
        ("PATCH", "/hotplug/memory"),
        ("GET", "/hotplug/memory"),
        ("PATCH", "/balloon/hinting/start"),
        ("PATCH", "/balloon/hinting/stop"),
        ("GET", "/balloon/hinting/status"),
    ] {
        let error = process.refused(method, path, &Value::Null);
        assert!(error.ends_with(" is not supported by firn"), "{path}: {error}");
    }
    let machine = |field: &str, value: Value| {
        let mut body = json!({ "vcpu_count": 1, "mem_size_mib": 128 });
        body[field] = value;
        process.refused("PUT", "/machine-config", &body)
    };
    assert!(machine("cpu_template", json!("V1N1")).starts_with("cpu_template is not supported"));
    assert!(machine("huge_pages", json!("2M")).starts_with("huge_pages is not supported"));
    assert!(machine("vcpu_count", json!(0)).starts_with("vcpu_count is not valid"));
    assert!(machine("vcpu_count", json!(33)).starts_with("vcpu_count is not valid"));
    assert!(machine("mem_size_mib", json!(0)).starts_with("mem_size_mib is not valid"));
    let drive = |field: &str, value: Value| {
        let mut body =
            json!({ "drive_id": "a", "is_root_device": false, "path_on_host": "/dev/null" });
        body[field] = value;
        process.refused("PUT", "/drives/a", &body)
    };
    assert!(drive("socket", json!("/x")).starts_with("socket is not supported"));
    assert!(drive("io_engine", json!("Async")).starts_with("io_engine is not supported"));
    assert!(drive("path_on_host", Value::Null).starts_with("path_on_host is not valid"));
    let hinting = json!({ "amount_mib": 0, "deflate_on_oom": true, "free_page_hinting": true });
    let error = process.refused("PUT", "/balloon", &hinting);
    assert!(error.starts_with("free_page_hinting is not supported"), "{error}");
    let bucket = json!({ "size": 1, "refill_time": 1 });
    let error = process.refused("PUT", "/serial", &json!({ "rate_limiter": bucket }));
    assert!(error.starts_with("rate_limiter is not supported"), "{error}");
}
