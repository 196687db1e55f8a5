//! The first process and its one child.

use std::fmt::{self, Display};
use std::io;

use rustix::io::Errno;
use rustix::process::{Pid, WaitOptions, WaitStatus, wait};

/// Which process [`fork`] returned in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    /// The first process, with the child's number.
    Parent(Pid),
    /// The child.
    Child,
}

/// How the child ended.
#[derive(Debug)]
pub(crate) enum End {
    Status(WaitStatus),
    Lost(Errno),
}

/// Splits off the process that serves. The first process must collect every orphan of the machine,
/// and the server waits for its own children by number: in one process each would take the other's.
pub(crate) fn fork() -> io::Result<Side> {
    // SAFETY: this process has one thread, so the child may go on with any code.
    let child = unsafe { libc::fork() };
    if child < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Pid::from_raw(child).map_or(Side::Child, Side::Parent))
}

/// Collects children until `child` ends.
pub(crate) fn reap_until(child: Pid) -> End {
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid == child => return End::Status(status),
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return End::Lost(error),
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
            Self::Lost(error) => write!(f, "{error}"),
        }
    }
}
