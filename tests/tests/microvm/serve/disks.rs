//! What guests write to their disks stays within its limits.

use std::path::{Path, PathBuf};
use std::thread::ScopedJoinHandle;

use firn_tests::{Daemon, World};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use serde_json::json;

/// Writes to its disk until that fails, then waits until the others have done so too.
const FILLER: &str = "\
import os, time


def handler(event, context):
    written, failure = 0, None
    with open('/tmp/full', 'wb', buffering=0) as file:
        while failure is None and written < event['most']:
            try:
                written += file.write(os.urandom(1 << 20))
                os.fsync(file.fileno())
            except OSError as error:
                failure = error.strerror
    time.sleep(event['sleep'])
    return {'written': written, 'failure': failure}
";

const MIB: u64 = 1 << 20;

#[test]
#[ignore = "long: make test-full"]
fn four_guests_that_fill_their_disks_in_memory_stay_within_the_limit() {
    if !firn_required::has("root", rustix::process::geteuid().is_root()) {
        return;
    }
    let world = World::default();
    let scratch = Tmpfs::mount(world.file("scratch"));
    let folder = scratch.0.display().to_string();
    let options = ["--memory", "900M", "--scratch", &folder];
    let more = ["--disk", "64M", "--queue-wait", "1", "--standby", "0"];
    let daemon = Daemon::start(&world, &[&options[..], &more].concat());
    daemon.publish("filler", FILLER);
    let before = used(&scratch.0);
    let event = json!({ "most": 512 * MIB, "sleep": 20 });
    let requests: Vec<_> = std::thread::scope(|scope| {
        let invoke = || daemon.invoke("filler:1", &event);
        let requests: Vec<_> = (0..4).map(|_| scope.spawn(invoke)).collect();
        let mut largest = 0;
        while !requests.iter().all(ScopedJoinHandle::is_finished) {
            largest = largest.max(dram(&world) + used(&scratch.0) - before);
            std::thread::sleep(std::time::Duration::from_millis(200));
        }
        assert!((200 * MIB..=900 * MIB).contains(&largest), "{} MiB", largest / MIB);
        requests.into_iter().map(|request| request.join().unwrap()).collect()
    });
    let (served, refused): (Vec<_>, Vec<_>) =
        requests.iter().partition(|reply| reply.status == 200);
    assert!(served.len() >= 2 && !refused.is_empty(), "{requests:?}");
    for reply in served {
        // The blocks of the guest's file system itself count too.
        let written = reply.body["written"].as_u64().unwrap();
        assert!((32 * MIB..=64 * MIB).contains(&written), "{reply:?}");
        assert_eq!(reply.body["failure"], "Input/output error", "{reply:?}");
    }
    for reply in refused {
        assert_eq!(reply.status, 429, "{reply:?}");
        let why = reply.body["message"].as_str().unwrap();
        assert!(why.contains("(64.0 MiB for its disk, --disk)"), "{why}");
        assert!(why.contains("of 900.0 MiB are free (--memory)"), "{why}");
    }
    daemon.end();
}

/// DRAM of the daemon's processes that they do not share, bytes.
fn dram(world: &World) -> u64 {
    let of = |process: i32| {
        let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
        let kib = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok()).unwrap_or(0)
        };
        (kib("RssAnon:") + kib("VmPTE:")) << 10
    };
    world.processes().into_iter().map(of).sum()
}

/// Used bytes of a file system.
fn used(path: &Path) -> u64 {
    let found = rustix::fs::statvfs(path).unwrap();
    (found.f_blocks - found.f_bfree) * found.f_frsize
}

/// A file system in memory, unmounted when this is dropped.
struct Tmpfs(PathBuf);

impl Tmpfs {
    fn mount(path: PathBuf) -> Self {
        std::fs::create_dir(&path).unwrap();
        let options = Some(c"size=2G");
        mount("tmpfs", &path, "tmpfs", MountFlags::empty(), options).unwrap();
        Self(path)
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        // The world reports what is left.
        let _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}
