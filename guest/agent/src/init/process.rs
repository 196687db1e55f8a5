//! The first process and its child, the server.

use std::fmt::{self, Display};
use std::io;

use rustix::io::Errno;
use rustix::process::{Pid, WaitOptions, WaitStatus, wait};

/// The process in which [`fork`] returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    /// The first process, with the child's pid.
    Parent(Pid),
    /// The child.
    Child,
}

/// How the child ended.
#[derive(Debug)]
pub(crate) enum End {
    Status(WaitStatus),
    WaitFailed(Errno),
}

/// Forks the server process. The first process must reap every orphan of the machine, and the
/// server waits for its own children by pid; in a single process, each would reap the other's
/// children.
pub(crate) fn fork() -> io::Result<Side> {
    // SAFETY: this process has one thread, so the child may run any code.
    let child = unsafe { libc::fork() };
    if child < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Pid::from_raw(child).map_or(Side::Child, Side::Parent))
}

/// Reaps children until `child` ends.
pub(crate) fn reap_until(child: Pid) -> End {
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid == child => return End::Status(status),
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return End::WaitFailed(error),
        }
    }
}

impl Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status(status) => match (status.exit_status(), status.terminating_signal()) {
                (Some(code), _) => write!(f, "exit status {code}"),
                (_, Some(signal)) => write!(f, "signal {signal}"),
                _ => write!(f, "{status:?}"),
            },
            Self::WaitFailed(error) => write!(f, "{error}"),
        }
    }
}
