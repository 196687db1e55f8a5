use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;

use tempfile::TempDir;

use super::*;
use crate::{Client, CopyGrant, CreateOptions, GRANULE, MappedMedium, MemfdOptions, Pool, Server};

const CHUNKS: u64 = 6;
const KEY: &str = "written=1";
/// Pages of a chunk.
const PAGES: u64 = COPY_CHUNK / PAGE_SIZE;

/// Runs of chunks.
fn chunks(runs: &[(u64, u64)]) -> Vec<PageRange> {
    let run =
        |(first, chunks): &(u64, u64)| PageRange { first: first * PAGES, pages: chunks * PAGES };
    runs.iter().map(run).collect()
}

struct World {
    folder: TempDir,
    server: Server,
}

impl World {
    fn new() -> Self {
        let options = MemfdOptions { size: 24 * GRANULE, huge: None, node: None };
        let medium = Arc::new(MappedMedium::memfd(options).unwrap());
        let pool = Pool::create(medium, &CreateOptions::default()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let server = Server::start(&folder.path().join("pool.sock"), pool).unwrap();
        server.set_arena(8 * COPY_CHUNK);
        Self { folder, server }
    }

    fn client(&self) -> Client {
        Client::connect(&self.folder.path().join("pool.sock")).unwrap()
    }

    /// Freezes a snapshot whose chunks contain different bytes.
    fn freeze(&self, name: &str) {
        let mut client = self.client();
        let grant = client.begin(name, CHUNKS * COPY_CHUNK, 16).unwrap();
        let extent = grant.map().unwrap();
        for chunk in 0..CHUNKS {
            extent
                .write_guest(chunk * COPY_CHUNK, &vec![byte(chunk); usize_of(COPY_CHUNK)])
                .unwrap();
        }
        client.commit(grant.extent().generation).unwrap();
    }

    /// A client that has pinned the snapshot.
    fn pinned(&self, name: &str) -> (Client, u64) {
        let mut client = self.client();
        let generation = client.snapshot(name).unwrap().extent().generation;
        (client, generation)
    }

    fn arena(&self) -> ArenaFacts {
        self.client().arena().unwrap()
    }
}

fn byte(chunk: u64) -> u8 {
    u8::try_from(chunk + 1).unwrap()
}

/// Requests a copy. Stores these runs if there is no set yet.
fn request(client: &mut Client, generation: u64, runs: &[PageRange]) -> CopyGrant {
    loop {
        if let Some(grant) = client.copy(generation, KEY).unwrap() {
            return grant;
        }
        client.store_copy_set(generation, KEY, None, runs, Vec::new()).unwrap();
    }
}

/// Requests a copy until one is ready; `None` if this host has no free huge pages.
fn copy(
    client: &mut Client,
    generation: u64,
    runs: &[PageRange],
) -> Option<(Vec<PageRange>, File)> {
    loop {
        match request(client, generation, runs).copy {
            Ok((runs, file)) => return Some((runs, file.into())),
            Err(NoCopy::BeingMade | NoCopy::ArenaFull) => std::thread::yield_now(),
            Err(NoCopy::NoHugePages) => return None,
            Err(NoCopy::Unneeded) => panic!("a copy is needed"),
        }
    }
}

/// Checks that a copy consists of these chunks.
fn check(file: &File, chunks: impl IntoIterator<Item = u64>) {
    let mut at = 0;
    let mut bytes = vec![0; usize_of(COPY_CHUNK)];
    for chunk in chunks {
        file.read_exact_at(&mut bytes, at).unwrap();
        assert!(bytes.iter().all(|found| *found == byte(chunk)), "chunk {chunk} of the copy");
        at += COPY_CHUNK;
    }
    assert_eq!(file.metadata().unwrap().len(), at);
}

/// Writes into a copy as a microVM does. Files of reserved huge pages do not support write(2).
fn write(file: &File, offset: u64, len: usize) {
    let how = How { writable: true, synchronous: false, align: COPY_CHUNK };
    let memory = Memory::map(file, 0, file.metadata().unwrap().len(), how).unwrap();
    memory.store(offset, &vec![0xff; len]);
}

#[test]
fn copies_use_reserved_huge_pages_if_enough_are_free() {
    const HUGETLBFS: i64 = 0x9584_58f6;
    let kib = |name: &str| {
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name)).unwrap_or(" 0 kB");
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
    };
    // Enough for all tests of this file, or none.
    let expected = match (kib("HugePages_Free:"), kib("HugePages_Total:")) {
        (257.., _) => true,
        (_, 0) => false,
        _ => return,
    };
    let world = World::new();
    world.freeze("hello");
    let (mut client, generation) = world.pinned("hello");
    let Some((_, file)) = copy(&mut client, generation, &chunks(&[(0, 3)])) else { return };
    check(&file, 0..3);
    let reserved = rustix::fs::fstatfs(&file).unwrap().f_type == HUGETLBFS;
    assert_eq!(reserved, expected);
}

