//! The supervisor's side.

use std::io;
use std::os::fd::OwnedFd;
use std::panic::resume_unwind;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use firn_base::PAGE_SIZE;
use firn_base::num::{u64_of, usize_of};
use firn_pool::Window;
use parking_lot::Mutex;
use rustix::io::{Errno, retry_on_intr};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType, recv, send, shutdown,
    socketpair,
};

use super::{MESSAGE_LEN, Message, PIECE, Part, Pieces};
use crate::extent::{ExtentTarget, failed};
use crate::freeze_error::FreezeError;
use crate::image::threads;
use crate::page_set::PageSet;

/// The number of pieces for which a machine gets the time limit of one step more. It is a rate that
/// every machine reaches, and limits how long one that sends slowly on purpose holds the extent.
const PIECES_PER_LIMIT: u64 = 64;

/// What a supervisor has received and written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Received {
    /// Writing: the sum over all threads.
    pub(crate) write: Duration,
    /// Zero pages of guest memory that were written.
    pub(crate) zero_pages_written: u64,
    /// Bytes that were written.
    pub(crate) bytes_written: u64,
}

/// Writes an extent that a machine passes.
pub(crate) struct Receiver<'a> {
    target: &'a dyn ExtentTarget,
    pieces: Pieces,
    window: Window,
    slots: u64,
    socket: OwnedFd,
    limit: Duration,
    state: Mutex<State>,
}

struct State {
    /// The pieces that came.
    taken: PageSet,
    /// Threads that write a piece.
    busy: usize,
    /// The last time that a thread began or ended to write a piece.
    active: Instant,
    received: Received,
    error: Option<FreezeError>,
}

