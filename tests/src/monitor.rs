//! A firn command that serves a microVM in the foreground.

use std::io::{BufRead, BufReader, Read};
use std::process::Child;
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;

use rustix::process::{Pid, Signal, kill_process};

use crate::Outcome;
use crate::world::{LIMIT, code, reader, wait};

/// A running monitor. Dropping it stops it with SIGTERM.
#[derive(Debug)]
pub struct Monitor {
    command: String,
    child: Child,
    /// Its first line; empty if it exited without one.
    pub first_line: String,
    stdout: Option<JoinHandle<String>>,
    stderr: Option<JoinHandle<String>>,
}

impl Monitor {
    #[track_caller]
    pub(crate) fn new(command: String, mut child: Child) -> Self {
        let (first, line): (_, Receiver<String>) = channel();
        let mut pipe = BufReader::new(child.stdout.take().unwrap());
        let stdout = std::thread::spawn(move || {
            let mut text = String::new();
            pipe.read_line(&mut text).unwrap();
            // A failed test has dropped the receiver.
            let _ = first.send(text.clone());
            pipe.read_to_string(&mut text).unwrap();
            text
        });
        let stderr = reader(child.stderr.take());
        let first_line = match line.recv_timeout(LIMIT) {
            Ok(line) => line,
            Err(error) => {
                child.kill().unwrap();
                panic!("{command}: {error}: {}", stderr.join().unwrap());
            }
        };
        Self { command, child, first_line, stdout: Some(stdout), stderr: Some(stderr) }
    }

    /// Fails unless the monitor reported that the microVM is ready.
    #[track_caller]
    pub fn ready(mut self) -> Self {
        if self.first_line.is_empty() {
            panic!("{:#?}", self.end());
        }
        self
    }

    /// Its process.
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// The process that runs its microVM: its only child.
    #[track_caller]
    pub fn monitor(&self) -> Pid {
        let children = format!("/proc/{0}/task/{0}/children", self.child.id());
        let children = std::fs::read_to_string(children).unwrap();
        Pid::from_raw(children.trim().parse().unwrap()).unwrap()
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    /// Waits until it exits, and returns its result.
    #[track_caller]
    pub fn end(&mut self) -> Outcome {
        let status = wait(&self.command, &mut self.child);
        let text = |thread: &mut Option<JoinHandle<String>>| thread.take().unwrap().join().unwrap();
        let (stdout, stderr) = (text(&mut self.stdout), text(&mut self.stderr));
        Outcome { command: self.command.clone(), code: code(status), stdout, stderr }
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.signal(Signal::TERM);
            if std::thread::panicking() {
                let _ = self.child.wait();
            } else {
                wait(&self.command, &mut self.child);
            }
        }
    }
}
