//! Frames that the guest has sent together.

/// The frames of a burst, one of which is being handled.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Burst<'a> {
    frames: &'a [&'a [u8]],
    current: usize,
}

/// Bytes of a burst, which have no memory of their own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    frame: usize,
    start: usize,
    pub(crate) len: usize,
}

impl<'a> Burst<'a> {
    pub(crate) const fn new(frames: &'a [&'a [u8]], current: usize) -> Self {
        Self { frames, current }
    }

    /// Where `bytes` of the current frame are.
    pub(crate) fn part(&self, bytes: &[u8]) -> Part {
        let frame = self.frames.get(self.current).copied().unwrap_or_default();
        let start = bytes.as_ptr().addr().saturating_sub(frame.as_ptr().addr());
        Part { frame: self.current, start, len: bytes.len() }
    }

    /// What is at `part`.
    pub(crate) fn bytes(&self, part: Part) -> &'a [u8] {
        let frame = self.frames.get(part.frame).copied().unwrap_or_default();
        frame.get(part.start..part.start + part.len).unwrap_or_default()
    }
}
