//! What one client, and all clients together, can take of the daemon. docs/reference/serve.md has
//! the table.

use std::fs::File;
use std::time::Duration;

use parking_lot::Mutex;

/// The longest head of a request, bytes. A connection buffers no more of a body either.
pub(super) const MAX_HEAD: usize = 32 << 10;

/// A body may take a second longer for each of these bytes.
pub(super) const BODY_RATE: u64 = 128 << 10;

/// Requests with code that are decoded at the same time.
pub(crate) const DECODERS: usize = 2;

/// The share of the open files that connections can have: the rest is for microVMs and files.
const FILES_PER_CONNECTION: u64 = 2;

/// The number of descriptors in the [`Reserve`].
const RESERVED: usize = 8;

/// Limits of the server.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Limit of connections.
    pub connections: usize,
    /// Limit of all bodies and answers together that the daemon holds, bytes.
    pub buffer: usize,
    /// Time limit for a request's head, from the connection or the last answer.
    pub head: Duration,
    /// Time limit for a request's body; a long body gets more.
    pub body: Duration,
    /// Time limit for the client to read an answer and to send the next request's first byte.
    pub answer: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 2048,
            buffer: 256 << 20,
            head: Duration::from_secs(10),
            body: Duration::from_secs(30),
            answer: Duration::from_secs(60),
        }
    }
}

impl Limits {
    /// How long a body of `length` bytes may take.
    pub(crate) fn body_limit(&self, length: usize) -> Duration {
        let length = u64::try_from(length).unwrap_or(u64::MAX);
        self.body.saturating_add(Duration::from_secs(length / BODY_RATE))
    }
}

/// Descriptors that are kept for new connections: when all others are in use, they let the server
/// accept a connection and close another.
#[derive(Debug, Default)]
pub(super) struct Reserve(Mutex<Vec<File>>);

impl Reserve {
    /// Takes what is missing, if there are free descriptors.
    pub(super) fn fill(&self) {
        let mut held = self.0.lock();
        while held.len() < RESERVED
            && let Ok(file) = File::open("/dev/null")
        {
            held.push(file);
        }
    }

    /// Gives them up.
    pub(super) fn release(&self) {
        self.0.lock().clear();
    }
}

/// Raises the process's limit of open files to the highest that it may set. Returns the number of
/// connections, at most `wanted`, that leave half of the files for microVMs.
pub(super) fn reserve_files(wanted: usize) -> usize {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, ..limit };
    // A process may set its soft limit up to its hard limit; if not, the limit stays.
    let files = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        Err(_) => limit.current,
    };
    connections_within(files, wanted)
}

fn connections_within(files: Option<u64>, wanted: usize) -> usize {
    let share = files.map_or(u64::MAX, |files| files / FILES_PER_CONNECTION);
    wanted.min(usize::try_from(share).unwrap_or(usize::MAX)).max(1)
}
