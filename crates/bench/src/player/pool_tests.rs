//! Players that map their memory from a pool of this process.

use std::path::Path;
use std::sync::Arc;

use firn_memory::copy_ahead::{Granule, Rule, request_copy};
use firn_memory::planners::parse;
use firn_pool::{Client, CreateOptions, Huge, MappedMedium, MemfdOptions, Pool, Server};
use firn_run::player::replay;
use firn_run::{Clock, ReplaySpec, Source, StartError, StartReport};
use firn_snapshot::{
    Destination, NoCopy, Profile, Verify, open_pooled, open_replica, set_pooled_profile,
};
use firn_vmm::KVM_DEVICE;

use super::{Leaves, PlayerInputs, PlayerOptions, freeze};
use crate::traces::load;

const RULE: Rule = Rule { written: 1, read: 0, granule: Granule::Size2M, learn: true };

/// A pool in memory, and its manager; `None` without huge pages on this host.
fn manager(dir: &tempfile::TempDir, size: u64, huge: Option<Huge>) -> Option<Server> {
    let options = MemfdOptions { size, huge, node: None };
    let medium = Arc::new(MappedMedium::memfd(options).ok()?);
    let pool = Pool::create(medium, &CreateOptions::default()).unwrap();
    Some(Server::start(&dir.path().join("pool.sock"), pool).unwrap())
}

fn run(source: &Source, planner: &str) -> Result<StartReport, StartError> {
    let planner = parse(planner).unwrap();
    let kvm = Path::new(KVM_DEVICE).into();
    replay(source, &ReplaySpec::default(), &*planner, kvm, &Clock::now())
}

fn pooled(socket: &Path) -> Source {
    let (snapshot, grant) = open_pooled(socket, "player", Verify::Once).unwrap();
    Source::new(snapshot, Some(grant))
}

fn replica(socket: &Path) -> Source {
    let (snapshot, grant) = open_replica(socket, "player", Verify::Once).unwrap();
    Source::new(snapshot, Some(grant))
}

#[test]
fn players_run_from_a_pool_and_do_not_change_its_sealed_bytes() {
    for (huge, leaves) in [(None, Leaves::All4K), (Some(Huge::Size2M), Leaves::All2M)] {
        let dir = tempfile::tempdir().unwrap();
        let Some(_manager) = manager(&dir, 256 << 20, huge) else { continue };
        let socket = dir.path().join("pool.sock");
        for trace in ["sequential-read:16M", "sequential-write:16M"] {
            let options = PlayerOptions { leaves, ..PlayerOptions::default() };
            let destination = Destination::Pool { socket: socket.clone(), name: "player".into() };
            let inputs = PlayerInputs::new(vec![load(trace).unwrap()]).unwrap();
            freeze(&inputs, &options, KVM_DEVICE.as_ref(), destination, false).unwrap();
            // Every run checks all its memory, so it detects a byte that an earlier run changed.
            for _ in 0..2 {
                let report = run(&pooled(&socket), "pass_shared").unwrap();
                assert!(
                    report.counters.pool_bytes + report.counters.private_bytes >= 16 << 20,
                    "{report:?}"
                );
                let written = trace.contains("write");
                assert_eq!(report.counters.private_bytes >= 16 << 20, written, "{report:?}");
                let report = run(&replica(&socket), "pass").unwrap();
                assert_eq!(
                    (report.counters.private_bytes, report.counters.shared_bytes),
                    (0, 0),
                    "{report:?}"
                );
            }
        }
    }
}

#[test]
fn a_replica_is_repaired_after_a_run() {
    let dir = tempfile::tempdir().unwrap();
    let _manager = manager(&dir, 256 << 20, None).unwrap();
    let socket = dir.path().join("pool.sock");
    let destination = Destination::Pool { socket: socket.clone(), name: "player".into() };
    let inputs = PlayerInputs::new(vec![load("sequential-write:16M").unwrap()]).unwrap();
    freeze(&inputs, &PlayerOptions::default(), KVM_DEVICE.as_ref(), destination, false).unwrap();
    let mut client = Client::connect(&socket).unwrap();
    let ready = |client: &mut Client| loop {
        let extents = client.list().unwrap().extents;
        if let Some(imaging) = extents.iter().find_map(|listed| listed.imaging) {
            return imaging;
        }
    };
    for _ in 0..2 {
        let used = replica(&socket);
        run(&used, "pass").unwrap();
        drop(used);
        let imaging = ready(&mut client);
        assert!(imaging.copied >= 16 << 20, "{imaging:?}");
        let replica = client.replica("player").unwrap();
        let is = replica.grant.map().unwrap();
        let was = client.snapshot("player").unwrap().map().unwrap();
        let (mut here, mut there) = (vec![0; 2 << 20], vec![0; 2 << 20]);
        for at in (0..is.extent().guest_bytes).step_by(here.len()) {
            is.read_guest(at, &mut here);
            was.read_guest(at, &mut there);
            assert!(here == there, "{at:#x}");
        }
        let generation = is.extent().generation;
        drop((is, replica));
        client.release(generation).unwrap();
        ready(&mut client);
    }
}

