//! Players that run straight from a pool of this process.

use std::sync::Arc;

use firn_memory::planners::parse;
use firn_pool::{CreateOptions, MappedMedium, MemfdOptions, Pool, Server};
use firn_snapshot::{NoCopy, PooledSnapshot, Verify};
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

#[test]
fn players_write_to_copies_that_are_made_ahead_of_them() {
    let dir = tempfile::tempdir().unwrap();
    let _manager = manager(&dir, false).unwrap();
    let socket = dir.path().join("pool.sock");
    let trace = "sequential-write:16M";
    let destination = Destination::Pool { socket: socket.clone(), name: "player".into() };
    let inputs = PlayerInputs::new(vec![load(trace).unwrap()]).unwrap();
    freeze(&inputs, &PlayerOptions::default(), KVM_DEVICE.as_ref(), destination, false).unwrap();
    let take = || {
        let mut snapshot = PooledSnapshot::open(&socket, "player", Verify::Once).unwrap();
        snapshot.take_copy(1, |_| Ok(Vec::new())).unwrap();
        snapshot
    };
    // Nobody recorded a profile: two runs teach what is written. Each checks all its memory.
    for _ in 0..2 {
        let mut snapshot = take();
        let report = run(&snapshot, "firn").unwrap();
        assert!(report.private_bytes >= 16 << 20 && report.copy_bytes == 0, "{report:?}");
        let writes = report.writes.unwrap();
        assert!(writes.predicted == 0 && writes.missed >= 8, "{writes:?}");
        snapshot.wrote(1, &writes.written).unwrap();
    }
    let first = loop {
        let snapshot = take();
        match snapshot.snapshot.copies().and_then(|copies| copies.absent) {
            Some(NoCopy::NoHugePages) => return,
            Some(_) => std::thread::yield_now(),
            None => break snapshot,
        }
    };
    // Two at once, of one sealed extent.
    let second = take();
    std::thread::scope(|scope| {
        let runs = [first, second]
            .map(|snapshot| scope.spawn(move || (run(&snapshot, "firn").unwrap(), snapshot)));
        for run in runs {
            let (report, snapshot) = run.join().unwrap();
            let writes = report.writes.unwrap();
            assert_eq!((writes.missed, writes.unused), (0, 0), "{writes:?}");
            if snapshot.snapshot.copies().unwrap().absent.is_none() {
                assert_eq!((report.private_bytes, writes.copied), (0, writes.predicted));
                assert!(report.copy_bytes >= 16 << 20);
            }
        }
    });
}
