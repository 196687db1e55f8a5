//! With the control groups of the host, if it has version 2 and lets this process make groups.

use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::json;

use super::*;
use crate::protocol::{Reply, Request};
use crate::serve::tests::TestGuest;

/// A freezer of the host's. Its groups are removed with it.
struct HostFreezer(Freezer);

impl HostFreezer {
    fn new() -> Option<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let mounts = fs::read_to_string("/proc/mounts").unwrap();
        let mount = mounts.lines().find_map(|line| {
            let mut fields = line.split(' ');
            let (_, place, kind) = (fields.next()?, fields.next()?, fields.next()?);
            (kind == "cgroup2").then(|| place.to_owned())
        });
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("firn-agent-{}-{number}", std::process::id());
        let made = mount.and_then(|mount| Freezer::new(&Path::new(&mount).join(name)).ok());
        firn_required::has("cgroup2", made.is_some()).then(|| Self(made.unwrap()))
    }
}

impl Drop for HostFreezer {
    fn drop(&mut self) {
        for group in ["others", "main", ""] {
            // Processes that were killed remain in their group until they have exited.
            while let Err(error) = fs::remove_dir(self.0.folder.join(group)) {
                assert_eq!(error.kind(), io::ErrorKind::ResourceBusy);
                // Part of the groups may be removed already.
                let _ = self.0.kill();
                std::thread::sleep(PAUSE);
            }
        }
    }
}

/// Threads and a child that never pause, in the interpreter and outside of it. The file `TURNS` has
/// the number of turns of each.
const BUSY: &str = "\
import hashlib, mmap, os, random, threading, time, uuid, zlib
uuid.uuid1()
with open('TURNS', 'r+b') as file:
    turns = mmap.mmap(file.fileno(), 56)
def repeat(number, step):
    at, count = number * 8, 0
    while True:
        step()
        count += 1
        turns[at:at + 8] = count.to_bytes(8, 'little')
steps = [
    random.random, lambda: time.sleep(0), lambda: time.sleep(0.001),
    lambda: zlib.compress(bytes(1 << 18)), lambda: hashlib.sha256(bytes(1 << 16)),
    lambda: [bytes(1000) for _ in range(1000)],
]
if not os.fork():
    repeat(len(steps), random.random)
for number, step in enumerate(steps):
    threading.Thread(target=repeat, args=[number, step], daemon=True).start()
def now():
    return [int.from_bytes(turns[at:at + 8], 'little') for at in range(0, 8 * len(steps) + 8, 8)]
def handler(event, context):
    before = now()
    while not all(old < new for old, new in zip(before, now())):
        time.sleep(0.001)
    return uuid.getnode()
";

#[test]
fn nothing_runs_from_the_freeze_until_the_clone_has_its_identity() {
    let Some(freezer) = HostFreezer::new() else { return };
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(56).unwrap();
    let turns = || fs::read(file.path()).unwrap();
    let guest = TestGuest::with_freezer(Some(freezer.0.clone()));
    let mut host = guest.connect();
    host.load(&BUSY.replace("TURNS", &file.path().display().to_string()));
    host.identify(1);
    let mut nodes = vec![host.answer(&json!(null))];
    for generation in 2..12 {
        let prepared = host.ask(&Request::PrepareFreeze);
        assert!(matches!(prepared, Reply::ReadyToFreeze), "{prepared:?}");
        let stopped = turns();
        std::thread::sleep(Duration::from_millis(20));
        host = guest.connect();
        assert_eq!(turns(), stopped, "generation {generation}");
        host.identify(generation);
        nodes.push(host.answer(&json!(null)));
    }
    nodes.sort_by_key(serde_json::Value::as_u64);
    nodes.dedup();
    assert_eq!(nodes.len(), 11, "each clone has a node of its own");
}

#[test]
fn a_clone_has_nothing_to_resume_where_nothing_had_to_stop() {
    let Some(freezer) = HostFreezer::new() else { return };
    let guest = TestGuest::with_freezer(Some(freezer.0.clone()));
    let sleeps = "import os, time\nif not os.fork(): time.sleep(1000)\n";
    for (others, is_stopped) in [("", false), (sleeps, true)] {
        let mut host = guest.connect();
        host.load(&format!("{others}def handler(event, context): return 1"));
        host.identify(1);
        assert!(matches!(host.ask(&Request::PrepareFreeze), Reply::ReadyToFreeze));
        let group = fs::read_to_string(freezer.0.folder.join("others/cgroup.freeze")).unwrap();
        assert_eq!(group.trim() == "1", is_stopped, "{others}");
        assert_eq!(freezer.0.stopped.load(Ordering::SeqCst), is_stopped, "{others}");
        host = guest.connect();
        host.identify(2);
        assert_eq!(host.answer(&json!(null)), json!(1));
    }
}

