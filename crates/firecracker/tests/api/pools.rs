//! Loads from a pool, whose manager this process is.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use firn_pool::{CreateOptions, Huge, MappedMedium, MemfdOptions, Pool, Server};
use firn_snapshot::{Destination, OpenTwice, Snapshot, import};
use serde_json::json;

use crate::player::{Player, has_kvm, replay};
use crate::process::Process;

/// A new pool in DRAM and its manager, for as long as the value lives.
pub(crate) fn serve(dir: &Path, size: u64, huge: Option<Huge>) -> (PathBuf, Server) {
    let medium = MappedMedium::memfd(MemfdOptions { size, huge, node: None }).unwrap();
    let pool = Pool::create(Arc::new(medium), &CreateOptions::default()).unwrap();
    let socket = dir.join("pool.sock");
    let server = Server::start(&socket, pool).unwrap();
    (socket, server)
}

/// Imports the snapshot that [`Process::save`] made.
pub(crate) fn import_into(socket: &Path, dir: &Path) {
    let (state, memory) = (dir.join("state"), dir.join("memory"));
    let image = OpenTwice::open(&memory).unwrap();
    let container = File::open(&state).unwrap();
    let snapshot = Snapshot::of_two_files(container, &state, Some((image, &memory))).unwrap();
    let name = snapshot.manifest().description.id.to_string();
    import(&snapshot, Destination::Pool { socket: socket.to_owned(), name }, None).unwrap();
}

#[test]
fn a_pool_provides_memory() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let process = Process::start();
    Player::new(dir.path()).boot(&process);
    let load = process.save(dir.path());
    drop(process);

    let (socket, _server) = serve(dir.path(), 256 << 20, None);
    for planner in ["pass_shared", "firn"] {
        let mut process = Process::start();
        process.put("/firn/planner", &json!({ "planner": planner, "pool": socket }));
        if planner == "pass_shared" {
            let error = process.refused("PUT", "/snapshot/load", &load);
            assert!(error.contains("no snapshot"), "{error}");
            import_into(&socket, dir.path());
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
