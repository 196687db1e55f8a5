//! The monitor, the process whose memory the pager serves.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};

use nix::sys::socket::{
    getsockopt,
    sockopt::{PeerCredentials, PeerPidfd},
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::process::{
    Pid, PidfdFlags, Signal, geteuid, kill_process, pidfd_open, pidfd_send_signal,
    test_kill_process,
};
use thiserror::Error;

use super::{PagerCommandError, wait};

/// Why a monitor is not served.
#[derive(Debug, Error)]
pub(crate) enum MonitorError {
    #[error("cannot identify the process that connected")]
    Find(#[source] io::Error),
    #[error(
        "the process that connected is in another pid namespace and cannot be killed: run the pager in the same or \
         an outer pid namespace"
    )]
    Elsewhere,
    #[error(
        "cannot watch the monitor, process {pid}; it is killed if its connection is still open"
    )]
    Watch { pid: i32, source: io::Error },
    #[error(
        "the monitor, process {pid}, is not served and must be stopped: uid {own} may not kill it if its pager ends; \
         run the pager as uid {uid} or as root"
    )]
    MayNotKill { pid: i32, uid: u32, own: u32, source: io::Error },
}

/// A monitor's process.
pub(super) struct Monitor {
    process: OwnedFd,
}

impl AsFd for Monitor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.process.as_fd()
    }
}

impl Monitor {
    /// The peer process of a connection, which this process may kill. A process that cannot be
    /// watched is killed.
    pub(super) fn of(connection: &UnixStream) -> Result<Self, MonitorError> {
        let peer = getsockopt(connection, PeerCredentials);
        let peer = peer.map_err(|errno| MonitorError::Find(errno.into()))?;
        // rustix's `Pid` is never 0, but the kernel reports 0 for a process in another pid
        // namespace.
        let pid = Pid::from_raw(peer.pid()).ok_or(MonitorError::Elsewhere)?;
        let process = match getsockopt(connection, PeerPidfd) {
            // Linux before 6.5.
            Err(nix::errno::Errno::ENOPROTOOPT) => by_number(connection, pid),
            process => process.map_err(Into::into),
        };
        let process = process.map_err(|source| {
            // The reported error is why the process cannot be watched.
            if !is_closed(connection) {
                let _ = kill_process(pid, Signal::KILL);
            }
            MonitorError::Watch { pid: peer.pid(), source }
        })?;
        match test_kill_process(pid) {
            Ok(()) => Ok(Self { process }),
            // The process has ended and its pid may be reused.
            Err(_) if has(&process, PollFlags::IN) => Ok(Self { process }),
            Err(errno) => Err(MonitorError::MayNotKill {
                pid: peer.pid(),
                uid: peer.uid(),
                own: geteuid().as_raw(),
                source: errno.into(),
            }),
        }
    }

    fn signal(&self) -> Result<(), Errno> {
        match pidfd_send_signal(&self.process, Signal::KILL) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(errno) => Err(errno),
        }
    }

    /// Kills the process and waits until it has ended and its memory is freed. If this process may
    /// not kill it any more, waits until it ends.
    pub(super) fn kill(&self) -> Result<(), PagerCommandError> {
        let killed = self.signal();
        wait(&[self])?;
        killed.map_err(|errno| PagerCommandError::Kill(errno.into()))
    }
}

/// The peer process of a connection, on a kernel that reports only its pid. The pid may be reused
/// after the process ended. In that case the connection is closed, unless a child of the process
/// still holds it.
fn by_number(connection: &UnixStream, pid: Pid) -> io::Result<OwnedFd> {
    let process = pidfd_open(pid, PidfdFlags::empty())?;
    if is_closed(connection) { Err(Errno::SRCH.into()) } else { Ok(process) }
}

fn is_closed(connection: &UnixStream) -> bool {
    has(connection, PollFlags::HUP)
}

/// Whether a descriptor has an event pending.
fn has(descriptor: impl AsFd, state: PollFlags) -> bool {
    let mut wait = [PollFd::new(&descriptor, state)];
    let polled = retry_on_intr(|| poll(&mut wait, Some(&Timespec::default())));
    polled.is_ok() && wait[0].revents().contains(state)
}

/// Kills the processes that have connected to a non-blocking socket without being served. Returns
/// whether there was one.
pub(super) fn turn_away(listener: &UnixListener) -> bool {
    let mut any = false;
    while let Ok((connection, _)) = listener.accept() {
        any = true;
        if let Ok(monitor) = Monitor::of(&connection)
            && monitor.signal().is_ok()
        {
            // The message stays in the socket until the process ends. No other process waits for
            // this one.
            let _ = wait(&[&monitor]);
        }
    }
    any
}

#[cfg(test)]
#[path = "monitor_tests.rs"]
mod tests;
