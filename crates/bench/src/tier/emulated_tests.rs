use std::fs;
use std::time::Instant;

use firn_run::ReplaySpec;
use firn_snapshot::Destination;
use firn_vmm::{KVM_DEVICE, open_kvm};

use super::*;
use crate::cache::{Cache, SnapshotFiles};
use crate::player::{PlayerInputs, PlayerOptions, freeze};
use crate::traces::load;

#[test]
fn readers_that_keep_processors_read_together_as_fast_as_readers_that_sleep() {
    let disk = |saturating_readers| DiskParameters {
        latency_ns: 180e3,
        read_bandwidth: 500_000_000,
        write_bandwidth: 500_000_000,
        saturating_readers,
    };
    // Reads of all in a latency, by readers and processors.
    for (saturating, readers, processors, reads) in [
        (None, 1, 2, 1.0),
        (None, 2, 2, 2.0),
        (None, 8, 2, 8.0),
        (Some(4), 1, 2, 1.0),
        (Some(4), 4, 2, 4.0),
        (Some(4), 8, 2, 4.0),
        (Some(4), 8, 16, 4.0),
        (Some(4), 2, 16, 2.0),
    ] {
        let latency = disk(saturating).busy(readers, processors).first_page_ns;
        let at_once = f64::from(readers.min(processors));
        assert_eq!(180e3 * at_once / latency, reads, "{saturating:?} {readers} {processors}");
    }
}

#[test]
fn reads_of_one_device_are_found_among_others() {
    let text = "7:1 Read 5\n7:0 Write 3\n7:0 Read 12\n7:0 Total 15\nTotal 20\n";
    assert_eq!((served(text, "7:0"), served(text, "7:1"), served(text, "7:2")), (12, 5, 0));
}

fn can_emulate() -> bool {
    let root = firn_required::has("root", rustix::process::geteuid().is_root());
    // The module is a property of the host that nothing else here needs.
    root && load_zram().is_ok()
}

#[test]
fn limits_are_of_the_device_and_leave_with_it() {
    // So are control groups of version 1.
    if !can_emulate() || controller().is_err() {
        return;
    }
    let disk = EmulatedDisk::make(64 << 20).unwrap();
    let (path, number) = (disk.path().to_owned(), disk.device.number());
    let device = device_path(disk.device.index);
    let limits = controller().unwrap().join("blkio.throttle.read_iops_device");
    let rule = format!("{number} 1234");
    let has = |rule: &str| fs::read_to_string(&limits).unwrap().lines().any(|line| line == rule);
    let throttle = Throttle { read_iops: 1234, read_bps: 1 << 30 };
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
fn each_read_takes_the_delays_of_its_pages_at_least() {
    if !can_emulate() {
        return;
    }
    let delay = Duration::from_micros(170);
    let disk = EmulatedDisk::make(64 << 20).unwrap();
    let path = disk.path().join("file");
    fs::write(&path, vec![1; 64 * 4096]).unwrap();
    let file = File::open(&path).unwrap();
    file.sync_all().unwrap();
    let read = |len: usize| {
        assert!(firn_memory::page_cache::evict(&file).unwrap().is_cold());
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).unwrap();
        let begin = Instant::now();
        for offset in (0..64 * 4096).step_by(len) {
            file.read_exact_at(&mut vec![0; len], offset).unwrap();
        }
        begin.elapsed()
    };
    let ns = |time: Duration| time.as_secs_f64() * 1e9;
    disk.delay_reads(ReadTimes { first_page_ns: ns(delay), further_page_ns: 0.0 }).unwrap();
    assert!(read(4096) >= delay * 64);
    // Four requests of 16 pages.
    let [first, further] = [100, 30].map(Duration::from_micros);
    let both = ReadTimes { first_page_ns: ns(first), further_page_ns: ns(further) };
    disk.delay_reads(both).unwrap();
    // The program counts whole nanoseconds of a sector.
    assert!(read(16 * 4096) >= (first + further * 15) * 4 - Duration::from_micros(1));
    disk.delay_reads(ReadTimes::default()).unwrap();
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
        if !has_kvm || !can_emulate() || controller().is_err() {
            return;
        }
        let disk = EmulatedDisk::make(256 << 20).unwrap();
        disk.throttle(Throttle { read_iops: 100_000, read_bps: 1 << 30 }).unwrap();
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
