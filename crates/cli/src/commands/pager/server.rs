//! The process that serves pages.

use std::io::{Stdin, stdin};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::ExitCode;

use firn_base::PAGE_SIZE;
use firn_memory::pager::{PageStore, Pager, PagerJob, end_process, firecracker};
use firn_memory::uffd::Uffd;

use super::monitor::{Monitor, turn_away};
use super::wire::{ReceiveError, receive, send};
use super::{PagerArgs, PagerCommandError, refuse, store, wait};

/// Receives a monitor's connection from the guardian and serves its memory until the monitor or the
/// guardian ends.
pub(super) fn run(arguments: &PagerArgs) -> Result<ExitCode, PagerCommandError> {
    let guardian = stdin();
    let store = store(arguments)?;
    // The guardian sends three messages: the listening socket; the connection; and, once it holds
    // the userfaultfd itself, permission to receive the monitor's message.
    let Some([listener]) = next(&guardian)? else { return Ok(ExitCode::SUCCESS) };
    let listener = UnixListener::from(listener);
    let Some([connection]) = next(&guardian)? else {
        // The guardian has ended, so this process handles its connected monitors.
        let any = turn_away(&listener);
        return if any { Err(PagerCommandError::GuardianEnded) } else { Ok(ExitCode::SUCCESS) };
    };
    drop(listener);
    let connection = UnixStream::from(connection);
    let monitor = match Monitor::of(&connection) {
        Ok(monitor) => monitor,
        Err(error) => {
            // The guardian also refuses it.
            wait(&[&guardian])?;
            return refuse(&connection, &error);
        }
    };
    let mut kept = Vec::new();
    let served = serve(arguments, store, &guardian, &monitor, &connection, &mut kept);
    // In every case, also after an error.
    monitor.kill()?;
    served
}

/// The next descriptors from the guardian; `None` if it has ended.
fn next<const COUNT: usize>(
    guardian: &Stdin,
) -> Result<Option<[OwnedFd; COUNT]>, PagerCommandError> {
    match receive(guardian) {
        Ok(descriptors) => Ok(descriptors.try_into().ok()),
        Err(ReceiveError::Ended) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Serves a monitor until it ends. Both processes hold the descriptors in `kept`.
fn serve(
    arguments: &PagerArgs,
    (store, len): (PageStore, u64),
    guardian: &Stdin,
    monitor: &Monitor,
    connection: &UnixStream,
    kept: &mut Vec<OwnedFd>,
) -> Result<ExitCode, PagerCommandError> {
    let Some([]) = next(guardian)? else { return Err(PagerCommandError::GuardianEnded) };
    *kept = firecracker::peek(connection).map_err(PagerCommandError::Handoff)?;
    let (message, uffd) = firecracker::receive(connection).map_err(PagerCommandError::Handoff)?;
    let areas = firecracker::parse(&message, len).map_err(PagerCommandError::Handoff)?;
    let pager = Pager::start(PagerJob {
        uffd: Uffd::of(uffd).map_err(|error| PagerCommandError::Pager(error.into()))?,
        areas,
        store,
        pages: len / PAGE_SIZE,
        policy: arguments.granule,
        // The guardian detects the end of this process and kills the monitor.
        on_failure: end_process,
    })?;
    // The following wait detects that the guardian has ended.
    let _ = send(guardian, &[]);
    if wait(&[monitor, guardian])? == 0 {
        return Ok(ExitCode::SUCCESS);
    }
    monitor.kill()?;
    drop(pager);
    Err(PagerCommandError::GuardianEnded)
}
