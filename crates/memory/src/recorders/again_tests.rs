//! Accesses that are recorded again, and the second invocation.

use std::num::NonZero;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use vm_memory::Bytes;

use super::{
    Access, FaultObserver, FaultOrigin, GapUnit, GuestAddress, GuestMemory, Leaf, PAGE_SIZE, PAGES,
    PageSet, PageStore, Recorder, Recording, Touch, TouchedPages, Toucher, Trace, TraceOrigin,
    byte, image, layout, write,
};
use crate::trace::{Again, Repeat};

/// The work before each fault: one second, longer than any test waits for a fault.
const GAP: u64 = 1_000_000_000;

/// The page that only a device touches.
const DEVICE: u64 = 30;

/// A guest that works before each fault. The leaf is unknown if page 1 cannot be read although it
/// was touched.
struct Worker {
    /// Whether page 1 was touched.
    page_1: bool,
    /// The work that each pause finds, and where it is reported.
    pauses: Option<(u64, Sender<()>)>,
}

impl FaultObserver for Worker {
    fn observe(&mut self, page: u64, _: u32, touched: &TouchedPages<'_>) -> FaultOrigin {
        let expected = self.page_1.then_some([2]);
        let leaf = (touched.read(PAGE_SIZE) == expected).then_some(Leaf::Size4K);
        self.page_1 |= page == 1;
        let by = if page == DEVICE { Toucher::Device } else { Toucher::Instruction };
        FaultOrigin { by, leaf, gap: GAP }
    }

    fn pause(&mut self, _: &TouchedPages<'_>) -> u64 {
        let Some((work, paused)) = &self.pauses else { return 0 };
        let _ = paused.send(());
        *work
    }

    fn release(&mut self) {}
}

fn record(
    period: u64,
    pauses: Option<(u64, Sender<()>)>,
    work: impl FnOnce(&GuestMemory, &Recorder),
) -> Recording {
    let observer = Box::new(Worker { page_1: false, pauses });
    let (store, period) = (PageStore::unchecked(image(PAGES)), NonZero::new(period).unwrap());
    let (memory, recorder) =
        Recorder::start_sampled(store, &layout(), observer, |_| (), period).unwrap();
    work(&memory, &recorder);
    let recording = recorder.finish().unwrap();
    assert_eq!(recording.unknown_leaves, 0);
    recording
}

fn touch(page: u64, access: Access, gap: u64) -> Touch {
    Touch { page, access, by: Toucher::Instruction, leaf: Leaf::Size4K, gap: gap * GAP }
}

fn repeat(after: usize, page: u64, access: Access) -> Repeat {
    Repeat { after, touch: touch(page, access, 1) }
}

#[test]
fn accesses_are_recorded_once_in_each_period() {
    let recording = record(3 * GAP, None, |memory, recorder| {
        assert_eq!(byte(memory, 1), 2);
        write(memory, 2);
        recorder.start_request();
        // A period ends; pages 1 and 2 are set aside.
        assert_eq!(byte(memory, 3), 4);
        assert_eq!((byte(memory, 1), byte(memory, 1)), (2, 2));
        assert_eq!(byte(memory, 2), 0xee);
        write(memory, 2);
        // The third fault of this period: all are set aside.
        write(memory, 3);
        write(memory, 3);
        write(memory, 1);
        write(memory, 2);
        assert_eq!((byte(memory, 1), byte(memory, 2), byte(memory, 3)), (0xee, 0xee, 0xee));
    });
    let touches = vec![
        touch(1, Access::Read, 1),
        touch(2, Access::Write, 1),
        touch(3, Access::Read, 1),
        // The work of the repeats is in the gap of the next touch.
        touch(3, Access::LaterWrite, 3),
        touch(1, Access::LaterWrite, 1),
    ];
    let repeats =
        vec![repeat(3, 1, Access::Read), repeat(3, 2, Access::Read), repeat(5, 2, Access::Write)];
    let again = Again { period: 3 * GAP, request: 2, repeats, second: Vec::new() };
    assert_eq!(recording, Recording { touches, unknown_leaves: 0, again: Some(again) });

    let origin = TraceOrigin {
        function: "f".into(),
        input: "a".into(),
        command: "c".into(),
        host: "h".into(),
        gaps: GapUnit::Nanoseconds,
    };
    let trace = Trace::new(origin, layout(), PageSet::new(PAGES), recording.touches).unwrap();
    let trace = trace.with_again(recording.again.unwrap()).unwrap();
    assert!(trace.accesses().all(|(touch, _)| touch.gap == GAP));
}

