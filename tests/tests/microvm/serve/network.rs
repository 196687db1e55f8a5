//! The network of functions.

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
        for function in ["client", "client:1"] {
            assert_eq!(ask(function, json!({"port": port, "text": "a"})), "a", "{function}");
            let denied = ask(function, json!({"port": port ^ 1, "text": "a"}));
            assert_eq!(denied, "OSError", "{function}");
        }
        for function in ["apart", "apart:1"] {
            assert_eq!(ask(function, json!({})), json!(["lo"]), "{function}");
        }
        daemon.end();
    });
}
