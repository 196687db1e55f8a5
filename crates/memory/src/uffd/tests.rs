use std::os::fd::AsFd;

use firn_base::PAGE_SIZE;
use firn_snapshot::MemoryLayout;
use rustix::event::{PollFd, PollFlags, poll};
use vm_memory::{Bytes, GuestAddress};

use super::{Event, Fault, FaultKind, Features, Fill, RegisterMode, Uffd, UffdError};
use crate::GuestMemory;

const ALL: Features = Features::WRITE_PROTECT.union(Features::THREAD_ID).union(Features::REMOVE);
const BOTH: RegisterMode = RegisterMode::MISSING.union(RegisterMode::WRITE_PROTECT);

fn registered(features: Features) -> (GuestMemory, Uffd, u64) {
    let memory = GuestMemory::anonymous(MemoryLayout::for_size(1 << 20).unwrap()).unwrap();
    let uffd = Uffd::open(features).unwrap();
    memory.register(&uffd, BOTH).unwrap();
    let base = memory.slots()[0].host_addr;
    (memory, uffd, base)
}

/// Waits for the next event.
fn next(uffd: &Uffd) -> Event {
    loop {
        if let Some(event) = uffd.events().unwrap().into_iter().next() {
            return event;
        }
        poll(&mut [PollFd::from_borrowed_fd(uffd.as_fd(), PollFlags::IN)], None).unwrap();
    }
}

fn thread_id() -> u32 {
    u32::try_from(rustix::thread::gettid().as_raw_nonzero().get()).unwrap()
}

#[test]
fn a_read_and_then_a_write_are_two_faults_of_the_accessing_thread() {
    let (memory, uffd, base) = registered(ALL);
    let view = memory.vm_memory();
    std::thread::scope(|scope| {
        let toucher = scope.spawn(move || {
            let address = GuestAddress(3 * PAGE_SIZE + 8);
            let read: u8 = view.read_obj(address).unwrap();
            view.write_obj(9u8, address).unwrap();
            (thread_id(), read, view.read_obj::<u8>(address).unwrap())
        });
        let page = base + 3 * PAGE_SIZE;
        let Event::Fault(first) = next(&uffd) else { panic!() };
        assert_eq!((first.address, first.kind), (page, FaultKind::MissingRead));
        uffd.copy(page, &[7; 4096], Fill::WRITE_PROTECTED).unwrap();
        let second = next(&uffd);
        uffd.write_protect(page..page + PAGE_SIZE, false).unwrap();
        let (thread, before, after) = toucher.join().unwrap();
        assert_eq!((thread, before, after), (first.thread, 7, 9));
        let written = Fault { address: page, kind: FaultKind::WriteProtected, thread };
        assert_eq!(second, Event::Fault(written));
    });
    assert_eq!(uffd.events().unwrap(), []);
}

#[test]
fn a_first_write_is_reported_as_a_write_and_woken_on_request() {
    let (memory, uffd, base) = registered(Features::empty());
    let view = memory.vm_memory();
    std::thread::scope(|scope| {
        let toucher = scope.spawn(move || view.write_obj(1u8, GuestAddress(0)));
        let written = Fault { address: base, kind: FaultKind::MissingWrite, thread: 0 };
        assert_eq!(next(&uffd), Event::Fault(written));
        uffd.copy(base, &[5; 8192], Fill::DONT_WAKE).unwrap();
        assert!(!toucher.is_finished());
        uffd.wake(base..base + PAGE_SIZE).unwrap();
        toucher.join().unwrap().unwrap();
    });
    assert_eq!(memory.vm_memory().read_obj::<u16>(GuestAddress(0)).unwrap(), 0x501);
}

#[test]
fn zeros_fill_missing_pages_and_present_pages_are_unchanged() {
    let (memory, uffd, base) = registered(ALL);
    uffd.copy(base + PAGE_SIZE, &[3; 4096], Fill::empty()).unwrap();
    let refused = uffd.zero(base..base + 3 * PAGE_SIZE).unwrap_err();
    assert!(
        matches!(refused, UffdError::Present { address } if address == base + PAGE_SIZE),
        "{refused}"
    );
    uffd.zero(base + 2 * PAGE_SIZE..base + 3 * PAGE_SIZE).unwrap();
    let view = memory.vm_memory();
    let bytes: Vec<u8> =
        [0, 1, 2].map(|page| view.read_obj(GuestAddress(page * PAGE_SIZE)).unwrap()).into();
    assert_eq!(bytes, [0, 3, 0]);
}

#[test]
fn discarded_pages_are_reported_and_missing_again() {
    let (memory, uffd, base) = registered(ALL);
    uffd.copy(base, &[3; 4096], Fill::empty()).unwrap();
    std::thread::scope(|scope| {
        let giver = scope.spawn(|| {
            memory.discard(0, PAGE_SIZE).unwrap();
            memory.vm_memory().read_obj::<u8>(GuestAddress(0)).unwrap()
        });
        assert_eq!(next(&uffd), Event::Remove(base..base + PAGE_SIZE));
        let Event::Fault(fault) = next(&uffd) else { panic!() };
        assert_eq!(fault.kind, FaultKind::MissingRead);
        uffd.zero(base..base + PAGE_SIZE).unwrap();
        assert_eq!(giver.join().unwrap(), 0);
    });
}

