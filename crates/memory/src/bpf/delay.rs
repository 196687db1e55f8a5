//! Reads of a block device that take longer than the device does.

use std::os::fd::OwnedFd;
use std::time::Duration;

use super::BpfError;
use super::program::delaying;
use super::syscalls::{attach_to_tracepoint, load_tracepoint};
use super::tracepoint::Queued;

/// Sectors of 512 bytes in a page.
const SECTORS: u32 = 8;

/// A BPF program that delays the reads of a block device. It is detached on drop.
///
/// The program runs where the kernel passes a read to the device's driver (the tracepoint
/// `block:block_bio_queue`), in the thread that reads, and looks at the clock until the time is
/// over. So a read takes a processor while it waits, as a driver does that polls. Writes are not
/// delayed.
#[derive(Debug)]
pub struct ReadDelay {
    _attached: OwnedFd,
}

impl ReadDelay {
    /// The longest delay of a read that the kernel's limit of instructions allows, where a look at
    /// the clock takes 20 ns or more. A longer one is cut to some time from there on.
    pub const LONGEST: Duration = Duration::from_micros(800);

    /// Delays each read of the device of these numbers, as `stat` gives them: by `first_page`, as a
    /// disk's latency does, and by `further_page` for each page of 4 KiB after the first in the
    /// same request, as its bandwidth does.
    ///
    /// # Errors
    ///
    /// [`BpfError`]: this is not root, or the kernel has no tracepoints or no BPF.
    pub fn attach(
        major: u32,
        minor: u32,
        first_page: Duration,
        further_page: Duration,
    ) -> Result<Self, BpfError> {
        let ns = |time: Duration| i32::try_from(time.min(Self::LONGEST).as_nanos()).unwrap_or(0);
        let sector_ns = ns(further_page / SECTORS);
        // Of the first page, its sectors are a part.
        let delay_ns = i64::from(ns(first_page)) - i64::from(sector_ns) * i64::from(SECTORS);
        let at = Queued::find()?;
        let program = delaying(&at, major << 20 | minor, delay_ns, sector_ns);
        let program = load_tracepoint(&program);
        let program = program.map_err(|source| BpfError::Refused { what: "program", source })?;
        let attached = attach_to_tracepoint(at.id, &program).map_err(BpfError::Attach)?;
        Ok(Self { _attached: attached })
    }
}
