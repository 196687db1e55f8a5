//! The process whose memory is served.

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
    #[error("finding the process that connected")]
    Find(#[source] io::Error),
    #[error(
        "the process that connected is in another pid namespace, where it cannot be killed: run the pager in the same or in \
         an outer one"
    )]
    Elsewhere,
    #[error("watching the monitor, process {pid}, which is killed if it still has its connection")]
    Watch { pid: i32, source: io::Error },
    #[error(
        "the monitor, process {pid}, is not served and has to be ended: uid {own} may not kill it if its pager is lost; \
         run the pager as uid {uid}, or as root"
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
    /// The process on the other side of a connection, which this process may kill. One that cannot be watched is killed.
    pub(super) fn of(connection: &UnixStream) -> Result<Self, MonitorError> {
        let peer = getsockopt(connection, PeerCredentials);
        let peer = peer.map_err(|errno| MonitorError::Find(errno.into()))?;
        // (rustix has a pid that is never 0, which the kernel does not promise.)
        let pid = Pid::from_raw(peer.pid()).ok_or(MonitorError::Elsewhere)?;
        let process = match getsockopt(connection, PeerPidfd) {
            // Before Linux 6.5.
            Err(nix::errno::Errno::ENOPROTOOPT) => by_number(connection, pid),
            process => process.map_err(Into::into),
        };
        let process = process.map_err(|source| {
            // What is said is why it cannot be watched.
            if !is_closed(connection) {
                let _ = kill_process(pid, Signal::KILL);
            }
            MonitorError::Watch { pid: peer.pid(), source }
        })?;
        match test_kill_process(pid) {
            Ok(()) => Ok(Self { process }),
            // It has ended: its number may be another's by now.
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

    /// Kills it, and waits until it is gone: with its memory. So it waits for one that may not be killed any more, too.
    pub(super) fn kill(&self) -> Result<(), PagerCommandError> {
        let killed = self.signal();
        wait(&[self])?;
        killed.map_err(|errno| PagerCommandError::Kill(errno.into()))
    }
}

/// The process on the other side of a connection, where the kernel names it by a number alone. It may be another's once the
/// process has ended; then the other side is closed, unless a child of the process has it.
fn by_number(connection: &UnixStream, pid: Pid) -> io::Result<OwnedFd> {
    let process = pidfd_open(pid, PidfdFlags::empty())?;
    if is_closed(connection) { Err(Errno::SRCH.into()) } else { Ok(process) }
}

fn is_closed(connection: &UnixStream) -> bool {
    has(connection, PollFlags::HUP)
}

/// Whether a descriptor is in a state now.
fn has(descriptor: impl AsFd, state: PollFlags) -> bool {
    let mut wait = [PollFd::new(&descriptor, state)];
    let polled = retry_on_intr(|| poll(&mut wait, Some(&Timespec::default())));
    polled.is_ok() && wait[0].revents().contains(state)
}

/// Kills who has connected to a socket, which does not block, and is not served. Whether there was anybody.
pub(super) fn turn_away(listener: &UnixListener) -> bool {
    let mut any = false;
    while let Ok((connection, _)) = listener.accept() {
        any = true;
        if let Ok(monitor) = Monitor::of(&connection)
            && monitor.signal().is_ok()
        {
            // Until then its message stays where it is. Nobody else waits for it.
            let _ = wait(&[&monitor]);
        }
    }
    any
}

#[cfg(test)]
#[path = "monitor_tests.rs"]
mod tests;