#[test]
fn moved_pages_keep_their_contents_and_are_missing_where_they_were() {
    let (memory, uffd, base) = registered(ALL | Features::MOVE);
    let page = |number| base + number * PAGE_SIZE;
    uffd.copy(base, &[3; 4096], Fill::WRITE_PROTECTED).unwrap();
    uffd.copy(page(1), &[4; 4096], Fill::empty()).unwrap();
    uffd.copy(page(20), &[5; 4096], Fill::empty()).unwrap();
    // Up to a present page, and up to a missing page.
    let refused = uffd.move_pages(base..page(2), page(19)).unwrap_err();
    assert!(matches!(refused, UffdError::Present { address } if address == page(1)), "{refused}");
    let refused = uffd.move_pages(page(1)..page(3), page(30)).unwrap_err();
    assert!(matches!(refused, UffdError::Missing { address } if address == page(2)), "{refused}");
    let view = memory.vm_memory();
    let at = |number| GuestAddress(number * PAGE_SIZE);
    let bytes: [u8; 3] = [19, 20, 30].map(|number| view.read_obj(at(number)).unwrap());
    assert_eq!(bytes, [3, 5, 4]);
    // It is not write-protected any more.
    view.write_obj(9u8, at(19)).unwrap();
    std::thread::scope(|scope| {
        let toucher = scope.spawn(|| view.read_obj::<u8>(at(0)).unwrap());
        let Event::Fault(fault) = next(&uffd) else { panic!() };
        assert_eq!((fault.address, fault.kind), (base, FaultKind::MissingRead));
        uffd.move_pages(page(19)..page(20), base).unwrap();
        assert!(!toucher.is_finished());
        uffd.wake(base..page(1)).unwrap();
        assert_eq!(toucher.join().unwrap(), 9);
    });
}

#[test]
fn errors_name_the_address() {
    let uffd = Uffd::open(ALL).unwrap();
    // SAFETY: nothing is mapped there, so the kernel returns an error.
    let refused = unsafe { uffd.register(4096..8192, BOTH) }.unwrap_err();
    assert_eq!(refused.to_string(), "cannot register 4096 bytes at 0x1000 with a userfaultfd");
    let refused = uffd.copy(1 << 20, &[0; 4096], Fill::empty()).unwrap_err();
    assert!(matches!(refused, UffdError::Unregistered { address: 0x10_0000 }), "{refused}");
}

#[test]
fn an_unsupported_feature_is_named() {
    let unknown = Features::from_bits_retain(1 << 63);
    let refused = Uffd::open(ALL | unknown).unwrap_err();
    assert!(matches!(refused, UffdError::Features { missing } if missing == unknown), "{refused}");
}

#[test]
fn an_access_to_a_poisoned_page_is_an_error() {
    let (memory, uffd, base) = registered(Features::POISON);
    uffd.copy(base, &[3; 4096], Fill::empty()).unwrap();
    uffd.poison(base + PAGE_SIZE..base + 2 * PAGE_SIZE).unwrap();
    let refused = uffd.poison(base..base + PAGE_SIZE).unwrap_err();
    assert!(matches!(refused, UffdError::Present { address } if address == base), "{refused}");
    // A system call accesses it, which returns an error where a thread would receive a signal.
    let view = memory.vm_memory();
    let mut file = tempfile::tempfile().unwrap();
    view.write_volatile_to(GuestAddress(0), &mut file, 4096).unwrap();
    view.write_volatile_to(GuestAddress(PAGE_SIZE), &mut file, 4096).unwrap_err();
}

#[test]
fn present_shared_pages_are_mapped_on_a_minor_fault() {
    use rustix::fs::{MemfdFlags, memfd_create};
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::from(memfd_create("shared", MemfdFlags::CLOEXEC).unwrap());
    file.write_all_at(&[9; 8192], 0).unwrap();
    let (null, protection) = (std::ptr::null_mut(), ProtFlags::READ | ProtFlags::WRITE);
    // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
    let mapped = unsafe { mmap(null, 8192, protection, MapFlags::SHARED, &file, 0) }.unwrap();
    let base = mapped.addr() as u64;
    let uffd = Uffd::open(Features::MINOR_SHARED).unwrap();
    // SAFETY: no reference points into the mapping.
    unsafe { uffd.register(base..base + 8192, RegisterMode::MINOR) }.unwrap();
    std::thread::scope(|scope| {
        let toucher = scope.spawn(move || {
            let first = std::ptr::with_exposed_provenance::<u8>(usize::try_from(base).unwrap());
            // SAFETY: the byte is mapped until the threads are joined.
            unsafe { first.read_volatile() }
        });
        let Event::Fault(fault) = next(&uffd) else { panic!() };
        assert_eq!((fault.address, fault.kind), (base, FaultKind::Minor));
        uffd.map_present(base..base + PAGE_SIZE).unwrap();
        assert_eq!(toucher.join().unwrap(), 9);
    });
    // SAFETY: the mapping is this test's own.
    unsafe { munmap(mapped, 8192) }.unwrap();
}

#[test]
fn a_userfaultfd_of_another_owner_is_taken_over() {
    let (memory, uffd, base) = registered(Features::empty());
    let taken = Uffd::of(uffd.as_fd().try_clone_to_owned().unwrap()).unwrap();
    drop(uffd);
    assert_eq!(taken.events().unwrap(), []);
    taken.copy(base, &[4; 4096], Fill::empty()).unwrap();
    assert_eq!(memory.vm_memory().read_obj::<u8>(GuestAddress(0)).unwrap(), 4);
}
