//! Threads that start monitors. A monitor is in the control groups of version 1, in the pid
//! namespace that the thread which starts it has for its children, and in its ipc and uts
//! namespaces, so each has a thread of its own.
//! The group of version 2, in which a thread cannot be without its process, is the child's alone.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use firn_base::error_chain;
use parking_lot::Mutex;
use rustix::thread::UnshareFlags;

use super::limits::{Limited, Limits};
use super::privileges;
use super::process::{Process, Program};

/// The namespaces of a monitor that are made with the thread that starts it: all or none, so that
/// the first process of a pid namespace has the others, too.
const OF_FIRST_PROCESS: UnshareFlags =
    UnshareFlags::NEWPID.union(UnshareFlags::NEWIPC).union(UnshareFlags::NEWUTS);

/// How long a program needs until it waits for its first message, and more.
const BEGINNING: Duration = Duration::from_millis(5);

/// Makes the threads of a supervisor's monitors: each is ready before its monitor is asked for.
#[derive(Debug)]
pub(crate) struct Spawners {
    limits: Option<Arc<Limits>>,
    namespace: bool,
    /// The thread that starts the next monitor.
    next: Mutex<Option<Spawner>>,
    /// How many were taken.
    taken: AtomicUsize,
}

impl Spawners {
    /// Their threads enter new groups of `limits`, if there are any, and their children are the
    /// first processes of a `namespace`, if they are to be. Prepares the first.
    pub(super) fn new(limits: Option<Arc<Limits>>, namespace: bool) -> Self {
        let (next, taken) = (Mutex::default(), AtomicUsize::new(0));
        let spawners = Self { limits, namespace, next, taken };
        spawners.prepare();
        spawners
    }

    /// A thread that starts a monitor.
    pub(super) fn take(&self) -> io::Result<Spawner> {
        self.taken.fetch_add(1, Ordering::Relaxed);
        let prepared = self.next.lock().take();
        prepared.map_or_else(|| self.start(), Ok)
    }

    /// Prepares the start of another monitor, in the background, once one is started: before, it
    /// would take the processor from that. A supervisor that has one monitor needs no other.
    pub(crate) fn prepare_next(&self) {
        if self.taken.load(Ordering::Relaxed) > 1 {
            self.prepare();
        }
    }

    fn prepare(&self) {
        let mut next = self.next.lock();
        if next.is_none() {
            // Without it, the next start has the error.
            *next = self.start().ok();
        }
    }

    fn start(&self) -> io::Result<Spawner> {
        Spawner::start(self.limits.clone(), self.namespace)
    }
}

/// A thread that waits for the program of a monitor.
#[derive(Debug)]
pub(crate) struct Spawner {
    programs: Option<SyncSender<Program>>,
    spawned: Receiver<io::Result<Process>>,
    /// Gets the groups once the thread is in them.
    entered: Receiver<Result<Limited, String>>,
    thread: Option<JoinHandle<()>>,
    /// Dropped after the thread has ended.
    limited: Option<Limited>,
}

impl Spawner {
    /// Starts the thread, which enters new groups of `limits`, if there are any, and whose child is
    /// the first process of a `namespace`, if it is to be. Does not wait.
    pub(super) fn start(limits: Option<Arc<Limits>>, namespace: bool) -> io::Result<Self> {
        let (programs, program) = sync_channel::<Program>(1);
        let (child, spawned) = sync_channel(1);
        let (group, entered) = sync_channel(1);
        let work = move || {
            let mut joined = None;
            if let Some(limits) = limits {
                let made = limits.group().and_then(|group| {
                    group.enter_thread()?;
                    joined = group.open_v2()?;
                    Ok(group)
                });
                // The other end waits for it.
                let _ = group.send(made.map_err(|error| error_chain(&error)));
            }
            drop(group);
            if namespace {
                // Where that fails, the monitor finds out.
                let _ = privileges::unshare(OF_FIRST_PROCESS);
            }
            let Ok(program) = program.recv() else { return };
            let spawned = program.spawn(joined.as_ref().map(AsFd::as_fd));
            let begins = spawned.is_ok();
            let _ = child.send(spawned);
            if begins {
                // This thread wakes where the program begins, which its end would interrupt.
                std::thread::sleep(BEGINNING);
            }
        };
        let thread = std::thread::Builder::new().name("spawn".into()).spawn(work)?;
        let (programs, thread) = (Some(programs), Some(thread));
        Ok(Self { programs, spawned, entered, thread, limited: None })
    }

    /// Waits for the thread to be ready. Returns why it has no groups, if they cannot be made.
    pub(super) fn wait(&mut self) -> Result<(), String> {
        if let Ok(entered) = self.entered.recv() {
            self.limited = Some(entered?);
        }
        Ok(())
    }

    /// Begins to start the process of a monitor.
    pub(crate) fn begin(&mut self, program: Program) -> io::Result<()> {
        let programs = self.programs.take().ok_or_else(ended)?;
        programs.send(program).map_err(|_| ended())
    }

    /// Waits until the process is started. Returns its groups with it.
    pub(crate) fn started(mut self) -> io::Result<(Process, Option<Limited>)> {
        let child = self.spawned.recv().map_err(|_| ended())??;
        let mut limited = self.limited.take();
        if let Some(limited) = &mut limited {
            limited.thread = self.thread.take();
        }
        Ok((child, limited))
    }
}

fn ended() -> io::Error {
    io::Error::other("the thread that starts a monitor has ended")
}

impl Drop for Spawner {
    fn drop(&mut self) {
        // Another thread could not remove the groups while that one is in them.
        if self.limited.is_none() {
            self.limited = self.entered.recv().ok().and_then(Result::ok);
        }
        drop(self.programs.take());
        if let Some(thread) = self.thread.take().filter(|_| self.limited.is_some()) {
            // It has nothing to report.
            let _ = thread.join();
        }
    }
}
