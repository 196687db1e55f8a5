use std::fs::{File, OpenOptions};
use std::io::{Seek, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex};

use firn_base::PAGE_SIZE;
use firn_snapshot::{ImageKind, MemoryLayout, MemoryRegion, PageSet, Snapshot};
use vm_memory::{Bytes, GuestAddress};

use super::marks::marked;
use super::{
    FaultObserver, FaultOrigin, Part, ProfileRecorder, RecordError, Recorder, Recording,
    TouchedPages, of,
};
use crate::GuestMemory;
use crate::pager::{PageStore, PagerError};
use crate::plan::Leaf;
use crate::testing::write_snapshot;
use crate::trace::{Access, GapUnit, Touch, Toucher, Trace, TraceOrigin};

#[path = "again_tests.rs"]
mod again;

const PAGES: u64 = 64;

/// A memory of two regions.
fn layout() -> MemoryLayout {
    let region = |guest_page: u64, pages: u64| MemoryRegion {
        guest_addr: guest_page * PAGE_SIZE,
        len: pages * PAGE_SIZE,
    };
    MemoryLayout::new(vec![region(0, PAGES / 2), region(1000, PAGES / 2)]).unwrap()
}

/// All bytes of each page are its own number plus one.
fn image(pages: u64) -> File {
    let mut file = tempfile::tempfile().unwrap();
    for page in 0..pages {
        file.write_all(&[u8::try_from(page + 1).unwrap(); 4096]).unwrap();
    }
    file.rewind().unwrap();
    file
}

/// Calls of an observer: page and thread, what it read of guest page 1, and releases.
#[derive(Debug, PartialEq)]
enum Call {
    Observe { page: u64, thread: u32, of_page_1: Option<[u8; 2]> },
    Release,
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<Call>>>);

impl FaultObserver for Log {
    fn observe(&mut self, page: u64, thread: u32, touched: &TouchedPages<'_>) -> FaultOrigin {
        let mut calls = self.0.lock().unwrap();
        calls.push(Call::Observe { page, thread, of_page_1: touched.read(PAGE_SIZE + 5) });
        let leaf = (page != 2).then_some(Leaf::Size2M);
        FaultOrigin { by: Toucher::Instruction, leaf, gap: calls.len() as u64 }
    }

    fn pause(&mut self, _: &TouchedPages<'_>) -> u64 {
        0
    }

    fn release(&mut self) {
        self.0.lock().unwrap().push(Call::Release);
    }
}

fn touch(page: u64, access: Access, leaf: Leaf, gap: u64) -> Touch {
    Touch { page, access, by: Toucher::Instruction, leaf, gap }
}

fn record(
    image: File,
    work: impl FnOnce(&GuestMemory, &Recorder),
) -> (Log, Result<Recording, RecordError>) {
    let log = Log::default();
    let (store, observer) = (PageStore::unchecked(image), Box::new(log.clone()));
    let (memory, recorder) = Recorder::start(store, &layout(), observer, |_| ()).unwrap();
    work(&memory, &recorder);
    (log, recorder.finish())
}

fn byte(memory: &GuestMemory, page: u64) -> u8 {
    memory.vm_memory().read_obj(GuestAddress(page * PAGE_SIZE + 9)).unwrap()
}

fn write(memory: &GuestMemory, page: u64) {
    memory.vm_memory().write_obj(0xeeu8, GuestAddress(page * PAGE_SIZE + 9)).unwrap();
}

