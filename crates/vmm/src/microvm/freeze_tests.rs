//! Freezes over the control socket, with a guest in ring 3. The supervisor and the monitor are
//! killed at all steps.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Lines};
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use firn_pool::{Access, CreateOptions, MappedMedium, MemfdOptions, Pool, Server};
use firn_snapshot::{
    Destination, FreezeRequest, NotFrozen, Snapshot, Verify, freeze, open_pooled, verify,
};

use super::*;
use crate::control::{ControlClient, ControlError, Request, serve_control};
use crate::microvm::tests::{boot, check, follow, host, names, to_directory};
use crate::microvm::{End, Handle};

/// The folder of a child that serves or freezes a microVM until it is killed.
const CHILD_FOLDER: &str = "FIRN_TEST_FREEZE_IN";

fn socket(folder: &Path) -> PathBuf {
    folder.join("control.sock")
}

fn connect(folder: &Path) -> ControlClient {
    ControlClient::connect(&socket(folder)).unwrap()
}

/// Serves a guest of one vCPU, and calls `clients` in another thread with what checks the guest's
/// next reports. The guest ends with it.
fn served(folder: &Path, clients: impl FnOnce(&Handle, &mut dyn FnMut()) + Send) {
    let (host, reports) = host();
    let mut microvm = boot(host, 1, 16 << 20);
    let handle = microvm.handle();
    microvm.resume().unwrap();
    serve_control(UnixListener::bind(socket(folder)).unwrap(), handle.clone()).unwrap();
    thread::scope(|scope| {
        let clients = scope.spawn(move || {
            let mut rounds = [0];
            let mut runs = || {
                for (vcpu, value) in reports.try_iter() {
                    check(vcpu, value, 1, &mut rounds);
                }
                follow(&reports, 1, &mut rounds, 3);
            };
            runs();
            let passed = catch_unwind(AssertUnwindSafe(|| clients(&handle, &mut runs)));
            handle.call(Microvm::stop).unwrap();
            passed
        });
        assert!(matches!(microvm.run().unwrap(), End::Stopped));
        drop(microvm);
        clients.join().unwrap().unwrap_or_else(|panic| resume_unwind(panic));
    });
}

#[test]
fn the_guest_continues_when_a_client_disconnects_after_a_freeze() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("snapshot");
    served(dir.path(), |_, runs| {
        let report = freeze(&mut connect(dir.path()), to_directory(&path)).unwrap();
        assert!(report.pause_ns > 0 && report.save_ns > 0 && report.sync_ns > 0, "{report:?}");
        assert!(report.stored_pages > 512 && report.disk_bytes > 512 * 4096, "{report:?}");
        runs();
        // Between the two steps.
        let mut client = connect(dir.path());
        let two = || (0..2).map(|_| tempfile::tempfile().unwrap().into()).collect();
        let directory = || Begin { target: Target::Files { dense: false }, function: None };
        client.write(directory(), two()).unwrap();
        drop(client);
        runs();
        // The first step fails; the second has nothing to seal.
        let mut client = connect(dir.path());
        let seal = || Seal::Container { protected: Vec::new() };
        for _ in 0..100 {
            let error = client.write(directory(), Vec::new()).unwrap_err().to_string();
            assert!(error.contains("takes 2 descriptors, and 0 came"), "{error}");
            let error = client.seal(seal(), two()).unwrap_err().to_string();
            assert!(error.contains("no freeze of this machine has begun"), "{error}");
        }
        client.write(directory(), two()).unwrap();
        let error = client.seal(seal(), two()).unwrap_err().to_string();
        assert!(error.contains("takes 1 descriptors, and 2 came"), "{error}");
        // The guest has run since the first step.
        client.write(directory(), two()).unwrap();
        client.request(&Request::Resume { generation: Uuid::new_v4() }).unwrap();
        let error = client.seal(seal(), two()).unwrap_err().to_string();
        assert!(error.contains("no freeze of this machine has begun"), "{error}");
        runs();
    });
    verify(&path, &mut |_, _| ()).unwrap();
}