/// A request starts a child that never pauses, and children that start the next one each; `TURNS`
/// has the number of turns of all.
const STARTS: &str = "\
import mmap, os
with open('TURNS', 'r+b') as file:
    turns = mmap.mmap(file.fileno(), 8)
def handler(event, context):
    turn = lambda: turns.__setitem__(slice(8), (int.from_bytes(turns[:], 'little') + 1).to_bytes(8, 'little'))
    if not os.fork():
        while True:
            turn()
    if not os.fork():
        while True:
            turn()
            if os.fork():
                os._exit(0)
    while not any(turns[:]):
        os.sched_yield()
";

/// The main thread of a clone stays excepted, and what it starts with it.
#[test]
fn what_a_clone_has_started_is_stopped_at_its_next_freeze() {
    let Some(freezer) = HostFreezer::new() else { return };
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(8).unwrap();
    let turns = || fs::read(file.path()).unwrap();
    let guest = TestGuest::with_freezer(Some(freezer.0.clone()));
    let mut host = guest.connect();
    host.load(&STARTS.replace("TURNS", &file.path().display().to_string()));
    host.identify(1);
    for generation in 2..5 {
        assert!(matches!(host.ask(&Request::PrepareFreeze), Reply::ReadyToFreeze));
        let stopped = turns();
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(turns(), stopped, "generation {generation}");
        host = guest.connect();
        host.identify(generation);
        host.answer(&json!(null));
    }
}

/// A thread that the kernel cannot stop: it is in a system call that reads a page that is never
/// provided (userfaultfd(2)).
const STUCK: &str = "\
import ctypes, mmap, os, threading
libc = ctypes.CDLL(None, use_errno=True)
faults = libc.syscall(323, os.O_CLOEXEC)
api = (ctypes.c_uint64 * 3)(0xaa)
assert faults >= 0 and libc.ioctl(faults, ctypes.c_ulong(0xc018aa3f), api) == 0, ctypes.get_errno()
memory = mmap.mmap(-1, 4096)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
missing = (ctypes.c_uint64 * 4)(address, 4096, 1)
assert libc.ioctl(faults, ctypes.c_ulong(0xc020aa00), missing) == 0, ctypes.get_errno()
reader, writer = os.pipe()
stuck = threading.Thread(target=libc.write, args=[writer, ctypes.c_void_p(address), 1], daemon=True)
stuck.start()
os.read(faults, 32)
def handler(event, context): return 1
";

#[test]
fn a_thread_that_does_not_stop_in_time_fails_the_freeze() {
    let Some(freezer) = HostFreezer::new() else { return };
    let guest = TestGuest::with_freezer(Some(freezer.0.clone()));
    let mut host = guest.connect();
    host.load(STUCK);
    host.identify(1);
    let first = freezer.0.processes().unwrap();
    let refused = host.ask(&Request::PrepareFreeze);
    let Reply::Refused(refusal) = &refused else { panic!("{refused:?}") };
    assert!(refusal.message.contains("within the time limit"), "{refused:?}");
    // The runtime is gone, so nothing of it can be in a later snapshot.
    while freezer.0.processes().unwrap().iter().any(|id| first.contains(id)) {
        std::thread::sleep(PAUSE);
    }
    host.identify(2);
    host.load("def handler(event, context): return 2");
    assert_eq!(host.answer(&json!(null)), json!(2));
    assert!(matches!(host.ask(&Request::PrepareFreeze), Reply::ReadyToFreeze));
}

#[test]
fn runtimes_end_with_all_their_processes_also_stopped_ones() {
    let Some(freezer) = HostFreezer::new() else { return };
    let guest = TestGuest::with_freezer(Some(freezer.0.clone()));
    let mut host = guest.connect();
    let child = "import os, time\nif not os.fork():\n os.setsid()\n time.sleep(1000)\n";
    host.load(&format!("{child}def handler(event, context): return os.getpid()"));
    host.identify(1);
    let first = freezer.0.processes().unwrap();
    assert_eq!(first.len(), 2, "{first:?}");
    assert!(freezer.0.stop(None, Instant::now() + Duration::from_secs(10)).unwrap());
    host.load("def handler(event, context): return 1");
    let left = || freezer.0.processes().unwrap().into_iter().any(|id| first.contains(&id));
    while left() {
        std::thread::sleep(PAUSE);
    }
    assert_eq!(host.answer(&json!(null)), json!(1));
}