#[test]
fn touches_are_recorded_once_in_order_and_writes_after_reads_apart() {
    let (log, recording) = record(image(PAGES), |memory, _| {
        assert_eq!(byte(memory, 1), 2);
        write(memory, 1000);
        assert_eq!(byte(memory, 1000), 0xee);
        assert_eq!(byte(memory, 2), 3);
        assert_eq!(byte(memory, 1), 2);
        write(memory, 1);
        write(memory, 1);
        assert_eq!(byte(memory, 1031), 64);
    });
    let recording = recording.unwrap();
    let expected = vec![
        touch(1, Access::Read, Leaf::Size2M, 1),
        touch(1000, Access::Write, Leaf::Size2M, 3),
        touch(2, Access::Read, Leaf::Size4K, 5),
        touch(1, Access::LaterWrite, Leaf::Size2M, 7),
        touch(1031, Access::Read, Leaf::Size2M, 9),
    ];
    assert_eq!(recording, Recording { touches: expected.clone(), unknown_leaves: 1, again: None });

    let thread = u32::try_from(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
    let calls = log.0.lock().unwrap();
    for (index, touch) in expected.iter().enumerate() {
        // The page is present at a later write, and missing at a first touch.
        let of_page_1 = (index > 0).then_some([2, 2]);
        assert_eq!(calls[2 * index], Call::Observe { page: touch.page, thread, of_page_1 });
        assert_eq!(calls[2 * index + 1], Call::Release);
    }

    let origin = TraceOrigin {
        function: "f".into(),
        input: "a".into(),
        command: "c".into(),
        host: "h".into(),
        gaps: GapUnit::Nanoseconds,
    };
    Trace::new(origin, layout(), PageSet::new(PAGES), recording.touches).unwrap();
}

#[test]
fn writes_after_reads_are_marked_and_not_recorded_as_touches() {
    let observer = Box::new(Log::default());
    let store = PageStore::unchecked(image(PAGES));
    let (memory, recorder) =
        Recorder::start_first_touches(store, &layout(), observer, |_| ()).unwrap();
    for page in [1, 2, 1000, 1031] {
        byte(&memory, page);
    }
    write(&memory, 0);
    write(&memory, 1);
    write(&memory, 5);
    // A write by the kernel counts, and so does a page that is discarded after its write.
    let mut file = image(1);
    memory.vm_memory().read_exact_volatile_from(GuestAddress(2 * PAGE_SIZE), &mut file, 9).unwrap();
    write(&memory, 1031);
    memory.discard(5 * PAGE_SIZE, PAGE_SIZE).unwrap();
    assert_eq!(byte(&memory, 5), 0);
    // Every second page, so that each page is a range of its own.
    (8..PAGES / 2).step_by(2).for_each(|page| write(&memory, page));

    let marked: Vec<u64> = marked(&memory).unwrap().iter().collect();
    let expected = [0, 1, 2, 5].into_iter().chain((8..PAGES / 2).step_by(2)).chain([PAGES - 1]);
    assert_eq!(marked, expected.collect::<Vec<_>>());
    let touches = recorder.finish().unwrap().touches;
    assert!(touches.iter().all(|touch| touch.access != Access::LaterWrite), "{touches:?}");
}

#[test]
fn accesses_of_the_kernel_are_recorded() {
    let (_, recording) = record(image(PAGES), |memory, _| {
        let view = memory.vm_memory();
        // read(2) into page 4, write(2) out of page 5.
        let mut file = image(2);
        view.read_exact_volatile_from(GuestAddress(4 * PAGE_SIZE), &mut file, 100).unwrap();
        let mut sink = tempfile::tempfile().unwrap();
        view.write_all_volatile_to(GuestAddress(5 * PAGE_SIZE), &mut sink, 100).unwrap();
        assert_eq!((byte(memory, 4), byte(memory, 5)), (1, 6));
    });
    let touches: Vec<_> =
        recording.unwrap().touches.iter().map(|touch| (touch.page, touch.access)).collect();
    assert_eq!(touches, [(4, Access::Write), (5, Access::Read)]);
}

#[test]
fn discarded_pages_are_zeros_and_not_touched_first_again() {
    let (_, recording) = record(image(PAGES), |memory, _| {
        assert_eq!(byte(memory, 7), 8);
        write(memory, 8);
        memory.discard(7 * PAGE_SIZE, 2 * PAGE_SIZE).unwrap();
        assert_eq!((byte(memory, 7), byte(memory, 8)), (0, 0));
        write(memory, 7);
        write(memory, 8);
        memory.discard(7 * PAGE_SIZE, PAGE_SIZE).unwrap();
        write(memory, 7);
    });
    let touches: Vec<_> =
        recording.unwrap().touches.iter().map(|touch| (touch.page, touch.access)).collect();
    let expected = [(7, Access::Read), (8, Access::Write), (7, Access::LaterWrite)];
    assert_eq!(touches, expected);
}

#[test]
fn faults_are_resolved_after_the_recording_stopped() {
    let (log, recording) = record(image(PAGES), |memory, recorder| {
        assert_eq!(byte(memory, 3), 4);
        recorder.stop_recording();
        assert_eq!(byte(memory, 4), 5);
        write(memory, 3);
    });
    assert_eq!(recording.unwrap().touches.len(), 1);
    assert_eq!(log.0.lock().unwrap().len(), 2);
}

#[test]
fn untouched_pages_after_a_fault_are_filled_with_it_once_the_recording_stopped() {
    let (_, recording) = record(image(PAGES), |memory, recorder| {
        assert_eq!(byte(memory, 9), 10);
        write(memory, 12);
        memory.discard(20 * PAGE_SIZE, PAGE_SIZE).unwrap();
        recorder.stop_recording();
        // Up to a touched page; to the end of a region.
        assert_eq!(byte(memory, 5), 6);
        assert_eq!(byte(memory, 1020), 53);
        // The next fault waits until the previous fault is resolved.
        assert_eq!(byte(memory, 10), 11);
        assert_eq!(byte(memory, 13), 14);
        assert_eq!(byte(memory, 1000), 33);
        // The last page that is filled with it.
        assert_eq!(byte(memory, 1019), 52);
        let present = (9 - 5) + 1 + 2 + 1 + (32 - 13);
        assert_eq!(memory.usage().unwrap().private, (present + 32) * PAGE_SIZE);
        for page in (0..32).chain(1000..1032) {
            let number = if page < 1000 { page + 1 } else { page - 1000 + 33 };
            let expected = if page == 12 { 0xee } else { number };
            assert_eq!(u64::from(byte(memory, page)), expected, "page {page}");
        }
    });
    assert_eq!(recording.unwrap().touches.len(), 2);
}

#[test]
fn touches_of_many_threads_are_each_recorded_once() {
    let (_, recording) = record(image(PAGES), |memory, _| {
        std::thread::scope(|scope| {
            for thread in 0..8 {
                scope.spawn(move || {
                    for page in 0..PAGES / 2 {
                        let page = (page + 4 * thread) % (PAGES / 2);
                        assert_eq!(u64::from(byte(memory, page)), page + 1);
                    }
                });
            }
        });
    });
    let mut pages: Vec<_> = recording.unwrap().touches.iter().map(|touch| touch.page).collect();
    pages.sort_unstable();
    assert_eq!(pages, (0..PAGES / 2).collect::<Vec<_>>());
}

/// Accesses a page in a system call, which returns an error where a thread would receive a signal.
fn reads(memory: &GuestMemory, page: u64) -> bool {
    let mut sink = tempfile::tempfile().unwrap();
    memory.vm_memory().write_volatile_to(GuestAddress(page * PAGE_SIZE), &mut sink, 4096).is_ok()
}

#[test]
fn an_image_that_shrinks_ends_the_recording_and_no_thread_hangs() {
    let (_, recording) = record(image(1), |memory, _| {
        assert!(reads(memory, 0));
        assert!(!reads(memory, 1), "never zeros");
        assert!(!reads(memory, 2) && reads(memory, 0));
    });
    let error = recording.unwrap_err();
    let RecordError::Serve(PagerError::Truncated { image_page: 1, .. }) = error else {
        panic!("{error}")
    };
}

/// A dense snapshot, and its image file, writable.
fn snapshot(path: &Path) -> (Snapshot, File) {
    let zero_map = PageSet::new(PAGES);
    let snapshot = write_snapshot(path, &layout(), &zero_map, ImageKind::Dense, 5);
    (snapshot, OpenOptions::new().write(true).open(path.join("memory.img")).unwrap())
}

#[test]
fn a_damaged_page_is_never_mapped_and_ends_the_recording() {
    let dir = tempfile::tempdir().unwrap();
    let (snapshot, image) = snapshot(&dir.path().join("s"));
    image.write_all_at(&[0xee], 40 * PAGE_SIZE + 4000).unwrap();
    let starts: [fn(_, &_, _, _) -> _; 2] = [Recorder::start, Recorder::start_first_touches];
    for start in starts {
        let store = PageStore::of(&snapshot);
        let observer = Box::new(Log::default());
        let (memory, recorder) = start(store, &layout(), observer, |_| ()).unwrap();
        assert!(reads(&memory, 31));
        // Pages after a touched page are filled with it once the recording stopped.
        recorder.stop_recording();
        assert!(reads(&memory, 1000));
        assert!(!reads(&memory, 1008));
        let error = recorder.finish().unwrap_err().to_string();
        assert!(error.starts_with("page 40 of the image is damaged"), "{error}");
    }
}

/// Pages that the kernel maps cannot be checked while the guest runs.
#[test]
fn a_damaged_image_is_detected_before_a_run_in_which_the_kernel_maps_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let (snapshot, image) = snapshot(&path);
    let refused = |words: &str| {
        for recorder in of(&[Part::Groups, Part::Cache]) {
            let ProfileRecorder::PageCache(mut recorder) = recorder else { panic!("not of it") };
            let error = recorder.prepare(&snapshot).unwrap_err();
            assert!(!error.is_host_limitation(), "{error}");
            assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
            let source = std::error::Error::source(&error).unwrap().to_string();
            assert!(source.starts_with(words), "{source}");
        }
    };
    image.write_all_at(&[0xee], 40 * PAGE_SIZE + 4000).unwrap();
    refused("page 40 of the image is damaged");
    image.set_len(39 * PAGE_SIZE).unwrap();
    refused("page 39 of the image is missing");
}
