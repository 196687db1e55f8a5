use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use proptest::prelude::{any, proptest};
use proptest::test_runner::Config;
use rustix::fs::{OFlags, fcntl_getfl};
use tempfile::TempDir;

use super::wire::{MAX_REQUEST, send};
use super::{Client, ClientError, MANAGER_VERSION, Refusal, Request, Server, ServerError, Wanted};
use crate::{
    Access, CreateOptions, GRANULE, Imaging, MappedMedium, MediumError, MemfdOptions, Pool,
    PoolReader, Role,
};

pub(super) const GUEST: u64 = GRANULE;

pub(super) struct World {
    pub(super) folder: TempDir,
    pub(super) server: Server,
}

impl World {
    pub(super) fn new(granules: u64) -> Self {
        let options = MemfdOptions { size: (granules + 2) * GRANULE, huge: None, node: None };
        Self::on(MappedMedium::memfd(options).unwrap(), tempfile::tempdir().unwrap())
    }

    /// A pool on a medium, which may be in the folder.
    pub(super) fn on(medium: MappedMedium, folder: TempDir) -> Self {
        let options = CreateOptions { names: 8, ..CreateOptions::default() };
        let pool = Pool::create(Arc::new(medium), &options).unwrap();
        let server = Server::start(&folder.path().join("pool.sock"), pool).unwrap();
        Self { folder, server }
    }

    pub(super) fn path(&self) -> PathBuf {
        self.folder.path().join("pool.sock")
    }

    pub(super) fn client(&self) -> Client {
        Client::connect(&self.path()).unwrap()
    }

    /// Waits until the manager has closed the connections of dropped clients.
    pub(super) fn settle(&self, connections: usize) {
        while self.server.connections() > connections {
            std::thread::yield_now();
        }
    }

    /// Waits until `count` replicas are ready and returns the cost of imaging the last one.
    fn ready(&self, client: &mut Client, count: usize) -> Imaging {
        loop {
            let listing = client.list().unwrap();
            let imagings = listing.extents.iter().filter_map(|listed| listed.imaging);
            let imagings: Vec<Imaging> = imagings.collect();
            if imagings.len() == count {
                return imagings[count - 1];
            }
        }
    }

    pub(super) fn count(&self, role: Role) -> usize {
        let listing = self.server.pool().list();
        listing.extents.iter().filter(|listed| listed.role == role).count()
    }
}

pub(super) fn freeze(client: &mut Client, name: &str, text: &[u8]) {
    let grant = client.begin(name, GUEST, 100).unwrap();
    let extent = grant.map().unwrap();
    extent.write_guest(0, &vec![0; 2 << 20]).unwrap();
    extent.write_guest(8192, text).unwrap();
    extent.write_tail(0, text).unwrap();
    extent.flush().unwrap();
    client.commit(grant.extent().generation).unwrap();
}

pub(super) fn refusal(error: &ClientError) -> Refusal {
    match error {
        ClientError::Refused { refusal, .. } => *refusal,
        error => panic!("{error}"),
    }
}

#[test]
fn snapshot_is_shared_between_clients() {
    let world = World::new(8);
    freeze(&mut world.client(), "hello", b"snow");
    let mut client = world.client();
    let grant = client.snapshot("hello").unwrap();
    assert_eq!(fcntl_getfl(grant.descriptor()).unwrap() & OFlags::RWMODE, OFlags::RDONLY);
    let mut bytes = [0; 4];
    grant.map().unwrap().read_guest(8192, &mut bytes);
    assert_eq!(&bytes, b"snow");
    grant.map().unwrap().read_tail(0, &mut bytes);
    assert_eq!(&bytes, b"snow");
    let described = client.describe().unwrap();
    assert_eq!((described.pid, described.pool.uuid), (std::process::id(), grant.pool()));
    let medium = MappedMedium::from_descriptor(described.descriptor, described.medium).unwrap();
    let reader = PoolReader::open(Arc::new(medium)).unwrap();
    assert_eq!(reader.lookup("hello").unwrap(), grant.extent());
}

