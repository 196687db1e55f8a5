use std::fs;
use std::time::Instant;

use firn_run::ReplaySpec;
use firn_snapshot::Destination;
use firn_vmm::{KVM_DEVICE, open_kvm};

use super::*;
use crate::cache::{Cache, SnapshotFiles};
use crate::player::{PlayerInputs, PlayerOptions, freeze};
use crate::traces::load;

const SSD: DiskParameters =
    DiskParameters { latency_ns: 180e3, read_bandwidth: 500_000_000, write_bandwidth: 500_000_000 };

#[test]
fn a_rate_stands_for_the_latency_of_several_readers() {
    let one = SSD.throttle(1);
    assert_eq!((one.read_iops, one.read_bps), (None, 500_000_000));
    assert_eq!(SSD.throttle(4).read_iops, Some(22_222));
}

#[test]
fn reads_of_one_device_are_found_among_others() {
    let text = "7:1 Read 5\n7:0 Write 3\n7:0 Read 12\n7:0 Total 15\nTotal 20\n";
    assert_eq!((served(text, "7:0"), served(text, "7:1"), served(text, "7:2")), (12, 5, 0));
}

fn can_emulate() -> bool {
    let root = firn_required::has("root", rustix::process::geteuid().is_root());
    // Control groups of version 1 are a property of the host that nothing else here needs.
    root && controller().is_ok() && load_zram().is_ok()
}

#[test]
fn limits_are_of_the_device_and_leave_with_it() {
    if !can_emulate() {
        return;
    }
    let disk = EmulatedDisk::make(64 << 20).unwrap();
    let (path, number) = (disk.path().to_owned(), disk.device.number());
    let device = device_path(disk.device.index);
    let limits = disk.device.controller.join("blkio.throttle.read_iops_device");
    let rule = format!("{number} 1234");
    let has = |rule: &str| fs::read_to_string(&limits).unwrap().lines().any(|line| line == rule);
    let throttle = Throttle { read_iops: Some(1234), read_bps: 1 << 30, write_bps: 1 << 30 };
    disk.throttle(throttle).unwrap();
    assert!(has(&rule));
    fs::write(path.join("file"), "content").unwrap();
    drop(disk);
    assert!(!has(&rule) && !path.exists() && !device.exists());
}

#[test]
fn what_a_killed_process_left_is_removed_and_what_is_in_use_stays() {
    if !can_emulate() {
        return;
    }
    let used = Device::make(64 << 20).unwrap();
    let mut left = Device::make(64 << 20).unwrap();
    // Another disk may take the index, but not the number in the order of all disks.
    let disk = |index| fs::read_to_string(format!("/sys/block/zram{index}/diskseq")).ok();
    let (index, before) = (left.index, disk(left.index));
    left.file = None;
    std::mem::forget(left);
    remove_left();
    assert_ne!(disk(index), before);
    assert!(has_label(&device_path(used.index)));
}

/// The program waits at least so long, so no load of the host makes this fail.
#[test]
fn each_read_takes_the_delay_at_least() {
    if !can_emulate() {
        return;
    }
    let (delay, pages) = (Duration::from_micros(170), 64);
    let disk = EmulatedDisk::make(64 << 20).unwrap();
    let path = disk.path().join("file");
    fs::write(&path, vec![1; 64 * 4096]).unwrap();
    let file = File::open(&path).unwrap();
    file.sync_all().unwrap();
    let read = || {
        assert!(firn_memory::page_cache::evict(&file).unwrap().is_cold());
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).unwrap();
        let begin = Instant::now();
        for page in 0..u64::from(pages) {
            file.read_exact_at(&mut [0; 1], page * 4096).unwrap();
        }
        begin.elapsed()
    };
    disk.delay_reads(delay).unwrap();
    assert!(read() >= delay * pages);
    disk.delay_reads(Duration::ZERO).unwrap();
    assert!(disk.delay.borrow().is_none());
}

#[test]
fn removed_files_give_their_memory_back() {
    if !can_emulate() {
        return;
    }
    let disk = EmulatedDisk::make(64 << 20).unwrap();
    // The first number of mm_stat in the kernel's zram.rst: bytes that are stored.
    let stored = || {
        let stat = format!("/sys/block/zram{}/mm_stat", disk.device.index);
        let text = fs::read_to_string(stat).unwrap();
        text.split_whitespace().next().unwrap().parse::<u64>().unwrap()
    };
    let path = disk.path().join("file");
    fs::write(&path, vec![1; 8 << 20]).unwrap();
    File::open(&path).unwrap().sync_all().unwrap();
    let before = stored();
    fs::remove_file(&path).unwrap();
    // The file system may write some pages of its own meanwhile.
    assert!(before - stored() >= 7 << 20);
}

/// The module is named so that the tests that need a KVM are found.
mod player {
    use super::*;

    /// Every page that a guest reads from the device is counted, and so limited, in the root group,
    /// whatever thread KVM lets read it.
    #[test]
    fn cold_faults_of_a_guest_are_reads_of_the_root_group() {
        let has_kvm = firn_required::has("kvm", open_kvm(KVM_DEVICE.as_ref()).is_ok());
        if !has_kvm || !can_emulate() {
            return;
        }
        let disk = EmulatedDisk::make(256 << 20).unwrap();
        disk.throttle(Throttle { read_iops: Some(100_000), read_bps: 1 << 30, write_bps: 1 << 30 })
            .unwrap();
        let trace = load("sequential-read:16M").unwrap();
        let pages = trace.trace.touched_pages();
        let inputs = PlayerInputs::new(vec![trace]).unwrap();
        let snapshot = disk.path().join("player");
        let destination = Destination::Directory(snapshot.clone());
        let options = PlayerOptions::default();
        freeze(&inputs, &options, KVM_DEVICE.as_ref(), destination, true).unwrap();
        SnapshotFiles::all(&snapshot).unwrap().prepare(Cache::Cold, false).unwrap();
        let before = disk.reads().unwrap();
        let source = firn_run::Source::open_directory(&snapshot).unwrap();
        let planner = firn_memory::planners::parse("firecracker:readahead=off").unwrap();
        let report = firn_run::player::replay(
            &source,
            &ReplaySpec::default(),
            &*planner,
            Path::new(KVM_DEVICE).into(),
            &firn_run::Clock::now(),
        )
        .unwrap();
        assert_eq!(report.replay.unwrap().pages, pages);
        let reads = disk.reads().unwrap() - before;
        assert!(reads >= pages, "{reads} reads for {pages} pages");
    }
}
