use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::thread::sleep;
use std::time::{Duration, Instant};

use firn_pool::{Client, ExtentState, Window};
use rustix::net::{SendFlags, send};

use super::{Message, PIECE, PIECE_PAGES, Part, Pieces, Receiver};
use crate::extent::ExtentTarget;
use crate::freeze::into_pool;
use crate::page_set::PageSet;
use crate::tests::support::{Managed, Memory, description, machine};
use crate::{
    Begin, Begun, Contents, Freeze, FreezeError, FreezeReport, NotFrozen, Seal, Target, Verify,
    open_pooled,
};

/// The time limit of hostile machines.
const LIMIT: Duration = Duration::from_millis(300);
/// Guest memory of a hostile machine: two pieces and a page.
const GUEST: u64 = 2 * PIECE + 4096;
/// Its tail: a page, of which a part is used.
const TAIL: u64 = 100;

/// What a machine got with the second step.
struct Passed {
    window: OwnedFd,
    socket: OwnedFd,
}

impl Passed {
    fn send(&self, message: &Message) {
        self.send_bytes(&message.encode());
    }

    fn send_bytes(&self, bytes: &[u8]) {
        // The supervisor may have ended the freeze.
        let _ = send(&self.socket, bytes, SendFlags::NOSIGNAL);
    }

    /// Passes pieces of zeros.
    fn zeros(&self, pieces: impl IntoIterator<Item = u64>) {
        pieces.into_iter().for_each(|piece| self.send(&message(0, piece, 0)));
    }
}

/// A message about a piece whose first `pages` are in a slot.
fn message(slot: u64, piece: u64, pages: u64) -> Message {
    let mut stored = PageSet::new(PIECE_PAGES);
    stored.insert_range(0..pages);
    Message { slot, piece, stored }
}

type Sealed = Result<FreezeReport, FreezeError>;

/// A machine that its guest has taken over.
struct Hostile<F> {
    pass: F,
    /// Its connection, and the machine's end of it.
    connection: Option<(UnixStream, UnixStream)>,
}

impl<F: FnMut(Passed) -> Sealed> Freeze for Hostile<F> {
    type Error = FreezeError;

    fn write(&mut self, _: Begin, _: Vec<OwnedFd>) -> Result<Begun, FreezeError> {
        Ok(Begun::Extent { guest_bytes: GUEST, tail_bytes: TAIL, disk_bytes: 0 })
    }

    fn seal(&mut self, _: Seal, files: Vec<OwnedFd>) -> Sealed {
        let [window, socket] = files.try_into().unwrap();
        (self.pass)(Passed { window, socket })
    }

    fn connection(&self) -> io::Result<Option<UnixStream>> {
        self.connection.as_ref().map(|(connection, _)| connection.try_clone()).transpose()
    }
}

impl Managed {
    fn freeze_from<M: Freeze>(&self, machine: &mut M) -> Result<FreezeReport, NotFrozen<M::Error>> {
        let begin = Begin { target: Target::Extent, function: None };
        into_pool(machine, &self.socket(), "hello", begin, None, LIMIT)
    }

    /// Has an honest machine write the snapshot.
    fn freeze_well(&self) {
        let mut memory = Memory::zeroed(700);
        memory.fill(699, 7);
        let mut contents = Contents::new(&memory, machine(description(), b"state"));
        self.freeze_from(&mut contents).unwrap();
    }

    /// The states of the extents.
    fn extents(&self) -> Vec<ExtentState> {
        let listing = Client::connect(&self.socket()).unwrap().list().unwrap();
        listing.extents.into_iter().map(|extent| extent.state).collect()
    }
}

/// Has a machine pass an extent, and checks that nothing is left of it.
fn hostile(pass: impl FnMut(Passed) -> Sealed) -> NotFrozen<FreezeError> {
    hostile_with(Hostile { pass, connection: None })
}

fn hostile_with(mut machine: Hostile<impl FnMut(Passed) -> Sealed>) -> NotFrozen<FreezeError> {
    let pool = Managed::new(64 << 20);
    pool.freeze_well();
    let before = pool.extents();
    let error = pool.freeze_from(&mut machine).unwrap_err();
    // The manager frees the extent when it finds the connection closed.
    let begin = Instant::now();
    while pool.extents() != before {
        assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", pool.extents());
    }
    open_pooled(&pool.socket(), "hello", Verify::Always).unwrap();
    pool.freeze_well();
    error
}

#[track_caller]
fn is_refused(words: &str, pass: impl Fn(&Passed)) {
    let error = hostile(|passed| {
        pass(&passed);
        Ok(FreezeReport::default())
    });
    assert!(matches!(error, NotFrozen::Supervisor(FreezeError::Passed { .. })), "{error:?}");
    assert!(error.to_string().contains(words), "{error}");
}

