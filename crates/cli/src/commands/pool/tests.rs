use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use firn_pool::simulated::SimulatedMedium;
use firn_pool::{Client, MappedMedium, Server};
use firn_pool::{CreateOptions, GRANULE, Huge, Listing, MemfdOptions, Pool, PoolReader};
use firn_snapshot::{
    Chunk, Contents, Description, Destination, FreezeRequest, Machine, MemoryLayout, PageSource,
    freeze,
};

use super::medium::{MediumName, parse};
use super::source::Source;
use super::{map, svg};

/// A pool of nine granules: `snow` twice with its old version pinned, `<ice>` being written, and a
/// replica.
fn listing(look: impl FnOnce(&Listing)) {
    let medium = Arc::new(SimulatedMedium::new(11 * GRANULE));
    let pool = Pool::create(medium, &CreateOptions::default()).unwrap();
    let publish = || pool.allocate("snow", GRANULE, 0).unwrap().publish().unwrap();
    publish();
    let pin = pool.pin("snow").unwrap();
    publish();
    let staging = pool.allocate("<ice>", 2 * GRANULE, 100).unwrap();
    let replica = pool.replica("snow").unwrap();
    look(&pool.list());
    drop((pin, staging, replica));
}

#[test]
fn media_are_parsed() {
    let memfd = |size, huge, node| Ok(MediumName::Memfd(MemfdOptions { size, huge, node }));
    assert_eq!(parse("memfd:1G"), memfd(1 << 30, None, None));
    assert_eq!(parse("memfd:64M,huge,node=1"), memfd(64 << 20, Some(Huge::Size2M), Some(1)));
    assert_eq!(parse("memfd:4G,node=1,huge=1G"), memfd(4 << 30, Some(Huge::Size1G), Some(1)));
    assert_eq!(parse("memfd:64M,node=0"), memfd(64 << 20, None, Some(0)));
    assert_eq!(parse("/dev/dax0.0"), Ok(MediumName::Path(PathBuf::from("/dev/dax0.0"))));
    for wrong in [
        "memfd:",
        "memfd:huge",
        "memfd:1G,",
        "memfd:1G,huge=4M",
        "memfd:1G,node",
        "memfd:1G,node=x",
    ] {
        assert!(parse(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn map_shows_every_granule() {
    listing(|listing| {
        let text = map::draw(listing);
        assert!(text.starts_with("           0x0  #-A+++~...#\n"), "{text}");
        assert!(text.contains("a cell is 2.0 MiB"), "{text}");
        assert!(
            text.contains("\nA snapshotted, available, generation 2, 2.0 MiB at 0x400000: snow\n")
        );
        assert!(text.contains("\n- unavailable: superseded, generation 1"), "{text}");
        assert!(text.contains("\n+ unavailable: being written, generation 3"), "{text}");
        assert!(text.contains("\n~ unavailable: replica, generation 4"), "{text}");
    });
}

#[test]
fn map_of_a_large_pool_is_bounded() {
    let medium = Arc::new(SimulatedMedium::new(40 << 30));
    let pool = Pool::create(medium, &CreateOptions::default()).unwrap();
    pool.allocate("snow", 30 << 30, 0).unwrap().publish().unwrap();
    let text = map::draw(&pool.list());
    assert!(text.contains("a cell is 20.0 MiB"), "{text}");
    assert!(text.lines().count() < 45, "{text}");
    assert_eq!(text.matches('A').count(), (30 << 10) / 20 + 1);
}

#[test]
fn picture_has_every_extent_and_escapes_names() {
    listing(|listing| {
        let picture = svg::draw(listing);
        assert!(picture.starts_with("<svg ") && picture.ends_with("</svg>\n"));
        assert_eq!(picture.matches("&lt;ice&gt;: unavailable: being written").count(), 2);
        assert_eq!(picture.matches("<title>").count(), 2 + 4 + 1);
        assert!(!picture.contains("<ice>"));
    });
}

#[test]
fn concurrent_reader_lists_the_same_extents_without_pins() {
    listing(|listing| assert!(listing.extents.iter().all(|listed| listed.pins.is_some())));
    let medium = Arc::new(SimulatedMedium::new(11 * GRANULE));
    let pool = Pool::create(Arc::clone(&medium) as _, &CreateOptions::default()).unwrap();
    let staging = pool.allocate("snow", GRANULE, 0).unwrap();
    let mut expected = pool.list();
    expected.extents.iter_mut().for_each(|listed| listed.pins = None);
    assert_eq!(PoolReader::open(medium).unwrap().list(), expected);
    drop(staging);
}

/// Guest memory with non-zero bytes in every page except those of the last chunk.
struct Memory {
    layout: MemoryLayout,
}

impl PageSource for Memory {
    fn layout(&self) -> &MemoryLayout {
        &self.layout
    }

    fn chunk<'a>(&'a self, offset: u64, buffer: &'a mut [u8]) -> std::io::Result<Chunk<'a>> {
        if offset >= 2 * GRANULE {
            return Ok(Chunk::Zero);
        }
        buffer.fill(7);
        Ok(Chunk::Bytes(buffer))
    }
}

#[test]
fn every_page_of_a_snapshot_is_checked() {
    let folder = tempfile::tempdir().unwrap();
    let (path, socket) = (folder.path().join("pool"), folder.path().join("pool.sock"));
    let medium = MappedMedium::create_file(&path, 16 * GRANULE).unwrap();
    let pool = Pool::create(Arc::new(medium), &CreateOptions::default()).unwrap();
    let server = Server::start(&socket, pool).unwrap();
    let machine = Machine {
        description: Description {
            id: uuid::Uuid::from_u128(1),
            vcpus: 1,
            ..Description::default()
        },
        state_version: 1,
        state: vec![1; 100],
        reported: Vec::new(),
    };
    let memory = Memory { layout: MemoryLayout::for_size(3 * GRANULE).unwrap() };
    let destination = Destination::Pool { socket: socket.clone(), name: "hello".to_owned() };
    let request = FreezeRequest { destination, dense: false, function: None };
    freeze(&mut Contents::new(&memory, machine), request).unwrap();

    let verify = || {
        let unmanaged = Source::Medium(path.clone()).verify(true).unwrap();
        let managed = Source::Manager(Client::connect(&socket).unwrap()).verify(true).unwrap();
        assert_eq!(unmanaged, managed);
        let texts: Vec<String> = unmanaged.problems.iter().map(ToString::to_string).collect();
        (unmanaged.snapshots, texts)
    };
    assert_eq!(verify(), (1, vec![]));
    let extent = server.pool().lookup("hello").unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&[1], extent.offset + 2 * GRANULE + 4096).unwrap();
    let (_, problems) = verify();
    assert!(problems.len() == 1 && problems[0].contains("1025"), "{problems:?}");
    file.write_all_at(&[0], extent.offset + 2 * GRANULE + 4096).unwrap();
    file.write_all_at(&[0], extent.tail_offset).unwrap();
    let (_, problems) = verify();
    assert!(problems.len() == 1 && problems[0].contains("its tail"), "{problems:?}");
}