#[test]
fn pin_ends_with_its_connection() {
    let world = World::new(8);
    let mut writer = world.client();
    freeze(&mut writer, "hello", b"snow");
    let mut first = world.client();
    let mut second = world.client();
    let old = first.snapshot("hello").unwrap();
    let extent = old.map().unwrap();
    let other = second.snapshot("hello").unwrap().extent().generation;
    freeze(&mut writer, "hello", b"ice!");
    assert_eq!(world.count(Role::Superseded), 1);
    second.release(other).unwrap();
    assert_eq!(refusal(&second.release(other).unwrap_err()), Refusal::Invalid);
    assert_eq!(world.count(Role::Superseded), 1);
    let mut bytes = [0; 4];
    extent.read_guest(8192, &mut bytes);
    assert_eq!(&bytes, b"snow");
    drop((old, extent, first));
    world.settle(2);
    assert_eq!(world.count(Role::Superseded), 0);
}

#[test]
fn staging_extent_is_freed_with_its_connection() {
    let world = World::new(8);
    let mut client = world.client();
    client.begin("hello", GUEST, 0).unwrap();
    assert_eq!(refusal(&world.client().snapshot("hello").unwrap_err()), Refusal::BeingWritten);
    let second = world.client().begin("hello", GUEST, 0).unwrap_err();
    assert_eq!(refusal(&second), Refusal::BeingWritten);
    drop(client);
    world.settle(0);
    assert_eq!(refusal(&world.client().snapshot("hello").unwrap_err()), Refusal::Unknown);
    assert!(world.server.pool().list().extents.is_empty());
}

#[test]
fn replicas_are_imaged_again_and_freed_when_the_pool_is_full() {
    let world = World::new(6);
    let mut client = world.client();
    freeze(&mut client, "hello", b"snow");
    let replica = client.replica("hello").unwrap();
    assert!(replica.prepared.is_none() && replica.imaging.compared == GUEST);
    let memory = replica.grant.map().unwrap();
    let mut bytes = [0; 4];
    memory.read_guest(8192, &mut bytes);
    assert_eq!(&bytes, b"snow");
    memory.write_guest(8192, b"mud!").unwrap();
    let extent = replica.grant.extent();
    client.release(extent.generation).unwrap();
    drop((memory, replica));

    let told = world.ready(&mut client, 1);
    assert_eq!((told.compared, told.copied), (GUEST, 64 << 10));
    let again = client.replica("hello").unwrap();
    assert_eq!((again.prepared, again.imaging), (Some(told), Imaging::default()));
    assert_eq!(again.grant.extent(), extent);
    again.grant.map().unwrap().read_guest(8192, &mut bytes);
    assert_eq!(&bytes, b"snow", "the replica was imaged after the first run");
    assert_eq!(again.source, client.snapshot("hello").unwrap().extent());
    drop((again, client));
    world.settle(0);
    assert_eq!(world.count(Role::Replica), 1);

    // The pool has six granules: two for the snapshot and one for the replica. The next extent
    // needs four.
    let mut client = world.client();
    client.begin("large", 4 * GRANULE, 0).unwrap();
    assert_eq!(world.count(Role::Replica), 0);
    let full = client.replica("hello").unwrap_err();
    assert_eq!(refusal(&full), Refusal::Full);
    assert!(full.to_string().contains("lacks 2097152 bytes"), "{full}");
}

#[test]
fn many_replicas_released_at_once_are_all_imaged_or_freed() {
    let world = World::new(12);
    let mut client = world.client();
    freeze(&mut client, "hello", b"snow");
    for round in 0..3 {
        let mut clients: Vec<Client> = (0..4).map(|_| world.client()).collect();
        for client in &mut clients {
            let replica = client.replica("hello").unwrap();
            let memory = replica.grant.map().unwrap();
            let mut bytes = [0; 4];
            memory.read_guest(8192, &mut bytes);
            assert_eq!(&bytes, b"snow", "round {round}");
            memory.write_guest(8192, b"mud!").unwrap();
        }
        drop(clients);
        world.settle(1);
        if round == 0 {
            world.ready(&mut client, 4);
        }
    }
    // Including the replica that is being compared.
    assert!(client.collect().unwrap().0 >= 4);
    assert_eq!(world.count(Role::Replica), 0);
}