#[test]
fn runs_of_pages_are_packed() {
    let world = World::new();
    world.freeze("hello");
    let (mut client, generation) = world.pinned("hello");
    let run = |first, pages| PageRange { first, pages };
    let runs = [run(3, 4), run(PAGES + 500, 30), run(3 * PAGES, PAGES), run(5 * PAGES - 3, PAGES)];
    let Some((copied, file)) = copy(&mut client, generation, &runs) else { return };
    assert_eq!(copied, runs);
    let mut bytes = vec![0; usize_of(PAGE_SIZE)];
    for (part, place) in pack_copy(&runs) {
        for (at, page) in (0..).zip(part.range()) {
            file.read_exact_at(&mut bytes, place + at * PAGE_SIZE).unwrap();
            assert!(bytes.iter().all(|found| *found == byte(page / PAGES)), "page {page}");
        }
    }
    assert_eq!(file.metadata().unwrap().len(), (34 + 2 * PAGES) * PAGE_SIZE);
    assert_eq!(world.arena().lent, (34 + 2 * PAGES) * PAGE_SIZE);
    // The arena has room for two chunks: the first pages are copied.
    world.server.set_arena(2 * COPY_CHUNK + 7 * PAGE_SIZE);
    drop(client);
    let (mut client, _) = world.pinned("hello");
    let (copied, file) = copy(&mut client, generation, &[]).unwrap();
    assert_eq!(copied, [&runs[..3], &[run(5 * PAGES - 3, PAGES - 34)]].concat());
    assert_eq!(file.metadata().unwrap().len(), 2 * COPY_CHUNK);
}

#[test]
fn copies_are_not_reused() {
    let world = World::new();
    world.freeze("hello");
    let (mut first, generation) = world.pinned("hello");
    let profile = chunks(&[(1, 2), (4, 1)]);
    let Some((copied, used)) = copy(&mut first, generation, &profile) else { return };
    assert_eq!(copied, profile);
    check(&used, [1, 2, 4]);
    // A run writes all chunks and keeps the descriptor after its end.
    write(&used, 0, usize_of(3 * COPY_CHUNK));
    assert!(used.set_len(COPY_CHUNK).is_err(), "its size is sealed");
    drop(first);
    for _ in 0..4 {
        let (mut next, generation) = world.pinned("hello");
        let (_, file) = copy(&mut next, generation, &profile).unwrap();
        check(&file, [1, 2, 4]);
        assert_ne!(file.metadata().unwrap().ino(), used.metadata().unwrap().ino());
        write(&file, 2 * COPY_CHUNK, 4096);
    }
    let (mut reader, _) = world.pinned("hello");
    let extent = reader.snapshot("hello").unwrap().map().unwrap();
    let mut bytes = vec![0; usize_of(COPY_CHUNK)];
    for chunk in 0..CHUNKS {
        extent.read_guest(chunk * COPY_CHUNK, &mut bytes);
        assert!(bytes.iter().all(|found| *found == byte(chunk)), "sealed chunk {chunk}");
    }
}

#[test]
fn concurrent_starts_get_their_own_copies_and_return_their_bytes() {
    let world = World::new();
    world.freeze("hello");
    let [(mut one, generation), (mut two, _)] = [(); 2].map(|()| world.pinned("hello"));
    let Some((_, first)) = copy(&mut one, generation, &chunks(&[(0, 2)])) else { return };
    let (_, second) = copy(&mut two, generation, &chunks(&[(0, 2)])).unwrap();
    write(&first, 0, 4096);
    check(&second, [0, 1]);
    assert_eq!(world.arena().lent, 4 * COPY_CHUNK);
    drop((one, two));
    while world.server.connections() > 0 {
        std::thread::yield_now();
    }
    assert_eq!(world.arena().lent, 0);
}

#[test]
fn arena_stays_within_its_size() {
    let world = World::new();
    world.freeze("hello");
    world.freeze("other");
    world.server.set_arena(2 * COPY_CHUNK);
    let (mut client, generation) = world.pinned("hello");
    let Some((copied, file)) = copy(&mut client, generation, &chunks(&[(0, 5)])) else { return };
    // Chunks that do not fit are not copied.
    assert_eq!(copied, chunks(&[(0, 2)]));
    check(&file, [0, 1]);
    let (mut second, generation) = world.pinned("other");
    let refused = loop {
        match request(&mut second, generation, &chunks(&[(3, 1)])).copy {
            Err(NoCopy::BeingMade) => std::thread::yield_now(),
            other => break other.map(drop),
        }
    };
    assert_eq!(refused, Err(NoCopy::ArenaFull));
    assert_eq!(
        world.arena(),
        ArenaFacts { size: 2 * COPY_CHUNK, ready: 0, lent: 2 * COPY_CHUNK, node: None }
    );
    drop(client);
    // The freed space is used for the last requested set.
    assert!(copy(&mut second, generation, &chunks(&[(3, 1)])).is_some());
    let arena = world.arena();
    assert!(arena.ready + arena.lent <= arena.size, "{arena:?}");
    world.server.set_arena(0);
    assert!(matches!(
        world.pinned("hello").0.copy(generation, KEY).unwrap_err(),
        crate::ClientError::Refused { .. }
    ));
}

