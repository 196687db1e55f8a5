use std::path::PathBuf;
use std::sync::Arc;

use firn_base::{PAGE_SIZE, PageRange};
use tempfile::TempDir;

use crate::layout::{ANNEX_COPY_BYTES, annex_at};
use crate::{
    Access, COPY_CHUNK, Client, CopySet, CreateOptions, GRANULE, Learnt, MappedMedium, MediumError,
    NoCopy, Pool, PoolReader, Server,
};

const CHUNKS: u64 = 6;
const KEY: &str = "written=1";

/// Runs of chunks.
fn chunks(runs: &[(u64, u64)]) -> Vec<PageRange> {
    let pages = COPY_CHUNK / PAGE_SIZE;
    let run =
        |(first, chunks): &(u64, u64)| PageRange { first: first * pages, pages: chunks * pages };
    runs.iter().map(run).collect()
}

/// A pool on a file, without a manager.
struct World {
    folder: TempDir,
}

impl World {
    fn new() -> Self {
        let world = Self { folder: tempfile::tempdir().unwrap() };
        let medium = MappedMedium::create_file(&world.medium(), 40 * GRANULE).unwrap();
        Pool::create(Arc::new(medium), &CreateOptions::default()).unwrap();
        world
    }

    fn medium(&self) -> PathBuf {
        self.folder.path().join("pool")
    }

    /// Opens the pool. The last manager may still be releasing its medium.
    fn open(&self) -> Pool {
        loop {
            match MappedMedium::open(&self.medium(), Access::Write) {
                Err(MediumError::InUse(_) | MediumError::HasClients(_)) => {
                    std::thread::yield_now();
                }
                medium => return Pool::open(Arc::new(medium.unwrap())).unwrap(),
            }
        }
    }

    fn serve(&self) -> Server {
        let path = self.folder.path().join("pool.sock");
        let server = Server::start(&path, self.open()).unwrap();
        server.set_arena(8 * COPY_CHUNK);
        server
    }

    fn client(&self) -> Client {
        Client::connect(&self.folder.path().join("pool.sock")).unwrap()
    }

    /// A client that has pinned the snapshot.
    fn pinned(&self, name: &str) -> (Client, u64) {
        let mut client = self.client();
        let generation = client.snapshot(name).unwrap().extent().generation;
        (client, generation)
    }

    fn freeze(&self, name: &str) {
        let mut client = self.client();
        let grant = client.begin(name, CHUNKS * COPY_CHUNK, 16).unwrap();
        client.commit(grant.extent().generation).unwrap();
    }

    /// Learns this set, as a run does: a start, then a new set.
    fn learn(&self, name: &str, key: &str, runs: &[(u64, u64)], state: &[u8]) {
        let (mut client, generation) = self.pinned(name);
        while client.copy(generation, key).unwrap().is_none() {
            client.store_copy_set(generation, key, None, &chunks(&[(0, 1)]), vec![]).unwrap();
        }
        let set = client.copy_set(generation, key).unwrap().unwrap();
        let (revision, runs) = (Some(set.revision), chunks(runs));
        assert!(client.store_copy_set(generation, key, revision, &runs, state.to_vec()).unwrap());
    }

    fn set(&self, name: &str, key: &str) -> Option<CopySet> {
        let (mut client, generation) = self.pinned(name);
        client.copy_set(generation, key).unwrap()
    }

    /// What the medium has stored about a snapshot.
    fn stored(&self, name: &str) -> Vec<Learnt> {
        let medium = MappedMedium::open(&self.medium(), Access::Read).unwrap();
        let listing = PoolReader::open(Arc::new(medium)).unwrap().list();
        let found = listing.extents.into_iter().find(|listed| listed.name.as_deref() == Some(name));
        found.unwrap().learnt
    }

    /// Ends a manager: clients first, because another manager waits for their mappings.
    fn end(server: Server) {
        while server.connections() > 0 {
            std::thread::yield_now();
        }
        drop(server);
    }
}

