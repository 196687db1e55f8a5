//! The channel from the lab's machine to the caller: frames over a virtio-serial port.
//!
//! A frame is a kind (1 byte), the length of its content (4 bytes, little-endian) and the content.
//! One stream carries the command's output, its results and its exit code in this order.

use std::io::{Read, Write};
use std::sync::{Mutex, PoisonError};

use thiserror::Error;

/// The longest content of a frame, in bytes.
pub(crate) const MAX_CONTENT: usize = 64 * 1024;
const HEADER: usize = 5;

/// The kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// L1 has booted and starts the command. Empty.
    Ready,
    /// Bytes of the command's standard output.
    Stdout,
    /// Bytes of the command's standard error.
    Stderr,
    /// Bytes of the tar archive of `/out`.
    Results,
    /// The exit code, one byte. The last frame.
    Exit,
    /// The lab's error, as text. The last frame.
    Failure,
    /// The timers of L1's kernel work. Empty.
    Beat,
}

impl Kind {
    const ALL: [Self; 7] = [
        Self::Ready,
        Self::Stdout,
        Self::Stderr,
        Self::Results,
        Self::Exit,
        Self::Failure,
        Self::Beat,
    ];

    fn byte(self) -> u8 {
        match self {
            Self::Ready => 1,
            Self::Stdout => 2,
            Self::Stderr => 3,
            Self::Results => 4,
            Self::Exit => 5,
            Self::Failure => 6,
            Self::Beat => 7,
        }
    }
}

/// A frame could not be received.
#[derive(Debug, Error)]
pub enum ReceiveError {
    /// The stream ended between frames or within a frame.
    #[error("the channel from the lab's machine ended early")]
    Ended,
    /// The stream cannot be read.
    #[error("cannot read the channel from the lab's machine")]
    Read(#[source] std::io::Error),
    /// The data is not a frame.
    #[error(
        "the channel from the lab's machine carries data that is not a frame (kind {kind}, length {length})"
    )]
    Malformed {
        /// The byte in place of a frame's kind.
        kind: u8,
        /// The bytes in place of a frame's length.
        length: u32,
    },
}

/// Reads one frame into `content` and returns its kind.
pub(crate) fn receive(stream: &mut impl Read, content: &mut Vec<u8>) -> Result<Kind, ReceiveError> {
    let mut header = [0; HEADER];
    read_exact(stream, &mut header)?;
    let [kind, length @ ..] = header;
    let length = u32::from_le_bytes(length);
    let malformed = ReceiveError::Malformed { kind, length };
    let Some(known) = Kind::ALL.into_iter().find(|known| known.byte() == kind) else {
        return Err(malformed);
    };
    match usize::try_from(length) {
        Ok(length) if length <= MAX_CONTENT => content.resize(length, 0),
        _ => return Err(malformed),
    }
    read_exact(stream, content)?;
    Ok(known)
}

fn read_exact(stream: &mut impl Read, buffer: &mut [u8]) -> Result<(), ReceiveError> {
    stream.read_exact(buffer).map_err(|error| match error.kind() {
        std::io::ErrorKind::UnexpectedEof => ReceiveError::Ended,
        _ => ReceiveError::Read(error),
    })
}

/// The sending end. The threads that relay the command's output share it.
#[derive(Debug)]
pub(crate) struct Sender<W>(Mutex<W>);

impl<W: Write> Sender<W> {
    pub(crate) fn new(stream: W) -> Self {
        Self(Mutex::new(stream))
    }

    /// Sends `content` in frames of at most [`MAX_CONTENT`] bytes; one frame if it is empty.
    pub(crate) fn send(&self, kind: Kind, content: &[u8]) -> std::io::Result<()> {
        let mut stream = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut rest = content;
        loop {
            let (part, after) = rest.split_at(rest.len().min(MAX_CONTENT));
            let length = u32::try_from(part.len()).map_err(std::io::Error::other)?;
            let mut frame = Vec::with_capacity(HEADER + part.len());
            frame.push(kind.byte());
            frame.extend(length.to_le_bytes());
            frame.extend(part);
            stream.write_all(&frame)?;
            if after.is_empty() {
                return stream.flush();
            }
            rest = after;
        }
    }

    /// A writer that sends each write as frames of `kind`.
    pub(crate) fn writer(&self, kind: Kind) -> FrameWriter<'_, W> {
        FrameWriter { sender: self, kind }
    }
}

/// Writes frames of one kind.
#[derive(Debug)]
pub(crate) struct FrameWriter<'a, W> {
    sender: &'a Sender<W>,
    kind: Kind,
}

impl<W: Write> Write for FrameWriter<'_, W> {
    fn write(&mut self, buffer: &[u8]) -> std::io::Result<usize> {
        if !buffer.is_empty() {
            self.sender.send(self.kind, buffer)?;
        }
        Ok(buffer.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
#[path = "channel_tests.rs"]
mod tests;
