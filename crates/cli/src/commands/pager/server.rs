//! The process that serves pages.

use std::io::stdin;
use std::process::ExitCode;

use firn_memory::pager::{Pager, PagerJob, end_process, firecracker};
use firn_memory::uffd::Uffd;
use firn_snapshot::PAGE_SIZE;

use super::wire::{ReceiveError, receive, send};
use super::{Monitor, PagerArgs, PagerCommandError, READY, store, wait};

/// Receives a monitor's memory from the guardian, and serves it until the monitor or the guardian ends.
pub(super) fn run(arguments: &PagerArgs) -> Result<ExitCode, PagerCommandError> {
    let guardian = stdin();
    let (store, len) = store(arguments)?;
    let (message, descriptors) = match receive(&guardian) {
        Ok(received) => received,
        // The guardian ended before there was anything to serve.
        Err(ReceiveError::Ended) => return Ok(ExitCode::SUCCESS),
        Err(error) => return Err(error.into()),
    };
    let [uffd, monitor] = <[_; 2]>::try_from(descriptors).map_err(|_| ReceiveError::Ended)?;
    let monitor = Monitor(monitor);
    let areas = firecracker::parse(&message, len).map_err(PagerCommandError::Handoff)?;
    let pager = Pager::start(PagerJob {
        uffd: Uffd::of(uffd).map_err(|error| PagerCommandError::Pager(error.into()))?,
        areas,
        store,
        pages: len / PAGE_SIZE,
        policy: arguments.granule,
        // The guardian sees the end of this process, and kills the monitor.
        on_loss: end_process,
    })?;
    // A guardian that is gone is seen at once.
    let _ = send(&guardian, READY, &[]);
    if wait(&[&monitor.0, &guardian])? == 0 {
        return Ok(ExitCode::SUCCESS);
    }
    monitor.kill()?;
    drop(pager);
    Err(PagerCommandError::GuardianLost)
}
