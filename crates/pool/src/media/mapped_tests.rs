use std::os::fd::{AsFd, AsRawFd};

use rustix::fs::{OFlags, fcntl_getfl, fstat};

use super::{
    Access, Durability, File, GRANULE, MappedMedium, Medium, MediumError, MediumKind, MemfdOptions,
};

const SIZE: u64 = 4 << 20;

fn memfd() -> MappedMedium {
    MappedMedium::memfd(MemfdOptions { size: SIZE, huge: None, node: None }).unwrap()
}

#[test]
fn memfd_is_mapped_completely_and_indexed() {
    let medium = memfd();
    let facts = medium.facts();
    assert_eq!(
        (facts.kind, facts.size, facts.durability),
        (MediumKind::Memfd, SIZE, Durability::Volatile)
    );
    let index = facts.index.unwrap();
    assert_eq!(index.entries, SIZE / index.leaf);
    assert_eq!(medium.current_size().unwrap(), SIZE);
    medium.store(SIZE - 3, b"end");
    let mut bytes = [0; 4];
    medium.load(SIZE - 4, &mut bytes);
    assert_eq!(&bytes, b"\0end");
    medium.store_word(8, 77);
    medium.flush(8, 8);
    medium.fence().unwrap();
    assert_eq!(medium.load_word(8), 77);
}

#[test]
fn memfd_binds_to_an_existing_node_only() {
    let options = MemfdOptions { size: SIZE, huge: None, node: Some(0) };
    assert_eq!(MappedMedium::memfd(options).unwrap().facts().name, "memfd on NUMA node 0");
    let error = MappedMedium::memfd(MemfdOptions { node: Some(1000), ..options }).unwrap_err();
    assert!(matches!(error, MediumError::Node { node: 1000, .. }), "{error}");
    let error = MappedMedium::memfd(MemfdOptions { node: Some(5000), ..options }).unwrap_err();
    assert!(matches!(error, MediumError::Node { node: 5000, .. }), "{error}");
}

#[test]
fn descriptors_have_their_own_access() {
    let medium = memfd();
    for (access, flags) in [(Access::Read, OFlags::RDONLY), (Access::Write, OFlags::RDWR)] {
        let descriptor = medium.descriptor(access).unwrap();
        let found = fcntl_getfl(descriptor.as_fd()).unwrap();
        assert_eq!(found & OFlags::RWMODE, flags, "{access:?}");
    }
}

#[test]
fn file_has_one_writer_and_several_readers() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pool");
    let writer = MappedMedium::create_file(&path, SIZE + 5).unwrap();
    assert_eq!(writer.facts().size, SIZE);
    writer.store(100, b"snow");
    writer.flush(100, 4);
    writer.fence().unwrap();
    assert!(
        matches!(MappedMedium::open(&path, Access::Write).unwrap_err(), MediumError::InUse(p) if p == path)
    );
    // A descriptor that outlives the writer counts as a client and does not hold the writer's lock.
    let descriptor = writer.descriptor(Access::Write).unwrap();
    let reader = MappedMedium::open(&path, Access::Read).unwrap();
    let mut bytes = [0; 4];
    reader.load(100, &mut bytes);
    assert_eq!(&bytes, b"snow");
    drop(writer);
    let refused = MappedMedium::open(&path, Access::Write).unwrap_err();
    assert!(matches!(refused, MediumError::HasClients(_)), "{refused}");
    drop(descriptor);
    MappedMedium::open(&path, Access::Write).unwrap();
}

#[test]
fn existing_file_is_not_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pool");
    std::fs::write(&path, "precious").unwrap();
    assert!(matches!(MappedMedium::create_file(&path, SIZE).unwrap_err(), MediumError::Exists(_)));
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    let error = MappedMedium::open(&path, Access::Write).unwrap_err();
    assert!(matches!(error, MediumError::TooSmall { size: 8, .. }), "{error}");
    let impossible = folder.path().join("impossible");
    assert!(MappedMedium::create_file(&impossible, 1 << 62).is_err());
    assert!(!impossible.exists());
}