#[test]
fn a_second_invocation_has_every_page_again() {
    let recording = record(100 * GAP, None, |memory, recorder| {
        byte(memory, 1);
        write(memory, 1000);
        byte(memory, 5);
        recorder.start_second().unwrap();
        assert_eq!(byte(memory, 1000), 0xee);
        write(memory, 1000);
        write(memory, 5);
        byte(memory, 1);
        byte(memory, 6);
        write(memory, 6);
        recorder.stop_recording();
        assert_eq!((byte(memory, 1), byte(memory, 5), byte(memory, 7)), (2, 0xee, 8));
    });
    assert_eq!(recording.touches.len(), 3);
    let second = [
        touch(1000, Access::Read, 1),
        touch(5, Access::Write, 1),
        touch(1, Access::Read, 1),
        touch(6, Access::Read, 1),
        touch(6, Access::Write, 1),
    ];
    let again = recording.again.unwrap();
    assert_eq!((again.repeats, &again.second[..]), (Vec::new(), &second[..]));
}

#[test]
fn pages_of_devices_are_recorded_once() {
    let recording = record(100 * GAP, None, |memory, recorder| {
        byte(memory, DEVICE);
        byte(memory, DEVICE - 1);
        recorder.start_second().unwrap();
        assert_eq!((byte(memory, DEVICE), byte(memory, DEVICE - 1)), (31, 30));
        // The first write to a page is recorded in any case.
        write(memory, DEVICE);
        recorder.start_second().unwrap();
        assert_eq!(byte(memory, DEVICE), 0xee);
    });
    assert_eq!(recording.touches.len(), 2);
    let second = recording.again.unwrap().second;
    let pages: Vec<_> = second.iter().map(|touch| (touch.page, touch.access)).collect();
    assert_eq!(pages, [(DEVICE - 1, Access::Read), (DEVICE, Access::Write)]);
}

#[test]
fn a_guest_without_faults_is_interrupted_after_each_period() {
    let (paused, pauses) = channel();
    let period = 1_000_000;
    let recording = record(period, Some((period / 2, paused)), |memory, _| {
        byte(memory, 1);
        let seen = || pauses.recv_timeout(Duration::from_secs(60)).unwrap();
        pauses.try_iter().for_each(drop);
        // At the latest the second of them ends a period, and it is over at the third.
        (0..3).for_each(|_| seen());
        byte(memory, 1);
    });
    // On a busy host a further period ends before the thread reads the page that was resolved for
    // it.
    let repeats = recording.again.unwrap().repeats;
    assert!(!repeats.is_empty());
    for repeat in repeats {
        assert_eq!((repeat.after, repeat.touch.page, repeat.touch.access), (1, 1, Access::Read));
        // The work that the pauses found, and that of the fault.
        assert!(repeat.touch.gap >= GAP + period, "{}", repeat.touch.gap);
    }
}

#[test]
fn no_write_is_lost_while_pages_are_set_aside() {
    const ROUNDS: u64 = 300;
    let address = |thread: u64, round: u64| {
        GuestAddress((2 + (round + thread) % 20) * PAGE_SIZE + 64 * thread)
    };
    record(GAP, None, |memory, recorder| {
        let view = memory.vm_memory();
        let count = |thread, round| -> u64 { view.read_obj(address(thread, round)).unwrap() };
        let start: Vec<u64> = (0..80).map(|index| count(index / 20, index % 20)).collect();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let view = view.clone();
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        let at = address(thread, round);
                        let before: u64 = view.read_obj(at).unwrap();
                        view.write_obj(before + 1, at).unwrap();
                    }
                });
            }
            scope.spawn(|| (0..20).for_each(|_| recorder.start_second().unwrap()));
        });
        for (index, start) in (0..).zip(start) {
            let (thread, page) = (index / 20, index % 20);
            let rounds = (0..ROUNDS).filter(|round| round % 20 == page).count() as u64;
            assert_eq!(count(thread, page), start + rounds, "thread {thread}, page {page}");
        }
    });
}

#[test]
fn pages_that_are_discarded_while_they_are_set_aside_are_zeros() {
    let recording = record(100 * GAP, None, |memory, recorder| {
        write(memory, 3);
        byte(memory, 4);
        write(memory, 5);
        recorder.start_second().unwrap();
        memory.discard(3 * PAGE_SIZE, 2 * PAGE_SIZE).unwrap();
        assert_eq!((byte(memory, 3), byte(memory, 4), byte(memory, 5)), (0, 0, 0xee));
        memory.discard(5 * PAGE_SIZE, PAGE_SIZE).unwrap();
        recorder.start_second().unwrap();
        assert_eq!((byte(memory, 3), byte(memory, 4), byte(memory, 5)), (0, 0, 0));
    });
    let pages: Vec<u64> = recording.again.unwrap().second.iter().map(|touch| touch.page).collect();
    // A discarded page that is present nowhere has no access to record again.
    assert_eq!(pages, [3, 4, 5, 3, 4]);
}