#[test]
fn a_machine_that_passes_what_is_no_part_of_the_extent_publishes_nothing() {
    is_refused("malformed", |passed| passed.send_bytes(b"short"));
    is_refused("malformed", |passed| passed.send_bytes(&[0; 81]));
    is_refused("malformed", |passed| passed.send_bytes(&vec![0; 100_000]));
    is_refused("outside of the extent", |passed| passed.zeros([4]));
    is_refused("outside of the extent", |passed| passed.zeros([u64::MAX]));
    is_refused("came before", |passed| passed.zeros([0, 1, 0]));
    is_refused("came before", |passed| passed.zeros([3, 3]));
    // The last piece of guest memory has one page, as has the tail.
    is_refused("more bytes than the extent", |passed| passed.send(&message(0, 2, 2)));
    is_refused("more bytes than the extent", |passed| passed.send(&message(0, 3, 2)));
    is_refused("does not exist", |passed| passed.send(&message(1000, 0, 1)));
    is_refused("does not exist", |passed| passed.send(&message(u64::MAX, 0, 1)));
}

#[test]
fn a_machine_that_passes_too_little_publishes_nothing() {
    for pieces in [vec![], vec![0, 1, 2], vec![1, 2, 3]] {
        let missing = 4 - u64::try_from(pieces.len()).unwrap();
        let error = hostile(|passed| {
            passed.zeros(pieces.clone());
            Ok(FreezeReport::default())
        });
        let NotFrozen::Supervisor(FreezeError::Incomplete { missing: found, of: 4 }) = error else {
            panic!("{error:?}");
        };
        assert_eq!(found, missing);
    }
}

#[test]
fn a_machine_that_fails_has_a_reason() {
    let error = hostile(|passed| {
        passed.zeros([0]);
        Err(FreezeError::NotBegun)
    });
    assert!(matches!(error, NotFrozen::Machine(FreezeError::NotBegun)), "{error:?}");
    let error = hostile(|passed| {
        passed.zeros([0, 1, 2, 3]);
        Err(FreezeError::NotBegun)
    });
    assert!(matches!(error, NotFrozen::Machine(FreezeError::NotBegun)), "{error:?}");
}

/// Waits until the supervisor hangs up.
fn wait(mut connection: &UnixStream) {
    connection.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    assert_eq!(connection.read(&mut [0]).unwrap(), 0);
}

/// The machine holds what it got until the supervisor hangs up.
fn stalls(pass: impl Fn(&Passed)) -> NotFrozen<FreezeError> {
    let connection = UnixStream::pair().unwrap();
    let own = connection.1.try_clone().unwrap();
    let pass = move |passed: Passed| {
        pass(&passed);
        wait(&own);
        Err(FreezeError::NotBegun)
    };
    hostile_with(Hostile { pass, connection: Some(connection) })
}

#[test]
fn a_machine_that_stalls_is_hung_up_on() {
    let begin = Instant::now();
    for pieces in [vec![], vec![0, 1]] {
        let error = stalls(|passed| passed.zeros(pieces.clone()));
        assert!(matches!(error, NotFrozen::Supervisor(FreezeError::Stalled { .. })), "{error:?}");
    }
    // It has passed everything, and does not answer.
    let error = stalls(|passed| passed.zeros([0, 1, 2, 3]));
    assert!(matches!(error, NotFrozen::Supervisor(FreezeError::Stalled { .. })), "{error:?}");
    assert!(begin.elapsed() < Duration::from_secs(30), "{:?}", begin.elapsed());
}

#[test]
fn a_machine_that_closes_its_end_and_does_not_answer_is_hung_up_on() {
    let connection = UnixStream::pair().unwrap();
    let own = connection.1.try_clone().unwrap();
    let pass = move |passed: Passed| {
        passed.zeros([0, 1, 2, 3]);
        drop(passed);
        wait(&own);
        Err(FreezeError::NotBegun)
    };
    let error = hostile_with(Hostile { pass, connection: Some(connection) });
    assert!(matches!(error, NotFrozen::Machine(FreezeError::NotBegun)), "{error:?}");
}

#[test]
fn a_machine_that_passes_slowly_on_purpose_has_one_limit_for_all() {
    let error = hostile(|passed| {
        for piece in 0..4 {
            sleep(LIMIT / 2);
            passed.zeros([piece]);
        }
        Ok(FreezeReport::default())
    });
    assert!(matches!(error, NotFrozen::Supervisor(FreezeError::Stalled { .. })), "{error:?}");
}

/// An extent that is zero, and keeps nothing.
struct Nowhere;