#[test]
fn a_request_that_waited_for_imaging_has_one_more_replica_made() {
    let world = World::new(12);
    let mut client = world.client();
    freeze(&mut client, "hello", b"snow");
    let replica = |client: &mut Client| client.replica("hello").unwrap();
    let mut two = [replica(&mut client), replica(&mut client)];
    let ready = loop {
        // One is imaged in the background, and the other waits.
        for replica in two {
            client.release(replica.grant.extent().generation).unwrap();
        }
        let first = replica(&mut client);
        client.settle().unwrap();
        if first.prepared.is_none() {
            break first;
        }
        two = [first, replica(&mut client)];
    };
    assert_eq!(world.count(Role::Replica), 3);
    world.ready(&mut client, 2);
    drop(ready);
}

#[test]
fn verification_is_forgotten_with_the_extent() {
    let world = World::new(8);
    let mut client = world.client();
    freeze(&mut client, "hello", b"snow");
    let first = client.snapshot("hello").unwrap();
    client.verified(first.extent().generation).unwrap();
    assert!(client.snapshot("hello").unwrap().is_verified());
    freeze(&mut client, "hello", b"ice!");
    assert!(!client.snapshot("hello").unwrap().is_verified());
    assert_eq!(refusal(&client.verified(u64::MAX).unwrap_err()), Refusal::Invalid);
}

#[test]
fn update_frees_ready_replicas() {
    let world = World::new(8);
    let mut client = world.client();
    freeze(&mut client, "hello", b"snow");
    let first = client.replica("hello").unwrap().grant.extent().generation;
    client.release(first).unwrap();
    world.ready(&mut client, 1);
    let replica = client.replica("hello").unwrap();
    let running = replica.grant.extent().generation;
    assert_eq!(first, running);
    freeze(&mut client, "hello", b"ice!");
    let sources = client.list().unwrap().extents;
    let source = sources.iter().find(|listed| listed.extent == replica.source).unwrap();
    assert_eq!(source.role, Role::Superseded, "it keeps its own snapshot");
    client.release(running).unwrap();
    drop(replica);
    client.settle().unwrap();
    assert_eq!((world.count(Role::Replica), world.count(Role::Superseded)), (0, 0));
    let replica = client.replica("hello").unwrap();
    assert!(replica.prepared.is_none());
    let mut bytes = [0; 4];
    replica.grant.map().unwrap().read_guest(8192, &mut bytes);
    assert_eq!(&bytes, b"ice!");
    client.release(replica.grant.extent().generation).unwrap();
    drop(replica);
    assert_eq!(client.collect().unwrap().0, 1);
    assert_eq!(client.reclaim("hello").unwrap(), 2 * GRANULE);
    assert!(client.list().unwrap().extents.is_empty());
}

#[test]
fn a_confined_connection_only_uses_what_it_was_granted() {
    let world = World::new(12);
    let mut other = world.client();
    freeze(&mut other, "hello", b"snow");
    let foreign = other.snapshot("hello").unwrap().extent().generation;
    let staged = other.begin("ice", GUEST, 0).unwrap().extent().generation;
    let mut client = world.client();
    let generation = client.snapshot("hello").unwrap().extent().generation;
    let replica = client.replica("hello").unwrap().grant.extent().generation;
    let staging = client.begin("mud", GUEST, 0).unwrap().extent().generation;
    assert!(client.store_copy_set(generation, "key", None, &[], vec![1]).unwrap());
    client.confine().unwrap();

    let confined = |error: ClientError| assert_eq!(refusal(&error), Refusal::Confined);
    confined(client.describe().unwrap_err());
    confined(client.snapshot("hello").unwrap_err());
    confined(client.replica("hello").unwrap_err());
    confined(client.begin("other", GUEST, 0).unwrap_err());
    confined(client.commit(staging).unwrap_err());
    confined(client.copy(generation, "key").unwrap_err());
    confined(client.store_copy_set(generation, "new", None, &[], vec![]).unwrap_err());
    confined(client.verified(generation).unwrap_err());
    confined(client.settle().unwrap_err());
    confined(client.list().unwrap_err());
    confined(client.reclaim("hello").unwrap_err());
    confined(client.collect().unwrap_err());
    assert_eq!(foreign, generation);
    assert_eq!(refusal(&client.release(staged).unwrap_err()), Refusal::Invalid);
    assert_eq!(refusal(&client.is_current(staged).unwrap_err()), Refusal::Invalid);

    assert!(client.is_current(generation).unwrap());
    let set = client.copy_set(generation, "key").unwrap().unwrap();
    assert!(client.store_copy_set(generation, "key", Some(set.revision), &[], vec![2]).unwrap());
    client.release(replica).unwrap();
    freeze(&mut other, "hello", b"ice!");
    assert!(!client.is_current(generation).unwrap());
    client.release(generation).unwrap();
    client.confine().unwrap();
    client.confined().unwrap();
}

