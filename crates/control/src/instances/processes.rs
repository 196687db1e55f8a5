//! The processes of all microVMs, so that the daemon can kill them when it stops.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// The processes of microVMs.
#[derive(Debug, Default)]
pub(crate) struct Processes(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    next: u64,
    open: HashMap<u64, Process>,
    closed: bool,
}

#[derive(Debug)]
struct Process {
    pidfd: OwnedFd,
    /// Whether it serves a request that has to be answered.
    serving: bool,
}

/// A process's entry, removed when this is dropped.
#[derive(Debug)]
pub(crate) struct Registered {
    processes: Arc<Processes>,
    id: u64,
}

impl Processes {
    /// Adds a child of this process that starts. Fails if the daemon is stopping.
    pub(super) fn register(self: &Arc<Self>, child: u32) -> io::Result<Registered> {
        let pid = i32::try_from(child).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or(io::ErrorKind::InvalidInput)?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
        let mut state = self.0.lock();
        if state.closed {
            return Err(io::Error::other("the daemon is stopping"));
        }
        state.next += 1;
        let id = state.next;
        state.open.insert(id, Process { pidfd, serving: false });
        Ok(Registered { processes: Arc::clone(self), id })
    }

    /// Refuses new processes, and kills those that serve no request.
    pub(super) fn close(&self) {
        let mut state = self.0.lock();
        state.closed = true;
        state.open.values().filter(|process| !process.serving).for_each(kill);
    }

    /// Kills all.
    pub(super) fn kill(&self) {
        self.0.lock().open.values().for_each(kill);
    }
}

fn kill(process: &Process) {
    // Fails if it has ended.
    let _ = pidfd_send_signal(&process.pidfd, Signal::KILL);
}

impl Registered {
    /// Records that the process serves requests.
    pub(super) fn serves(&self) {
        let mut state = self.processes.0.lock();
        if let Some(process) = state.open.get_mut(&self.id) {
            process.serving = true;
        }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.processes.0.lock().open.remove(&self.id);
    }
}
