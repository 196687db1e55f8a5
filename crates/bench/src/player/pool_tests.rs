//! Players that run straight from a pool of this process.

use std::fs::File;
use std::sync::Arc;

use firn_memory::planners::parse;
use firn_pool::{Access, CreateOptions, MappedMedium, Medium, MemfdOptions, Pool};
use firn_snapshot::{ExtentPlace, PoolTarget, Snapshot, tail_of};
use firn_vmm::KVM_DEVICE;

use super::{Clock, Leaves, PlayerOptions, PlayerReport, ReplayError, freeze_extent, replay};
use crate::traces::load;

struct Host {
    medium: Arc<MappedMedium>,
    pool: Pool,
    leaf: u64,
}

impl Host {
    /// `None` where this host has no huge pages set aside.
    fn new(huge: bool) -> Option<Self> {
        let options = MemfdOptions { size: 256 << 20, huge, node: None };
        let medium = Arc::new(MappedMedium::memfd(options).ok()?);
        let leaf = medium.facts().index?.leaf;
        let pool = Pool::create(medium.clone(), &CreateOptions::default()).unwrap();
        Some(Self { medium, pool, leaf })
    }

    fn freeze(&self, trace: &str, leaves: Leaves) {
        let trace = load(trace).unwrap();
        let options = PlayerOptions { leaves, ..PlayerOptions::default() };
        let mut target = PoolTarget::new(&self.pool, "player");
        freeze_extent(&trace, &options, KVM_DEVICE.as_ref(), "player", &mut target).unwrap();
    }

    fn open(&self, access: Access, offset: u64) -> Snapshot {
        let pin = self.pool.pin("player").unwrap();
        let medium = File::from(self.medium.descriptor(access).unwrap());
        let replica = access == Access::Write;
        let place = ExtentPlace { offset, leaf: self.leaf, private: true, replica };
        Snapshot::open_extent("player", medium, place, &tail_of(pin.map().unwrap())).unwrap()
    }

    fn shared(&self) -> Result<PlayerReport, ReplayError> {
        let offset = self.pool.lookup("player").unwrap().offset;
        run(&self.open(Access::Read, offset), "pass_shared")
    }

    /// On a replica, which is first made what the snapshot is.
    fn own(&self) -> Result<PlayerReport, ReplayError> {
        let replica = self.pool.replica("player").unwrap();
        let (from, to) = (replica.source().map().unwrap(), replica.map().unwrap());
        let mut chunk = vec![0; 1 << 20];
        let mut at = 0;
        while at < from.extent().guest_bytes {
            let rest = usize::try_from(from.extent().guest_bytes - at).unwrap();
            let part = chunk.len().min(rest);
            from.read_guest(at, &mut chunk[..part]);
            to.write_guest(at, &chunk[..part]);
            at += part as u64;
        }
        run(&self.open(Access::Write, replica.extent().offset), "pass")
    }
}

fn run(snapshot: &Snapshot, planner: &str) -> Result<PlayerReport, ReplayError> {
    let clock = Clock { begin_ns: 0, request_ns: None, open_ns: 0 };
    replay(snapshot, &*parse(planner).unwrap(), KVM_DEVICE.as_ref(), clock)
}

#[test]
fn players_run_from_a_pool_and_leave_its_sealed_bytes_alone() {
    for (huge, leaves) in [(false, Leaves::All4K), (true, Leaves::All2M)] {
        let Some(host) = Host::new(huge) else { continue };
        for trace in ["sequential-read:16M", "sequential-write:16M"] {
            host.freeze(trace, leaves);
            // Every run checks all its memory, so a byte that the run before it left would be found.
            for _ in 0..2 {
                let report = host.shared().unwrap();
                assert!(report.pool_bytes + report.private_bytes >= 16 << 20, "{report:?}");
                let written = trace.contains("write");
                assert_eq!(report.private_bytes >= 16 << 20, written, "{report:?}");
                let report = host.own().unwrap();
                assert_eq!((report.private_bytes, report.shared_bytes), (0, 0), "{report:?}");
            }
        }
    }
}
