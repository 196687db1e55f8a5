//! Network devices on tap devices.

use std::net::Ipv4Addr;

use firn_required::{TapDevice, in_own_network};
use serde_json::json;

use crate::player::{Player, has_kvm, replay};
use crate::process::Process;

#[test]
fn a_microvm_with_a_tap_device_is_loaded_with_another() {
    if has_kvm() {
        in_own_network(load_with_another_tap);
    }
}

fn load_with_another_tap() {
    let taps = ["fc-tap0", "fc-tap1"];
    let _made = taps.map(|name| TapDevice::create(name, Ipv4Addr::new(192, 0, 2, 1)).unwrap());
    let dir = tempfile::tempdir().unwrap();
    let process = Process::start();
    let bucket = json!({ "size": 1_000_000, "refill_time": 100 });
    let network = json!({
        "iface_id": "eth0", "host_dev_name": taps[0], "guest_mac": "06:00:00:00:00:01", "mtu": 1400,
        "rx_rate_limiter": { "bandwidth": bucket },
    });
    process.put("/network-interfaces/eth0", &network);
    let mut other = network.clone();
    other["iface_id"] = json!("eth1");
    let error = process.refused("PUT", "/network-interfaces/eth1", &other);
    assert_eq!(error, "host_dev_name is not valid: the network device eth0 has it");
    other["host_dev_name"] = json!(taps[1]);
    let error = process.refused("PUT", "/network-interfaces/eth1", &other);
    assert_eq!(error, "guest_mac is not valid: the network device eth0 has it");
    let mut mmds =
        json!({ "network_interfaces": ["eth0"], "version": "V2", "ipv4_address": "10.0.0.1" });
    let error = process.refused("PUT", "/mmds/config", &mmds);
    assert!(error.starts_with("ipv4_address is not valid: use a link-local address"), "{error}");
    mmds["ipv4_address"] = json!("169.254.170.2");
    process.put("/mmds/config", &mmds);
    Player::new(dir.path()).boot(&process);
    let limits = json!({ "iface_id": "eth0", "tx_rate_limiter": { "ops": bucket } });
    process.patch("/network-interfaces/eth0", &limits);
    let found = process.get("/vm/config")["network-interfaces"][0].clone();
    assert_eq!(found["tx_rate_limiter"], limits["tx_rate_limiter"]);
    assert_eq!(found["rx_rate_limiter"], network["rx_rate_limiter"]);
    let unknown = json!({ "iface_id": "eth9" });
    let error = process.refused("PATCH", "/network-interfaces/eth9", &unknown);
    assert_eq!(error, "the microVM has no network device \"eth9\"");
    let files = process.save(dir.path());

    // The first process still has its tap device.
    let mut second = Process::start();
    let mut load = files;
    load["resume_vm"] = json!(true);
    let error = second.refused("PUT", "/snapshot/load", &load);
    assert!(error.contains("the tap device fc-tap0 is in use"), "{error}");
    let network = json!([{ "iface_id": "eth0", "host_dev_name": taps[1] }]);
    load["network_overrides"] = network;
    second.put("/snapshot/load", &load);
    let config = second.get("/vm/config");
    assert_eq!(config["network-interfaces"][0]["host_dev_name"], taps[1]);
    assert_eq!(config["mmds-config"]["version"], "V2");
    replay(&mut second);
}