/// A start's connection is confined with its grants where nothing is left to request, and only
/// then: else the client checks the bytes, or stores a copy set, first.
#[test]
fn a_start_is_confined_with_its_grants_unless_something_is_missing() {
    let world = World::new(12);
    let mut other = world.client();
    freeze(&mut other, "hello", b"snow");
    let start = |wanted, confine| {
        let mut client = world.client();
        let grant = client.start("hello", wanted, confine).unwrap();
        let is_confined =
            matches!(client.list(), Err(error) if refusal(&error) == Refusal::Confined);
        (grant, is_confined, client)
    };
    let all = [Wanted::Snapshot, Wanted::Copy("key"), Wanted::Replica];
    for wanted in all {
        let (grant, is_confined, _client) = start(wanted, true);
        assert!(!is_confined && !grant.snapshot.is_verified() && grant.copy.is_none());
        assert_eq!(grant.replica.is_some(), wanted == Wanted::Replica);
    }
    let generation = other.snapshot("hello").unwrap().extent().generation;
    other.verified(generation).unwrap();
    for (wanted, expected) in all.into_iter().zip([true, false, true]) {
        assert_eq!(start(wanted, true).1, expected, "{wanted:?}");
        assert!(!start(wanted, false).1);
    }
    assert!(other.store_copy_set(generation, "key", None, &[], vec![]).unwrap());
    let (grant, is_confined, mut client) = start(Wanted::Copy("key"), true);
    assert!(is_confined && grant.copy.is_some());
    client.confine().unwrap();
    client.confined().unwrap();
    assert!(client.is_current(generation).unwrap());

    let mut client = world.client();
    let refused = client.start("other", Wanted::Replica, true).unwrap_err();
    assert_eq!(refusal(&refused), Refusal::Unknown);
    assert!(client.start("hello", Wanted::Replica, true).unwrap().replica.is_some());
}

#[test]
fn invalid_requests_are_refused() {
    let world = World::new(8);
    let mut client = world.client();
    for name in ["", "a\nb", &"x".repeat(200)] {
        assert_eq!(refusal(&client.begin(name, GUEST, 0).unwrap_err()), Refusal::Invalid);
    }
    assert_eq!(refusal(&client.begin("hello", 7, 0).unwrap_err()), Refusal::Invalid);
    assert_eq!(refusal(&client.begin("hello", GUEST, u64::MAX).unwrap_err()), Refusal::Full);
    assert_eq!(refusal(&client.commit(1).unwrap_err()), Refusal::Invalid);
    assert_eq!(refusal(&client.reclaim("hello").unwrap_err()), Refusal::Unknown);
    assert_eq!(refusal(&client.replica("hello").unwrap_err()), Refusal::Unknown);
    // A connection cannot publish another connection's extent.
    let mut other = world.client();
    let generation = other.begin("hello", GUEST, 0).unwrap().extent().generation;
    assert_eq!(refusal(&client.commit(generation).unwrap_err()), Refusal::Invalid);
    other.commit(generation).unwrap();
}