#[test]
fn nothing_serves_the_guest_between_the_two_steps() {
    let dir = tempfile::tempdir().unwrap();
    served(dir.path(), |handle, runs| {
        let mut client = connect(dir.path());
        client.write(Begin { target: Target::Extent, function: None }, Vec::new()).unwrap();
        let served = Arc::new(AtomicBool::new(false));
        let event = served.clone();
        handle.post(move |_| event.store(true, Ordering::Relaxed)).unwrap();
        thread::sleep(Duration::from_millis(100));
        assert!(!served.load(Ordering::Relaxed));
        // It is served once the client wants something else.
        client.request(&Request::Status).unwrap();
        assert!(served.load(Ordering::Relaxed));
        drop(client);
        runs();
    });
}

#[test]
fn a_machine_that_has_run_since_is_not_sealed() {
    let (host, _reports) = host();
    let mut microvm = boot(host, 1, 16 << 20);
    let files = |number| (0..number).map(|_| tempfile::tempfile().unwrap().into()).collect();
    let target = Target::Files { dense: false };
    microvm.write(Begin { target, function: None }, files(2)).unwrap();
    microvm.resume().unwrap();
    microvm.pause().unwrap();
    let seal = Seal::Container { protected: Vec::new() };
    let error = microvm.seal(seal, files(1)).unwrap_err();
    let FreezeError::Write(firn_snapshot::FreezeError::NotBegun) = error else { panic!("{error}") };
}

#[test]
fn a_running_microvm_is_frozen_into_a_pool() {
    let dir = tempfile::tempdir().unwrap();
    let options = MemfdOptions { size: 64 << 20, huge: None, node: None };
    let medium = Arc::new(MappedMedium::memfd(options).unwrap());
    let pool = Pool::create(medium, &CreateOptions::default()).unwrap();
    let manager = dir.path().join("pool.sock");
    let _server = Server::start(&manager, pool).unwrap();
    served(dir.path(), |_, runs| {
        for _ in 0..2 {
            let destination = Destination::Pool { socket: manager.clone(), name: "it".into() };
            let request = FreezeRequest { destination, dense: false, function: None };
            freeze(&mut connect(dir.path()), request).unwrap();
            open_pooled(&manager, "it", Verify::Always).unwrap();
            runs();
        }
    });
}

/// A monitor's process, whose descriptors are recorded while it takes the second step.
struct Watched {
    monitor: ControlClient,
    pid: u32,
    /// What the new descriptors refer to.
    seen: BTreeSet<PathBuf>,
    /// The stream sockets of this host.
    streams: BTreeSet<PathBuf>,
}

impl Watched {
    fn descriptors(pid: u32) -> BTreeSet<PathBuf> {
        let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
        // A descriptor may be closed meanwhile.
        entries.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok()).collect()
    }

    fn has_seen(&self, kind: &str) -> bool {
        self.seen.iter().any(|path| path.to_str().unwrap().starts_with(kind))
    }
}

impl Freeze for Watched {
    type Error = ControlError;

    fn write(&mut self, begin: Begin, files: Vec<OwnedFd>) -> Result<Begun, ControlError> {
        self.monitor.write(begin, files)
    }

    fn seal(&mut self, seal: Seal, files: Vec<OwnedFd>) -> Result<FreezeReport, ControlError> {
        let Self { monitor, pid, seen, streams } = self;
        let before = Self::descriptors(*pid);
        thread::scope(|scope| {
            let sealing = scope.spawn(|| monitor.seal(seal, files));
            while !sealing.is_finished() {
                seen.extend(Self::descriptors(*pid).difference(&before).cloned());
                streams.append(&mut stream_sockets());
            }
            sealing.join().unwrap()
        })
    }

    fn connection(&self) -> io::Result<Option<UnixStream>> {
        self.monitor.connection()
    }
}