#[test]
fn players_write_to_runs_of_pages_over_the_sealed_extent() {
    let rule = Rule { granule: Granule::Size16K, ..RULE };
    let dir = tempfile::tempdir().unwrap();
    let _manager = manager(&dir, 600 << 20, None).unwrap();
    let socket = dir.path().join("pool.sock");
    let destination = Destination::Pool { socket: socket.clone(), name: "player".into() };
    let inputs = PlayerInputs::new(vec![load("json-a").unwrap()]).unwrap();
    freeze(&inputs, &PlayerOptions::default(), KVM_DEVICE.as_ref(), destination, false).unwrap();
    let planner = "firn:read=0,granule=16k";
    let mut client = Client::connect(&socket).unwrap();
    // Each run checks all its memory. The written pages are learnt from two runs.
    for number in 0..4 {
        let (snapshot, mut grant) = open_pooled(&socket, "player", Verify::Once).unwrap();
        request_copy(&snapshot, &mut grant, rule).unwrap();
        let mut source = Source::new(snapshot, Some(grant));
        let report = run(&source, planner).unwrap();
        let (counters, writes) = (report.counters, report.writes.unwrap());
        assert_eq!(writes.granule, 16 << 10);
        let copied = counters.copy_bytes;
        if number < 2 {
            assert_eq!((writes.predicted, copied), (0, 0), "{writes:?}");
            assert!(writes.missed > 100, "{writes:?}");
        } else if writes.no_copy.is_none() {
            assert_eq!(writes.missed, 0, "{writes:?}");
            assert_eq!(counters.private_bytes, 0, "no page is copied on a write");
            assert_eq!(copied, writes.copied * writes.granule);
            assert!(copied < 20 << 20, "30 chunks are written: {copied}");
        }
        assert_eq!(source.learn(Some(&writes)), None);
        drop(source);
        client.settle().unwrap();
    }
    // Where others have all copies, the kernel copies these pages before the guest runs.
    let mut others = Vec::new();
    let report = loop {
        let (snapshot, mut grant) = open_pooled(&socket, "player", Verify::Once).unwrap();
        request_copy(&snapshot, &mut grant, rule).unwrap();
        if let Some(reason) = grant.copies().unwrap().absent {
            assert_eq!(reason, NoCopy::BeingMade);
            break run(&Source::new(snapshot, Some(grant)), planner).unwrap();
        }
        others.push(grant);
    };
    let (counters, writes) = (report.counters, report.writes.unwrap());
    assert_eq!((counters.copy_bytes, writes.missed), (0, 0), "{writes:?}");
    assert_eq!(counters.private_bytes, writes.predicted * writes.granule);
    // Of whole chunks these are the profile's pages, which are here more than the written ones.
    let id = open_pooled(&socket, "player", Verify::Once).unwrap().0.manifest().description.id;
    let profile = Profile { written: Some(writes.written.clone()), ..Profile::of(id) };
    set_pooled_profile(&socket, "player", &profile, None, None).unwrap();
    let (snapshot, mut grant) = open_pooled(&socket, "player", Verify::Once).unwrap();
    request_copy(&snapshot, &mut grant, RULE).unwrap();
    assert_eq!(
        grant.copies().unwrap().absent,
        Some(NoCopy::BeingMade),
        "this is the first request"
    );
    let report = run(&Source::new(snapshot, Some(grant)), "firn:read=0").unwrap();
    let pages: u64 = writes.written.iter().map(|run| run.pages).sum();
    assert_eq!(report.counters.private_bytes, pages << 12);
}

#[test]
fn runs_change_nothing_without_learning() {
    let dir = tempfile::tempdir().unwrap();
    let _manager = manager(&dir, 300 << 20, None).unwrap();
    let socket = dir.path().join("pool.sock");
    let destination = Destination::Pool { socket: socket.clone(), name: "player".into() };
    let inputs = PlayerInputs::new(vec![load("sequential-write:1M").unwrap()]).unwrap();
    freeze(&inputs, &PlayerOptions::default(), KVM_DEVICE.as_ref(), destination, false).unwrap();
    let predicted = |rule: Rule, planner| {
        let mut client = Client::connect(&socket).unwrap();
        let of_runs = (0..3).map(|_| {
            let (snapshot, mut grant) = open_pooled(&socket, "player", Verify::Once).unwrap();
            request_copy(&snapshot, &mut grant, rule).unwrap();
            let mut source = Source::new(snapshot, Some(grant));
            let writes = run(&source, planner).unwrap().writes.unwrap();
            assert_eq!(source.learn(Some(&writes)), None);
            drop(source);
            client.settle().unwrap();
            writes.predicted
        });
        of_runs.collect::<Vec<_>>()
    };
    let frozen = Rule { learn: false, ..RULE };
    assert_eq!(predicted(frozen, "firn:read=0,learn=off"), [0, 0, 0]);
    assert!(predicted(RULE, "firn:read=0")[2] > 0);
}