#[test]
fn socket_is_refused_replaced_or_unchanged() {
    let world = World::new(4);
    let pool = world.server.pool().clone();
    let taken = Server::start(&world.path(), pool.clone()).unwrap_err();
    assert!(matches!(taken, ServerError::InUse(_)), "{taken}");
    let file = world.folder.path().join("file");
    std::fs::write(&file, "precious").unwrap();
    let refused = Server::start(&file, pool.clone()).unwrap_err();
    assert!(matches!(refused, ServerError::NotASocket(_)), "{refused}");
    let stale = world.folder.path().join("stale");
    drop(std::os::unix::net::UnixListener::bind(&stale).unwrap());
    assert!(matches!(Client::connect(&stale).unwrap_err(), ClientError::NotRunning(_)));
    let server = Server::start(&stale, pool).unwrap();
    use std::os::unix::fs::PermissionsExt;
    let mode = std::fs::metadata(&stale).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    Client::connect(&stale).unwrap().list().unwrap();
    drop(server);
    assert!(!stale.exists());
}

fn raw(path: &Path, bytes: &[u8]) -> Vec<u8> {
    let mut stream = UnixStream::connect(path).unwrap();
    // The manager may close the connection before everything is written.
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    answer
}

#[test]
fn other_versions_and_oversized_frames_are_refused() {
    let world = World::new(4);
    let frame = |version: u32, len: u32| {
        [&b"fpmg"[..], &version.to_le_bytes(), &len.to_le_bytes()].concat()
    };
    let (is, other) = (MANAGER_VERSION, MANAGER_VERSION + 1);
    for bytes in [frame(other, 0), frame(is, MAX_REQUEST + 1), frame(is, 0)] {
        let answer = String::from_utf8_lossy(&raw(&world.path(), &bytes)).into_owned();
        assert!(answer.contains("the request is not valid"), "{answer}");
    }
    assert_eq!(raw(&world.path(), &frame(is, 100)), b"");
    world.client().list().unwrap();
}

#[test]
fn descriptors_sent_by_clients_are_closed() {
    let world = World::new(4);
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let mut client = world.client();
    client.list().unwrap();
    let (near, far) = UnixStream::pair().unwrap();
    let before = descriptors();
    let sender = UnixStream::connect(world.path()).unwrap();
    for _ in 0..50 {
        let copy = far.try_clone().unwrap().into();
        send(&sender, &Request::List, Some(&copy)).unwrap();
        super::wire::receive::<super::Response>(&sender, super::wire::MAX_RESPONSE).unwrap();
    }
    assert!(descriptors() < before + 30, "{} {before}", descriptors());
    drop((near, far));
}

#[test]
fn descriptors_of_a_file_pool_do_not_share_its_lock() {
    let folder = tempfile::tempdir().unwrap();
    let (path, socket) = (folder.path().join("pool"), folder.path().join("pool.sock"));
    let medium = Arc::new(MappedMedium::create_file(&path, 8 * GRANULE).unwrap());
    let server = Server::start(&socket, Pool::create(medium, &CreateOptions::default()).unwrap());
    let mut client = Client::connect(&socket).unwrap();
    freeze(&mut client, "hello", b"snow");
    let grant = client.snapshot("hello").unwrap();
    let staging = client.begin("next", GUEST, 0).unwrap();
    drop(client);
    let server = server.unwrap();
    while server.connections() > 0 {
        std::thread::yield_now();
    }
    let pool = server.pool().clone();
    assert!(matches!(MappedMedium::open(&path, Access::Write).unwrap_err(), MediumError::InUse(_)));
    drop((server, pool));
    // The last connection's thread may still be terminating.
    let open = || loop {
        match MappedMedium::open(&path, Access::Write) {
            Err(MediumError::InUse(_)) => {}
            opened => break opened.map(drop),
        }
    };
    // Space that a remaining client may use is not reused.
    assert!(matches!(open(), Err(MediumError::HasClients(_))));
    let mapped = grant.map().unwrap();
    drop((grant, staging));
    assert!(matches!(open(), Err(MediumError::HasClients(_))));
    drop(mapped);
    open().unwrap();
}

