//! A pool and its copies on chosen NUMA nodes. The lab has a node without processors; other hosts
//! may have only one node.

use std::fs;

use firn_tests::World;
use serde_json::Value;

const MIB: u64 = 1 << 20;

#[test]
fn a_pool_is_on_the_node_that_was_chosen() {
    let nodes = fs::read_to_string("/sys/devices/system/node/has_memory").unwrap();
    // `0-1` in the lab.
    let last = nodes.trim().rsplit(['-', ',']).next().unwrap();
    assert!(last == "1" || std::env::var_os("FIRN_LAB").is_none(), "{nodes}");
    let world = World::default();
    let socket = world.file("pool.sock");
    let medium = format!("memfd:256M,node={last}");
    let serve = world.firn(["pool", "serve", "--medium", &medium, "--copies-node", "0"]);
    let _manager = serve.arg("--socket").arg(&socket).start().ready();
    let player = ["player", "--trace", "sequential-write:16M", "--out", "player", "--pool"];
    world.firn(player).arg(&socket).run().ok();
    // Each player checks every byte of its memory.
    for planner in ["pass", "firn", "firn"] {
        let thaw = ["thaw", "--json", "--planner", planner, "--pool"];
        let report: Value = world.firn(thaw).arg(&socket).arg("player").run().json();
        let own =
            report["private_bytes"].as_u64().unwrap() + report["copy_bytes"].as_u64().unwrap();
        assert_eq!(own >= 16 * MIB, planner != "pass", "{report}");
    }
    let show = world.firn(["pool", "show", "--json", "--pool"]).arg(&socket).run().json();
    let node: u64 = last.parse().unwrap();
    assert_eq!(show["medium"]["nodes"], serde_json::json!([{ "node": node, "bytes": 256 * MIB }]));
    let text = world.firn(["pool", "show", "--pool"]).arg(&socket).run();
    let text = text.ok();
    assert!(text.contains(&format!("256.0 MiB on node {last}")), "{text}");
    assert!(text.contains("at most") && text.contains("on node 0"), "{text}");
    let refused = world.firn(["pool", "serve", "--medium", "memfd:64M,node=900", "--socket"]);
    refused.arg(world.file("other.sock")).run().refused(&["node 900", "has_memory"]);
}