/// The unix stream sockets, as `/proc/PID/fd` has them.
fn stream_sockets() -> BTreeSet<PathBuf> {
    let table = std::fs::read_to_string("/proc/net/unix").unwrap();
    let rows = table.lines().map(|row| row.split_whitespace().collect::<Vec<_>>());
    let rows = rows.filter(|row| row[4] == "0001");
    rows.map(|row| format!("socket:[{}]", row[6]).into()).collect()
}

/// A pool on a file, and its manager.
fn pool_on_a_file(folder: &Path) -> (PathBuf, Server) {
    let file = folder.join("pool.img");
    File::create(&file).unwrap().set_len(128 << 20).unwrap();
    let medium = Arc::new(MappedMedium::open(&file, Access::Write).unwrap());
    let pool = Pool::create(medium, &CreateOptions::default()).unwrap();
    let manager = folder.join("pool.sock");
    let server = Server::start(&manager, pool).unwrap();
    (manager, server)
}

fn into_pool(manager: &Path) -> FreezeRequest {
    let destination = Destination::Pool { socket: manager.to_owned(), name: "it".into() };
    FreezeRequest { destination, dense: false, function: None }
}

#[test]
fn a_monitor_that_freezes_into_a_pool_has_no_descriptor_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let (manager, _server) = pool_on_a_file(dir.path());
    let (child, _lines) = child(dir.path(), "serve_until_killed");
    let (pid, seen) = (child.id(), BTreeSet::new());
    let streams = BTreeSet::new();
    let mut watched = Watched { monitor: connect(dir.path()), pid, seen, streams };
    let begin = Instant::now();
    while !["/memfd:firn-window", "socket:"].iter().all(|kind| watched.has_seen(kind)) {
        assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", watched.seen);
        freeze(&mut watched, into_pool(&manager)).unwrap();
    }
    assert!(!watched.has_seen(dir.path().join("pool.img").to_str().unwrap()), "{:?}", watched.seen);
    // A connection to the manager would be a stream.
    assert!(watched.seen.is_disjoint(&watched.streams), "{:?}", watched.seen);
    open_pooled(&manager, "it", Verify::Always).unwrap();
    kill(child);
}

#[test]
fn a_monitor_that_is_killed_while_it_freezes_into_a_pool_leaves_the_previous_snapshot() {
    let dir = tempfile::tempdir().unwrap();
    let (manager, _server) = pool_on_a_file(dir.path());
    let mut killed = 0;
    for round in 0..20 {
        let _ = std::fs::remove_file(socket(dir.path()));
        let (monitor, _lines) = child(dir.path(), "serve_until_killed");
        let mut client = connect(dir.path());
        if round == 0 {
            freeze(&mut client, into_pool(&manager)).unwrap();
        }
        let killer = thread::spawn(move || {
            thread::sleep(Duration::from_micros(round * 997));
            kill(monitor);
        });
        if let Err(error) = freeze(&mut client, into_pool(&manager)) {
            killed += 1;
            assert!(
                matches!(error.source, NotFrozen::Machine(ControlError::Ended(_))),
                "{error:?}"
            );
        }
        killer.join().unwrap();
        open_pooled(&manager, "it", Verify::Always).unwrap();
    }
    assert!(killed > 0);
    // The extents of the killed freezes are free: there is room for one snapshot more at most.
    let states = firn_pool::Client::connect(&manager).unwrap().list().unwrap().extents.len();
    assert_eq!(states, 1);
}

#[test]
fn other_requests_take_no_descriptors() {
    let dir = tempfile::tempdir().unwrap();
    served(dir.path(), |_, runs| {
        let begin = Begin { target: Target::Extent, function: None };
        let error = connect(dir.path()).write(begin, vec![File::open("/").unwrap().into()]);
        let ControlError::Refused(text) = error.unwrap_err() else { panic!("not refused") };
        assert!(text.contains("takes 0 descriptors, and 1 came"), "{text}");
        runs();
    });
}

