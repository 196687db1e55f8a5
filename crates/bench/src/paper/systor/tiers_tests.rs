use std::path::Path;
use std::time::Instant;

use firn_run::ReplaySpec;
use firn_snapshot::Destination;
use firn_vmm::{KVM_DEVICE, open_kvm};

use super::*;
use crate::cache::SnapshotFiles;
use crate::player::{PlayerInputs, PlayerOptions, freeze};
use crate::traces::load;

#[test]
fn a_model_is_what_a_memory_takes_longer_than_dram() {
    let dcpm = DCPM.model();
    assert!((dcpm.load_ns - 220.0).abs() < 1e-9, "{dcpm:?}");
    // 4096 bytes at 6.8 and at 23 GB/s.
    assert!((dcpm.copy_ns - (220.0 + 602.35 - 178.09)).abs() < 0.1, "{dcpm:?}");
    let cxl = CXL.model();
    assert_eq!((cxl.load_ns, cxl.copy_ns), (130.0, 130.0));
}

#[test]
fn limits_have_a_shortest_time() {
    let throttle = Throttle { read_iops: Some(1000), read_bps: 40_960_000, write_bps: 1 };
    assert!((least_ns(throttle, 4096) - 3.986e9).abs() < 1.0);
    // The bandwidth decides: 10,000 pages a second.
    let bandwidth = Throttle { read_iops: None, ..throttle };
    assert!((least_ns(bandwidth, 4096) - 0.2996e9).abs() < 1.0);
    assert_eq!(least_ns(throttle, 10), 0.0);
}

/// The module is named so that the tests that need a KVM are found.
mod player {
    use super::*;

    /// blk-throttle guarantees the shortest time, so no load of the host makes this fail.
    #[test]
    fn guests_at_once_cannot_read_faster_than_the_limits() {
        let has_kvm = firn_required::has("kvm", open_kvm(KVM_DEVICE.as_ref()).is_ok());
        let root = firn_required::has("root", rustix::process::geteuid().is_root());
        if !has_kvm || !root {
            return;
        }
        // Control groups of version 1 are a property of the host that nothing else here needs.
        let Ok(disk) = EmulatedDisk::make(512 << 20) else { return };
        let trace = load("sequential-read:8M").unwrap();
        let pages = trace.trace.touched_pages() * u64::from(SSD_DEPTH);
        let inputs = PlayerInputs::new(vec![trace]).unwrap();
        let snapshots: Vec<PathBuf> =
            (0..SSD_DEPTH).map(|number| disk.path().join(number.to_string())).collect();
        for (snapshot, seed) in snapshots.iter().zip(1..) {
            let destination = Destination::Directory(snapshot.clone());
            let options = PlayerOptions { seed, ..PlayerOptions::default() };
            freeze(&inputs, &options, KVM_DEVICE.as_ref(), destination, true).unwrap();
            SnapshotFiles::all(snapshot).unwrap().prepare(Cache::Cold, false).unwrap();
        }
        let throttle = Throttle { read_iops: Some(4000), read_bps: 1 << 30, write_bps: 1 << 30 };
        disk.throttle(throttle).unwrap();
        let (before, begun) = (disk.reads().unwrap(), Instant::now());
        std::thread::scope(|scope| {
            for snapshot in &snapshots {
                scope.spawn(move || {
                    let source = firn_run::Source::open_directory(snapshot).unwrap();
                    let planner = firn_memory::planners::parse("firecracker:readahead=off");
                    let spec = ReplaySpec { unchecked: true, ..ReplaySpec::default() };
                    let (kvm, clock) = (Path::new(KVM_DEVICE).into(), firn_run::Clock::now());
                    firn_run::player::replay(&source, &spec, &*planner.unwrap(), kvm, &clock)
                        .unwrap();
                });
            }
        });
        let took = begun.elapsed();
        let reads = disk.reads().unwrap() - before;
        assert!(reads >= pages, "{reads} reads for {pages} pages");
        let least = least_ns(throttle, pages);
        assert!(least > 1.9e9 && took.as_nanos() as f64 >= least, "{took:?}, {least} ns");
    }
}
