//! Frames: a length (u32, little-endian) and that many bytes.

use std::io::{self, Read, Write};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Why a frame could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The peer closed the connection between two frames.
    #[error("the peer closed the connection")]
    Closed,
    /// The peer closed the connection before it had read all sent bytes. The kernel reports this
    /// for Unix sockets (`unix_release_sock` in Linux's `net/unix/af_unix.c`).
    #[error("the peer closed the connection before it had read all sent bytes")]
    Reset,
    /// The peer closed the connection inside a frame.
    #[error("the peer closed the connection inside a message")]
    Truncated,
    /// The time limit was exceeded.
    #[error("the peer did not respond within the time limit")]
    TimedOut,
    /// The frame exceeds the limit of its direction.
    #[error("a message of {length} bytes exceeds the limit of {limit} bytes")]
    TooLong {
        /// The frame's length in bytes, without the length field.
        length: usize,
        /// The limit in bytes.
        limit: usize,
    },
    /// The connection failed.
    #[error("the connection failed")]
    Io(#[source] io::Error),
}

impl From<io::Error> for FrameError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::TimedOut => Self::TimedOut,
            io::ErrorKind::UnexpectedEof => Self::Truncated,
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Self::Reset,
            _ => Self::Io(error),
        }
    }
}

/// Why a message could not be received.
#[derive(Debug, thiserror::Error)]
pub enum ReceiveError {
    /// No complete frame was received.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The frame does not contain a message of this protocol.
    #[error("the peer sent a message that is not of this protocol")]
    Malformed(#[source] serde_json::Error),
}

/// Why a message could not be sent.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// The frame was not sent.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The message cannot be encoded as JSON.
    #[error("the message cannot be encoded as JSON")]
    Unwritable(#[source] serde_json::Error),
}

/// Reads one frame of at most `limit` bytes. The buffer grows with the received bytes, not with the
/// announced length.
///
/// # Errors
/// [`FrameError::Closed`] if the peer closed the connection before the first byte; other variants
/// as documented there.
pub fn read_frame(reader: &mut impl Read, limit: usize) -> Result<Vec<u8>, FrameError> {
    let mut header = [0; 4];
    let mut have = 0;
    while have < header.len() {
        match reader.read(&mut header[have..]) {
            Ok(0) if have == 0 => return Err(FrameError::Closed),
            Ok(0) => return Err(FrameError::Truncated),
            Ok(count) => have += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    let announced = u32::from_le_bytes(header);
    let length = usize::try_from(announced).unwrap_or(usize::MAX);
    if length > limit {
        return Err(FrameError::TooLong { length, limit });
    }
    let mut payload = Vec::with_capacity(length.min(64 << 10));
    reader.take(u64::from(announced)).read_to_end(&mut payload)?;
    if payload.len() < length {
        return Err(FrameError::Truncated);
    }
    Ok(payload)
}

/// Writes `payload` as one frame.
///
/// # Errors
/// [`FrameError::TooLong`] if the payload exceeds `limit`. Nothing is written in that case.
pub fn write_frame(
    writer: &mut impl Write,
    payload: &[u8],
    limit: usize,
) -> Result<(), FrameError> {
    let mut frame = Vec::with_capacity(payload.len() + 4);
    frame.extend_from_slice(&[0; 4]);
    frame.extend_from_slice(payload);
    finish(writer, frame, limit)
}

/// Sends `message` as one frame.
///
/// # Errors
/// As [`write_frame`], and [`SendError::Unwritable`] if the message cannot be encoded as JSON.
pub fn send<T: Serialize>(
    writer: &mut impl Write,
    message: &T,
    limit: usize,
) -> Result<(), SendError> {
    let mut frame = vec![0; 4];
    serde_json::to_writer(&mut frame, message).map_err(SendError::Unwritable)?;
    Ok(finish(writer, frame, limit)?)
}

/// Receives one message of at most `limit` bytes.
///
/// # Errors
/// As [`read_frame`], and [`ReceiveError::Malformed`] if the frame does not contain a `T`.
pub fn receive<T: DeserializeOwned>(
    reader: &mut impl Read,
    limit: usize,
) -> Result<T, ReceiveError> {
    let payload = read_frame(reader, limit)?;
    serde_json::from_slice(&payload).map_err(ReceiveError::Malformed)
}

/// Writes the length into the first four bytes of `frame` and sends the frame with one write: a
/// separate header would cost the guest another interrupt.
fn finish(writer: &mut impl Write, mut frame: Vec<u8>, limit: usize) -> Result<(), FrameError> {
    let length = frame.len() - 4;
    let too_long = FrameError::TooLong { length, limit };
    if length > limit {
        return Err(too_long);
    }
    let Ok(announced) = u32::try_from(length) else { return Err(too_long) };
    frame[..4].copy_from_slice(&announced.to_le_bytes());
    writer.write_all(&frame)?;
    writer.flush()?;
    Ok(())
}