fn child(folder: &Path, test: &str) -> (Child, Lines<BufReader<ChildStdout>>) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("microvm::freeze::tests::{test}"), "--ignored", "--nocapture"])
        .env(CHILD_FOLDER, folder)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("ready")));
    (child, lines)
}

fn kill(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

/// The names in the folder of the snapshots.
fn snapshots(folder: &Path) -> Vec<String> {
    let names = names(&folder.join("snapshots"));
    names.into_iter().map(|name| name.into_string().unwrap()).collect()
}

fn is_whole(path: &Path) -> Uuid {
    verify(path, &mut |_, _| ()).unwrap();
    Snapshot::open(path).unwrap().manifest().description.id
}

#[test]
fn a_killed_monitor_leaves_the_previous_snapshot_and_no_files() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("snapshots/snapshot");
    std::fs::create_dir(path.parent().unwrap()).unwrap();
    let mut killed = 0;
    for round in 0..30 {
        let _ = std::fs::remove_file(socket(dir.path()));
        let (monitor, _lines) = child(dir.path(), "serve_until_killed");
        let mut client = connect(dir.path());
        if round == 0 {
            freeze(&mut client, to_directory(&path)).unwrap();
        }
        let before = is_whole(&path);
        let killer = thread::spawn(move || {
            thread::sleep(Duration::from_micros(round * 797));
            kill(monitor);
        });
        let frozen = freeze(&mut client, to_directory(&path));
        killer.join().unwrap();
        let after = is_whole(&path);
        match frozen {
            Ok(_) => assert!(before != after),
            Err(error) => {
                killed += 1;
                assert!(matches!(error.source, NotFrozen::Machine(ControlError::Ended(_))));
                assert!(error.to_string().contains("snapshots/snapshot"), "{error}");
                assert_eq!(before, after);
            }
        }
        assert_eq!(snapshots(dir.path()), ["snapshot"], "round {round}");
    }
    assert!(killed > 0);
}

/// The monitor of the test above.
#[test]
#[ignore = "a_killed_monitor_leaves_the_previous_snapshot_and_no_files starts and kills it"]
fn serve_until_killed() {
    let Some(folder) = std::env::var_os(CHILD_FOLDER).map(PathBuf::from) else { return };
    let (host, _reports) = host();
    let mut microvm = boot(host, 1, 16 << 20);
    microvm.resume().unwrap();
    serve_control(UnixListener::bind(socket(&folder)).unwrap(), microvm.handle()).unwrap();
    println!("ready");
    microvm.run().unwrap();
}

#[test]
fn a_killed_supervisor_leaves_the_previous_snapshot_and_a_running_guest() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("snapshots/snapshot");
    std::fs::create_dir(path.parent().unwrap()).unwrap();
    served(dir.path(), |_, runs| {
        freeze(&mut connect(dir.path()), to_directory(&path)).unwrap();
        runs();
        for round in 0..30 {
            let (supervisor, _lines) = child(dir.path(), "freeze_until_killed");
            thread::sleep(Duration::from_micros(round * 797));
            kill(supervisor);
            is_whole(&path);
            runs();
        }
        // The next freeze removes the files of the killed ones.
        freeze(&mut connect(dir.path()), to_directory(&path)).unwrap();
        assert_eq!(snapshots(dir.path()), ["snapshot"]);
        runs();
    });
    is_whole(&path);
}

/// The supervisor of the test above.
#[test]
#[ignore = "a_killed_supervisor_leaves_the_previous_snapshot_and_a_running_guest starts and kills it"]
fn freeze_until_killed() {
    let Some(folder) = std::env::var_os(CHILD_FOLDER).map(PathBuf::from) else { return };
    println!("ready");
    loop {
        freeze(&mut connect(&folder), to_directory(&folder.join("snapshots/snapshot"))).unwrap();
    }
}
