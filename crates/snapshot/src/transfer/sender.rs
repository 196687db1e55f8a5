//! The machine's side.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use firn_base::PAGE_SIZE;
use firn_base::num::u64_of;
use rustix::io::retry_on_intr;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::{Message, PIECE, PIECE_PAGES, Pieces};
use crate::freeze_error::FreezeError;
use crate::image::ImageSink;
use crate::page_set::PageSet;

/// Passes pieces to the supervisor. Several threads do it.
#[derive(Debug)]
pub(crate) struct Sender {
    /// It is written and not mapped: a jailed monitor maps no file after its guest has run.
    window: File,
    socket: OwnedFd,
}

impl Sender {
    /// Takes what came from the supervisor.
    pub(crate) fn new([window, socket]: [OwnedFd; 2]) -> Self {
        Self { window: window.into(), socket }
    }

    /// Waits for a free slot.
    fn slot(&self) -> Result<u64, FreezeError> {
        let mut slot = [0; 8];
        let received = retry_on_intr(|| recv(&self.socket, &mut slot[..], RecvFlags::empty()));
        match received {
            Ok((_, 8)) => Ok(u64::from_le_bytes(slot)),
            Ok(_) => Err(failed(io::ErrorKind::UnexpectedEof.into())),
            Err(errno) => Err(failed(errno.into())),
        }
    }

    fn send(&self, message: &Message) -> Result<(), FreezeError> {
        let bytes = message.encode();
        let sent = retry_on_intr(|| send(&self.socket, &bytes, SendFlags::NOSIGNAL));
        sent.map(drop).map_err(|errno| failed(errno.into()))
    }

    /// The tail, which follows guest memory of `guest_bytes`.
    pub(crate) fn tail(&self, guest_bytes: u64) -> TailStream<'_> {
        let piece = Pieces { guest_bytes, tail_bytes: 0 }.count();
        TailStream { sender: self, piece, slot: 0, filled: 0 }
    }
}

/// The pieces of guest memory are the chunks of the image.
impl ImageSink for Sender {
    fn write_chunk(&self, offset: u64, _: u64, runs: &[(u64, &[u8])]) -> Result<(), FreezeError> {
        let mut stored = PageSet::new(PIECE_PAGES);
        let slot = if runs.is_empty() { 0 } else { self.slot()? };
        for (start, bytes) in runs {
            self.window.write_all_at(bytes, slot * PIECE + start).map_err(failed)?;
            stored.insert_range(start / PAGE_SIZE..(start + u64_of(bytes.len())) / PAGE_SIZE);
        }
        self.send(&Message { slot, piece: offset / PIECE, stored })
    }
}

/// Passes the tail from its beginning to its end.
#[derive(Debug)]
pub(crate) struct TailStream<'a> {
    sender: &'a Sender,
    /// The piece that is being filled.
    piece: u64,
    /// Its slot, if any byte of it is filled.
    slot: u64,
    filled: u64,
}

impl TailStream<'_> {
    /// Passes the next bytes.
    pub(crate) fn write(&mut self, mut bytes: &[u8]) -> Result<(), FreezeError> {
        while !bytes.is_empty() {
            if self.filled == 0 {
                self.slot = self.sender.slot()?;
            }
            let room = usize::try_from(PIECE - self.filled).unwrap_or(usize::MAX);
            let (now, later) = bytes.split_at(bytes.len().min(room));
            let place = self.slot * PIECE + self.filled;
            self.sender.window.write_all_at(now, place).map_err(failed)?;
            self.filled += u64_of(now.len());
            if self.filled == PIECE {
                self.pass()?;
            }
            bytes = later;
        }
        Ok(())
    }

    /// Passes what is left.
    pub(crate) fn finish(mut self) -> Result<(), FreezeError> {
        if self.filled > 0 { self.pass() } else { Ok(()) }
    }

    fn pass(&mut self) -> Result<(), FreezeError> {
        let mut stored = PageSet::new(PIECE_PAGES);
        stored.insert_range(0..self.filled.div_ceil(PAGE_SIZE));
        let (slot, piece) = (self.slot, self.piece);
        self.filled = 0;
        self.piece += 1;
        self.sender.send(&Message { slot, piece, stored })
    }
}

fn failed(source: io::Error) -> FreezeError {
    FreezeError::HandOver { source }
}
