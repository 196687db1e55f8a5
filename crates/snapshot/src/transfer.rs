//! How the bytes of an extent get from a machine to its supervisor, which alone can write the
//! extent.
//!
//! The two share a window of memory and a pair of sockets. The window has slots of one piece each.
//! The supervisor sends the numbers of free slots. The machine's threads copy pieces into them, and
//! send a [`Message`] about each piece. The supervisor's threads take these, write the pieces, and
//! send the slots back. So several pieces are under way at any time, and guest memory is never in
//! DRAM a second time.
//!
//! The machine may have been taken over by its guest. The supervisor does not look at the bytes. It
//! checks the few numbers of a message, takes each piece once, and has time limits.

mod receiver;
mod sender;

use firn_base::PAGE_SIZE;

use crate::layout::CHUNK_SIZE;
use crate::page_set::PageSet;

pub(crate) use receiver::{Received, Receiver};
pub(crate) use sender::{Sender, TailStream};

/// Bytes of a piece, except for the last piece of guest memory and the last one of the tail.
const PIECE: u64 = CHUNK_SIZE;
/// Pages of a piece.
const PIECE_PAGES: u64 = PIECE / PAGE_SIZE;
/// Bytes of a message.
const MESSAGE_LEN: usize = 80;

/// A part of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Guest memory.
    Guest,
    /// Everything else.
    Tail,
}

/// The pieces of an extent: those of guest memory, then those of the tail.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pieces {
    pub(crate) guest_bytes: u64,
    pub(crate) tail_bytes: u64,
}

impl Pieces {
    fn count(self) -> u64 {
        self.first_of_tail() + self.tail_bytes.div_ceil(PIECE)
    }

    fn first_of_tail(self) -> u64 {
        self.guest_bytes.div_ceil(PIECE)
    }

    /// The place of a piece: its part, its offset in it and its length.
    fn place(self, piece: u64) -> Option<(Part, u64, u64)> {
        if piece >= self.count() {
            return None;
        }
        let (part, number, bytes) = match piece.checked_sub(self.first_of_tail()) {
            None => (Part::Guest, piece, self.guest_bytes),
            Some(number) => (Part::Tail, number, self.tail_bytes),
        };
        Some((part, number * PIECE, PIECE.min(bytes - number * PIECE)))
    }
}

/// What a machine sends about a piece.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Message {
    /// The slot that contains it, at the offsets that the bytes have in the piece. Without meaning
    /// if all pages are zero.
    slot: u64,
    piece: u64,
    /// The pages of the piece that are in the slot. All others are zero.
    stored: PageSet,
}

impl Message {
    fn encode(&self) -> Vec<u8> {
        [&self.slot.to_le_bytes()[..], &self.piece.to_le_bytes(), &self.stored.to_bytes()].concat()
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (slot, rest) = bytes.split_first_chunk()?;
        let (piece, stored) = rest.split_first_chunk()?;
        let stored = PageSet::from_bytes(stored, PIECE_PAGES)?;
        Some(Self { slot: u64::from_le_bytes(*slot), piece: u64::from_le_bytes(*piece), stored })
    }
}

#[cfg(test)]
#[path = "transfer_tests.rs"]
mod tests;
