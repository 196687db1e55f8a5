//! Players that run straight from a pool of this process.

use std::sync::Arc;

use firn_memory::planners::parse;
use firn_pool::{CreateOptions, MappedMedium, MemfdOptions, Pool, Server};
use firn_snapshot::{PooledSnapshot, Verify};
use firn_vmm::{Destination, KVM_DEVICE};

use super::{
    Clock, Leaves, PlayerInputs, PlayerOptions, PlayerReport, ReplayError, freeze, replay,
};
use crate::traces::load;

/// A pool in memory, and its manager; `None` where this host has no huge pages set aside.
fn manager(dir: &tempfile::TempDir, huge: bool) -> Option<Server> {
    let options = MemfdOptions { size: 256 << 20, huge, node: None };
    let medium = Arc::new(MappedMedium::memfd(options).ok()?);
    let pool = Pool::create(medium, &CreateOptions::default()).unwrap();
    Some(Server::start(&dir.path().join("pool.sock"), pool).unwrap())
}

fn run(snapshot: &PooledSnapshot, planner: &str) -> Result<PlayerReport, ReplayError> {
    let clock = Clock { begin_ns: 0, request_ns: None, open_ns: 0, hold: None, faults: false };
    let planner = parse(planner).unwrap();
    replay(&snapshot.snapshot, None, &*planner, KVM_DEVICE.as_ref(), clock)
}

#[test]
fn players_run_from_a_pool_and_leave_its_sealed_bytes_alone() {
    for (huge, leaves) in [(false, Leaves::All4K), (true, Leaves::All2M)] {
        let dir = tempfile::tempdir().unwrap();
        let Some(_manager) = manager(&dir, huge) else { continue };
        let socket = dir.path().join("pool.sock");
        for trace in ["sequential-read:16M", "sequential-write:16M"] {
            let options = PlayerOptions { leaves, ..PlayerOptions::default() };
            let destination = Destination::Pool { socket: socket.clone(), name: "player".into() };
            let inputs = PlayerInputs::new(vec![load(trace).unwrap()]).unwrap();
            freeze(&inputs, &options, KVM_DEVICE.as_ref(), destination, false).unwrap();
            // Every run checks all its memory, so a byte that the run before it left would be found.
            for _ in 0..2 {
                let sealed = PooledSnapshot::open(&socket, "player", Verify::Once).unwrap();
                let report = run(&sealed, "pass_shared").unwrap();
                assert!(report.pool_bytes + report.private_bytes >= 16 << 20, "{report:?}");
                let written = trace.contains("write");
                assert_eq!(report.private_bytes >= 16 << 20, written, "{report:?}");
                let replica =
                    PooledSnapshot::open_replica(&socket, "player", Verify::Once).unwrap();
                let report = run(&replica, "pass").unwrap();
                assert_eq!((report.private_bytes, report.shared_bytes), (0, 0), "{report:?}");
            }
        }
    }
}
