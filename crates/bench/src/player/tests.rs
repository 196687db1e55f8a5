//! Real players under this host's KVM.

use std::path::Path;

use firn_memory::planners::{Planner, parse};
use firn_snapshot::Snapshot;
use firn_vmm::KVM_DEVICE;

use super::{Clock, PlayerOptions, PlayerReport, ReplayError, freeze, replay, trace_of};
use crate::traces::{NamedTrace, load};

fn player(trace: &NamedTrace, options: PlayerOptions, dir: &Path) -> Snapshot {
    let path = dir.join("snapshot");
    freeze(trace, &options, KVM_DEVICE.as_ref(), &path, false).unwrap();
    Snapshot::open(&path).unwrap()
}

fn run(snapshot: &Snapshot, planner: &str) -> Result<PlayerReport, ReplayError> {
    let planner: Box<dyn Planner> = parse(planner).unwrap();
    let clock = Clock { begin_ns: 0, request_ns: None, open_ns: 0 };
    replay(snapshot, &*planner, KVM_DEVICE.as_ref(), clock)
}

#[test]
fn a_player_replays_its_trace_and_reports() {
    let dir = tempfile::tempdir().unwrap();
    let trace = load("sequential-write:16M").unwrap();
    let snapshot = player(&trace, PlayerOptions::default(), dir.path());
    assert_eq!(trace_of(snapshot.manifest()), Some("sequential-write:16M"));
    let report = run(&snapshot, "firecracker").unwrap();
    assert_eq!((report.touches, report.pages), (4096, 4096));
    assert_eq!(report.trace, "sequential-write:16M");
    assert!(report.private_bytes >= 16 << 20, "{report:?}");
    assert!(report.kvm.page_faults > 0);
}