#[test]
fn unsupported_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for path in [folder.path(), "/dev/null".as_ref()] {
        let error = MappedMedium::open(path, Access::Read).unwrap_err();
        assert!(matches!(error, MediumError::NoMedium { .. }), "{error}");
    }
    let missing = folder.path().join("missing");
    assert!(matches!(MappedMedium::open(&missing, Access::Read), Err(MediumError::Open { .. })));
}

#[test]
fn a_range_of_a_memfd_gets_memory_of_its_own_in_place_of_the_mediums() {
    let (begin, len) = (GRANULE, 2 * GRANULE);
    let options = MemfdOptions { size: 4 * GRANULE, huge: None, node: Some(0) };
    let medium = MappedMedium::memfd(options).unwrap();
    let bytes = |file: &File| u64::try_from(fstat(file).unwrap().st_blocks).unwrap() * 512;
    let load = |at: u64| {
        let mut bytes = [1; 4];
        medium.load(at, &mut bytes);
        bytes
    };
    for at in [0, begin, begin + len - 4, begin + len] {
        medium.store(at, b"snow");
    }
    medium.separate(begin, len).unwrap();
    assert_eq!(bytes(&medium.file), 2 * GRANULE);
    for at in [begin, begin + len - 4] {
        assert_eq!(load(at), [0; 4]);
        medium.store(at, b"mud!");
    }
    let grant = medium.grant(Access::Write, begin).unwrap();
    let file = File::from(grant.descriptor);
    assert_eq!((grant.offset, fstat(&file).unwrap().st_size.unsigned_abs()), (0, len));
    let mut own = [0; 4];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut own, len - 4).unwrap();
    assert_eq!((&own, bytes(&file)), (b"mud!", len));
    if let Ok(maps) = std::fs::read_to_string("/proc/self/numa_maps") {
        let own = maps.lines().find(|line| line.contains("firn-replica")).unwrap();
        assert!(own.contains(" bind:0 "), "{own}");
    }
    assert!(medium.is_held(begin) && !medium.is_held(0));
    drop(file);
    assert!(!medium.is_held(begin));
    assert!(medium.join(begin, len).unwrap());
    assert!(!medium.join(begin, len).unwrap());
    assert_eq!((load(begin), load(begin + len - 4)), ([0; 4], [0; 4]));
    assert_eq!((load(0), load(begin + len)), (*b"snow", *b"snow"));
    assert_eq!(bytes(&medium.file), 4 * GRANULE);
}

#[test]
fn only_a_medium_that_shows_its_users_lets_go_of_an_extent() {
    let mut medium = memfd();
    assert!(medium.marks_last && !medium.is_held(GRANULE));
    medium.marks_last = false;
    assert!(medium.is_held(GRANULE));
}

/// What is open for the next grants holds no extent, and is granted once.
#[test]
fn a_prepared_grant_is_as_another_one() {
    let medium = memfd();
    medium.prepare_grants();
    let open = medium.spares.lock().iter().flatten().map(AsRawFd::as_raw_fd).collect::<Vec<_>>();
    assert!(open.len() == 2 && !medium.is_held(0) && !medium.is_held(GRANULE));
    for (access, prepared) in [(Access::Read, open[0]), (Access::Write, open[1])] {
        let grants = [GRANULE, 0].map(|offset| medium.grant(access, offset).unwrap());
        let descriptors = grants.each_ref().map(|grant| grant.descriptor.as_raw_fd());
        assert_eq!((descriptors[0], descriptors[1] == prepared), (prepared, false));
        assert!(medium.is_held(0) && medium.is_held(GRANULE));
        for grant in grants {
            let file = File::from(grant.descriptor);
            let written = std::os::unix::fs::FileExt::write_all_at(&file, b"snow", grant.offset);
            assert_eq!(written.is_ok(), access == Access::Write);
        }
        assert!(!medium.is_held(0) && !medium.is_held(GRANULE));
    }
}
