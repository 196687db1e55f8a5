//! An HTTP server, most of whose answers are not what a client hopes for.

use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::sockopt::set_socket_linger;
use sha2::{Digest, Sha256};

use super::site::ADDRESS;

/// Its port.
pub(super) const PORT: u16 = 80;
/// What `/drip` sends, a byte a second.
pub(super) const DRIP: &str = "a byte each second";
/// What ends `/early`, before its client.
pub(super) const EARLY: &str = "that is all";
/// How long `/deaf` reads nothing: longer than its client waits.
const DEAF: Duration = Duration::from_secs(20);
const BLOCK: usize = 1 << 16;
/// For what must happen at some time.
const LIMIT: Duration = Duration::from_secs(120);

/// A request that has ended.
#[derive(Clone, Debug)]
pub(super) struct Ended {
    path: String,
    /// The digest of the request's body, where it was read.
    pub(super) digest: String,
    /// What ended the connection before its time.
    pub(super) error: Option<ErrorKind>,
}

/// The server, in threads that end with the test program.
///
/// | request | answer |
/// |---|---|
/// | `GET /bytes/N` | N bytes |
/// | `GET /reset` | half of the body, then a reset |
/// | `GET /stall` | half of the body, then nothing |
/// | `GET /drip` | a byte each second |
/// | `GET /endless` | bytes as long as the client takes some |
/// | `PUT /sha256` | the digest of the body |
/// | `PUT /deaf` | nothing; the body is read after [`DEAF`] |
/// | `PUT /early` | ends its half, then reads the body up to its end |
/// | `PUT /late` | the digest of all up to the end of the client's half |
#[derive(Debug)]
pub(super) struct Plain(Arc<State>);

#[derive(Debug, Default)]
struct State {
    ended: Mutex<Vec<Ended>>,
    /// Bytes of `/endless`.
    endless: AtomicU64,
}

impl Plain {
    /// Listens on [`PORT`] of [`ADDRESS`].
    pub(super) fn start() -> Self {
        let listener = TcpListener::bind((ADDRESS, PORT)).unwrap();
        let state = Arc::new(State::default());
        let shared = Arc::clone(&state);
        thread::spawn(move || {
            for connection in listener.incoming() {
                let (connection, state) = (connection.unwrap(), Arc::clone(&shared));
                thread::spawn(move || state.serve(&connection));
            }
        });
        Self(state)
    }

    /// The bytes that `/endless` has sent.
    pub(super) fn endless(&self) -> u64 {
        self.0.endless.load(Ordering::Relaxed)
    }

    /// Waits for the end of a request for this path.
    #[track_caller]
    pub(super) fn ended(&self, path: &str) -> Ended {
        let begin = Instant::now();
        loop {
            let ended = self.0.ended.lock().unwrap();
            if let Some(ended) = ended.iter().find(|ended| ended.path == path) {
                return ended.clone();
            }
            drop(ended);
            assert!(begin.elapsed() < LIMIT, "{path} does not end");
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Forgets the requests that have ended.
    pub(super) fn forget(&self) {
        self.0.ended.lock().unwrap().clear();
    }
}

/// The digest of the body of `/bytes/count`.
pub(super) fn digest(count: u64) -> String {
    let mut digest = Sha256::new();
    write_body(count, &mut |bytes: &[u8]| {
        digest.update(bytes);
        Ok(())
    })
    .unwrap();
    hex(digest)
}

fn hex(digest: Sha256) -> String {
    digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Bytes that are different in each place: the number of each word.
fn write_body(count: u64, write: &mut impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
    let mut block = vec![0; BLOCK];
    let mut left = count;
    let mut word = 0_u32;
    while left > 0 {
        for bytes in block.as_chunks_mut().0 {
            *bytes = word.to_le_bytes();
            word = word.wrapping_add(1);
        }
        let part = usize::try_from(left).unwrap_or(BLOCK).min(BLOCK);
        write(&block[..part])?;
        left -= u64::try_from(part).unwrap();
    }
    Ok(())
}

impl State {
    fn serve(&self, connection: &TcpStream) {
        let mut reader = BufReader::new(connection);
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
        let mut length = None;
        let mut expects = false;
        while line != "\r\n" && !line.is_empty() {
            line.clear();
            reader.read_line(&mut line).unwrap();
            let head = line.to_ascii_lowercase();
            if let Some(value) = head.strip_prefix("content-length:") {
                length = value.trim().parse().ok();
            }
            expects |= head.starts_with("expect: 100-continue");
        }
        if expects {
            (&*connection).write_all(b"HTTP/1.1 100 Continue\r\n\r\n").unwrap();
        }
        let mut body = reader.take(length.unwrap_or(if line.is_empty() { 0 } else { u64::MAX }));
        let answered = self.answer(connection, &path, &mut body);
        let (digest, error) = match answered {
            Ok(digest) => (digest, None),
            Err(error) => (String::new(), Some(error.kind())),
        };
        self.ended.lock().unwrap().push(Ended { path, digest, error });
    }

    /// Returns the digest of the body, where it was read.
    fn answer(
        &self,
        mut connection: &TcpStream,
        path: &str,
        body: &mut impl Read,
    ) -> io::Result<String> {
        let begin = |length: u64| {
            let head =
                format!("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n");
            (&*connection).write_all(head.as_bytes())
        };
        let mut send = |bytes: &[u8]| connection.write_all(bytes);
        let length = |path: &str| path.rsplit('/').next().unwrap().parse::<u64>();
        let half = 1 << 16;
        match path {
            "/reset" => {
                begin(2 * half)?;
                write_body(half, &mut send)?;
                // What closes the last descriptor resets the connection.
                set_socket_linger(connection, Some(Duration::ZERO))?;
            }
            "/stall" => {
                begin(2 * half)?;
                write_body(half, &mut send)?;
                wait_for_end(connection)?;
            }
            "/drip" => {
                begin(DRIP.len().try_into().unwrap())?;
                for byte in DRIP.bytes() {
                    thread::sleep(Duration::from_secs(1));
                    send(&[byte])?;
                }
            }
            "/endless" => {
                begin(1 << 50)?;
                write_body(1 << 50, &mut |bytes| {
                    send(bytes)?;
                    self.endless.fetch_add(bytes.len().try_into().unwrap(), Ordering::Relaxed);
                    Ok(())
                })?;
            }
            "/deaf" => {
                thread::sleep(DEAF);
                return digest_of(body);
            }
            "/early" => {
                begin(EARLY.len().try_into().unwrap())?;
                send(EARLY.as_bytes())?;
                connection.shutdown(Shutdown::Write)?;
                return digest_of(body);
            }
            "/sha256" | "/late" => {
                let digest = digest_of(body)?;
                begin(digest.len().try_into().unwrap())?;
                send(digest.as_bytes())?;
                return Ok(digest);
            }
            bytes => {
                let count = length(bytes).map_err(io::Error::other)?;
                begin(count)?;
                write_body(count, &mut send)?;
            }
        }
        Ok(String::new())
    }
}

fn digest_of(body: &mut impl Read) -> io::Result<String> {
    let mut digest = Sha256::new();
    let mut block = vec![0; BLOCK];
    loop {
        match body.read(&mut block)? {
            0 => return Ok(hex(digest)),
            read => digest.update(&block[..read]),
        }
    }
}

/// Waits for the client's end without reading what it sends.
fn wait_for_end(connection: &TcpStream) -> io::Result<()> {
    poll(&mut [PollFd::new(connection, PollFlags::RDHUP)], None)?;
    connection.take_error()?.map_or(Ok(()), Err)
}
