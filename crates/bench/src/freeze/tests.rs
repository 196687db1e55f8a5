use std::sync::Arc;

use firn_pool::{CreateOptions, MappedMedium, MemfdOptions, Pool, Server};
use firn_vmm::open_kvm;

use super::*;
use crate::batch::Interrupt;
use crate::progress::Quiet;

const MIB: u64 = 1 << 20;

fn has_kvm() -> bool {
    firn_required::has("kvm", open_kvm(Path::new(KVM_DEVICE)).is_ok())
}

#[test]
fn a_guest_has_as_many_used_pages_as_requested() {
    for (memory, used) in [(64 * MIB, MIB), (64 * MIB, 64 * MIB), (2 * MIB, 4096), (MIB, 516 << 10)]
    {
        let inputs = guest::inputs(memory, used).unwrap();
        let trace = &inputs.iter().next().unwrap().trace;
        let pages = trace.layout().pages();
        assert_eq!((pages, pages - trace.zero_map().count()), (memory / 4096, used / 4096));
        assert_eq!(trace.written_pages(), used / 4096);
    }
    for used in [0, 4095, 3 * MIB] {
        assert!(matches!(guest::inputs(2 * MIB, used), Err(GuestError::Used { .. })), "{used}");
    }
}

#[test]
fn a_small_guest_is_frozen_into_a_directory_and_a_pool() {
    if !has_kvm() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("pool.sock");
    let options = MemfdOptions { size: 64 * MIB, huge: None, node: None };
    let medium = Arc::new(MappedMedium::memfd(options).unwrap());
    let _manager =
        Server::start(&socket, Pool::create(medium, &CreateOptions::default()).unwrap()).unwrap();
    let interrupt = Interrupt::catch().unwrap();
    let harness = Harness { program: PathBuf::new(), interrupt: &interrupt, progress: &Quiet };
    let snapshots = tempfile::tempdir().unwrap();
    let config = FreezeConfig {
        runs: 2,
        memory: 16 * MIB,
        used: MIB,
        directory: Some(snapshots.path().to_owned()),
        pool: Some(socket.clone()),
        reference: false,
    };
    let results = config.run(&harness).unwrap();
    let [directory, pool] = results.rows.as_slice() else { panic!("{results:?}") };
    for row in [directory, pool] {
        assert_eq!((row.runs, &row.reference), (2, &None));
        let parts = [row.pause_ms, row.save_ms, row.image_ms, row.sync_ms, row.publish_ms];
        let parts: f64 = parts.iter().map(|part| part.min).sum();
        assert!(parts > 0.0 && parts <= row.total_ms.max, "{row:?}");
        // The player's own region is in use, too.
        assert!((15 * MIB / 4096..16 * MIB / 4096 + 512).contains(&row.zero_pages), "{row:?}");
    }
    // The manager has zeroed what the freeze before left.
    assert_eq!((directory.zero_pages_written, pool.zero_pages_written), (0, 0));
    assert!(directory.settle_ms.is_none() && pool.settle_ms.is_some());
    assert!(pool.bytes_written < 3 * MIB, "{pool:?}");
    assert!(directory.stored_pages < 2 * MIB / 4096 && directory.bytes_written >= MIB);
    let text = results.text();
    assert!(text.contains("freeze, directory") && text.contains("freeze, pool"), "{text}");
    // Nothing is left.
    assert_eq!(std::fs::read_dir(snapshots.path()).unwrap().count(), 0);
    assert!(firn_pool::Client::connect(&socket).unwrap().list().unwrap().extents.is_empty());
}

#[test]
fn the_limit_follows_a_slow_medium() {
    let report = FreezeReport {
        pause_ns: 1,
        save_ns: 1,
        image_ns: 1,
        read_ns: 1,
        digest_ns: 1,
        write_ns: 1,
        overlay_ns: 0,
        sync_ns: 1,
        protect_ns: 0,
        publish_ns: 1,
        stored_pages: 1,
        zero_pages: 1,
        zero_pages_written: 0,
        bytes_written: 1,
        disk_bytes: 1,
        protected: vec![],
    };
    let run = |total_ns, fio_ns| Run { total_ns, settle_ns: None, report: report.clone(), fio_ns };
    let mut subject = Subject {
        name: "directory",
        medium: String::new(),
        destination: Destination::Directory(PathBuf::new()),
        beside: None,
        planner: "firecracker",
        runs: vec![run(120_000_000, None)],
    };
    let row = subject.row().unwrap();
    assert_eq!((row.limit_ms, row.reference), (150.0, None));
    subject.runs = vec![run(120_000_000, Some(60_000_000))];
    let row = subject.row().unwrap();
    assert_eq!((row.limit_ms, row.reference.unwrap().ratio.median), (150.0, 2.0));
    subject.runs = vec![run(120_000_000, Some(200_000_000))];
    assert_eq!(subject.row().unwrap().limit_ms, 1.3 * 200.0);
}

#[test]
fn the_duration_of_fio_is_read_from_its_json() {
    let json = br#"{"fio version":"fio-3.33","jobs":[{"jobname":"reference","job_runtime":51}]}"#;
    assert_eq!(fio::parse(json).unwrap(), 51_000_000);
    assert!(matches!(fio::parse(br#"{"jobs":[]}"#), Err(FioError::Failed(_))));
    assert!(matches!(fio::parse(b"fio: error"), Err(FioError::Output(_))));
}