impl<'a> Receiver<'a> {
    /// A receiver, and what the machine gets: the window and its end of the sockets. The machine
    /// may let the supervisor wait for `limit` at a time.
    pub(crate) fn new(
        target: &'a dyn ExtentTarget,
        pieces: Pieces,
        limit: Duration,
    ) -> Result<(Self, Vec<OwnedFd>), FreezeError> {
        // While each thread writes one, the machine fills another.
        let slots = u64_of(threads()) + 1;
        let made = || -> io::Result<_> {
            let (window, for_machine) = Window::create(slots * PIECE)?;
            let (family, flags) = (AddressFamily::UNIX, SocketFlags::CLOEXEC);
            let (socket, other) = socketpair(family, SocketType::SEQPACKET, flags, None)?;
            set_socket_timeout(&socket, Timeout::Recv, Some(limit))?;
            for slot in 0..slots {
                send(&socket, &slot.to_le_bytes(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?;
            }
            Ok((window, socket, vec![for_machine, other]))
        };
        let (window, socket, passed) = made().map_err(|source| FreezeError::Window { source })?;
        let state = Mutex::new(State {
            taken: PageSet::new(pieces.count()),
            busy: 0,
            active: Instant::now(),
            received: Received::default(),
            error: None,
        });
        Ok((Self { target, pieces, window, slots, socket, limit, state }, passed))
    }

    /// Writes what the machine passes during `step`, and until it answers. `hang_up` is called if
    /// the machine does not answer in time: it makes `step` return.
    pub(crate) fn during<T>(
        self,
        step: impl FnOnce() -> T,
        hang_up: impl FnOnce() + Send,
    ) -> (T, Result<Received, FreezeError>) {
        let (answered, answer) = channel::<()>();
        let receiver = &self;
        thread::scope(|scope| {
            let transfer = scope.spawn(move || {
                let received = receiver.receive();
                // A machine that fails answers with its reason.
                if answer.recv_timeout(receiver.limit) == Err(RecvTimeoutError::Timeout) {
                    hang_up();
                }
                received
            });
            let stepped = step();
            drop(answered);
            // What is in the socket is still received.
            let _ = shutdown(&receiver.socket, Shutdown::Read);
            let received = transfer.join().unwrap_or_else(|panic| resume_unwind(panic));
            (stepped, received)
        })
    }

    fn receive(&self) -> Result<Received, FreezeError> {
        let begin = Instant::now();
        self.state.lock().active = begin;
        thread::scope(|scope| {
            let others: Vec<_> = (1..threads())
                .map_while(|_| {
                    let thread = thread::Builder::new().name("freeze-write".to_owned());
                    thread.spawn_scoped(scope, || self.work(begin)).ok()
                })
                .collect();
            self.work(begin);
            for other in others {
                other.join().unwrap_or_else(|panic| resume_unwind(panic));
            }
        });
        let mut state = self.state.lock();
        match state.error.take() {
            Some(error) => Err(error),
            None if state.taken.count() < self.pieces.count() => Err(FreezeError::Incomplete {
                missing: self.pieces.count() - state.taken.count(),
                of: self.pieces.count(),
            }),
            None => Ok(state.received),
        }
    }

    /// Writes pieces until the machine has closed its end, or anything fails.
    fn work(&self, begin: Instant) {
        let zeros = vec![0; usize_of(PIECE)];
        loop {
            match self.next(begin) {
                Ok(None) => break,
                Ok(Some(message)) => {
                    let written = self.write(&message, &zeros);
                    let mut state = self.state.lock();
                    state.busy -= 1;
                    state.active = Instant::now();
                    match written {
                        Ok(written) => state.received.add(written),
                        Err(error) => {
                            drop(state);
                            self.fail(error);
                        }
                    }
                }
                Err(error) => self.fail(error),
            }
        }
    }

    /// Ends the transfer: all threads find the socket closed, and so does the machine.
    fn fail(&self, error: FreezeError) {
        self.state.lock().error.get_or_insert(error);
        let _ = shutdown(&self.socket, Shutdown::Both);
    }

    /// The next message, which is valid.
    fn next(&self, begin: Instant) -> Result<Option<Message>, FreezeError> {
        let steps = u32::try_from(self.pieces.count() / PIECES_PER_LIMIT).unwrap_or(u32::MAX);
        let longest = self.limit.saturating_mul(steps.saturating_add(1));
        loop {
            // One byte more shows a message that is too long.
            let mut bytes = [0; MESSAGE_LEN + 1];
            let received = retry_on_intr(|| recv(&self.socket, &mut bytes[..], RecvFlags::empty()));
            let mut state = self.state.lock();
            if state.error.is_some() {
                return Ok(None);
            }
            let late = begin.elapsed() > longest;
            match received {
                Ok((_, 0)) => return Ok(None),
                // The machine has closed its end with free slots in it, which the kernel reports
                // once, before the messages that are left.
                Err(Errno::CONNRESET) => {}
                _ if late => return Err(FreezeError::Stalled { limit: longest }),
                Ok((_, len)) => {
                    let message = Message::decode(&bytes[..len]);
                    let message =
                        message.ok_or(FreezeError::Passed { reason: "it is malformed" })?;
                    self.check(&message, &state.taken)?;
                    state.taken.insert(message.piece);
                    state.busy += 1;
                    state.active = Instant::now();
                    return Ok(Some(message));
                }
                // A machine that waits for a slot does not stall.
                Err(Errno::AGAIN) if state.busy > 0 || state.active.elapsed() < self.limit => {}
                Err(Errno::AGAIN) => return Err(FreezeError::Stalled { limit: self.limit }),
                Err(errno) => return Err(FreezeError::Window { source: errno.into() }),
            }
        }
    }

    fn check(&self, message: &Message, taken: &PageSet) -> Result<(), FreezeError> {
        let refused = |reason| Err(FreezeError::Passed { reason });
        let Some((_, _, len)) = self.pieces.place(message.piece) else {
            return refused("it is about bytes outside of the extent");
        };
        if taken.get(message.piece) {
            return refused("it is about bytes that came before");
        }
        match message.stored.ranges().last() {
            Some(last) if last.end > len.div_ceil(PAGE_SIZE) => {
                refused("it has more bytes than the extent")
            }
            Some(_) if message.slot >= self.slots => refused("its slot does not exist"),
            _ => Ok(()),
        }
    }

    /// Writes a piece, and frees its slot.
    fn write(&self, message: &Message, zeros: &[u8]) -> Result<Received, FreezeError> {
        let Some((part, start, len)) = self.pieces.place(message.piece) else {
            return Ok(Received::default());
        };
        let begin = Instant::now();
        let mut received = Received::default();
        for (pages, stored) in message.stored.split(0..len.div_ceil(PAGE_SIZE)) {
            let at = pages.start * PAGE_SIZE;
            let (to, len) = (start + at, len.min(pages.end * PAGE_SIZE) - at);
            let written = if stored {
                self.target.write_from(part, to, &self.window, message.slot * PIECE + at, len)
            } else if self.target.is_zeroed(part, to, len) {
                continue;
            } else {
                if part == Part::Guest {
                    received.zero_pages_written += pages.end - pages.start;
                }
                self.target.write(part, to, &zeros[..usize_of(len)])
            };
            written.map_err(failed("write"))?;
            received.bytes_written += len;
        }
        received.write = begin.elapsed();
        if message.stored.ranges().next().is_some() {
            self.free(message.slot)?;
        }
        Ok(received)
    }

    /// Sends a free slot back. It never waits: there is room for all slots.
    fn free(&self, slot: u64) -> Result<(), FreezeError> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match retry_on_intr(|| send(&self.socket, &slot.to_le_bytes(), flags)) {
            // The machine has passed everything.
            Ok(_) | Err(Errno::PIPE | Errno::CONNRESET) => Ok(()),
            Err(Errno::AGAIN) => Err(FreezeError::Passed { reason: "its slot was not free" }),
            Err(errno) => Err(FreezeError::Window { source: errno.into() }),
        }
    }
}

impl Received {
    fn add(&mut self, other: Self) {
        self.write += other.write;
        self.zero_pages_written += other.zero_pages_written;
        self.bytes_written += other.bytes_written;
    }
}