#[test]
fn next_manager_has_what_its_predecessor_learnt() {
    let world = World::new();
    let server = world.serve();
    world.freeze("hello");
    world.freeze("other");
    world.learn("hello", KEY, &[(1, 2), (4, 1)], b"snow");
    world.learn("hello", "second", &[(0, 6)], b"ice");
    world.learn("hello", KEY, &[(1, 3)], b"firn");
    World::end(server);

    let stored = world.stored("hello");
    let short: Vec<_> =
        stored.iter().map(|set| (set.key.as_str(), set.bytes / COPY_CHUNK, set.starts)).collect();
    assert_eq!(short, [(KEY, 3, 2), ("second", 6, 1)], "the last requested first");
    assert!(stored.iter().all(|set| set.last_start > 0));
    assert_eq!(world.stored("other"), []);

    let server = world.serve();
    let set = world.set("hello", KEY).unwrap();
    assert_eq!((set.runs, set.state), (chunks(&[(1, 3)]), b"firn".to_vec()));
    assert_eq!(world.set("hello", "second").unwrap().state, b"ice");
    assert!(world.set("hello", "third").is_none() && world.set("other", KEY).is_none());
    assert_eq!(world.client().arena().unwrap().ready, 0, "no copy without a start");
    let (mut client, generation) = world.pinned("hello");
    let copy = client.copy(generation, KEY).unwrap().unwrap();
    assert_eq!(copy.runs, chunks(&[(1, 3)]), "the first start has the expectation");
    assert!(!client.store_copy_set(generation, KEY, None, &[], vec![]).unwrap());
    let listing = client.list().unwrap();
    let listed = listing.extents.iter().find(|listed| listed.name.as_deref() == Some("hello"));
    assert_eq!(listed.unwrap().learnt[0].starts, 3);
    drop(client);
    World::end(server);
    assert_eq!(world.stored("hello")[0].starts, 3);
}

#[test]
fn prepared_copies_are_ready_for_the_first_start() {
    let world = World::new();
    let server = world.serve();
    world.freeze("first");
    world.freeze("last");
    world.learn("first", KEY, &[(0, 4)], b"");
    world.learn("last", KEY, &[(3, 2)], b"");
    World::end(server);
    let server = world.serve();
    let mut client = world.client();
    server.prepare_copies();
    client.settle().unwrap();
    let (mut start, generation) = world.pinned("last");
    let copy = match start.copy(generation, KEY).unwrap().unwrap().copy {
        Err(NoCopy::NoHugePages) => return,
        copy => copy.unwrap(),
    };
    assert_eq!(copy.0, chunks(&[(3, 2)]));
    drop((start, client));
    World::end(server);
}

/// A manager that is killed does not store anything at its end: what its thread stored is there.
#[test]
fn first_change_is_stored_while_the_manager_runs() {
    let world = World::new();
    let server = world.serve();
    world.freeze("hello");
    let (mut client, generation) = world.pinned("hello");
    client.store_copy_set(generation, KEY, None, &chunks(&[(2, 2)]), b"snow".to_vec()).unwrap();
    let stored = loop {
        let stored = world.stored("hello");
        if !stored.is_empty() {
            break stored;
        }
        std::thread::yield_now();
    };
    assert_eq!((stored[0].key.as_str(), stored[0].bytes), (KEY, 2 * COPY_CHUNK));
    drop(client);
    World::end(server);
}

#[test]
fn removed_and_replaced_snapshots_take_their_sets_along() {
    let world = World::new();
    let server = world.serve();
    for name in ["removed", "replaced", "kept"] {
        world.freeze(name);
        world.learn(name, KEY, &[(1, 1)], name.as_bytes());
    }
    World::end(server);
    let server = world.serve();
    world.client().reclaim("removed").unwrap();
    world.freeze("removed");
    world.freeze("replaced");
    World::end(server);
    let server = world.serve();
    assert!(world.set("removed", KEY).is_none() && world.set("replaced", KEY).is_none());
    assert_eq!(world.set("kept", KEY).unwrap().state, b"kept");
    World::end(server);
}

#[test]
fn damaged_sets_are_learnt_anew_and_the_snapshot_stays() {
    let world = World::new();
    let server = world.serve();
    world.freeze("hello");
    world.learn("hello", KEY, &[(1, 1)], b"snow");
    World::end(server);
    {
        let pool = world.open();
        let annex = annex_at(&pool.lookup("hello").unwrap()).unwrap();
        let medium = pool.shared_medium();
        for copy in [annex, annex + ANNEX_COPY_BYTES] {
            medium.store(copy + 16, &[0xff; 64]);
        }
    }
    assert_eq!(world.stored("hello"), []);
    let server = world.serve();
    assert!(world.set("hello", KEY).is_none());
    world.learn("hello", KEY, &[(2, 1)], b"ice");
    World::end(server);
    assert_eq!(world.stored("hello")[0].bytes, COPY_CHUNK);
    let server = world.serve();
    assert_eq!(world.set("hello", KEY).unwrap().state, b"ice");
    World::end(server);
}

#[test]
fn collecting_frees_copies_and_keeps_sets() {
    let world = World::new();
    let server = world.serve();
    world.freeze("hello");
    world.learn("hello", KEY, &[(1, 2)], b"snow");
    let mut client = world.client();
    client.settle().unwrap();
    client.collect().unwrap();
    client.settle().unwrap();
    assert_eq!(client.arena().unwrap().ready, 0);
    assert_eq!(world.set("hello", KEY).unwrap().state, b"snow");
    drop(client);
    World::end(server);
}
