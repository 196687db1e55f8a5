//! Reads of a block device that take longer than the device does.

use std::os::fd::OwnedFd;
use std::time::Duration;

use super::BpfError;
use super::program::delaying;
use super::syscalls::{attach_to_tracepoint, load_tracepoint};
use super::tracepoint::Queued;

/// A BPF program that delays the reads of a block device. It is detached on drop.
///
/// The program runs where the kernel passes a read to the device's driver (the tracepoint
/// `block:block_bio_queue`), in the thread that reads, and looks at the clock until the time is
/// over. So a read takes a processor while it waits, as a driver does that polls. Writes are not
/// delayed. A read of several pages in one request is delayed once, as a disk's latency is.
#[derive(Debug)]
pub struct ReadDelay {
    _attached: OwnedFd,
}

impl ReadDelay {
    /// The longest delay that the kernel's limit of instructions allows, where a look at the clock
    /// takes 20 ns or more.
    pub const LONGEST: Duration = Duration::from_micros(400);

    /// Delays each read of the device of these numbers, as `stat` gives them, by `delay`, which is
    /// at most [`ReadDelay::LONGEST`].
    ///
    /// # Errors
    ///
    /// [`BpfError`]: this is not root, or the kernel has no tracepoints or no BPF.
    pub fn attach(major: u32, minor: u32, delay: Duration) -> Result<Self, BpfError> {
        let delay_ns = delay.min(Self::LONGEST).as_nanos();
        let delay_ns = u64::try_from(delay_ns).unwrap_or(u64::MAX);
        let at = Queued::find()?;
        let program = load_tracepoint(&delaying(&at, major << 20 | minor, delay_ns));
        let program = program.map_err(|source| BpfError::Refused { what: "program", source })?;
        let attached = attach_to_tracepoint(at.id, &program).map_err(BpfError::Attach)?;
        Ok(Self { _attached: attached })
    }
}
