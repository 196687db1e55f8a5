use std::sync::Arc;

use firn_base::PageRange;
use firn_pool::{CreateOptions, MappedMedium, MemfdOptions, Pool, Server};
use firn_snapshot::{
    Contents, Description, Destination, FreezeRequest, Machine, MemoryLayout, Verify, freeze,
    open_replica,
};

use super::*;
use crate::planners::{parse, plan};
use crate::testing::page_bytes;
use crate::{Sources, execute};

const PAGES: u64 = 1500;

#[test]
fn a_replica_is_compared_with_its_sealed_extent() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("pool.sock");
    let options = MemfdOptions { size: 64 << 20, huge: None, node: None };
    let medium = Arc::new(MappedMedium::memfd(options).unwrap());
    let pool = Pool::create(medium, &CreateOptions::default()).unwrap();
    let _server = Server::start(&socket, pool).unwrap();

    let layout = MemoryLayout::for_size(PAGES * PAGE_SIZE).unwrap();
    let booted = GuestMemory::anonymous(layout).unwrap();
    for page in [0, 3, 700, PAGES - 1] {
        let guest_addr = GuestAddress(page * PAGE_SIZE);
        booted.vm_memory().write_slice(&page_bytes(page, 9), guest_addr).unwrap();
    }
    let machine = Machine {
        description: Description { vcpus: 1, ..Description::default() },
        state_version: 1,
        state: Vec::new(),
        reported: Vec::new(),
    };
    let destination = Destination::Pool { socket: socket.clone(), name: "it".to_owned() };
    let request = FreezeRequest { destination, dense: false, function: None };
    freeze(&mut Contents::new(&booted.pages(), machine), request).unwrap();

    let (snapshot, grant) = open_replica(&socket, "it", Verify::Once).unwrap();
    let plan = plan(&snapshot, Some(&grant), &*parse("pass").unwrap()).unwrap();
    let medium = grant.take_medium().unwrap();
    assert!(grant.take_medium().is_none());
    let mut memory =
        execute(&plan, &Sources::of(&snapshot, Some((&grant, &medium))).unwrap()).unwrap().memory;
    memory.vm_memory().write_slice(&[7; 4096], GuestAddress(700 * PAGE_SIZE)).unwrap();
    memory.vm_memory().write_slice(&[0; 4096], GuestAddress((PAGES - 1) * PAGE_SIZE)).unwrap();
    memory.track_writes();
    memory.vm_memory().write_obj(7u8, GuestAddress(3 * PAGE_SIZE)).unwrap();
    let written = memory.written().unwrap();

    let report = Original::of(&snapshot).compare(&memory, &written).unwrap();
    assert_eq!((report.pages, report.written), (PAGES, 1));
    // A write that is not logged.
    assert_eq!(report.first_differing, [700, PAGES - 1]);
    assert_eq!(report.zeros, [PageRange { first: PAGES - 1, pages: 1 }]);
    // The other pages equal the sealed extent.
    assert_eq!(report.differing, 2);
}

#[test]
fn pages_that_were_reported_free_are_counted_apart() {
    let mut memory =
        GuestMemory::anonymous(MemoryLayout::for_size(PAGES * PAGE_SIZE).unwrap()).unwrap();
    let image = tempfile::tempfile().unwrap();
    image.set_len(PAGES * PAGE_SIZE).unwrap();
    memory.track_writes();
    memory.vm_memory().write_obj(7u8, GuestAddress(3 * PAGE_SIZE)).unwrap();
    memory.discard(5 * PAGE_SIZE, 2 * PAGE_SIZE).unwrap();
    let written = memory.written().unwrap();
    let report = compare_without(&memory, &image, &PageSet::new(PAGES), &written).unwrap();
    assert_eq!((report.written, report.reported, report.differing), (3, 2, 0));
}