#[test]
fn unused_manager_is_detected_and_refuses_new_clients() {
    let world = World::new(4);
    let (watch, idle) = (world.server.watch(), std::time::Duration::from_millis(20));
    let mut client = world.client();
    client.list().unwrap();
    let waiting = std::thread::spawn(move || watch.wait_until_unused(idle));
    let mut second = world.client();
    second.list().unwrap();
    drop(client);
    second.list().unwrap();
    assert!(!waiting.is_finished());
    drop(second);
    waiting.join().unwrap();
    let late = Client::connect(&world.path()).and_then(|mut client| client.list().map(drop));
    assert!(matches!(late, Err(ClientError::Closed(_) | ClientError::NotRunning(_))), "{late:?}");
}

proptest! {
    #![proptest_config(Config::with_cases(30))]

    #[test]
    fn random_bytes_are_rejected(bytes in proptest::collection::vec(any::<u8>(), 0..200), framed: bool) {
        let world = World::new(3);
        let mut frame = Vec::new();
        if framed {
            frame.extend(b"fpmg");
            frame.extend(MANAGER_VERSION.to_le_bytes());
            frame.extend(u32::try_from(bytes.len()).unwrap().to_le_bytes());
        }
        frame.extend(&bytes);
        raw(&world.path(), &frame);
        let mut client = world.client();
        assert!(client.list().unwrap().extents.is_empty());
    }
}

/// A pool's file on storage, or its memory: both are zeroed ahead, in their own way.
fn zeroable(folder: &TempDir) -> [MappedMedium; 2] {
    let memory = MappedMedium::memfd(MemfdOptions { size: 8 * GRANULE, huge: None, node: None });
    let file = MappedMedium::create_file(&folder.path().join("medium"), 8 * GRANULE);
    [memory.unwrap(), file.unwrap()]
}

#[test]
fn free_space_is_zeroed_ahead_and_old_content_never_counts_as_zero() {
    let folder = tempfile::tempdir().unwrap();
    for (number, medium) in zeroable(&folder).into_iter().enumerate() {
        let pool = Pool::create(Arc::new(medium), &CreateOptions::default()).unwrap();
        let path = folder.path().join(format!("{number}.sock"));
        let _server = Server::start(&path, pool).unwrap();
        let mut client = Client::connect(&path).unwrap();
        client.settle().unwrap();
        let free = client.list().unwrap();
        assert_eq!(free.zeroed_bytes, free.free_bytes());
        for mark in 1..4_u8 {
            // All content of the freeze before this one is gone.
            let grant = client.begin("hello", 2 * GUEST, 100).unwrap();
            assert!(grant.is_zeroed(0, 2 * GUEST) && !grant.is_zeroed(0, 4 * GUEST));
            let used = client.list().unwrap();
            assert_eq!(used.zeroed_bytes, used.free_bytes());
            let extent = grant.map().unwrap();
            let mut bytes = vec![1; 2 << 20];
            for offset in [0, GUEST] {
                extent.read_guest(offset, &mut bytes);
                assert!(bytes.iter().all(|byte| *byte == 0), "{mark}");
            }
            extent.write_guest(GUEST, &vec![mark; 2 << 20]).unwrap();
            extent.write_tail(0, &[mark; 100]).unwrap();
            extent.flush().unwrap();
            // A freeze that was given up leaves content, too.
            let generation = grant.extent().generation;
            drop((extent, grant));
            if mark == 2 {
                client.release(generation).unwrap();
            } else {
                client.commit(generation).unwrap();
                client.reclaim("hello").unwrap();
            }
            client.settle().unwrap();
        }
    }
}

#[test]
fn space_that_is_used_again_at_once_is_not_zeroed() {
    let world = World::new(4);
    let mut client = world.client();
    client.settle().unwrap();
    // Without a thread, nothing is zeroed any more.
    world.server.pool().end_zeroing();
    client.settle().unwrap();
    for zeroed in [true, false, false] {
        let grant = client.begin("hello", 3 * GUEST, 100).unwrap();
        assert_eq!(grant.is_zeroed(0, 3 * GUEST), zeroed);
        grant.map().unwrap().write_guest(0, &[7; 4096]).unwrap();
        client.release(grant.extent().generation).unwrap();
    }
    assert_eq!(client.list().unwrap().zeroed_bytes, 0);
}