/// Without private mappings a pager fills the rest of a chunk with runs from the sealed extent.
#[test]
fn players_write_to_runs_of_pages_without_private_mappings() {
    let rule = Rule { granule: Granule::Size16K, ..RULE };
    let dir = tempfile::tempdir().unwrap();
    let Some(_manager) = manager(&dir, 300 << 20, Some(Huge::Size2M)) else { return };
    let socket = dir.path().join("pool.sock");
    let destination = Destination::Pool { socket: socket.clone(), name: "player".into() };
    let inputs = PlayerInputs::new(vec![load("json-a").unwrap()]).unwrap();
    freeze(&inputs, &PlayerOptions::default(), KVM_DEVICE.as_ref(), destination, false).unwrap();
    let mut client = Client::connect(&socket).unwrap();
    let mut whole = 0;
    // Each run checks all its memory. The written pages are learnt from two runs.
    for number in 0..4 {
        let (snapshot, mut grant) = open_pooled(&socket, "player", Verify::Once).unwrap();
        request_copy(&snapshot, &mut grant, rule).unwrap();
        let mut source = Source::new(snapshot, Some(grant));
        let report = run(&source, "firn:read=0,granule=16k").unwrap();
        let (counters, writes) = (report.counters, report.writes.unwrap());
        let own = counters.private_bytes + counters.copy_bytes;
        if number < 2 {
            assert_eq!((writes.predicted, counters.copy_bytes), (0, 0), "{writes:?}");
            assert!(counters.chunk_copies.chunks > 10 && counters.pager.is_none(), "{counters:?}");
            whole = own;
        } else if writes.no_copy.is_none() {
            assert_eq!(writes.missed, 0, "{writes:?}");
            let pager = counters.pager.unwrap();
            assert!(pager.faults > 0 && pager.copied_bytes >= 16 << 10, "{pager:?}");
            assert!(own < whole / 2, "{own} of {whole} bytes");
        }
        assert_eq!(source.learn(Some(&writes)), None);
        drop(source);
        client.settle().unwrap();
    }
}

#[test]
fn players_write_to_copies_made_in_advance() {
    let dir = tempfile::tempdir().unwrap();
    let _manager = manager(&dir, 256 << 20, None).unwrap();
    let socket = dir.path().join("pool.sock");
    let trace = "sequential-write:16M";
    let destination = Destination::Pool { socket: socket.clone(), name: "player".into() };
    let inputs = PlayerInputs::new(vec![load(trace).unwrap()]).unwrap();
    freeze(&inputs, &PlayerOptions::default(), KVM_DEVICE.as_ref(), destination, false).unwrap();
    let take = || {
        let (snapshot, mut grant) = open_pooled(&socket, "player", Verify::Once).unwrap();
        request_copy(&snapshot, &mut grant, RULE).unwrap();
        Source::new(snapshot, Some(grant))
    };
    // There is no profile: the manager learns the written chunks from two runs. Each run checks all
    // its memory.
    for _ in 0..2 {
        let mut snapshot = take();
        let report = run(&snapshot, "firn").unwrap();
        assert!(
            report.counters.private_bytes >= 16 << 20 && report.counters.copy_bytes == 0,
            "{report:?}"
        );
        let writes = report.writes.unwrap();
        assert!(writes.predicted == 0 && writes.missed >= 8, "{writes:?}");
        assert_eq!(snapshot.learn(Some(&writes)), None);
    }
    let first = loop {
        let snapshot = take();
        match snapshot.grant().unwrap().copies().and_then(|copies| copies.absent) {
            Some(NoCopy::NoHugePages) => return,
            Some(_) => std::thread::yield_now(),
            None => break snapshot,
        }
    };
    // Two microVMs at once, from one sealed extent.
    let second = take();
    std::thread::scope(|scope| {
        let runs = [first, second]
            .map(|snapshot| scope.spawn(move || (run(&snapshot, "firn").unwrap(), snapshot)));
        for run in runs {
            let (report, snapshot) = run.join().unwrap();
            let writes = report.writes.unwrap();
            assert_eq!((writes.missed, writes.unused), (0, 0), "{writes:?}");
            if snapshot.grant().unwrap().copies().unwrap().absent.is_none() {
                assert_eq!((report.counters.private_bytes, writes.copied), (0, writes.predicted));
                assert!(report.counters.copy_bytes >= 16 << 20);
            }
        }
    });
}