impl ExtentTarget for Nowhere {
    fn write(&self, _: Part, _: u64, _: &[u8]) -> io::Result<()> {
        Ok(())
    }

    fn write_from(&self, _: Part, _: u64, _: &Window, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn is_zeroed(&self, _: Part, _: u64, _: u64) -> bool {
        true
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
}

/// More pieces than the socket has room for free slots.
#[test]
fn a_machine_that_takes_no_free_slots_is_refused() {
    let pieces = Pieces { guest_bytes: 2000 * PIECE, tail_bytes: 0 };
    let (receiver, passed) = Receiver::new(&Nowhere, pieces, LIMIT).unwrap();
    let [window, socket] = passed.try_into().unwrap();
    let passed = Passed { window, socket };
    let pass = || (0..2000).for_each(|piece| passed.send(&message(0, piece, 1)));
    let error = receiver.during(pass, || panic!("the machine has answered")).1.unwrap_err();
    assert!(error.to_string().contains("slot was not free"), "{error:?}");
}

#[test]
fn a_window_cannot_become_shorter_and_the_descriptors_are_no_part_of_the_pool() {
    let mut seen = false;
    let error = hostile(|passed| {
        for len in [0, 1 << 30] {
            rustix::fs::ftruncate(&passed.window, len).unwrap_err();
        }
        let stat = rustix::fs::fstat(&passed.window).unwrap();
        assert!(u64::try_from(stat.st_size).unwrap() < 64 << 20);
        rustix::net::getsockname(&passed.socket).unwrap();
        seen = true;
        Err(FreezeError::NotBegun)
    });
    assert!(seen && matches!(error, NotFrozen::Machine(_)), "{error:?}");
}

#[test]
fn the_supervisor_writes_what_is_in_the_window_and_zeros_elsewhere() {
    let pool = Managed::new(64 << 20);
    // Old bytes.
    let mut old = Memory::zeroed(2000);
    (0..2000).for_each(|page| old.fill(page, 0xa5));
    let mut contents = Contents::new(&old, machine(description(), b"state"));
    pool.freeze_from(&mut contents).unwrap();
    Client::connect(&pool.socket()).unwrap().reclaim("hello").unwrap();
    let pass = |passed: Passed| {
        let window = File::from(passed.window.try_clone().unwrap());
        window.write_all_at(&[7; 4096], PIECE).unwrap();
        window.write_all_at(&[8; 4096], PIECE + 4096).unwrap();
        passed.zeros([0, 2]);
        passed.send(&message(1, 1, 2));
        window.write_all_at(&[9; 100], 0).unwrap();
        passed.send(&message(0, 3, 1));
        Ok(FreezeReport::default())
    };
    let report = pool.freeze_from(&mut Hostile { pass, connection: None }).unwrap();
    let extent = Client::connect(&pool.socket()).unwrap().snapshot("hello").unwrap().map().unwrap();
    let mut guest = vec![1; usize::try_from(GUEST).unwrap()];
    extent.read_guest(0, &mut guest);
    let mut expected = vec![0; guest.len()];
    let piece = usize::try_from(PIECE).unwrap();
    expected[piece..piece + 4096].fill(7);
    expected[piece + 4096..piece + 8192].fill(8);
    assert!(guest == expected);
    let mut tail = [0; 100];
    extent.read_tail(0, &mut tail);
    assert_eq!(tail, [9; 100]);
    assert_eq!(report.stored_pages, GUEST / 4096);
    let written = report.zero_pages_written * 4096 + 8192 + TAIL;
    assert_eq!((report.bytes_written, report.disk_bytes), (written, written));
}

#[test]
fn pieces_tile_guest_memory_and_tail() {
    let pieces = Pieces { guest_bytes: GUEST, tail_bytes: PIECE + 1 };
    let places: Vec<_> = (0..pieces.count()).map(|piece| pieces.place(piece).unwrap()).collect();
    let expected = [
        (Part::Guest, 0, PIECE),
        (Part::Guest, PIECE, PIECE),
        (Part::Guest, 2 * PIECE, 4096),
        (Part::Tail, 0, PIECE),
        (Part::Tail, PIECE, 1),
    ];
    assert_eq!(places, expected);
    assert_eq!(pieces.place(5), None);
    assert_eq!(pieces.place(u64::MAX), None);
}

#[test]
fn messages_are_read_as_they_were_sent() {
    let mut stored = PageSet::new(PIECE_PAGES);
    stored.insert_range(3..70);
    let message = Message { slot: 2, piece: 1 << 40, stored };
    let bytes = message.encode();
    assert_eq!(bytes.len(), super::MESSAGE_LEN);
    assert_eq!(Message::decode(&bytes), Some(message));
    assert_eq!(Message::decode(&bytes[1..]), None);
}
