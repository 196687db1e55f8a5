use std::path::Path;
use std::time::{Duration, Instant};

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

/// The module is named so that the tests that need a KVM are found.
mod player {
    use super::*;

    const READERS: u32 = 4;

    /// Each read waits at least so long, so no load of the host makes this fail.
    #[test]
    fn guests_at_once_cannot_read_faster_than_the_delay_lets_them() {
        let has_kvm = firn_required::has("kvm", open_kvm(KVM_DEVICE.as_ref()).is_ok());
        let root = firn_required::has("root", rustix::process::geteuid().is_root());
        if !has_kvm || !root {
            return;
        }
        // zram is a property of the host that nothing else here needs.
        let Ok(disk) = EmulatedDisk::make(512 << 20) else { return };
        let trace = load("sequential-read:8M").unwrap();
        let pages = trace.trace.touched_pages() * u64::from(READERS);
        let inputs = PlayerInputs::new(vec![trace]).unwrap();
        let snapshots: Vec<PathBuf> =
            (0..READERS).map(|number| disk.path().join(number.to_string())).collect();
        for (snapshot, seed) in snapshots.iter().zip(1..) {
            let destination = Destination::Directory(snapshot.clone());
            let options = PlayerOptions { seed, ..PlayerOptions::default() };
            freeze(&inputs, &options, KVM_DEVICE.as_ref(), destination, true).unwrap();
            SnapshotFiles::all(snapshot).unwrap().prepare(Cache::Cold, false).unwrap();
        }
        let delay = Duration::from_micros(250);
        let first_page_ns = delay.as_nanos() as f64;
        disk.delay_reads(ReadTimes { first_page_ns, further_page_ns: 0.0 }).unwrap();
        let begun = Instant::now();
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
        let least = delay * u32::try_from(pages).unwrap() / READERS.min(processors());
        assert!(took >= least, "{took:?}, {least:?}");
    }
}
