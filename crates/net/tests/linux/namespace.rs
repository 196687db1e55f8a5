//! Network namespaces.

use std::any::Any;
use std::process::Command;
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, JoinHandle};

type Job = Box<dyn FnOnce() + Send>;

/// A network namespace: a thread that starts other threads in it.
pub(crate) struct Namespace {
    jobs: Sender<Job>,
}

impl Namespace {
    pub(crate) fn new() -> Self {
        let (jobs, queue) = channel::<Job>();
        thread::spawn(move || {
            // SAFETY: the network namespace is of this thread alone, and no descriptor changes.
            unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }
                .unwrap();
            queue.into_iter().for_each(|job| job());
        });
        Self { jobs }
    }

    /// Starts a thread in the namespace.
    pub(crate) fn spawn<T: Send + 'static>(
        &self,
        run: impl FnOnce() -> T + Send + 'static,
    ) -> JoinHandle<T> {
        let (send, receive) = channel();
        self.jobs.send(Box::new(move || send.send(thread::spawn(run)).unwrap())).unwrap();
        receive.recv().unwrap()
    }

    /// Runs in the namespace, and waits.
    pub(crate) fn run<T: Send + 'static>(&self, run: impl FnOnce() -> T + Send + 'static) -> T {
        self.spawn(run).join().unwrap_or_else(|panic: Box<dyn Any + Send>| {
            std::panic::resume_unwind(panic);
        })
    }

    /// Runs a script in the namespace.
    pub(crate) fn sh(&self, script: &str) {
        let script = script.to_owned();
        self.run(move || {
            let status = Command::new("sh").args(["-ec", &script]).status().unwrap();
            assert!(status.success(), "{script}");
        });
    }
}