#[test]
fn set_and_copies_are_replaced_by_revision() {
    let world = World::new();
    world.freeze("hello");
    let (mut client, generation) = world.pinned("hello");
    assert!(client.copy(generation, KEY).unwrap().is_none());
    assert!(client.copy_set(generation, KEY).unwrap().is_none());
    assert!(!client.store_copy_set(generation, KEY, Some(1), &chunks(&[(0, 2)]), vec![1]).unwrap());
    assert!(client.store_copy_set(generation, KEY, None, &chunks(&[(0, 2)]), vec![1]).unwrap());
    assert!(!client.store_copy_set(generation, KEY, None, &chunks(&[(1, 1)]), vec![2]).unwrap());
    let (mut other, _) = world.pinned("hello");
    let old = other.copy_set(generation, KEY).unwrap().unwrap();
    assert_eq!((old.runs, old.state), (chunks(&[(0, 2)]), vec![1]));
    let _ = copy(&mut client, generation, &[]);
    let new = chunks(&[(3, 1), (5, 1)]);
    let revision = Some(old.revision);
    assert!(other.store_copy_set(generation, KEY, revision, &new, vec![3, 4]).unwrap());
    assert!(!client.store_copy_set(generation, KEY, revision, &[], vec![]).unwrap());
    assert_eq!(client.copy_set(generation, KEY).unwrap().unwrap().state, [3, 4]);
    assert!(client.copy(generation, "another key").unwrap().is_none());
    assert_eq!(request(&mut client, generation, &[]).runs, new);
    let Some((copied, file)) = copy(&mut client, generation, &[]) else { return };
    assert_eq!(copied, new);
    check(&file, [3, 5]);
}

#[test]
fn key_that_is_too_long_is_refused() {
    let world = World::new();
    world.freeze("hello");
    let (mut client, generation) = world.pinned("hello");
    let refused = client.store_copy_set(generation, &"k".repeat(129), None, &[], vec![]);
    assert!(matches!(refused, Err(crate::ClientError::Refused { .. })), "{refused:?}");
}

#[test]
fn copies_of_a_replaced_snapshot_are_dropped() {
    let world = World::new();
    world.freeze("hello");
    let (mut old, generation) = world.pinned("hello");
    let Some(_) = copy(&mut old, generation, &chunks(&[(0, 1)])) else { return };
    world.freeze("hello");
    // The manager may still be preparing a copy of the old snapshot.
    while world.arena().ready > 0 {
        std::thread::yield_now();
    }
    let (mut new, current) = world.pinned("hello");
    assert!(new.copy(generation, KEY).is_err(), "the old extent is not pinned");
    assert!(new.copy(current, KEY).unwrap().is_none());
    assert_eq!(request(&mut new, current, &[]).copy.map(drop), Err(NoCopy::Unneeded));
    // The old copy is still lent, and its snapshot is still pinned.
    assert_eq!(world.arena().lent, COPY_CHUNK);
    new.reclaim("hello").unwrap();
}

#[test]
fn pages_beyond_guest_memory_are_ignored() {
    let world = World::new();
    world.freeze("hello");
    let (mut client, generation) = world.pinned("hello");
    let far = [(5 * PAGES, u64::from(u32::MAX)), (u64::from(u32::MAX), 7)];
    let far = far.map(|(first, pages)| PageRange { first, pages });
    assert_eq!(request(&mut client, generation, &far).runs, chunks(&[(5, 1)]));
    let set = client.copy_set(generation, KEY).unwrap().unwrap();
    assert!(client.store_copy_set(generation, KEY, Some(set.revision), &far, Vec::new()).unwrap());
    assert_eq!(request(&mut client, generation, &[]).runs, chunks(&[(5, 1)]));
}

#[test]
fn copies_are_made_on_a_node_that_exists() {
    let world = World::new();
    let error = world.server.set_copies_node(1000).unwrap_err();
    assert!(error.to_string().contains("node 1000"), "{error}");
    world.server.set_copies_node(0).unwrap();
    assert_eq!(world.arena().node, Some(0));
}
