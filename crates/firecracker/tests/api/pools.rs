//! Loads from a pool, whose manager this process is.

use std::fs::File;

use firn_pool::{CreateOptions, MappedMedium, MemfdOptions, Pool, Server};
use firn_snapshot::{Destination, OpenTwice, Snapshot, import};
use serde_json::json;

use crate::player::{Player, has_kvm, replay};
use crate::process::Process;

#[test]
fn a_pool_provides_memory() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let process = Process::start();
    Player::new(dir.path()).boot(&process);
    let load = process.save(dir.path());
    drop(process);

    let medium = MappedMedium::memfd(MemfdOptions { size: 256 << 20, huge: None, node: None });
    let pool = Pool::create(std::sync::Arc::new(medium.unwrap()), &CreateOptions::default());
    let socket = path("pool.sock");
    let _server = Server::start(&socket, pool.unwrap()).unwrap();
    for planner in ["pass_shared", "firn"] {
        let mut process = Process::start();
        process.put("/firn/planner", &json!({ "planner": planner, "pool": socket }));
        if planner == "pass_shared" {
            let error = process.refused("PUT", "/snapshot/load", &load);
            assert!(error.contains("no snapshot"), "{error}");
            let (state, memory) = (path("state"), path("memory"));
            let image = OpenTwice::open(&memory).unwrap();
            let container = File::open(&state).unwrap();
            let snapshot = Snapshot::of_two_files(container, &state, Some((image, &memory)));
            let snapshot = snapshot.unwrap();
            let name = snapshot.manifest().description.id.to_string();
            let destination = Destination::Pool { socket: socket.clone(), name };
            import(&snapshot, destination, None).unwrap();
        }
        process.put("/snapshot/load", &load);
        process.resume();
        replay(&mut process);
    }
    let process = Process::start();
    process.put("/firn/planner", &json!({ "planner": "firecracker", "pool": socket }));
    let error = process.refused("PUT", "/snapshot/load", &load);
    assert!(error.contains("maps from no pool"), "{error}");
}
