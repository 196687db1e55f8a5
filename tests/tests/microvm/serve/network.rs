//! The network of functions.

use std::io::Read;
use std::net::Ipv4Addr;

use firn_required::TapDevice;
use firn_tests::{Daemon, World};
use serde_json::json;

use crate::network::with_taps;

/// Sends the bytes in its event to a server that sends them back, or lists its interfaces.
const CLIENT: &str = "\
import os
import socket


def handler(event, context):
    if 'port' not in event:
        return sorted(os.listdir('/sys/class/net'))
    try:
        with socket.create_connection(('10.9.0.1', event['port']), timeout=60) as connection:
            connection.sendall(event['text'].encode())
            return connection.recv(1000).decode()
    except OSError as error:
        return type(error).__name__
";

/// How many connections of all guests a rule has decided.
#[track_caller]
fn decided(daemon: &Daemon, rule: &str) -> u64 {
    let mut metrics = String::new();
    daemon.send("GET", "/metrics", "").read_to_string(&mut metrics).unwrap();
    let name = format!("firn_egress_connections_total{{rule=\"{rule}\"}} ");
    let count = metrics.lines().find_map(|line| line.strip_prefix(&name));
    count.unwrap_or_else(|| panic!("{metrics}")).parse().unwrap()
}

#[test]
fn functions_reach_what_the_rules_allow() {
    with_taps(1, |port| {
        let world = World::default();
        let rule = format!("allow:10.9.0.1:{port}");
        let daemon = Daemon::start(&world, &["--egress", &rule]);
        daemon.publish("client", CLIENT);
        let none = json!({"Environment": {"Variables": {"FIRN_NETWORK": "none"}}});
        let created = daemon.create("apart", "handler.py", CLIENT, &none);
        assert_eq!(created.status, 201, "{created:?}");
        assert_eq!(daemon.settled("apart").body["State"], "Active");
        let ask = |function: &str, event| daemon.invoke(function, &event).body;
        // Booted, and thawed.
        assert_eq!(decided(&daemon, &rule), 0);
        for function in ["client", "client:1"] {
            assert_eq!(ask(function, json!({"port": port, "text": "a"})), "a", "{function}");
            let denied = ask(function, json!({"port": port ^ 1, "text": "a"}));
            assert_eq!(denied, "OSError", "{function}");
        }
        for function in ["apart", "apart:1"] {
            assert_eq!(ask(function, json!({})), json!(["lo"]), "{function}");
        }
        assert_eq!(decided(&daemon, &rule), 2);
        assert!(decided(&daemon, "default deny") >= 2);
        daemon.end();
    });
}

#[test]
fn each_microvm_has_a_tap_device_of_its_own() {
    with_taps(0, |port| {
        let world = World::default();
        // Their numbers are so far apart that each has the /24 that the test's device has.
        let make = |name, network| TapDevice::create(name, Ipv4Addr::new(10, 9, network, 1));
        let _devices = [make("fn0", 0).unwrap(), make("fn64", 1).unwrap()];
        let daemon = Daemon::start(&world, &["--network", "tap:fn,network=10.9.0.0/16"]);
        daemon.publish("client", CLIENT);
        daemon.publish("other", CLIENT);
        // Four microVMs, booted and thawed, with two devices: those that are idle end.
        for function in ["client", "client:1", "other", "other:1", "client"] {
            let answer = daemon.invoke(function, &json!({"port": port, "text": "a"})).body;
            assert_eq!(answer, "a", "{function}");
        }
        let busy = world.firn(["serve", "--listen", "127.0.0.1:0"]);
        let busy = busy.args(["--network", "tap:fn,network=10.9.0.0/16"]).run();
        busy.refused(&["the tap device fn", "is in use"]);
        daemon.end();
        let none = world.firn(["serve", "--listen", "127.0.0.1:0"]);
        let none = none.args(["--network", "tap:gn,network=10.9.0.0/16"]).run();
        none.refused(&["there is no tap device gn0"]);
    });
}
